//! A receiver: checks, stages and applies payloads in declared order (section 6, appendix B.1).

use std::collections::{BTreeMap, BTreeSet};

use dcr_core::tensor::TensorMeta;
use serde::{Deserialize, Serialize};

use crate::{Application, AttemptId, BaselineId, DeclaredOrder, Held, Message, Mode, PayloadKey, ReceiverWork};

/// What prewarm found about the loader path of a tensor on this rank (table A.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoaderClass {
    /// Stored bits are preserved and nothing else writes there.
    Xor,
    /// Values arrive, but cast, transformed or beside other writes.
    Overwrite,
    /// The native loader skips the tensor on this rank.
    Skip,
    /// The path cannot be done exactly.
    Unsupported,
}

/// A tensor's class and, where it is not XOR-able, why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorClass {
    /// Canonical name.
    pub name: String,
    /// Its class.
    pub class: LoaderClass,
    /// Why, for people.
    pub reason: String,
}

/// What happened at a receiver.
#[derive(Clone, Debug)]
pub enum ReceiverEvent {
    /// A message arrived.
    Message(Message),
    /// Prewarm has classified the catalog, or failed.
    Prewarmed(Result<Vec<TensorClass>, String>),
    /// A payload arrived and its digest and content are as they should be.
    Payload {
        /// Its attempt.
        attempt: AttemptId,
        /// Which one.
        key: PayloadKey,
        /// Digest of the compressed body.
        digest: [u8; 16],
    },
    /// A payload arrived that is wrong.
    BadPayload {
        /// The attempt that it claims.
        attempt: AttemptId,
        /// What is wrong with it.
        reason: String,
    },
    /// The batch handed out last is applied, or failed.
    Applied {
        /// Items handed to the loader and seconds inside it; the payloads are known.
        work: ReceiverWork,
        /// The failure, if any.
        result: Result<(), String>,
    },
    /// The device is synchronised and the checks are done, or failed.
    Finished(Result<f64, String>),
    /// The worker found something wrong outside of these.
    Failed(String),
}

/// What a receiver has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum ReceiverAction {
    /// Send a message to the coordinator.
    ToCoordinator(Message),
    /// Send a message to the relay.
    ToRelay(Message),
    /// Classify the loader paths of these tensors.
    Prewarm(Vec<TensorMeta>),
    /// Keep the payload that just arrived.
    Stage(PayloadKey),
    /// Apply these staged payloads, in this order.
    Apply(Vec<PayloadKey>),
    /// Synchronise the device and run the checks.
    Finish,
    /// Drop everything staged.
    DropStaged,
}

#[derive(Debug)]
struct Attempt {
    id: AttemptId,
    mode: Mode,
    application: Application,
    prepared: bool,
    order: DeclaredOrder,
    seen: BTreeMap<PayloadKey, [u8; 16]>,
    staged: BTreeSet<PayloadKey>,
    /// The coordinator asked whether everything is there, for this many payloads.
    awaited: Option<u64>,
    open: bool,
    flush: bool,
    busy: Busy,
    wrote: bool,
    failed: bool,
    stop: bool,
    /// Payloads of the batch that is being applied.
    handed_out: u64,
    work: ReceiverWork,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Busy {
    No,
    Prewarming,
    Applying,
    Finishing,
    Done,
}

/// The state machine of one receiver.
#[derive(Debug)]
pub struct Receiver {
    held: Option<Held>,
    catalog: Option<(BaselineId, Vec<TensorMeta>)>,
    classes: Option<(BaselineId, Vec<TensorClass>)>,
    attempt: Option<Attempt>,
    batch: usize,
}

impl Receiver {
    /// A receiver that holds no committed version and applies at most `batch` payloads in one loader call.
    pub fn new(batch: usize) -> Self {
        Self { held: None, catalog: None, classes: None, attempt: None, batch: batch.max(1) }
    }

    /// The policy that the storage holds; `None` before the first refit and after a partial write.
    pub fn held(&self) -> Option<Held> {
        self.held
    }

    /// The catalog that payloads are checked against.
    pub fn catalog(&self) -> &[TensorMeta] {
        self.catalog.as_ref().map_or(&[], |(_, catalog)| catalog)
    }

    /// The classes that prewarm found.
    pub fn classes(&self) -> &[TensorClass] {
        self.classes.as_ref().map_or(&[], |(_, classes)| classes)
    }

    /// The attempt that tasks belong to, in whatever state it is.
    pub fn attempt(&self) -> Option<AttemptId> {
        self.attempt.as_ref().map(|attempt| attempt.id)
    }

    /// The active attempt and its mode, if payloads are expected for one.
    pub fn active(&self) -> Option<(AttemptId, Mode)> {
        self.attempt.as_ref().filter(|attempt| attempt.prepared && !attempt.failed).map(|a| (a.id, a.mode))
    }

    /// Handles one event.
    pub fn handle(&mut self, event: ReceiverEvent) -> Vec<ReceiverAction> {
        let mut out = Vec::new();
        match event {
            ReceiverEvent::Message(message) => self.message(message, &mut out),
            ReceiverEvent::Prewarmed(result) => self.prewarmed(result, &mut out),
            ReceiverEvent::Payload { attempt, key, digest } => self.payload(attempt, key, digest, &mut out),
            ReceiverEvent::BadPayload { attempt, reason } => {
                if self.attempt.as_ref().is_some_and(|current| current.id == attempt) {
                    self.fail(reason, &mut out);
                }
            }
            ReceiverEvent::Applied { work, result } => self.applied(work, result, &mut out),
            ReceiverEvent::Finished(result) => self.finished(result, &mut out),
            ReceiverEvent::Failed(reason) => self.fail(reason, &mut out),
        }
        out
    }

    fn message(&mut self, message: Message, out: &mut Vec<ReceiverAction>) {
        match message {
            Message::PrepareReceiver { attempt, base, mode, application, owners, catalog_digest, catalog, .. } => {
                self.replace(out);
                if let Some(catalog) = catalog {
                    self.catalog = Some((catalog_digest, catalog));
                }
                let reject = |reason: String| ReceiverAction::ToCoordinator(Message::Rejected { attempt, reason });
                if mode != Mode::Dense && base != self.held {
                    let holds = self.held.map_or("no committed version".to_owned(), |held| held.to_string());
                    let base = base.map_or("none".to_owned(), |base| base.to_string());
                    let reason = format!("holds {holds} but the attempt starts from {base}: a dense refit is needed");
                    return out.push(reject(reason));
                }
                let Some((known, tensors)) = self.catalog.as_ref().filter(|(known, _)| *known == catalog_digest) else {
                    return out.push(reject("has not received the catalog of this attempt".to_owned()));
                };
                let prewarm = self.classes.as_ref().is_none_or(|(digest, _)| digest != known);
                if prewarm {
                    out.push(ReceiverAction::Prewarm(tensors.clone()));
                }
                self.attempt = Some(Attempt {
                    id: attempt,
                    mode,
                    application,
                    prepared: false,
                    order: DeclaredOrder::new(owners),
                    seen: BTreeMap::new(),
                    staged: BTreeSet::new(),
                    awaited: None,
                    open: false,
                    flush: false,
                    busy: if prewarm { Busy::Prewarming } else { Busy::No },
                    wrote: false,
                    failed: false,
                    stop: false,
                    handed_out: 0,
                    work: ReceiverWork::default(),
                });
                if !prewarm {
                    self.admit(out);
                }
            }
            Message::StreamEnd { attempt, owner, totals } => {
                let Some(current) = self.current(attempt) else {
                    return;
                };
                if current.order.end(owner, totals.payloads) {
                    self.advance(out);
                } else {
                    self.fail(format!("owner/{owner} contradicts itself about the length of its stream"), out);
                }
            }
            Message::AwaitPayloads { attempt, payloads } => {
                let Some(current) = self.current(attempt) else { return };
                if (0..).zip(&payloads).all(|(owner, count)| current.order.end(owner, *count)) {
                    current.awaited = Some(payloads.iter().map(|count| u64::from(*count)).sum());
                    self.staged(out);
                } else {
                    self.fail("the coordinator names other stream lengths than the owners".to_owned(), out);
                }
            }
            Message::OpenApply { attempt } => {
                if let Some(current) = self.current(attempt) {
                    current.open = true;
                    self.advance(out);
                }
            }
            Message::Flush { attempt, payloads } => {
                let Some(current) = self.current(attempt) else {
                    return;
                };
                current.flush = true;
                let agrees = (0..).zip(&payloads).all(|(owner, count)| current.order.end(owner, *count));
                if agrees {
                    self.advance(out);
                } else {
                    self.fail("flush names other stream lengths than the owners".to_owned(), out);
                }
            }
            Message::Committed { attempt, held } => {
                if self.attempt.as_ref().is_some_and(|current| current.id == attempt && current.busy == Busy::Done) {
                    self.held = Some(held);
                    self.attempt = None;
                    out.push(ReceiverAction::ToRelay(Message::Holding { held: self.held }));
                }
            }
            Message::Stop { attempt, .. } => {
                match self.attempt.as_mut().filter(|current| current.id == attempt) {
                    Some(current) => {
                        current.failed = true;
                        current.stop = true;
                        current.staged.clear();
                        out.push(ReceiverAction::DropStaged);
                        self.stopped(out);
                    }
                    // Never prepared here, or already replaced: nothing is pending.
                    None => out.push(ReceiverAction::ToCoordinator(Message::Stopped { attempt, wrote: false })),
                }
            }
            _ => {}
        }
    }

    /// The attempt with this identifier, unless it has failed.
    fn current(&mut self, attempt: AttemptId) -> Option<&mut Attempt> {
        self.attempt.as_mut().filter(|current| current.id == attempt && !current.failed)
    }

    /// A later prepare replaces whatever attempt is left over.
    fn replace(&mut self, out: &mut Vec<ReceiverAction>) {
        if self.attempt.take().is_some() {
            out.push(ReceiverAction::DropStaged);
        }
    }

    fn prewarmed(&mut self, result: Result<Vec<TensorClass>, String>, out: &mut Vec<ReceiverAction>) {
        if let (Ok(classes), Some((digest, _))) = (&result, &self.catalog) {
            self.classes = Some((*digest, classes.clone()));
        }
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.busy == Busy::Prewarming) else {
            return;
        };
        attempt.busy = Busy::No;
        if attempt.stop {
            return self.stopped(out);
        }
        match result {
            Ok(_) => self.admit(out),
            Err(reason) => {
                let attempt_id = attempt.id;
                attempt.failed = true;
                let reason = format!("prewarm failed: {reason}");
                out.push(ReceiverAction::ToCoordinator(Message::Rejected { attempt: attempt_id, reason }));
            }
        }
    }

    /// Accepts the attempt, or rejects it when a tensor's loader path is not supported.
    fn admit(&mut self, out: &mut Vec<ReceiverAction>) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let classes = self.classes.as_ref().map_or(&[][..], |(_, classes)| classes);
        let of = |class| classes.iter().filter(move |tensor| tensor.class == class);
        if let Some(first) = of(LoaderClass::Unsupported).next() {
            attempt.failed = true;
            let more = match of(LoaderClass::Unsupported).count() - 1 {
                0 => String::new(),
                more => format!(" (and {more} more tensors)"),
            };
            let reason = format!("tensor `{}` cannot be refitted exactly here: {}{more}", first.name, first.reason);
            return out.push(ReceiverAction::ToCoordinator(Message::Rejected { attempt: attempt.id, reason }));
        }
        attempt.prepared = true;
        out.push(ReceiverAction::ToCoordinator(Message::ReceiverPrepared {
            attempt: attempt.id,
            overwrite_only: of(LoaderClass::Overwrite).map(|tensor| tensor.name.clone()).collect(),
            skipped: of(LoaderClass::Skip).count() as u64,
        }));
    }

    fn payload(&mut self, attempt: AttemptId, key: PayloadKey, digest: [u8; 16], out: &mut Vec<ReceiverAction>) {
        let Some(current) = self.current(attempt).filter(|current| current.prepared) else {
            return;
        };
        match current.seen.get(&key) {
            Some(seen) if *seen == digest => {}
            Some(_) => {
                let PayloadKey { sequence, owner } = key;
                self.fail(format!("payload {sequence} of owner/{owner} arrived twice with different bytes"), out);
            }
            None if !current.order.expects(key) => {
                let PayloadKey { sequence, owner } = key;
                self.fail(format!("payload {sequence} of owner/{owner} is beyond the end of its stream"), out);
            }
            None => {
                current.seen.insert(key, digest);
                current.staged.insert(key);
                out.push(ReceiverAction::Stage(key));
                if current.application == Application::Asynchronous {
                    // Staged is taken: only synchronous application holds owners back.
                    out.push(ReceiverAction::ToRelay(Message::PayloadTaken { attempt, key }));
                    self.staged(out);
                }
                self.advance(out);
            }
        }
    }

    /// Says that everything is there, once asked and once it is.
    fn staged(&mut self, out: &mut Vec<ReceiverAction>) {
        let Some(current) = self.attempt.as_mut().filter(|current| !current.failed) else { return };
        if current.awaited == Some(current.seen.len() as u64) {
            current.awaited = None;
            out.push(ReceiverAction::ToCoordinator(Message::PayloadsStaged { attempt: current.id }));
        }
    }

    /// Hands out the next batch, or the final checks, when it is time.
    fn advance(&mut self, out: &mut Vec<ReceiverAction>) {
        let batch = self.batch;
        let Some(current) = self.attempt.as_mut().filter(|current| !current.failed) else {
            return;
        };
        if !current.open || current.busy != Busy::No {
            return;
        }
        let mut keys = Vec::new();
        while keys.len() < batch
            && let Some(key) = current.order.due()
            && current.staged.remove(&key)
        {
            current.order.advance();
            keys.push(key);
        }
        if !keys.is_empty() {
            current.busy = Busy::Applying;
            current.handed_out = keys.len() as u64;
            current.wrote = true;
            // From the first write until the commit, the storage holds no committed version.
            if self.held.take().is_some() {
                out.push(ReceiverAction::ToRelay(Message::Holding { held: None }));
            }
            let attempt = current.id;
            if current.application == Application::Synchronous {
                let taken = keys.iter().map(|&key| ReceiverAction::ToRelay(Message::PayloadTaken { attempt, key }));
                out.extend(taken);
            }
            out.push(ReceiverAction::Apply(keys));
        } else if current.flush && current.order.complete() {
            current.busy = Busy::Finishing;
            out.push(ReceiverAction::Finish);
        }
    }

    fn applied(&mut self, work: ReceiverWork, result: Result<(), String>, out: &mut Vec<ReceiverAction>) {
        let Some(current) = self.attempt.as_mut().filter(|current| current.busy == Busy::Applying) else {
            return;
        };
        current.busy = Busy::No;
        current.work.payloads += current.handed_out;
        current.work.items += work.items;
        current.work.apply_s += work.apply_s;
        if current.stop {
            return self.stopped(out);
        }
        match result {
            Ok(()) => self.advance(out),
            Err(reason) => self.distrust(reason, out),
        }
    }

    /// The loader did otherwise than prewarm had found (storage may have moved): the next attempt begins with a prewarm.
    fn distrust(&mut self, reason: String, out: &mut Vec<ReceiverAction>) {
        self.classes = None;
        self.fail(reason, out);
    }

    fn finished(&mut self, result: Result<f64, String>, out: &mut Vec<ReceiverAction>) {
        let Some(current) = self.attempt.as_mut().filter(|current| current.busy == Busy::Finishing) else {
            return;
        };
        current.busy = Busy::No;
        if current.stop {
            return self.stopped(out);
        }
        match result {
            Ok(seconds) => {
                current.busy = Busy::Done;
                current.work.finish_s = seconds;
                let message = Message::Flushed { attempt: current.id, work: current.work };
                out.push(ReceiverAction::ToCoordinator(message));
            }
            Err(reason) => self.distrust(reason, out),
        }
    }

    fn fail(&mut self, reason: String, out: &mut Vec<ReceiverAction>) {
        let Some(current) = self.attempt.as_mut().filter(|current| !current.failed) else {
            return;
        };
        current.failed = true;
        current.staged.clear();
        out.push(ReceiverAction::DropStaged);
        out.push(ReceiverAction::ToCoordinator(Message::AttemptFailed { attempt: current.id, reason }));
    }

    /// Answers `Stop` as soon as the worker is idle.
    fn stopped(&mut self, out: &mut Vec<ReceiverAction>) {
        let idle = |attempt: &Attempt| matches!(attempt.busy, Busy::No | Busy::Done);
        if self.attempt.as_ref().is_some_and(|attempt| attempt.stop && idle(attempt))
            && let Some(attempt) = self.attempt.take()
        {
            out.push(ReceiverAction::ToCoordinator(Message::Stopped { attempt: attempt.id, wrote: attempt.wrote }));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::StreamTotals;
    use dcr_core::dtype::DType;

    const ATTEMPT: AttemptId = AttemptId([1; 16]);

    fn key(sequence: u32) -> PayloadKey {
        PayloadKey { sequence, owner: 0 }
    }

    /// A receiver that has accepted a synchronous dense attempt of one owner.
    fn prepared() -> Receiver {
        let mut receiver = Receiver::new(8);
        let catalog = vec![TensorMeta { name: "w".to_owned(), shape: vec![4], dtype: DType::Bf16 }];
        let actions = receiver.handle(ReceiverEvent::Message(Message::PrepareReceiver {
            attempt: ATTEMPT,
            version: 1,
            base: None,
            mode: Mode::Dense,
            application: Application::Synchronous,
            owners: 1,
            catalog_digest: BaselineId([2; 16]),
            catalog: Some(catalog),
        }));
        assert!(matches!(actions.as_slice(), [ReceiverAction::Prewarm(_)]));
        let class = TensorClass { name: "w".to_owned(), class: LoaderClass::Xor, reason: String::new() };
        let actions = receiver.handle(ReceiverEvent::Prewarmed(Ok(vec![class])));
        assert!(matches!(actions.as_slice(), [ReceiverAction::ToCoordinator(Message::ReceiverPrepared { .. })]));
        receiver
    }

    fn arrive(receiver: &mut Receiver, sequence: u32, digest: u8) -> Vec<ReceiverAction> {
        receiver.handle(ReceiverEvent::Payload { attempt: ATTEMPT, key: key(sequence), digest: [digest; 16] })
    }

    #[test]
    fn the_same_bytes_again_are_ignored_and_other_bytes_fail_the_attempt() {
        let mut receiver = prepared();
        assert_eq!(arrive(&mut receiver, 0, 7), [ReceiverAction::Stage(key(0))]);
        assert_eq!(arrive(&mut receiver, 0, 7), []);
        let actions = arrive(&mut receiver, 0, 8);
        let [ReceiverAction::DropStaged, ReceiverAction::ToCoordinator(Message::AttemptFailed { reason, .. })] =
            actions.as_slice()
        else {
            panic!("{actions:?}");
        };
        assert!(reason.contains("payload 0 of owner/0") && reason.contains("different bytes"), "{reason}");
        assert_eq!(arrive(&mut receiver, 1, 7), [], "nothing more is taken for a failed attempt");
    }

    #[test]
    fn stop_is_answered_only_when_the_worker_is_idle_again() {
        let mut receiver = prepared();
        arrive(&mut receiver, 0, 7);
        let open = receiver.handle(ReceiverEvent::Message(Message::OpenApply { attempt: ATTEMPT }));
        assert!(open.contains(&ReceiverAction::Apply(vec![key(0)])), "{open:?}");
        let stop = Message::Stop { attempt: ATTEMPT, reason: "another rank failed".to_owned() };
        assert_eq!(receiver.handle(ReceiverEvent::Message(stop)), [ReceiverAction::DropStaged]);
        let applied = ReceiverEvent::Applied { work: ReceiverWork::default(), result: Ok(()) };
        let stopped = Message::Stopped { attempt: ATTEMPT, wrote: true };
        assert_eq!(receiver.handle(applied), [ReceiverAction::ToCoordinator(stopped)]);
        assert_eq!(receiver.held(), None);
    }

    #[test]
    fn a_failed_application_is_followed_by_a_new_prewarm() {
        let mut receiver = prepared();
        arrive(&mut receiver, 0, 7);
        receiver.handle(ReceiverEvent::Message(Message::OpenApply { attempt: ATTEMPT }));
        let reason = "resident tensor `w` has other storage".to_owned();
        receiver.handle(ReceiverEvent::Applied { work: ReceiverWork::default(), result: Err(reason) });
        let prepare = |catalog| Message::PrepareReceiver {
            attempt: AttemptId([3; 16]),
            version: 1,
            base: None,
            mode: Mode::Dense,
            application: Application::Synchronous,
            owners: 1,
            catalog_digest: BaselineId([2; 16]),
            catalog,
        };
        let actions = receiver.handle(ReceiverEvent::Message(prepare(None)));
        assert!(actions.iter().any(|action| matches!(action, ReceiverAction::Prewarm(_))), "{actions:?}");
    }

    #[test]
    fn a_payload_beyond_the_end_of_its_stream_fails_the_attempt() {
        let mut receiver = prepared();
        let totals = StreamTotals { payloads: 1, ..Default::default() };
        receiver.handle(ReceiverEvent::Message(Message::StreamEnd { attempt: ATTEMPT, owner: 0, totals }));
        let actions = arrive(&mut receiver, 1, 7);
        assert!(format!("{actions:?}").contains("beyond the end"), "{actions:?}");
    }

    #[test]
    fn nothing_of_another_attempt_is_taken() {
        let mut receiver = prepared();
        let other = AttemptId([9; 16]);
        let late = ReceiverEvent::Payload { attempt: other, key: key(0), digest: [7; 16] };
        assert_eq!(receiver.handle(late), []);
        assert_eq!(receiver.handle(ReceiverEvent::Message(Message::OpenApply { attempt: other })), []);
        let stop = Message::Stop { attempt: other, reason: String::new() };
        let stopped = Message::Stopped { attempt: other, wrote: false };
        assert_eq!(receiver.handle(ReceiverEvent::Message(stop)), [ReceiverAction::ToCoordinator(stopped)]);
        assert_eq!(receiver.active(), Some((ATTEMPT, Mode::Dense)));
    }
}
