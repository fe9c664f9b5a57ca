//! What peers say to each other: one JSON header a frame; payload bytes travel beside it, never inside.

use dcr_core::payload;
use dcr_core::tensor::TensorMeta;
use serde::{Deserialize, Serialize};

use crate::{AttemptId, BaselineId, Held, PeerName, Role};

/// Version of the protocol. Peers of different versions refuse each other at `Hello`.
pub const PROTOCOL_VERSION: u16 = 1;

/// How the changed set of an attempt is encoded (section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// XOR where the receivers' loader paths preserve stored bits, overwrite elsewhere.
    Mixed,
    /// Every record is an absolute overwrite.
    Overwrite,
    /// Every element of every tensor: a dense refit.
    Dense,
}

impl Mode {
    /// The name in messages, reports and Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Overwrite => "overwrite",
            Self::Dense => "dense",
        }
    }
}

/// When receivers apply what arrives (section 7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Application {
    /// The gate closes first and payloads are applied while later ones still arrive.
    Synchronous,
    /// Rollout serves on until every payload is staged and checked; the gate closes for the application alone.
    /// Whatever is wrong with a payload or a tensor is then found before anything is written.
    Asynchronous,
}

/// What tells the payloads of one attempt apart: the owner and its running number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PayloadKey {
    /// Position in the owner's stream, from 0. First in the declared order.
    pub sequence: u32,
    /// Index of the owner.
    pub owner: u32,
}

impl From<&payload::PayloadId> for PayloadKey {
    fn from(id: &payload::PayloadId) -> Self {
        Self { sequence: id.sequence, owner: id.owner }
    }
}

/// What one owner sent in one attempt. Bytes and elements are totals over its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StreamTotals {
    /// Payloads sent: sequences `0..payloads`.
    pub payloads: u32,
    /// Compressed payload bytes.
    pub payload_bytes: u64,
    /// Elements whose stored bits differ from the baseline.
    pub changed: u64,
    /// Elements of the owner's share of the checkpoint: compared, or in residual tensors that no change flag selected.
    pub elements: u64,
    /// Bytes of the owner's share of the checkpoint.
    pub bytes: u64,
    /// Residual tensors that were converted and compared.
    pub residual_tensors: u64,
    /// Items encoded as XOR.
    pub xor_items: u64,
    /// Items encoded as overwrite or dense.
    pub overwrite_items: u64,
    /// Seconds spent comparing stored bits.
    pub compare_s: f64,
    /// Seconds spent encoding and compressing.
    pub encode_s: f64,
    /// Seconds spent waiting for credits.
    pub blocked_s: f64,
}

/// What one receiver did in one attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReceiverWork {
    /// Payloads applied.
    pub payloads: u64,
    /// Items handed to the native loader.
    pub items: u64,
    /// Seconds inside the native loader.
    pub apply_s: f64,
    /// Seconds for device synchronisation and checks at the end.
    pub finish_s: f64,
}

/// A peer that is connected to the relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// Its name.
    pub name: PeerName,
    /// Changes with every connection of a process.
    pub session: u64,
    /// What its storage (receiver) or baseline (owner) holds.
    pub held: Option<Held>,
}

/// A digest of a catalog, for telling whether a receiver has already prewarmed for it.
pub fn catalog_digest(catalog: &[TensorMeta]) -> BaselineId {
    let mut text = Vec::new();
    for tensor in catalog {
        text.extend_from_slice(format!("{:?}", (&tensor.name, &tensor.shape, tensor.dtype.name())).as_bytes());
    }
    BaselineId(dcr_core::payload::digest(&text))
}

/// One message. Everything except the first group belongs to an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Message {
    /// First message of a connection, to the relay.
    Hello {
        /// [`PROTOCOL_VERSION`] of the sender.
        protocol: u16,
        /// What the sender holds.
        held: Option<Held>,
    },
    /// The relay's answer.
    Welcome,
    /// The relay does not take the connection, for this reason.
    Refused {
        /// One line for people.
        reason: String,
    },
    /// Sent when there was nothing else to send for a while; the relay answers.
    Heartbeat,
    /// A receiver or owner holds something else now; to the relay.
    Holding {
        /// What it holds.
        held: Option<Held>,
    },
    /// The relay's peers, to the coordinator, after every change.
    Roster {
        /// Connected peers.
        peers: Vec<PeerInfo>,
    },
    /// The coordinator wants an owner's catalog.
    CatalogRequest,
    /// The tensors that an owner owns.
    Catalog {
        /// Their metadata, in export order.
        tensors: Vec<TensorMeta>,
    },

    /// Where payloads of an attempt go, to the relay.
    Route {
        /// The attempt.
        attempt: AttemptId,
        /// Its required receivers.
        receivers: Vec<PeerName>,
    },
    /// `prepare` of table B.1, for receivers.
    PrepareReceiver {
        /// The fresh attempt.
        attempt: AttemptId,
        /// The version that it would commit.
        version: u64,
        /// The committed policy that it starts from; `None` for a dense refit.
        base: Option<Held>,
        /// Encoding of the changed set.
        mode: Mode,
        /// When to apply.
        application: Application,
        /// Number of owners that will stream.
        owners: u32,
        /// Digest of the catalog.
        catalog_digest: BaselineId,
        /// The catalog, when this receiver has not had it yet.
        catalog: Option<Vec<TensorMeta>>,
    },
    /// A receiver is ready for the attempt.
    ReceiverPrepared {
        /// The attempt.
        attempt: AttemptId,
        /// Tensors whose loader path on this rank does not preserve stored bits or overlaps other writes.
        overwrite_only: Vec<String>,
        /// Tensors that the native loader skips on this rank.
        skipped: u64,
    },
    /// `prepare` for owners.
    PrepareOwner {
        /// The fresh attempt.
        attempt: AttemptId,
        /// The version that it would commit.
        version: u64,
        /// The committed policy that it starts from; `None` for a dense refit.
        base: Option<Held>,
        /// Encoding of the changed set.
        mode: Mode,
        /// Tensors that must be overwritten on some receiver.
        overwrite_only: Vec<String>,
    },
    /// An owner is ready and starts to stream.
    OwnerPrepared {
        /// The attempt.
        attempt: AttemptId,
    },
    /// A failed prepare check: the attempt cannot be done exactly as asked.
    Rejected {
        /// The attempt.
        attempt: AttemptId,
        /// One line for people.
        reason: String,
    },
    /// One payload; its bytes are the frame's body.
    Payload {
        /// The attempt.
        attempt: AttemptId,
        /// Which of its payloads.
        key: PayloadKey,
    },
    /// A payload left the sender's window: receiver to relay, and relay to owner once all receivers said so.
    PayloadTaken {
        /// The attempt.
        attempt: AttemptId,
        /// Which of its payloads.
        key: PayloadKey,
    },
    /// An owner has sent everything.
    StreamEnd {
        /// The attempt.
        attempt: AttemptId,
        /// The owner's index.
        owner: u32,
        /// What it sent.
        totals: StreamTotals,
    },
    /// Every owner has ended its stream: is everything there? Asynchronous application only.
    AwaitPayloads {
        /// The attempt.
        attempt: AttemptId,
        /// Payloads of each owner, by index.
        payloads: Vec<u32>,
    },
    /// Every payload has arrived and was checked.
    PayloadsStaged {
        /// The attempt.
        attempt: AttemptId,
    },
    /// `open_apply`: the gate is closed, receivers may write.
    OpenApply {
        /// The attempt.
        attempt: AttemptId,
    },
    /// `flush`: everything must be there, applied and synchronised.
    Flush {
        /// The attempt.
        attempt: AttemptId,
        /// Payloads of each owner, by index.
        payloads: Vec<u32>,
    },
    /// A receiver's completion acknowledgement.
    Flushed {
        /// The attempt.
        attempt: AttemptId,
        /// What it did.
        work: ReceiverWork,
    },
    /// The commit record names this attempt's version now.
    Committed {
        /// The attempt.
        attempt: AttemptId,
        /// The new policy.
        held: Held,
    },
    /// An owner has updated its baseline in place.
    BaselineUpdated {
        /// The attempt.
        attempt: AttemptId,
    },
    /// Something went wrong at the sender.
    AttemptFailed {
        /// The attempt.
        attempt: AttemptId,
        /// One line for people.
        reason: String,
    },
    /// `mark_obsolete` and `stop_and_wait`: ignore the attempt, finish pending writes, answer.
    Stop {
        /// The attempt.
        attempt: AttemptId,
        /// Why, for people.
        reason: String,
    },
    /// Nothing of the attempt is pending at the sender any more.
    Stopped {
        /// The attempt.
        attempt: AttemptId,
        /// Whether the sender wrote into weights for it.
        wrote: bool,
    },
}

impl Message {
    /// Whether a peer of this role may say this. The relay drops everything else, so that a mistake in one process
    /// cannot pass for another's word.
    pub fn allowed_from(&self, role: Role) -> bool {
        match self {
            Self::Hello { .. } | Self::Heartbeat | Self::Holding { .. } => role != Role::Relay,
            Self::Welcome | Self::Refused { .. } | Self::Roster { .. } => role == Role::Relay,
            Self::CatalogRequest
            | Self::Route { .. }
            | Self::PrepareReceiver { .. }
            | Self::PrepareOwner { .. }
            | Self::AwaitPayloads { .. }
            | Self::OpenApply { .. }
            | Self::Flush { .. }
            | Self::Committed { .. }
            | Self::Stop { .. } => role == Role::Coordinator,
            Self::Catalog { .. }
            | Self::OwnerPrepared { .. }
            | Self::Payload { .. }
            | Self::StreamEnd { .. }
            | Self::BaselineUpdated { .. } => role == Role::Owner,
            Self::ReceiverPrepared { .. } | Self::PayloadsStaged { .. } | Self::Flushed { .. } => {
                role == Role::Receiver
            }
            Self::PayloadTaken { .. } => matches!(role, Role::Receiver | Role::Relay),
            Self::Rejected { .. } | Self::AttemptFailed { .. } | Self::Stopped { .. } => role != Role::Coordinator,
        }
    }
}

/// A message with its addresses, as it crosses the wire.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    /// The sender.
    pub from: PeerName,
    /// The sender's session.
    pub session: u64,
    /// Grows with every frame of the session.
    pub sequence: u64,
    /// Where it goes. Empty: to the required receivers of the message's attempt.
    pub to: Vec<PeerName>,
    /// What it says.
    pub message: Message,
}

impl StreamTotals {
    /// The sum of two streams.
    pub fn plus(self, other: &Self) -> Self {
        Self {
            payloads: self.payloads + other.payloads,
            payload_bytes: self.payload_bytes + other.payload_bytes,
            changed: self.changed + other.changed,
            elements: self.elements + other.elements,
            bytes: self.bytes + other.bytes,
            residual_tensors: self.residual_tensors + other.residual_tensors,
            xor_items: self.xor_items + other.xor_items,
            overwrite_items: self.overwrite_items + other.overwrite_items,
            compare_s: self.compare_s + other.compare_s,
            encode_s: self.encode_s + other.encode_s,
            blocked_s: self.blocked_s + other.blocked_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_may_say_only_what_is_theirs() {
        let attempt = AttemptId([1; 16]);
        let cases = [
            (Message::OpenApply { attempt }, vec![Role::Coordinator]),
            (
                Message::Committed { attempt, held: Held { version: 1, baseline: BaselineId([2; 16]) } },
                vec![Role::Coordinator],
            ),
            (Message::Payload { attempt, key: PayloadKey { sequence: 0, owner: 0 } }, vec![Role::Owner]),
            (Message::Flushed { attempt, work: ReceiverWork::default() }, vec![Role::Receiver]),
            (Message::Welcome, vec![Role::Relay]),
            (Message::Stopped { attempt, wrote: false }, vec![Role::Owner, Role::Receiver, Role::Relay]),
            (Message::Heartbeat, vec![Role::Owner, Role::Receiver, Role::Coordinator]),
        ];
        for (message, allowed) in cases {
            for role in [Role::Owner, Role::Receiver, Role::Coordinator, Role::Relay] {
                assert_eq!(message.allowed_from(role), allowed.contains(&role), "{message:?} from {role:?}");
            }
        }
    }
}
