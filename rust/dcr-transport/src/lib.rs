//! Moving payloads and control frames: authenticated frames, supervised endpoints and the relay, over ZeroMQ.
//!
//! The `zeromq` crate queues without bound, does not reconnect a DEALER and may drop what is queued when a socket
//! closes. So nothing here trusts an accepted send: owners keep byte windows that only receivers'
//! acknowledgements open, a supervisor recreates sockets, and silence for [`SILENCE`] means gone.

mod address;
mod endpoint;
mod frame;
mod key;
mod relay;

use std::time::Duration;

use thiserror::Error;

pub use address::RelayAddress;
pub use endpoint::{Endpoint, EndpointEvent, HeldCell, Outgoing};
pub use frame::{Frame, FrameError};
pub use key::{KEY_ENV, KEY_FILE_ENV, LOOPBACK_ENV, RunKey};
pub use relay::{Relay, RelayConfig};

/// A peer that was not heard for this long is gone.
pub const SILENCE: Duration = Duration::from_secs(30);

/// How often a peer with nothing else to say sends a heartbeat.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// What can go wrong before a connection stands.
#[derive(Debug, Error)]
pub enum TransportError {
    /// An address is not of the form that the transport takes.
    #[error("relay address `{address}`: {reason}; write it as tcp://HOST:PORT")]
    Address {
        /// What was given.
        address: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The run key is missing or not a key.
    #[error("run key: {0}")]
    Key(String),
    /// The relay cannot listen there.
    #[error("the relay cannot listen on {address}: {reason}")]
    Listen {
        /// Where.
        address: String,
        /// Why not.
        reason: String,
    },
    /// The relay's socket broke.
    #[error("the relay's socket failed: {0}")]
    Socket(String),
}
