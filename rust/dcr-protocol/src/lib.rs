//! The refit protocol as pure state machines (paper, section 6.3 and appendix B).
//!
//! Nothing here does I/O, reads a clock, spawns a thread or draws randomness. Messages, completions and the
//! current time come in as events; what to do goes out as actions. `dcr-node` runs these machines on real
//! sockets; tests run a whole refit from a script.

mod coordinator;
mod ids;
mod message;
mod order;
mod owner;
mod receiver;
mod report;

pub use coordinator::{Action, CommitOutcome, Coordinator, CoordinatorConfig, Deadlines, Event, Timer};
pub use ids::{AttemptId, BaselineId, CommitRecord, Held, ParseIdError, PeerName, Role};
pub use message::{
    Application, Envelope, Message, Mode, PROTOCOL_VERSION, PayloadKey, PeerInfo, ReceiverWork, StreamTotals,
    catalog_digest,
};
pub use order::DeclaredOrder;
pub use owner::{Owner, OwnerAction, OwnerEvent};
pub use receiver::{LoaderClass, Receiver, ReceiverAction, ReceiverEvent, TensorClass};
pub use report::{Failure, Report, Stages, WeightsAfter};
