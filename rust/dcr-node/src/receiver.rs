//! The running receiver: checks and stages payloads on its own threads, and hands work to the worker's.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dcr_core::payload::{self, Encoding, Item};
use dcr_core::tensor::TensorMeta;
use dcr_protocol::{
    AttemptId, LoaderClass, Message, Mode, PayloadKey, PeerName, Receiver, ReceiverAction, ReceiverEvent, ReceiverWork,
    TensorClass,
};
use dcr_transport::{Endpoint, EndpointEvent, Frame, HeldCell, Outgoing};
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::warn;

use crate::NodeError;
use crate::runtime::{Connection, Link, connect};

/// Payloads that one loader call applies at most (appendix C: groups of eight decoded payloads).
const BATCH: usize = 8;

/// Something for the worker's thread to do.
#[derive(Clone, Debug)]
pub struct Task {
    /// Tells answers to this task from answers to earlier ones.
    pub id: u64,
    /// The attempt that it belongs to.
    pub attempt: Option<AttemptId>,
    /// What.
    pub kind: TaskKind,
}

/// What there is to do.
#[derive(Clone, Debug)]
pub enum TaskKind {
    /// Classify the loader paths of these tensors.
    Prewarm(Arc<Vec<TensorMeta>>),
    /// Hand these items to the native loader, in this order.
    Apply(Arc<Vec<Item>>),
    /// Synchronise the device and run the checks.
    Finish,
    /// The receiver is being closed.
    Shutdown,
}

/// A task that nobody has started. Payloads stay compressed until the worker takes them.
enum Queued {
    Prewarm(Vec<TensorMeta>),
    Apply(Vec<Bytes>),
    Finish,
}

struct State {
    machine: Receiver,
    staged: HashMap<PayloadKey, Bytes>,
    /// What payloads of the active attempt are checked against.
    checks: Option<Arc<Checks>>,
    /// The payload that is being handed to the machine right now.
    arriving: Option<Bytes>,
    tasks: VecDeque<(u64, Option<AttemptId>, Queued)>,
    /// The task whose answer the machine waits for.
    expected: u64,
    next_id: u64,
    closed: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    endpoint: Arc<Endpoint>,
    told: HeldCell,
}

/// A receiver with its connection.
pub struct ReceiverNode {
    connection: Mutex<Option<Connection>>,
    shared: Arc<Shared>,
}

impl ReceiverNode {
    /// Starts connecting; a relay that is not there yet is waited for in the background.
    pub fn start(link: &Link, name: &str) -> Result<Self, NodeError> {
        let name = PeerName::new(name)
            .ok_or(NodeError::Misuse("a receiver's name must look like receiver/HOST/RANK, of at most 200 bytes"))?;
        let (connection, events) = connect(link, name)?;
        let state = State {
            machine: Receiver::new(BATCH),
            staged: HashMap::new(),
            checks: None,
            arriving: None,
            tasks: VecDeque::new(),
            expected: 0,
            next_id: 1,
            closed: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            endpoint: Arc::clone(&connection.endpoint),
            told: Arc::clone(&connection.held),
        });
        connection.spawn(run(Arc::clone(&shared), events));
        Ok(Self { connection: Mutex::new(Some(connection)), shared })
    }

    /// The next thing to do; `None` when there was nothing for this long. Decodes payloads on the calling thread.
    pub fn next_task(&self, patience: Duration) -> Option<Task> {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while_for(&mut state, |state| state.tasks.is_empty() && !state.closed, patience);
        if state.closed {
            return Some(Task { id: 0, attempt: None, kind: TaskKind::Shutdown });
        }
        let (id, attempt, queued) = state.tasks.pop_front()?;
        drop(state);
        let kind = match queued {
            Queued::Prewarm(catalog) => TaskKind::Prewarm(Arc::new(catalog)),
            Queued::Finish => TaskKind::Finish,
            Queued::Apply(payloads) => {
                let decoded: Result<Vec<_>, _> = payloads.iter().map(|bytes| payload::decode(bytes)).collect();
                match decoded {
                    Ok(decoded) => {
                        TaskKind::Apply(Arc::new(decoded.into_iter().flat_map(|payload| payload.items).collect()))
                    }
                    Err(error) => {
                        // It was decoded when it arrived, so this says that memory went wrong meanwhile.
                        self.applied(id, 0, 0.0, Err(format!("a staged payload was damaged in memory: {error}")));
                        return None;
                    }
                }
            }
        };
        Some(Task { id, attempt, kind })
    }

    /// The answer to a prewarm task.
    pub fn prewarmed(&self, task: u64, result: Result<Vec<TensorClass>, String>) {
        self.answer(task, ReceiverEvent::Prewarmed(result));
    }

    /// The answer to an apply task: `items` went through the loader in `seconds`.
    pub fn applied(&self, task: u64, items: u64, seconds: f64, result: Result<(), String>) {
        let work = ReceiverWork { payloads: 0, items, apply_s: seconds, finish_s: 0.0 };
        self.answer(task, ReceiverEvent::Applied { work, result });
    }

    /// The answer to a finish task.
    pub fn finished(&self, task: u64, result: Result<f64, String>) {
        self.answer(task, ReceiverEvent::Finished(result));
    }

    /// Something outside of a task went wrong; fails the running attempt.
    pub fn report_failure(&self, reason: &str) {
        self.shared.handle(ReceiverEvent::Failed(reason.to_owned()));
    }

    /// The classes that the last prewarm found.
    pub fn classes(&self) -> Vec<TensorClass> {
        self.shared.state.lock().machine.classes().to_vec()
    }

    /// Closes the connection and ends `next_task` with a shutdown task.
    pub fn close(&self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
        *self.connection.lock() = None;
    }

    fn answer(&self, task: u64, event: ReceiverEvent) {
        let current = {
            let state = self.shared.state.lock();
            state.expected == task
        };
        // An answer to a task of an attempt that was replaced meanwhile says nothing about the current one.
        if current {
            self.shared.handle(event);
        }
    }
}

async fn run(shared: Arc<Shared>, mut events: UnboundedReceiver<EndpointEvent>) {
    while let Some(event) = events.recv().await {
        match event {
            EndpointEvent::Connected => {}
            EndpointEvent::Lost(reason) => {
                shared.handle(ReceiverEvent::Failed(format!("the connection to the relay was lost: {reason}")));
            }
            EndpointEvent::Frame(frame) => tokio::task::block_in_place(|| shared.frame(*frame)),
        }
    }
}

impl Shared {
    fn frame(&self, frame: Frame) {
        let Frame { envelope, body, .. } = frame;
        match envelope.message {
            Message::Payload { attempt, key } => {
                // A late payload of an obsolete attempt is dropped before any work is done for it.
                let checks = self.state.lock().checks.clone();
                let Some(checks) = checks.filter(|checks| checks.attempt == attempt) else {
                    return;
                };
                let body = body.unwrap_or_default();
                match checks.check(key, &body) {
                    Ok(digest) => {
                        self.state.lock().arriving = Some(body);
                        self.handle(ReceiverEvent::Payload { attempt, key, digest });
                        self.state.lock().arriving = None;
                    }
                    Err(reason) => {
                        let PayloadKey { sequence, owner } = key;
                        let reason = format!("payload {sequence} of owner/{owner}: {reason}");
                        self.handle(ReceiverEvent::BadPayload { attempt, reason });
                    }
                }
            }
            message => self.handle(ReceiverEvent::Message(message)),
        }
    }

    fn handle(&self, event: ReceiverEvent) {
        let mut state = self.state.lock();
        let mut next = Some(event);
        while let Some(event) = next.take() {
            for action in state.machine.handle(event) {
                next = next.or(self.act(&mut state, action));
            }
        }
        let active = state.machine.active();
        if state.checks.as_ref().map(|checks| (checks.attempt, checks.mode)) != active {
            state.checks = active.map(|(attempt, mode)| {
                Arc::new(Checks::new(attempt, mode, state.machine.catalog(), state.machine.classes()))
            });
        }
        *self.told.lock() = state.machine.held();
        self.changed.notify_all();
    }

    /// Does what the machine asks for; the result is an event that follows from it at once.
    fn act(&self, state: &mut State, action: ReceiverAction) -> Option<ReceiverEvent> {
        let send = |to, message| self.endpoint.send(Outgoing { to: vec![to], message, body: None });
        match action {
            ReceiverAction::ToCoordinator(message) => {
                if let Message::Rejected { reason, .. } | Message::AttemptFailed { reason, .. } = &message {
                    warn!(%reason, "attempt failed");
                }
                send(PeerName::coordinator(), message);
            }
            ReceiverAction::ToRelay(message) => send(PeerName::relay(), message),
            ReceiverAction::Prewarm(catalog) => state.push(Queued::Prewarm(catalog)),
            ReceiverAction::Stage(key) => {
                if let Some(body) = state.arriving.take() {
                    state.staged.insert(key, body);
                }
            }
            ReceiverAction::Apply(keys) => {
                let payloads = keys.iter().filter_map(|key| state.staged.remove(key)).collect();
                state.push(Queued::Apply(payloads));
            }
            ReceiverAction::Finish => state.push(Queued::Finish),
            ReceiverAction::DropStaged => {
                state.staged.clear();
                // Work that nobody has started must not be started any more, and `stop` must not wait for it.
                let unstarted =
                    |(_, _, queued): &(u64, Option<AttemptId>, Queued)| !matches!(queued, Queued::Prewarm(_));
                let position = state.tasks.iter().position(unstarted);
                let (.., queued) = position.and_then(|position| state.tasks.remove(position))?;
                let reason = Err("stopped before it started".to_owned());
                return Some(match queued {
                    Queued::Apply(_) => ReceiverEvent::Applied { work: ReceiverWork::default(), result: reason },
                    _ => ReceiverEvent::Finished(reason.map(|()| 0.0)),
                });
            }
        }
        None
    }
}

impl State {
    fn push(&mut self, queued: Queued) {
        let id = self.next_id;
        self.next_id += 1;
        self.expected = id;
        self.tasks.push_back((id, self.machine.attempt(), queued));
    }
}

/// The reception checks of appendix B.1 that look inside a payload.
struct Checks {
    attempt: AttemptId,
    mode: Mode,
    tensors: HashMap<String, (TensorMeta, bool)>,
    /// Largest uncompressed body of an honest payload.
    body_limit: u64,
}

impl Checks {
    fn new(attempt: AttemptId, mode: Mode, catalog: &[TensorMeta], classes: &[TensorClass]) -> Self {
        let overwrite = classes.iter().filter(|tensor| tensor.class == LoaderClass::Overwrite);
        let overwrite: HashSet<&str> = overwrite.map(|tensor| tensor.name.as_str()).collect();
        let tensors = catalog.iter().map(|tensor| {
            let xor = !overwrite.contains(tensor.name.as_str());
            (tensor.name.clone(), (tensor.clone(), xor))
        });
        // Values, locations of at most 8 bytes each, and metadata: never more than this for all tensors together.
        let body = catalog.iter().map(|tensor| {
            let values = tensor.nbytes().unwrap_or(0) as u64;
            let locations = tensor.numel().unwrap_or(0).saturating_mul(8);
            values.saturating_add(locations).saturating_add(tensor.name.len() as u64 + 1024)
        });
        let body_limit = body.fold(1024, u64::saturating_add);
        Self { attempt, mode, tensors: tensors.collect(), body_limit }
    }

    /// The digest of a payload that is what it should be.
    fn check(&self, key: PayloadKey, body: &[u8]) -> Result<[u8; 16], String> {
        let header = payload::peek(body).map_err(|error| error.to_string())?;
        if (header.id.attempt, PayloadKey::from(&header.id)) != (self.attempt.0, key) {
            return Err("its header names another attempt, owner or sequence than its frame".to_owned());
        }
        let payload = payload::decode_with_limit(body, self.body_limit).map_err(|error| error.to_string())?;
        for item in &payload.items {
            let name = item.meta.name.as_str();
            let Some((tensor, xor)) = self.tensors.get(name) else {
                return Err(format!("tensor `{name}` is not in the catalog of this attempt"));
            };
            if *tensor != item.meta {
                let describe = |meta: &TensorMeta| format!("{} {:?}", meta.dtype.name(), meta.shape);
                let (got, wanted) = (describe(&item.meta), describe(tensor));
                return Err(format!("tensor `{name}` is {got} but the catalog says {wanted}"));
            }
            let allowed = match item.encoding {
                Encoding::Xor => self.mode == Mode::Mixed && *xor,
                Encoding::Overwrite => self.mode != Mode::Dense,
                Encoding::Dense => self.mode == Mode::Dense,
            };
            if !allowed {
                let mode = self.mode.name();
                return Err(format!("tensor `{name}` is encoded as {:?} in a {mode} refit", item.encoding));
            }
        }
        Ok(header.digest)
    }
}
