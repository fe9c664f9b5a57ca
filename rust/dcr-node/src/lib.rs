//! The running owner, receiver and coordinator: protocol, transport and core on tokio and threads.
//!
//! Each node owns a small tokio runtime for its connection. The methods that callers (Python threads) use block,
//! and say in one line why they fail.

mod construct;
mod coordinator;
mod gate;
mod memory;
mod owner;
mod receiver;
mod runtime;

use std::time::Duration;

use dcr_control::ControlError;
use dcr_core::tensor::TensorMeta;
use dcr_protocol::Failure;
use dcr_transport::TransportError;
use thiserror::Error;

pub use construct::{ConstructOptions, Construction, Offer, Sink, StreamOrder, compare};
pub use coordinator::{CoordinatorNode, CoordinatorOptions};
pub use gate::Gate;
pub use owner::{OwnerNode, OwnerOptions, Prepared};
pub use receiver::{ReceiverNode, Task, TaskKind};
pub use runtime::Link;

/// Why a node cannot do what it was asked.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The connection cannot be made as configured.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The commit record cannot be used.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A tensor is not what was declared.
    #[error("tensor `{}`: {reason}", tensor.name)]
    Tensor {
        /// The tensor as given.
        tensor: Box<TensorMeta>,
        /// What is wrong.
        reason: String,
    },
    /// The relay did not take the connection in time.
    #[error("{0}")]
    NoRelay(String),
    /// Nothing happened in time.
    #[error("waited {waited:?} for {what}")]
    Timeout {
        /// How long.
        waited: Duration,
        /// For what.
        what: &'static str,
    },
    /// The attempt has ended without a commit.
    #[error("{0}")]
    Attempt(String),
    /// The refit has failed.
    #[error(transparent)]
    Refit(Failure),
    /// The node was used in a way that it cannot be.
    #[error("{0}")]
    Misuse(&'static str),
    /// The folder for file-backed memory cannot be used.
    #[error("the baseline's folder {} cannot be used: {source}", folder.display())]
    Folder {
        /// The folder.
        folder: std::path::PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The operating system refused something.
    #[error("cannot {doing}: {source}")]
    System {
        /// What.
        doing: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}
