//! The running owner: compares, encodes and streams its share of the changed set.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcr_core::baseline::Baseline;
use dcr_core::ownership::owner_of;
use dcr_core::payload::{self, Encoding, Item, PayloadId};
use dcr_core::tensor::TensorMeta;
use dcr_protocol::{
    AttemptId, Held, Message, Mode, Owner, OwnerAction, OwnerEvent, PayloadKey, PeerName, StreamTotals,
};
use dcr_transport::{Endpoint, EndpointEvent, HeldCell, Outgoing};
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::{debug, warn};

use crate::NodeError;
use crate::runtime::{Connection, Link, connect};

/// Sizes of an owner's pipeline (appendix C, pipeline settings).
#[derive(Clone, Copy, Debug)]
pub struct OwnerOptions {
    /// A bucket is closed once the tensors in it total this many bytes, changed or not.
    pub bucket_bytes: u64,
    /// Unacknowledged payload bytes that may be on their way.
    pub window_bytes: u64,
}

impl Default for OwnerOptions {
    fn default() -> Self {
        Self { bucket_bytes: 512 << 20, window_bytes: 256 << 20 }
    }
}

/// An accepted `prepare`: the owner may offer its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// The attempt.
    pub attempt: AttemptId,
    /// The version that it would commit.
    pub version: u64,
    /// Encoding of the changed set.
    pub mode: Mode,
    overwrite_only: BTreeSet<String>,
}

struct State {
    machine: Owner,
    connected: bool,
    lost: Option<String>,
    /// A `prepare` that the caller has not taken yet.
    prepared: Option<Prepared>,
    /// The attempt that the caller works on.
    taken: Option<AttemptId>,
    /// How the last attempt ended, until the caller has been told.
    ended: Option<(AttemptId, Result<Held, String>)>,
}

impl State {
    /// How the attempt that the caller works on ended, if it has.
    fn taken_ended(&self) -> Option<&Result<Held, String>> {
        self.ended.as_ref().filter(|(attempt, _)| Some(*attempt) == self.taken).map(|(_, result)| result)
    }

    /// Whether an attempt ended before the caller took it.
    fn ended_untaken(&self) -> bool {
        self.ended.is_some() && self.taken_ended().is_none()
    }
}

/// What the comparing thread works on; also locked by the baseline update, which never runs while it compares.
#[derive(Default)]
struct Work {
    baseline: Baseline,
    current: Option<Prepared>,
    offered: BTreeSet<String>,
    bucket: Vec<Item>,
    bucket_bytes: u64,
    totals: StreamTotals,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    work: Mutex<Work>,
    /// Not part of `work`: it is asked for while a comparison waits for credits that only the asked thread can bring.
    catalog: Mutex<Vec<TensorMeta>>,
}

/// An owner with its connection and baseline.
pub struct OwnerNode {
    index: u32,
    owners: u32,
    options: OwnerOptions,
    connection: Option<Connection>,
    shared: Arc<Shared>,
}

impl OwnerNode {
    /// An owner with an empty baseline and no connection.
    pub fn new(index: u32, owners: u32, options: OwnerOptions) -> Result<Self, NodeError> {
        if index >= owners {
            return Err(NodeError::Misuse("an owner's index must be below the number of owners"));
        }
        let state = State {
            machine: Owner::new(index, options.window_bytes),
            connected: false,
            lost: None,
            prepared: None,
            taken: None,
            ended: None,
        };
        let shared = Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            work: Mutex::default(),
            catalog: Mutex::default(),
        };
        Ok(Self { index, owners, options, connection: None, shared: Arc::new(shared) })
    }

    /// Whether the stable hash of the name picks this owner.
    pub fn owns(&self, name: &str) -> bool {
        owner_of(name, self.owners) == self.index
    }

    /// Copies an owned tensor's stored bits into the baseline. Once for every tensor, before the first refit.
    pub fn track(&self, meta: TensorMeta, bytes: &[u8]) -> Result<(), NodeError> {
        let error = |reason: String| NodeError::Tensor { tensor: Box::new(meta.clone()), reason };
        if !self.owns(&meta.name) {
            return Err(error(format!("belongs to owner/{}", owner_of(&meta.name, self.owners))));
        }
        let mut work = self.shared.work.lock();
        work.baseline.track(meta.clone(), bytes).map_err(|cause| error(cause.to_string()))?;
        self.shared.catalog.lock().push(meta.clone());
        Ok(())
    }

    /// Connects to the relay; the catalog is sent when the coordinator asks for it.
    pub fn register(&mut self, link: &Link, patience: Duration) -> Result<(), NodeError> {
        if self.connection.is_some() {
            return Err(NodeError::Misuse("this owner is registered already"));
        }
        let (connection, events) = connect(link, PeerName::owner(self.index))?;
        let driver = Driver {
            shared: Arc::clone(&self.shared),
            endpoint: Arc::clone(&connection.endpoint),
            told: Arc::clone(&connection.held),
        };
        connection.spawn(driver.run(events));
        self.connection = Some(connection);
        let mut state = self.shared.state.lock();
        let waited = self.shared.changed.wait_while_for(&mut state, |state| !state.connected, patience);
        if waited.timed_out() {
            let reason = state
                .lost
                .clone()
                .unwrap_or_else(|| format!("the relay did not take the connection within {patience:?}"));
            return Err(NodeError::NoRelay(reason));
        }
        Ok(())
    }

    /// Waits for a `prepare`.
    pub fn await_prepared(&self, patience: Duration) -> Result<Prepared, NodeError> {
        let mut state = self.shared.state.lock();
        let waiting = |state: &mut State| state.prepared.is_none() && !state.ended_untaken();
        self.shared.changed.wait_while_for(&mut state, waiting, patience);
        if let Some(prepared) = state.prepared.take() {
            state.taken = Some(prepared.attempt);
            // How an earlier attempt ended is of no interest any more.
            state.ended.take_if(|(attempt, _)| *attempt != prepared.attempt);
            drop(state);
            let mut work = self.shared.work.lock();
            work.bucket.clear();
            work.bucket_bytes = 0;
            work.offered.clear();
            work.totals = StreamTotals::default();
            work.baseline.discard();
            work.current = Some(prepared.clone());
            return Ok(prepared);
        }
        let taken = state.taken;
        match state.ended.take_if(|(attempt, _)| Some(*attempt) != taken) {
            Some((_, Err(reason))) => Err(NodeError::Attempt(reason)),
            _ => Err(NodeError::Timeout { waited: patience, what: "the coordinator to prepare a refit" }),
        }
    }

    /// Compares an owned tensor with the baseline and streams what changed. Blocks while the window is full.
    pub fn offer(&self, meta: &TensorMeta, bytes: &[u8]) -> Result<(), NodeError> {
        let error = |reason: String| NodeError::Tensor { tensor: Box::new(meta.clone()), reason };
        let mut work = self.shared.work.lock();
        let Some(current) = work.current.clone() else {
            return Err(NodeError::Misuse("no refit is prepared: call await_prepared first"));
        };
        self.still_running()?;
        if !work.offered.insert(meta.name.clone()) {
            return Err(error("offered twice in one refit".to_owned()));
        }
        let encoding = match current.mode {
            Mode::Dense => Encoding::Dense,
            Mode::Mixed if !current.overwrite_only.contains(&meta.name) => Encoding::Xor,
            Mode::Mixed | Mode::Overwrite => Encoding::Overwrite,
        };
        let started = Instant::now();
        let work = &mut *work;
        let candidate = work.baseline.compare(meta, bytes).map_err(|cause| error(cause.to_string()))?;
        let totals = &mut work.totals;
        totals.changed += candidate.positions().count();
        totals.elements += (bytes.len() / meta.dtype.width()) as u64;
        totals.bytes += bytes.len() as u64;
        totals.compare_s += started.elapsed().as_secs_f64();
        if encoding == Encoding::Dense || !candidate.is_unchanged() {
            let started = Instant::now();
            let item = candidate.item(encoding);
            totals.encode_s += started.elapsed().as_secs_f64();
            match encoding {
                Encoding::Xor => totals.xor_items += 1,
                Encoding::Overwrite | Encoding::Dense => totals.overwrite_items += 1,
            }
            // A bucket counts the full input of what it holds, so that its size does not depend on luck.
            work.bucket_bytes += bytes.len() as u64;
            work.bucket.push(item);
            if work.bucket_bytes >= self.options.bucket_bytes {
                self.send_bucket(work, &current)?;
            }
        }
        Ok(())
    }

    /// Sends what is left and tells everybody that the stream has ended.
    pub fn end_stream(&self) -> Result<StreamTotals, NodeError> {
        let mut work = self.shared.work.lock();
        let Some(current) = work.current.take() else {
            return Err(NodeError::Misuse("no refit is prepared: call await_prepared first"));
        };
        self.still_running()?;
        let missing = self.shared.catalog.lock().iter().find(|tensor| !work.offered.contains(&tensor.name)).cloned();
        if let Some(tensor) = missing {
            let reason = "was tracked but not offered in this refit".to_owned();
            return Err(NodeError::Tensor { tensor: Box::new(tensor), reason });
        }
        self.send_bucket(&mut work, &current)?;
        let totals = work.totals;
        drop(work);
        self.handle(OwnerEvent::StreamEnded(totals));
        Ok(totals)
    }

    /// Waits until the attempt is committed and the baseline updated, or has failed.
    pub fn await_end(&self, patience: Duration) -> Result<Held, NodeError> {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while_for(&mut state, |state| state.taken_ended().is_none(), patience);
        match state.taken_ended() {
            Some(Ok(held)) => Ok(*held),
            Some(Err(reason)) => Err(NodeError::Attempt(reason.clone())),
            None => Err(NodeError::Timeout { waited: patience, what: "the refit to end" }),
        }
    }

    /// Fails the running attempt for the caller's own reason.
    pub fn fail(&self, reason: &str) {
        self.handle(OwnerEvent::Failed(reason.to_owned()));
    }

    /// Bytes that the baseline holds in host memory.
    pub fn baseline_bytes(&self) -> usize {
        self.shared.work.lock().baseline.bytes_held()
    }

    /// Closes the connection.
    pub fn close(&mut self) {
        self.connection = None;
    }

    fn still_running(&self) -> Result<(), NodeError> {
        let state = self.shared.state.lock();
        match state.taken_ended() {
            Some(Err(reason)) => Err(NodeError::Attempt(reason.clone())),
            _ if state.machine.attempt() != state.taken => Err(NodeError::Attempt("the attempt has ended".to_owned())),
            _ => Ok(()),
        }
    }

    fn send_bucket(&self, work: &mut Work, current: &Prepared) -> Result<(), NodeError> {
        if work.bucket.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let key = PayloadKey { sequence: work.totals.payloads, owner: self.index };
        let id = PayloadId { attempt: current.attempt.0, owner: key.owner, sequence: key.sequence };
        let encoded = payload::encode(&id, &work.bucket).map_err(|cause| {
            let first = &work.bucket[0].meta;
            NodeError::Tensor { tensor: Box::new(first.clone()), reason: format!("its bucket: {cause}") }
        })?;
        work.bucket.clear();
        work.bucket_bytes = 0;
        work.totals.payloads += 1;
        work.totals.payload_bytes += encoded.len() as u64;
        work.totals.encode_s += started.elapsed().as_secs_f64();

        let started = Instant::now();
        let bytes = encoded.len() as u64;
        {
            let mut state = self.shared.state.lock();
            self.shared
                .changed
                .wait_while(&mut state, |state| state.machine.attempt() == state.taken && !state.machine.may_send());
        }
        self.still_running()?;
        work.totals.blocked_s += started.elapsed().as_secs_f64();
        self.handle(OwnerEvent::PayloadReady { sequence: key.sequence, bytes });
        if let Some(connection) = &self.connection {
            connection.endpoint.send(Outgoing {
                to: Vec::new(),
                message: Message::Payload { attempt: current.attempt, key },
                body: Some(Bytes::from(encoded)),
            });
        }
        Ok(())
    }

    fn handle(&self, event: OwnerEvent) {
        if let Some(connection) = &self.connection {
            let driver = Driver {
                shared: Arc::clone(&self.shared),
                endpoint: Arc::clone(&connection.endpoint),
                told: Arc::clone(&connection.held),
            };
            driver.handle(event);
        }
    }
}

struct Driver {
    shared: Arc<Shared>,
    endpoint: Arc<Endpoint>,
    told: HeldCell,
}

impl Driver {
    async fn run(self, mut events: UnboundedReceiver<EndpointEvent>) {
        while let Some(event) = events.recv().await {
            match event {
                EndpointEvent::Connected => self.update(|state| state.connected = true),
                EndpointEvent::Lost(reason) => {
                    self.update(|state| {
                        state.connected = false;
                        state.lost = Some(reason.clone());
                    });
                    self.handle(OwnerEvent::Failed(format!("the connection to the relay was lost: {reason}")));
                }
                EndpointEvent::Frame(frame) => {
                    // Committing copies memory; other tasks of this small runtime move on meanwhile.
                    tokio::task::block_in_place(|| self.handle(OwnerEvent::Message(frame.envelope.message)));
                }
            }
        }
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.state.lock());
        self.shared.changed.notify_all();
    }

    fn handle(&self, event: OwnerEvent) {
        let actions = self.shared.state.lock().machine.handle(event);
        self.shared.changed.notify_all();
        for action in actions {
            self.act(action);
        }
    }

    fn act(&self, action: OwnerAction) {
        let send = |to, message| self.endpoint.send(Outgoing { to, message, body: None });
        match action {
            OwnerAction::ToCoordinator(message) => send(vec![PeerName::coordinator()], message),
            OwnerAction::ToReceivers(message) => send(Vec::new(), message),
            OwnerAction::Holding(held) => {
                *self.told.lock() = held;
                send(vec![PeerName::relay()], Message::Holding { held });
            }
            OwnerAction::SendCatalog => {
                let tensors = self.shared.catalog.lock().clone();
                send(vec![PeerName::coordinator()], Message::Catalog { tensors });
            }
            OwnerAction::Start { attempt, version, mode, overwrite_only } => {
                debug!(%attempt, version, mode = mode.name(), "prepared");
                self.update(|state| {
                    state.prepared = Some(Prepared { attempt, version, mode, overwrite_only });
                });
            }
            OwnerAction::UpdateBaseline => {
                self.shared.work.lock().baseline.commit();
                self.handle(OwnerEvent::BaselineUpdated);
            }
            OwnerAction::DiscardCandidate => {
                // The comparing thread may hold the lock while it waits for credits; it is woken by the end of the
                // attempt and the next attempt discards first, so nothing is lost by not waiting here.
                if let Some(mut work) = self.shared.work.try_lock() {
                    work.baseline.discard();
                }
            }
            OwnerAction::End(attempt, result) => {
                if let Err(reason) = &result {
                    warn!(%attempt, %reason, "attempt ended");
                }
                self.update(|state| state.ended = Some((attempt, result)));
            }
        }
    }
}
