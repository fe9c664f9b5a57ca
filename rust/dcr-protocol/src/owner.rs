//! An owner: compares its tensors with the source baseline and streams what changed (section 4, appendix B).

use std::collections::BTreeSet;

use crate::{AttemptId, Held, Message, Mode, PayloadKey, StreamTotals};

/// What happened at an owner.
#[derive(Clone, Debug)]
pub enum OwnerEvent {
    /// A message arrived.
    Message(Message),
    /// A payload of this many bytes is ready to be sent.
    PayloadReady {
        /// Its number.
        sequence: u32,
        /// Its size.
        bytes: u64,
    },
    /// Every owned tensor has been offered and the last payload was sent.
    StreamEnded(StreamTotals),
    /// The baseline now holds the committed candidate.
    BaselineUpdated,
    /// The caller or the connection failed.
    Failed(String),
}

/// What an owner has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum OwnerAction {
    /// Send a message to the coordinator.
    ToCoordinator(Message),
    /// Send a message to the attempt's receivers.
    ToReceivers(Message),
    /// Tell the relay what is held.
    Holding(Option<Held>),
    /// Answer a catalog request.
    SendCatalog,
    /// Start comparing: `prepare` was accepted.
    Start {
        /// The attempt.
        attempt: AttemptId,
        /// The version that it would commit.
        version: u64,
        /// Encoding of the changed set.
        mode: Mode,
        /// Tensors to overwrite although the mode is mixed.
        overwrite_only: BTreeSet<String>,
    },
    /// Write the candidate of this attempt into the baseline, then report `BaselineUpdated`.
    UpdateBaseline,
    /// Forget the candidate.
    DiscardCandidate,
    /// The attempt has ended: committed, or the reason why not. Told once for every attempt, also for one that was
    /// stopped before this owner was asked to prepare it.
    End(AttemptId, Result<Held, String>),
}

#[derive(Debug)]
struct Attempt {
    id: AttemptId,
    in_flight: Vec<(PayloadKey, u64)>,
    committed: Option<Held>,
}

/// The state machine of one owner.
#[derive(Debug)]
pub struct Owner {
    index: u32,
    window: u64,
    held: Option<Held>,
    attempt: Option<Attempt>,
    ended: Option<AttemptId>,
}

impl Owner {
    /// An owner whose unacknowledged payloads may total `window` bytes (one payload may always be in flight).
    pub fn new(index: u32, window: u64) -> Self {
        Self { index, window, held: None, attempt: None, ended: None }
    }

    /// The policy that the baseline is committed to, if any.
    pub fn held(&self) -> Option<Held> {
        self.held
    }

    /// The running attempt.
    pub fn attempt(&self) -> Option<AttemptId> {
        self.attempt.as_ref().map(|attempt| attempt.id)
    }

    /// Whether the window has room for another payload.
    pub fn may_send(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| {
            attempt.in_flight.is_empty() || attempt.in_flight.iter().map(|(_, bytes)| bytes).sum::<u64>() < self.window
        })
    }

    /// Handles one event.
    pub fn handle(&mut self, event: OwnerEvent) -> Vec<OwnerAction> {
        let mut out = Vec::new();
        match event {
            OwnerEvent::Message(message) => self.message(message, &mut out),
            OwnerEvent::PayloadReady { sequence, bytes } => {
                if let Some(attempt) = &mut self.attempt {
                    attempt.in_flight.push((PayloadKey { sequence, owner: self.index }, bytes));
                }
            }
            OwnerEvent::StreamEnded(totals) => {
                if let Some(attempt) = &self.attempt {
                    let message = Message::StreamEnd { attempt: attempt.id, owner: self.index, totals };
                    out.push(OwnerAction::ToReceivers(message.clone()));
                    out.push(OwnerAction::ToCoordinator(message));
                }
            }
            OwnerEvent::BaselineUpdated => {
                if let Some(Attempt { id, committed: Some(held), .. }) = self.attempt.take() {
                    self.held = Some(held);
                    out.push(OwnerAction::Holding(self.held));
                    out.push(OwnerAction::ToCoordinator(Message::BaselineUpdated { attempt: id }));
                    self.end(id, Ok(held), &mut out);
                }
            }
            OwnerEvent::Failed(reason) => self.failed(reason, &mut out),
        }
        out
    }

    fn message(&mut self, message: Message, out: &mut Vec<OwnerAction>) {
        match message {
            Message::CatalogRequest => out.push(OwnerAction::SendCatalog),
            Message::PrepareOwner { attempt, version, base, mode, overwrite_only } => {
                if let Some(old) = self.attempt.take() {
                    out.push(OwnerAction::DiscardCandidate);
                    self.end(old.id, Err(format!("attempt {} was replaced by {attempt}", old.id)), out);
                }
                if mode != Mode::Dense && base != self.held {
                    let holds = self.held.map_or("nothing committed".to_owned(), |held| held.to_string());
                    let base = base.map_or("nothing".to_owned(), |base| base.to_string());
                    let reason = format!("its baseline holds {holds} but the attempt starts from {base}");
                    out.push(OwnerAction::ToCoordinator(Message::Rejected { attempt, reason: reason.clone() }));
                    return self.end(attempt, Err(reason), out);
                }
                self.attempt = Some(Attempt { id: attempt, in_flight: Vec::new(), committed: None });
                out.push(OwnerAction::ToCoordinator(Message::OwnerPrepared { attempt }));
                let overwrite_only = overwrite_only.into_iter().collect();
                out.push(OwnerAction::Start { attempt, version, mode, overwrite_only });
            }
            Message::PayloadTaken { attempt, key } => {
                if let Some(current) = self.attempt.as_mut().filter(|current| current.id == attempt) {
                    current.in_flight.retain(|(sent, _)| *sent != key);
                }
            }
            Message::Committed { attempt, held } => {
                if let Some(current) = self.attempt.as_mut().filter(|current| current.id == attempt) {
                    current.committed = Some(held);
                    out.push(OwnerAction::UpdateBaseline);
                }
            }
            Message::Stop { attempt, reason } => {
                if self.attempt.as_ref().is_some_and(|current| current.id == attempt) {
                    self.attempt = None;
                    out.push(OwnerAction::DiscardCandidate);
                }
                self.end(attempt, Err(reason), out);
                out.push(OwnerAction::ToCoordinator(Message::Stopped { attempt, wrote: false }));
            }
            _ => {}
        }
    }

    fn failed(&mut self, reason: String, out: &mut Vec<OwnerAction>) {
        let Some(attempt) = self.attempt.take() else { return };
        if attempt.committed.is_some() {
            // The version is committed but this baseline does not hold it: only a dense refit can follow.
            self.held = None;
            out.push(OwnerAction::Holding(None));
        }
        out.push(OwnerAction::ToCoordinator(Message::AttemptFailed { attempt: attempt.id, reason: reason.clone() }));
        out.push(OwnerAction::DiscardCandidate);
        self.end(attempt.id, Err(reason), out);
    }

    fn end(&mut self, attempt: AttemptId, result: Result<Held, String>, out: &mut Vec<OwnerAction>) {
        if self.ended.replace(attempt) != Some(attempt) {
            out.push(OwnerAction::End(attempt, result));
        }
    }
}
