//! The running coordinator.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dcr_control::{CommitStore, ControlError, EmbeddedStore, Swap};
use dcr_protocol::{
    Action, Application, AttemptId, BaselineId, CommitOutcome, CommitRecord, Coordinator, CoordinatorConfig, Deadlines,
    Event, Failure, Mode, PeerName, Report, WeightsAfter,
};
use dcr_transport::{EndpointEvent, Outgoing};
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use crate::NodeError;
use crate::gate::Gate;
use crate::runtime::{Connection, Link, connect};

/// What a coordinator needs to know.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// Training ranks.
    pub owners: u32,
    /// Rollout ranks that must be connected before a refit starts.
    pub receivers: usize,
    /// When receivers apply a delta.
    pub application: Application,
    /// File of the commit record.
    pub record: PathBuf,
    /// Base URLs of the rollout servers.
    pub gates: Vec<String>,
    /// How long to wait for what.
    pub deadlines: Deadlines,
}

#[derive(Default)]
struct Shared {
    connected: bool,
    lost: Option<String>,
    running: bool,
    result: Option<Result<Report, Failure>>,
}

/// A coordinator with its connection, commit store and gates.
pub struct CoordinatorNode {
    connection: Connection,
    events: UnboundedSender<Event>,
    shared: Arc<(Mutex<Shared>, Condvar)>,
    store: Arc<dyn CommitStore>,
}

impl CoordinatorNode {
    /// Starts connecting. [`CoordinatorNode::wait_connected`] says whether that worked.
    pub fn start(link: &Link, options: CoordinatorOptions) -> Result<Self, NodeError> {
        let store: Arc<dyn CommitStore> = Arc::new(EmbeddedStore::new(options.record)?);
        let (connection, endpoint_events) = connect(link, PeerName::coordinator())?;
        let (events, events_rx) = unbounded_channel();
        let config = CoordinatorConfig {
            owners: options.owners,
            receivers: options.receivers,
            application: options.application,
            deadlines: options.deadlines,
        };
        let driver = Driver {
            machine: Coordinator::new(config),
            endpoint: Arc::clone(&connection.endpoint),
            store: Arc::clone(&store),
            gate: Gate::new(options.gates, options.deadlines.gate),
            events: events.clone(),
            shared: Arc::default(),
            started: Instant::now(),
        };
        let shared = Arc::clone(&driver.shared);
        connection.spawn(driver.run(endpoint_events, events_rx));
        Ok(Self { connection, events, shared, store })
    }

    /// Waits until the relay has taken the connection.
    pub fn wait_connected(&self, patience: Duration) -> Result<(), NodeError> {
        let (lock, changed) = &*self.shared;
        let mut shared = lock.lock();
        let timed_out = changed.wait_while_for(&mut shared, |shared| !shared.connected, patience).timed_out();
        if timed_out {
            let reason = shared.lost.clone();
            return Err(NodeError::NoRelay(
                reason.unwrap_or_else(|| format!("the relay did not take the connection within {patience:?}")),
            ));
        }
        Ok(())
    }

    /// Starts a refit. `None` lets the coordinator choose between mixed and dense.
    pub fn begin(&self, mode: Option<Mode>) -> Result<(), NodeError> {
        {
            let mut shared = self.shared.0.lock();
            if shared.running {
                return Err(NodeError::Misuse("a refit is already running: wait for it to end"));
            }
            shared.running = true;
            shared.result = None;
        }
        let record = self.connection.block_on(self.store.read()).unwrap_or(Err(ControlError::Stopped));
        let record = record.inspect_err(|_| self.shared.0.lock().running = false)?;
        let fresh = || rand::random::<[u8; 16]>();
        self.event(Event::Begin {
            mode,
            attempt: AttemptId(fresh()),
            baseline: BaselineId(fresh()),
            nonce: BaselineId(fresh()),
            record,
        });
        Ok(())
    }

    /// Waits for the end of the refit. A timeout leaves it running.
    pub fn wait(&self, patience: Duration) -> Result<Report, NodeError> {
        let (lock, changed) = &*self.shared;
        let mut shared = lock.lock();
        if !shared.running && shared.result.is_none() {
            return Err(NodeError::Misuse("no refit is running: begin one first"));
        }
        changed.wait_while_for(&mut shared, |shared| shared.result.is_none(), patience);
        match shared.result.take() {
            Some(result) => result.map_err(NodeError::Refit),
            None => Err(NodeError::Timeout { waited: patience, what: "the refit to end" }),
        }
    }

    /// Ends the running refit for the caller's own reason.
    pub fn abort(&self, reason: &str) {
        self.event(Event::Abort { reason: reason.to_owned() });
    }

    fn event(&self, event: Event) {
        // The driver ends only with the runtime.
        let _ = self.events.send(event);
    }
}

struct Driver {
    machine: Coordinator,
    endpoint: Arc<dcr_transport::Endpoint>,
    store: Arc<dyn CommitStore>,
    gate: Gate,
    events: UnboundedSender<Event>,
    shared: Arc<(Mutex<Shared>, Condvar)>,
    started: Instant,
}

impl Driver {
    async fn run(
        mut self,
        mut endpoint_events: UnboundedReceiver<EndpointEvent>,
        mut events: UnboundedReceiver<Event>,
    ) {
        loop {
            let event = tokio::select! {
                Some(event) = endpoint_events.recv() => match event {
                    EndpointEvent::Connected => {
                        self.update(|shared| shared.connected = true);
                        continue;
                    }
                    EndpointEvent::Lost(reason) => {
                        self.update(|shared| {
                            shared.connected = false;
                            shared.lost = Some(reason.clone());
                        });
                        Event::RelayLost { reason }
                    }
                    EndpointEvent::Frame(frame) => {
                        Event::Message { from: frame.envelope.from, message: frame.envelope.message }
                    }
                },
                Some(event) = events.recv() => event,
                else => return,
            };
            for action in self.machine.handle(self.started.elapsed(), event) {
                self.act(action);
            }
        }
    }

    fn update(&self, change: impl FnOnce(&mut Shared)) {
        change(&mut self.shared.0.lock());
        self.shared.1.notify_all();
    }

    fn act(&self, action: Action) {
        // A send fails only once the driver, and with it the refit, is gone.
        let events = self.events.clone();
        match action {
            Action::Send { to, message } => self.endpoint.send(Outgoing { to, message, body: None }),
            Action::CloseGate | Action::OpenGate => {
                let (gate, close) = (self.gate.clone(), action == Action::CloseGate);
                spawn_blocking(move || {
                    let event = if close { Event::GateClosed(gate.close()) } else { Event::GateOpened(gate.open()) };
                    let _ = events.send(event);
                });
            }
            Action::Commit { expected, new } => {
                let store = Arc::clone(&self.store);
                tokio::spawn(async move {
                    let _ = events.send(Event::CommitDone(commit(&*store, expected, new).await));
                });
            }
            Action::Arm { timer, after } => {
                tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    let _ = events.send(Event::Deadline(timer));
                });
            }
            Action::Finish(result) => {
                match &*result {
                    Ok(report) => info!(
                        version = report.committed.version,
                        mode = report.mode.name(),
                        changed = report.totals.changed,
                        payload_bytes = report.totals.payload_bytes,
                        seconds = report.stages.gate_opened,
                        "refit committed"
                    ),
                    Err(failure) => warn!(%failure, "refit failed"),
                }
                self.update(|shared| {
                    shared.running = false;
                    shared.result = Some(*result);
                });
            }
        }
    }
}

/// Compare-and-set, with an unknown outcome resolved by reading the record (algorithm B.2, lines 28-31).
async fn commit(store: &dyn CommitStore, expected: Option<CommitRecord>, new: CommitRecord) -> CommitOutcome {
    let error = match store.compare_and_set(expected, new).await {
        Ok(Swap::Done) => return CommitOutcome::Success,
        Ok(Swap::Differs(Some(other))) => return CommitOutcome::Conflict(other),
        Ok(Swap::Differs(None)) => {
            return CommitOutcome::Failed("the commit record has disappeared".to_owned());
        }
        Err(error) => error,
    };
    match store.read().await {
        Ok(record) if record == Some(new) => CommitOutcome::Success,
        Ok(Some(other)) if expected != Some(other) => CommitOutcome::Conflict(other),
        // Unreadable: nothing may be called committed that cannot be read back.
        _ => CommitOutcome::Failed(error.to_string()),
    }
}

impl NodeError {
    /// What the failure left in the receivers' storage; untouched for everything that is not a failed refit.
    pub fn weights(&self) -> WeightsAfter {
        match self {
            Self::Refit(failure) => failure.weights,
            _ => WeightsAfter::Untouched,
        }
    }
}
