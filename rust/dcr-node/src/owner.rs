//! The running owner: compares, encodes and streams its share of the changed set.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dcr_core::baseline::Role;
use dcr_core::projection::Projection;
use dcr_core::tensor::TensorMeta;
use dcr_protocol::{
    AttemptId, Held, Message, Mode, Owner, OwnerAction, OwnerEvent, PayloadKey, PeerName, StreamTotals,
};
use dcr_transport::{Endpoint, EndpointEvent, HeldCell, Outgoing};
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::{debug, warn};

use crate::NodeError;
use crate::construct::{ConstructOptions, Construction, Offer, Sink, StreamOrder};
use crate::runtime::{Connection, Link, connect};

/// How an owner works.
#[derive(Clone, Debug)]
pub struct OwnerOptions {
    /// Sizes of its pipeline.
    pub construct: ConstructOptions,
    /// Unacknowledged payload bytes that may be on their way.
    pub window_bytes: u64,
}

impl Default for OwnerOptions {
    fn default() -> Self {
        Self { construct: ConstructOptions::default(), window_bytes: 256 << 20 }
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
    /// The caller has closed the owner: nobody waits for credits any more.
    closed: bool,
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

    /// Why nothing more can be sent.
    fn reason(&self) -> NodeError {
        match self.taken_ended() {
            Some(Err(reason)) => NodeError::Attempt(reason.clone()),
            _ => NodeError::Attempt("the attempt has ended".to_owned()),
        }
    }

    /// Whether an attempt ended before the caller took it.
    fn ended_untaken(&self) -> bool {
        self.ended.is_some() && self.taken_ended().is_none()
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// What the comparing thread works on; also locked by the baseline update, which never runs while it compares.
    construction: Mutex<Construction>,
    /// Not part of the construction: it is asked for while a comparison waits for credits that only the asked thread
    /// can bring.
    catalog: Mutex<BTreeMap<String, TensorMeta>>,
}

/// An owner with its connection and baseline.
pub struct OwnerNode {
    index: u32,
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
            closed: false,
            lost: None,
            prepared: None,
            taken: None,
            ended: None,
        };
        let shared = Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            construction: Mutex::new(Construction::new(options.construct)?),
            catalog: Mutex::default(),
        };
        Ok(Self { index, connection: None, shared: Arc::new(shared) })
    }

    /// Copies an owned tensor's stored bits into the baseline. Once for every tensor, before the first refit. Without a
    /// projection it is a whole canonical tensor.
    pub fn track(&self, offer: &Offer<'_>, role: Role, projection: Option<Projection>) -> Result<(), NodeError> {
        let canonical: Vec<TensorMeta> = match &projection {
            Some(projection) => projection.pieces().iter().map(|piece| piece.tensor().clone()).collect(),
            None => vec![offer.meta.clone()],
        };
        self.shared.construction.lock().track(offer, role, projection)?;
        let mut catalog = self.shared.catalog.lock();
        for tensor in canonical {
            match catalog.get(&tensor.name) {
                Some(known) if *known != tensor => {
                    let reason = format!("is {} {:?} in another shard of this owner", known.dtype, known.shape);
                    return Err(NodeError::Tensor { tensor: Box::new(tensor), reason });
                }
                _ => catalog.insert(tensor.name.clone(), tensor),
            };
        }
        Ok(())
    }

    /// Remembers the bits of a residual task's shard, for its change flag.
    pub fn track_flag(&self, offer: &Offer<'_>) -> Result<(), NodeError> {
        self.shared.construction.lock().track_flag(offer)
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
            let order = StreamOrder {
                attempt: prepared.attempt,
                owner: self.index,
                mode: prepared.mode,
                overwrite_only: prepared.overwrite_only.clone(),
            };
            self.shared.construction.lock().begin(order, self.sink(prepared.attempt))?;
            return Ok(prepared);
        }
        let taken = state.taken;
        match state.ended.take_if(|(attempt, _)| Some(*attempt) != taken) {
            Some((_, Err(reason))) => Err(NodeError::Attempt(reason)),
            _ => Err(NodeError::Timeout { waited: patience, what: "the coordinator to prepare a refit" }),
        }
    }

    /// Begins a stream that no coordinator asked for, whose payloads go to `sink` instead of the receivers: to see what a
    /// refit would send. Not while one runs.
    pub fn rehearse(&self, mode: Mode, overwrite_only: BTreeSet<String>, sink: Sink) -> Result<(), NodeError> {
        if self.shared.state.lock().machine.attempt().is_some() {
            return Err(NodeError::Misuse("a refit is running: it cannot be rehearsed at the same time"));
        }
        let order = StreamOrder { attempt: AttemptId([0; 16]), owner: self.index, mode, overwrite_only };
        self.shared.construction.lock().begin(order, sink)
    }

    /// Takes what a rehearsed stream found as the committed version. Receivers know nothing of it: for measuring only.
    pub fn commit_rehearsed(&self) -> Result<(), NodeError> {
        if self.connection.is_some() {
            return Err(NodeError::Misuse("a registered owner's baseline changes with a commit only"));
        }
        self.shared.construction.lock().commit();
        Ok(())
    }

    /// The change flags of residual tasks' shards: whether each one's bits differ from the committed ones.
    pub fn flags(&self, offers: &[Offer<'_>]) -> Result<Vec<bool>, NodeError> {
        self.still_running()?;
        self.shared.construction.lock().flags(offers)
    }

    /// Compares owned tensors with the baseline and streams what changed. Blocks while the window is full. Their memory
    /// is not used any more when this returns.
    pub fn offer(&self, offers: &[Offer<'_>]) -> Result<(), NodeError> {
        self.still_running()?;
        self.shared.construction.lock().offer(offers)
    }

    /// Streams whole canonical tensors, in a dense refit, of which the baseline holds shards only.
    pub fn offer_dense(&self, offers: &[Offer<'_>]) -> Result<(), NodeError> {
        self.still_running()?;
        self.shared.construction.lock().offer_dense(offers)
    }

    /// Sends what is left and tells everybody that the stream has ended. `required` names the residual tensors that had
    /// to be offered, and in a dense refit also those that had to be sent whole.
    pub fn end_stream(&self, required: &[String]) -> Result<StreamTotals, NodeError> {
        self.still_running()?;
        let totals = self.shared.construction.lock().end(required)?;
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
        self.shared.construction.lock().baseline().bytes_held()
    }

    /// Closes the connection.
    pub fn close(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
        self.connection = None;
    }

    fn still_running(&self) -> Result<(), NodeError> {
        let state = self.shared.state.lock();
        if matches!(state.taken_ended(), Some(Err(_))) || state.machine.attempt() != state.taken {
            return Err(state.reason());
        }
        Ok(())
    }

    /// Where an attempt's payloads go: to the relay, once there are credits for them.
    fn sink(&self, attempt: AttemptId) -> Sink {
        let (shared, owner) = (Arc::clone(&self.shared), self.index);
        let endpoint = self.connection.as_ref().map(|connection| Arc::clone(&connection.endpoint));
        Arc::new(move |sequence, payload| {
            let mut state = shared.state.lock();
            let waits = |state: &mut State| {
                !state.closed && state.machine.attempt() == Some(attempt) && !state.machine.may_send()
            };
            shared.changed.wait_while(&mut state, waits);
            if state.closed || state.machine.attempt() != Some(attempt) {
                return Err(state.reason());
            }
            state.machine.handle(OwnerEvent::PayloadReady { sequence, bytes: payload.len() as u64 });
            drop(state);
            if let Some(endpoint) = &endpoint {
                let message = Message::Payload { attempt, key: PayloadKey { sequence, owner } };
                endpoint.send(Outgoing { to: Vec::new(), message, body: Some(Bytes::from(payload)) });
            }
            Ok(())
        })
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
                let tensors = self.shared.catalog.lock().values().cloned().collect();
                send(vec![PeerName::coordinator()], Message::Catalog { tensors });
            }
            OwnerAction::Start { attempt, version, mode, overwrite_only } => {
                debug!(%attempt, version, mode = mode.name(), "prepared");
                self.update(|state| {
                    state.prepared = Some(Prepared { attempt, version, mode, overwrite_only });
                });
            }
            OwnerAction::UpdateBaseline => {
                self.shared.construction.lock().commit();
                self.handle(OwnerEvent::BaselineUpdated);
            }
            OwnerAction::DiscardCandidate => {
                // The comparing thread may hold the lock while it waits for credits; it is woken by the end of the
                // attempt and the next attempt discards first, so nothing is lost by not waiting here.
                if let Some(mut construction) = self.shared.construction.try_lock() {
                    construction.discard();
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
