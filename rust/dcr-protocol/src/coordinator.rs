//! The coordinator: drives one attempt of one transition at a time (algorithms B.1 and B.2).
//!
//! This first machine makes one attempt. A failure ends the refit; receivers that wrote are then unusable until
//! a dense refit, which is what the next `auto` refit will be.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcr_core::tensor::TensorMeta;

use crate::{
    Application, AttemptId, BaselineId, CommitRecord, Failure, Held, Message, Mode, PeerInfo, PeerName, ReceiverWork,
    Report, Role, Stages, StreamTotals, WeightsAfter, catalog_digest,
};

/// How long each wait of a refit may last.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// For all owners and receivers to connect.
    pub peers: Duration,
    /// For `prepare`, including prewarm.
    pub prepare: Duration,
    /// For the gate: running requests finish first.
    pub gate: Duration,
    /// For streaming and application together.
    pub stream: Duration,
    /// For `flush` after the last payload was sent.
    pub flush: Duration,
    /// For `stop_and_wait`.
    pub stop: Duration,
    /// For the commit store to answer.
    pub commit: Duration,
    /// For owners to update their baselines.
    pub baseline: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            peers: seconds(300),
            prepare: seconds(600),
            gate: seconds(600),
            stream: seconds(3600),
            flush: seconds(1800),
            stop: seconds(120),
            commit: seconds(120),
            baseline: seconds(600),
        }
    }
}

/// Who takes part.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    /// Number of owners: the training ranks.
    pub owners: u32,
    /// Number of receivers that must be connected before a refit starts. All connected ones are required.
    pub receivers: usize,
    /// When receivers apply. A dense refit is always applied while it arrives: staging a whole checkpoint on every
    /// receiver would cost what the delta saves, and what it overwrites is not needed any more.
    pub application: Application,
    /// How long to wait for what.
    pub deadlines: Deadlines,
}

/// What the wait was for that a deadline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer {
    phase: Phase,
    refit: u64,
}

/// How a compare-and-set ended, once it is certain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// The record names this attempt now.
    Success,
    /// The record is unchanged, for this reason.
    Failed(String),
    /// Another coordinator committed first.
    Conflict(CommitRecord),
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// Start a refit. The identifiers are fresh; `record` was just read.
    Begin {
        /// Encoding; `None` chooses dense when a receiver or owner does not hold the committed policy.
        mode: Option<Mode>,
        /// Fresh τ.
        attempt: AttemptId,
        /// Fresh g.
        baseline: BaselineId,
        /// Fresh nonce for the commit record.
        nonce: BaselineId,
        /// K as it is now; `None` before the first commit.
        record: Option<CommitRecord>,
    },
    /// A message arrived.
    Message {
        /// Its sender.
        from: PeerName,
        /// Its content.
        message: Message,
    },
    /// The connection to the relay was lost.
    RelayLost {
        /// Why, for people.
        reason: String,
    },
    /// The gate's answer to `CloseGate`.
    GateClosed(Result<(), String>),
    /// The gate's answer to `OpenGate`.
    GateOpened(Result<(), String>),
    /// The answer to `Commit`.
    CommitDone(CommitOutcome),
    /// A timer that was armed has run out.
    Deadline(Timer),
    /// The caller gives up (its own failure or interrupt).
    Abort {
        /// Why, for people.
        reason: String,
    },
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send a message.
    Send {
        /// To whom.
        to: Vec<PeerName>,
        /// What.
        message: Message,
    },
    /// Hold new requests, let running ones finish, clear caches; answer with `GateClosed`.
    CloseGate,
    /// Let requests in again; answer with `GateOpened`.
    OpenGate,
    /// Compare-and-set the commit record; answer with `CommitDone`.
    Commit {
        /// K must still be this.
        expected: Option<CommitRecord>,
        /// The new K.
        new: CommitRecord,
    },
    /// Send `Deadline(timer)` after this time.
    Arm {
        /// The timer.
        timer: Timer,
        /// Its time.
        after: Duration,
    },
    /// The refit has ended.
    Finish(Box<Result<Report, Failure>>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    Peers,
    Receivers,
    Owners,
    Streaming,
    Flushing,
    Committing,
    Baselines,
    OpeningGate,
    Stopping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    Closing,
    Closed,
}

struct Refit {
    attempt: AttemptId,
    requested: Option<Mode>,
    mode: Mode,
    application: Application,
    expected: Option<CommitRecord>,
    new: CommitRecord,
    started: Duration,
    receivers: Vec<PeerName>,
    waiting: BTreeSet<PeerName>,
    overwrite_only: BTreeSet<String>,
    ends: Vec<Option<StreamTotals>>,
    work: BTreeMap<PeerName, ReceiverWork>,
    tensors: u64,
    gate: Gate,
    opened: bool,
    wrote: bool,
    committed: bool,
    /// What went wrong while the commit was under way. Its outcome comes first.
    meanwhile: Option<String>,
    failure: Option<String>,
    stages: Stages,
}

/// The coordinator's state machine.
pub struct Coordinator {
    config: CoordinatorConfig,
    phase: Phase,
    refits: u64,
    peers: BTreeMap<PeerName, PeerInfo>,
    catalogs: BTreeMap<PeerName, (u64, Vec<TensorMeta>)>,
    prewarmed: BTreeMap<PeerName, (u64, BaselineId)>,
    refit: Option<Refit>,
}

impl Coordinator {
    /// A coordinator that knows no peers yet.
    pub fn new(config: CoordinatorConfig) -> Self {
        Self {
            config,
            phase: Phase::Idle,
            refits: 0,
            peers: BTreeMap::new(),
            catalogs: BTreeMap::new(),
            prewarmed: BTreeMap::new(),
            refit: None,
        }
    }

    /// Handles one event at a time `now` on any steady clock.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Begin { mode, attempt, baseline, nonce, record } => {
                self.begin(now, mode, attempt, baseline, nonce, record, &mut out);
            }
            Event::Message { from, message } => self.message(now, &from, message, &mut out),
            Event::RelayLost { reason } => {
                self.peers.clear();
                self.fail(now, format!("the connection to the relay was lost: {reason}"), &mut out);
            }
            Event::GateClosed(answer) => self.gate_closed(now, answer, &mut out),
            Event::GateOpened(answer) => self.gate_opened(now, answer, &mut out),
            Event::CommitDone(outcome) => self.commit_done(now, outcome, &mut out),
            Event::Deadline(timer) => self.deadline(now, timer, &mut out),
            // What is committed cannot be taken back: the transition then ends as it would have.
            Event::Abort { reason } if self.refit.as_ref().is_some_and(|refit| !refit.committed) => {
                self.fail(now, reason, &mut out);
            }
            Event::Abort { .. } => {}
        }
        out
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one event")]
    fn begin(
        &mut self,
        now: Duration,
        requested: Option<Mode>,
        attempt: AttemptId,
        baseline: BaselineId,
        nonce: BaselineId,
        record: Option<CommitRecord>,
        out: &mut Vec<Action>,
    ) {
        if self.refit.is_some() {
            let reason = "a refit is already running; wait for it to end".to_owned();
            return out.push(finish_untouched(reason));
        }
        let version = record.map_or(1, |record| record.held.version + 1);
        self.refits += 1;
        self.refit = Some(Refit {
            attempt,
            requested,
            mode: Mode::Dense,
            application: Application::Synchronous,
            expected: record,
            new: CommitRecord { held: Held { version, baseline }, nonce },
            started: now,
            receivers: Vec::new(),
            waiting: BTreeSet::new(),
            overwrite_only: BTreeSet::new(),
            ends: vec![None; self.config.owners as usize],
            work: BTreeMap::new(),
            tensors: 0,
            gate: Gate::Open,
            opened: false,
            wrote: false,
            committed: false,
            meanwhile: None,
            failure: None,
            stages: Stages::default(),
        });
        self.enter(Phase::Peers, self.config.deadlines.peers, out);
        self.peers_ready(now, out);
    }

    fn enter(&mut self, phase: Phase, deadline: Duration, out: &mut Vec<Action>) {
        self.phase = phase;
        out.push(Action::Arm { timer: Timer { phase, refit: self.refits }, after: deadline });
    }

    fn message(&mut self, now: Duration, from: &PeerName, message: Message, out: &mut Vec<Action>) {
        match message {
            Message::Roster { peers } => return self.roster(now, peers, out),
            Message::Catalog { tensors } => {
                if let Some(peer) = self.peers.get(from) {
                    self.catalogs.insert(from.clone(), (peer.session, tensors));
                }
                return self.peers_ready(now, out);
            }
            _ => {}
        }
        let Some(refit) = &mut self.refit else { return };
        match message {
            Message::ReceiverPrepared { attempt, overwrite_only, .. }
                if attempt == refit.attempt && self.phase == Phase::Receivers =>
            {
                refit.overwrite_only.extend(overwrite_only);
                if refit.waiting.remove(from) && refit.waiting.is_empty() {
                    refit.stages.receivers_prepared = since(refit, now);
                    let synchronous = refit.application == Application::Synchronous;
                    self.prepare_owners(out);
                    if synchronous {
                        // The gate closes when the first attempt starts, while owners already compare.
                        self.close_gate(now, out);
                    }
                }
            }
            Message::OwnerPrepared { attempt } if attempt == refit.attempt && self.phase == Phase::Owners => {
                if refit.waiting.remove(from) && refit.waiting.is_empty() {
                    refit.stages.owners_prepared = since(refit, now);
                    self.enter(Phase::Streaming, self.config.deadlines.stream, out);
                    self.await_payloads(out);
                    self.open_apply(now, out);
                }
            }
            Message::Rejected { attempt, reason } | Message::AttemptFailed { attempt, reason }
                if attempt == refit.attempt =>
            {
                self.fail(now, format!("{from}: {reason}"), out);
            }
            Message::StreamEnd { attempt, owner, totals } if attempt == refit.attempt => {
                if from.owner_index() == Some(owner)
                    && let Some(end) = refit.ends.get_mut(owner as usize)
                {
                    *end = Some(totals);
                    if refit.ends.iter().all(Option::is_some) {
                        refit.stages.streamed = since(refit, now);
                    }
                    self.await_payloads(out);
                    self.flush(out);
                }
            }
            Message::PayloadsStaged { attempt }
                if attempt == refit.attempt && self.phase == Phase::Streaming && refit.gate == Gate::Open =>
            {
                if refit.waiting.remove(from) && refit.waiting.is_empty() {
                    refit.stages.staged = since(refit, now);
                    self.close_gate(now, out);
                }
            }
            Message::Flushed { attempt, work } if attempt == refit.attempt && self.phase == Phase::Flushing => {
                if refit.waiting.remove(from) {
                    refit.work.insert(from.clone(), work);
                    if refit.waiting.is_empty() {
                        refit.stages.flushed = since(refit, now);
                        out.push(Action::Commit { expected: refit.expected, new: refit.new });
                        self.enter(Phase::Committing, self.config.deadlines.commit, out);
                    }
                }
            }
            Message::BaselineUpdated { attempt } if attempt == refit.attempt && self.phase == Phase::Baselines => {
                refit.waiting.remove(from);
                self.baselines_updated(now, out);
            }
            Message::Stopped { attempt, wrote } if attempt == refit.attempt && self.phase == Phase::Stopping => {
                refit.wrote |= wrote;
                if refit.waiting.remove(from) {
                    self.stopped(now, out);
                }
            }
            _ => {}
        }
    }

    fn roster(&mut self, now: Duration, peers: Vec<PeerInfo>, out: &mut Vec<Action>) {
        let peers: BTreeMap<_, _> = peers.into_iter().map(|peer| (peer.name.clone(), peer)).collect();
        let gone: Vec<_> = self
            .peers
            .values()
            .filter(|old| peers.get(&old.name).is_none_or(|new| new.session != old.session))
            .map(|old| old.name.clone())
            .collect();
        for peer in peers.values().filter(|peer| peer.name.role() == Some(Role::Owner)) {
            if self.catalogs.get(&peer.name).is_none_or(|(session, _)| *session != peer.session) {
                self.catalogs.remove(&peer.name);
                out.push(Action::Send { to: vec![peer.name.clone()], message: Message::CatalogRequest });
            }
        }
        self.peers = peers;
        for name in gone {
            self.gone(now, &name, out);
        }
        self.peers_ready(now, out);
        self.baselines_updated(now, out);
    }

    fn gone(&mut self, now: Duration, name: &PeerName, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        if self.phase == Phase::Peers || self.phase == Phase::OpeningGate {
            return;
        }
        let takes_part = name.role() == Some(Role::Owner) || refit.receivers.contains(name);
        if !takes_part {
            return;
        }
        if self.phase == Phase::Stopping {
            // A receiver that is gone has nothing left to stop; whoever takes its place starts from nothing.
            if refit.waiting.remove(name) {
                self.stopped(now, out);
            }
            return;
        }
        self.fail(now, format!("{name} is gone: its connection to the relay ended"), out);
    }

    /// Leaves the first phase once everybody is there and every owner has told its catalog.
    fn peers_ready(&mut self, now: Duration, out: &mut Vec<Action>) {
        if self.phase != Phase::Peers || !self.missing_peers().is_empty() {
            return;
        }
        match self.merged_catalog() {
            Ok(catalog) => self.prepare_receivers(now, catalog, out),
            Err(reason) => self.fail(now, reason, out),
        }
    }

    /// Who is not there yet, in words; empty when the refit can start.
    fn missing_peers(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for index in 0..self.config.owners {
            let name = PeerName::owner(index);
            if !self.peers.contains_key(&name) {
                missing.push(name.to_string());
            } else if !self.catalogs.contains_key(&name) {
                missing.push(format!("the catalog of {name}"));
            }
        }
        let receivers = self.peers.keys().filter(|name| name.role() == Some(Role::Receiver)).count();
        if receivers < self.config.receivers.max(1) {
            missing.push(format!("receivers ({receivers} of {} connected)", self.config.receivers.max(1)));
        }
        missing
    }

    /// All owners' catalogs as one. Owners of shards of one tensor all list it, and must describe it alike.
    fn merged_catalog(&self) -> Result<Vec<TensorMeta>, String> {
        let mut catalog: BTreeMap<&str, (&TensorMeta, &PeerName)> = BTreeMap::new();
        for (owner, (_, tensors)) in &self.catalogs {
            for tensor in tensors {
                let (known, first) = *catalog.entry(&tensor.name).or_insert((tensor, owner));
                if known != tensor {
                    let describe = |meta: &TensorMeta| format!("{} {:?}", meta.dtype, meta.shape);
                    let (known, this) = (describe(known), describe(tensor));
                    return Err(format!("tensor `{}` is {known} for {first} but {this} for {owner}", tensor.name));
                }
            }
        }
        if catalog.is_empty() {
            return Err("the owners' catalogs are empty: the training side exported no tensor".to_owned());
        }
        Ok(catalog.into_values().map(|(tensor, _)| tensor.clone()).collect())
    }

    fn prepare_receivers(&mut self, now: Duration, catalog: Vec<TensorMeta>, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        refit.stages.peers = since(refit, now);
        refit.tensors = catalog.len() as u64;
        let committed = refit.expected.map(|record| record.held);
        let storing = |peer: &&PeerInfo| matches!(peer.name.role(), Some(Role::Owner | Role::Receiver));
        let stale = self.peers.values().filter(storing).find(|peer| peer.held.is_none() || peer.held != committed);
        refit.mode = refit.requested.unwrap_or(if stale.is_some() { Mode::Dense } else { Mode::Mixed });
        if refit.mode != Mode::Dense {
            refit.application = self.config.application;
        }
        if refit.mode != Mode::Dense
            && let Some(peer) = stale
        {
            let holds = peer.held.map_or("no committed version".to_owned(), |held| held.to_string());
            let reason = format!(
                "{} holds {holds}, so a {} refit is not exact: use mode `dense` or `auto`",
                peer.name,
                refit.mode.name()
            );
            return self.fail(now, reason, out);
        }
        let receivers = self.peers.values().filter(|peer| peer.name.role() == Some(Role::Receiver));
        refit.receivers = receivers.clone().map(|peer| peer.name.clone()).collect();
        refit.waiting = refit.receivers.iter().cloned().collect();
        let attempt = refit.attempt;
        out.push(Action::Send {
            to: vec![PeerName::relay()],
            message: Message::Route { attempt, receivers: refit.receivers.clone() },
        });
        let digest = catalog_digest(&catalog);
        for peer in receivers {
            let known = self.prewarmed.insert(peer.name.clone(), (peer.session, digest));
            let message = Message::PrepareReceiver {
                attempt,
                version: refit.new.held.version,
                base: if refit.mode == Mode::Dense { None } else { committed },
                mode: refit.mode,
                application: refit.application,
                owners: self.config.owners,
                catalog_digest: digest,
                catalog: (known != Some((peer.session, digest))).then(|| catalog.clone()),
            };
            out.push(Action::Send { to: vec![peer.name.clone()], message });
        }
        self.enter(Phase::Receivers, self.config.deadlines.prepare, out);
    }

    fn prepare_owners(&mut self, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        let owners: Vec<_> = (0..self.config.owners).map(PeerName::owner).collect();
        refit.waiting = owners.iter().cloned().collect();
        let message = Message::PrepareOwner {
            attempt: refit.attempt,
            version: refit.new.held.version,
            base: if refit.mode == Mode::Dense { None } else { refit.expected.map(|record| record.held) },
            mode: refit.mode,
            overwrite_only: refit.overwrite_only.iter().cloned().collect(),
        };
        out.push(Action::Send { to: owners, message });
        self.enter(Phase::Owners, self.config.deadlines.prepare, out);
    }

    fn close_gate(&mut self, now: Duration, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        refit.gate = Gate::Closing;
        refit.stages.gate_closing = since(refit, now);
        out.push(Action::CloseGate);
    }

    fn gate_closed(&mut self, now: Duration, answer: Result<(), String>, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        match answer {
            Ok(()) => {
                refit.gate = Gate::Closed;
                if self.phase == Phase::Stopping {
                    return self.stopped(now, out);
                }
                self.open_apply(now, out);
            }
            Err(reason) => {
                // Part of the gates may be closed; opening all of them is what the failure path does.
                refit.gate = Gate::Closed;
                if self.phase == Phase::Stopping {
                    return self.stopped(now, out);
                }
                self.fail(now, format!("the request gate could not be closed: {reason}"), out);
            }
        }
    }

    /// Asynchronous application: once every stream has ended, asks whether everything is there.
    fn await_payloads(&mut self, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        if let (Phase::Streaming, Application::Asynchronous, Some(payloads)) =
            (self.phase, refit.application, refit.payloads())
        {
            refit.waiting = refit.receivers.iter().cloned().collect();
            let message = Message::AwaitPayloads { attempt: refit.attempt, payloads };
            out.push(Action::Send { to: refit.receivers.clone(), message });
        }
    }

    fn open_apply(&mut self, now: Duration, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        if self.phase == Phase::Streaming && refit.gate == Gate::Closed && !refit.opened {
            refit.opened = true;
            refit.stages.gate_closed = since(refit, now);
            let message = Message::OpenApply { attempt: refit.attempt };
            out.push(Action::Send { to: refit.receivers.clone(), message });
            self.flush(out);
        }
    }

    fn flush(&mut self, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        if let (Phase::Streaming, true, Some(payloads)) = (self.phase, refit.opened, refit.payloads()) {
            refit.waiting = refit.receivers.iter().cloned().collect();
            let message = Message::Flush { attempt: refit.attempt, payloads };
            out.push(Action::Send { to: refit.receivers.clone(), message });
            self.enter(Phase::Flushing, self.config.deadlines.flush, out);
        }
    }

    fn commit_done(&mut self, now: Duration, outcome: CommitOutcome, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        if self.phase != Phase::Committing {
            return;
        }
        match outcome {
            CommitOutcome::Success => {
                refit.committed = true;
                refit.stages.committed = since(refit, now);
                let owners: Vec<_> = (0..self.config.owners).map(PeerName::owner).collect();
                refit.waiting = owners.iter().cloned().collect();
                let to = owners.into_iter().chain(refit.receivers.iter().cloned()).collect();
                let message = Message::Committed { attempt: refit.attempt, held: refit.new.held };
                out.push(Action::Send { to, message });
                let meanwhile = refit.meanwhile.take();
                self.enter(Phase::Baselines, self.config.deadlines.baseline, out);
                if let Some(reason) = meanwhile {
                    self.fail(now, reason, out);
                }
            }
            CommitOutcome::Failed(reason) => self.end_commit(now, format!("the commit failed: {reason}"), out),
            CommitOutcome::Conflict(record) => {
                let reason = format!("conflict: another coordinator committed {} first", record.held);
                self.end_commit(now, reason, out);
            }
        }
    }

    /// The commit did not take effect, or nobody can say whether it did.
    fn end_commit(&mut self, now: Duration, reason: String, out: &mut Vec<Action>) {
        self.phase = Phase::Flushing;
        self.fail(now, reason, out);
    }

    /// Ends the transition once every owner has reported and the roster shows the version on every receiver, so
    /// that the next refit starts from what peers really hold.
    fn baselines_updated(&mut self, now: Duration, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        let holds = |name: &PeerName| self.peers.get(name).is_some_and(|peer| peer.held == Some(refit.new.held));
        if self.phase == Phase::Baselines && refit.waiting.is_empty() && refit.receivers.iter().all(holds) {
            refit.stages.baseline_updated = since(refit, now);
            self.open_gate(out);
        }
    }

    fn open_gate(&mut self, out: &mut Vec<Action>) {
        self.enter(Phase::OpeningGate, self.config.deadlines.gate, out);
        out.push(Action::OpenGate);
    }

    fn gate_opened(&mut self, now: Duration, answer: Result<(), String>, out: &mut Vec<Action>) {
        if self.phase != Phase::OpeningGate {
            return;
        }
        if let Some(refit) = &mut self.refit {
            refit.stages.gate_opened = since(refit, now);
            if let Err(reason) = answer {
                let reason = format!("the request gate could not be opened: {reason}");
                refit.failure = Some(refit.failure.take().map_or(reason.clone(), |first| format!("{first}; {reason}")));
            }
        }
        self.end(out);
    }

    fn deadline(&mut self, now: Duration, timer: Timer, out: &mut Vec<Action>) {
        if timer != (Timer { phase: self.phase, refit: self.refits }) {
            return;
        }
        let Some(refit) = &mut self.refit else { return };
        if self.phase == Phase::Committing {
            let version = refit.new.held.version;
            let reason = format!(
                "the commit record's store does not answer: whether version {version} is committed is unknown until \
                 the next refit reads the record"
            );
            return self.end_commit(now, reason, out);
        }
        let waiting = refit.waiting.iter().map(PeerName::to_string).collect::<Vec<_>>().join(", ");
        match self.phase {
            Phase::Stopping => {
                // Whoever did not answer may have written.
                refit.wrote |= refit.opened;
                refit.waiting.clear();
                self.stopped(now, out);
            }
            Phase::OpeningGate => self.gate_opened(now, Err("no answer in time".to_owned()), out),
            Phase::Peers => {
                let missing = self.missing_peers().join(", ");
                let reason = format!(
                    "waited {:?} for {missing}: check that they run and use this relay and run key",
                    self.config.deadlines.peers
                );
                self.fail(now, reason, out);
            }
            Phase::Owners | Phase::Streaming if refit.gate == Gate::Closing => {
                self.fail(now, "the request gate did not close in time: requests are still running".to_owned(), out);
            }
            Phase::Streaming if refit.payloads().is_some() => {
                self.fail(now, format!("payloads did not arrive in time at {waiting}"), out);
            }
            Phase::Streaming => {
                let late = refit.ends.iter().enumerate().filter(|(_, end)| end.is_none());
                let late = late.map(|(index, _)| PeerName::owner(index as u32).to_string()).collect::<Vec<_>>();
                self.fail(now, format!("no end of stream in time from {}", late.join(", ")), out);
            }
            phase => self.fail(now, format!("no answer in time ({phase:?}) from {waiting}"), out),
        }
    }

    /// Starts `mark_obsolete` and `stop_and_wait`.
    fn fail(&mut self, now: Duration, reason: String, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        if self.phase == Phase::Committing {
            refit.meanwhile.get_or_insert(reason);
            return;
        }
        if let Some(first) = &mut refit.failure {
            // The first reason is the cause. A relay lost now means that nobody will answer.
            if self.phase == Phase::Stopping && self.peers.is_empty() {
                first.push_str("; ");
                first.push_str(&reason);
                refit.wrote |= refit.opened;
                refit.waiting.clear();
                self.stopped(now, out);
            }
            return;
        }
        refit.failure = Some(reason.clone());
        if self.phase == Phase::OpeningGate {
            return;
        }
        refit.waiting.clear();
        if !refit.committed {
            let owners = (0..self.config.owners).map(PeerName::owner);
            let connected = owners.chain(refit.receivers.iter().cloned()).filter(|name| self.peers.contains_key(name));
            refit.waiting = connected.collect();
            // A receiver that went away after open_apply may have left nothing, but its weights died with it;
            // if the relay is lost nobody can be asked.
            refit.wrote |= refit.opened && self.peers.is_empty();
            let to: Vec<_> = refit.waiting.iter().cloned().chain([PeerName::relay()]).collect();
            out.push(Action::Send { to, message: Message::Stop { attempt: refit.attempt, reason } });
        }
        self.enter(Phase::Stopping, self.config.deadlines.stop, out);
        self.stopped(now, out);
    }

    /// Ends the refit once nothing is pending; opens the gate unless weights are unusable.
    fn stopped(&mut self, _now: Duration, out: &mut Vec<Action>) {
        let Some(refit) = &mut self.refit else { return };
        if !refit.waiting.is_empty() || refit.gate == Gate::Closing {
            return;
        }
        let unusable = refit.wrote && !refit.committed;
        if refit.gate == Gate::Closed && !unusable { self.open_gate(out) } else { self.end(out) }
    }

    fn end(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Idle;
        let Some(refit) = self.refit.take() else {
            return;
        };
        let result = match refit.failure {
            Some(reason) => Err(Failure {
                reason,
                weights: match (refit.committed, refit.wrote) {
                    (true, _) => WeightsAfter::Committed,
                    (false, true) => WeightsAfter::Unusable,
                    (false, false) => WeightsAfter::Untouched,
                },
            }),
            None => Ok(Report {
                attempt: refit.attempt,
                mode: refit.mode,
                application: refit.application,
                committed: refit.new.held,
                receivers: refit.receivers.iter().map(PeerName::to_string).collect(),
                totals: refit.ends.iter().flatten().fold(StreamTotals::default(), |sum, one| sum.plus(one)),
                owners: refit.ends.into_iter().flatten().collect(),
                work: refit.receivers.iter().filter_map(|name| refit.work.get(name).copied()).collect(),
                tensors: refit.tensors,
                stages: refit.stages,
            }),
        };
        out.push(Action::Finish(Box::new(result)));
    }
}

impl Refit {
    /// How many payloads each owner sent, once all have said so.
    fn payloads(&self) -> Option<Vec<u32>> {
        self.ends.iter().map(|end| end.map(|totals| totals.payloads)).collect()
    }
}

fn since(refit: &Refit, now: Duration) -> f64 {
    now.saturating_sub(refit.started).as_secs_f64()
}

fn finish_untouched(reason: String) -> Action {
    Action::Finish(Box::new(Err(Failure { reason, weights: WeightsAfter::Untouched })))
}
