//! Whole refits, simulated: the real state machines joined by a network that a seed drives.
//!
//! Links keep their order, but which link delivers next is random, so every interleaving that a relay can produce
//! is reachable. Faults are injected at random points. What must hold whatever happens is in `check`.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use dcr_core::dtype::DType;
use dcr_core::tensor::TensorMeta;
use dcr_protocol::{
    Action, Application, AttemptId, BaselineId, CommitOutcome, CommitRecord, Coordinator, CoordinatorConfig, Deadlines,
    Event, Failure, Held, LoaderClass, Message, Mode, Owner, OwnerAction, OwnerEvent, PayloadKey, PeerInfo, PeerName,
    Receiver, ReceiverAction, ReceiverEvent, ReceiverWork, Report, StreamTotals, TensorClass, WeightsAfter,
};
use proptest::prelude::*;

const OWNERS: u32 = 2;
const RECEIVERS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    ReceiverApply,
    ReceiverGone,
    OwnerFails,
    OwnerGone,
    GateStaysOpen,
    CommitFails,
    Unsupported,
    DuplicatePayloads,
    ConflictingPayload,
    Abort,
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

struct Net {
    rng: Rng,
    now: Duration,
    links: BTreeMap<(PeerName, PeerName), VecDeque<Message>>,
    local: VecDeque<(PeerName, Local)>,
    coordinator: Coordinator,
    owners: Vec<(Owner, Option<Mode>)>,
    receivers: Vec<(Receiver, Vec<PayloadKey>)>,
    gone: Vec<PeerName>,
    route: (Option<AttemptId>, Vec<PeerName>),
    pending: BTreeMap<PayloadKey, Vec<PeerName>>,
    gate_open: bool,
    record: Option<CommitRecord>,
    finished: Vec<Result<Report, Failure>>,
    fault: Fault,
    payloads: [u32; OWNERS as usize],
}

/// Completions of work that nodes do outside of their machines.
#[derive(Clone, Debug)]
enum Local {
    Stream { sequence: u32 },
    BaselineUpdated,
    Prewarmed(usize),
    Applied(Vec<PayloadKey>),
    Finished,
    GateClosed,
    GateOpened,
    Commit { expected: Option<CommitRecord>, new: CommitRecord },
}

fn receiver_name(index: usize) -> PeerName {
    PeerName::new(format!("receiver/host/rank{index}")).unwrap()
}

fn receiver_index(name: &PeerName) -> usize {
    name.as_str().trim_start_matches("receiver/host/rank").parse().unwrap()
}

fn catalog() -> Vec<TensorMeta> {
    (0..6).map(|i| TensorMeta { name: format!("model.{i}"), shape: vec![4], dtype: DType::Bf16 }).collect()
}

impl Net {
    fn new(seed: u64, fault: Fault, application: Application, payloads: [u32; OWNERS as usize]) -> Self {
        let deadlines = Deadlines::default();
        let config = CoordinatorConfig { owners: OWNERS, receivers: RECEIVERS, application, deadlines };
        let mut net = Self {
            rng: Rng(seed),
            now: Duration::ZERO,
            links: BTreeMap::new(),
            local: VecDeque::new(),
            coordinator: Coordinator::new(config),
            owners: (0..OWNERS).map(|index| (Owner::new(index, 100), None)).collect(),
            receivers: (0..RECEIVERS).map(|_| (Receiver::new(3), Vec::new())).collect(),
            gone: Vec::new(),
            route: (None, Vec::new()),
            pending: BTreeMap::new(),
            gate_open: true,
            record: None,
            finished: Vec::new(),
            fault,
            payloads,
        };
        net.roster();
        net
    }

    fn push(&mut self, from: &PeerName, to: &PeerName, message: Message) {
        self.links.entry((from.clone(), to.clone())).or_default().push_back(message);
    }

    fn roster(&mut self) {
        let mut peers = vec![(PeerName::coordinator(), None)];
        for index in 0..OWNERS {
            peers.push((PeerName::owner(index), self.owners[index as usize].0.held()));
        }
        for index in 0..RECEIVERS {
            peers.push((receiver_name(index), self.receivers[index].0.held()));
        }
        let peers = peers.into_iter().filter(|(name, _)| !self.gone.contains(name));
        let peers = peers.map(|(name, held)| PeerInfo { name, session: 1, held }).collect();
        self.push(&PeerName::relay(), &PeerName::coordinator(), Message::Roster { peers });
    }

    fn vanish(&mut self, name: PeerName) {
        self.links.retain(|(from, to), _| *from != name && *to != name);
        self.local.retain(|(owner, _)| *owner != name);
        self.gone.push(name);
        self.roster();
    }

    /// What the relay does with a message.
    fn route(&mut self, from: &PeerName, to: Vec<PeerName>, message: Message) {
        let to = if to.is_empty() { self.route.1.clone() } else { to };
        for name in to {
            if name == PeerName::relay() {
                match &message {
                    Message::Route { attempt, receivers } => {
                        self.route = (Some(*attempt), receivers.clone());
                        self.pending.clear();
                    }
                    Message::Holding { .. } => self.roster(),
                    Message::PayloadTaken { attempt, key } => {
                        if let Some(waiting) = self.pending.get_mut(key) {
                            waiting.retain(|peer| peer != from);
                            if waiting.is_empty() {
                                self.pending.remove(key);
                                let message = Message::PayloadTaken { attempt: *attempt, key: *key };
                                self.push(&PeerName::relay(), &PeerName::owner(key.owner), message);
                            }
                        }
                    }
                    _ => {}
                }
            } else if !self.gone.contains(&name) {
                if let Message::Payload { key, .. } = &message {
                    self.pending.insert(*key, self.route.1.clone());
                    if self.fault == Fault::DuplicatePayloads {
                        self.push(from, &name, message.clone());
                    }
                }
                self.push(from, &name, message.clone());
            }
        }
    }

    fn begin(&mut self, mode: Option<Mode>, fresh: u8) {
        let event = Event::Begin {
            mode,
            attempt: AttemptId([fresh; 16]),
            baseline: BaselineId([fresh; 16]),
            nonce: BaselineId([fresh.wrapping_add(100); 16]),
            record: self.record,
        };
        self.coordinate(event);
    }

    fn coordinate(&mut self, event: Event) {
        self.now += Duration::from_millis(1);
        for action in self.coordinator.handle(self.now, event) {
            match action {
                Action::Send { to, message } => self.route(&PeerName::coordinator(), to, message),
                Action::CloseGate => self.local.push_back((PeerName::coordinator(), Local::GateClosed)),
                Action::OpenGate => self.local.push_back((PeerName::coordinator(), Local::GateOpened)),
                Action::Commit { expected, new } => {
                    self.local.push_back((PeerName::coordinator(), Local::Commit { expected, new }));
                }
                Action::Arm { .. } => {}
                Action::Finish(result) => self.finished.push(*result),
            }
        }
    }

    fn own(&mut self, index: usize, event: OwnerEvent) {
        let name = PeerName::owner(index as u32);
        for action in self.owners[index].0.handle(event) {
            match action {
                OwnerAction::ToCoordinator(message) => self.route(&name, vec![PeerName::coordinator()], message),
                OwnerAction::ToReceivers(message) => self.route(&name, vec![], message),
                OwnerAction::Holding(held) => self.route(&name, vec![PeerName::relay()], Message::Holding { held }),
                OwnerAction::SendCatalog => {
                    // Every second tensor, and the first one as shards of all owners.
                    let mine = |(number, _): &(usize, TensorMeta)| *number == 0 || number % OWNERS as usize == index;
                    let tensors = catalog().into_iter().enumerate().filter(mine).map(|(_, tensor)| tensor).collect();
                    self.route(&name, vec![PeerName::coordinator()], Message::Catalog { tensors });
                }
                OwnerAction::Start { mode, .. } => {
                    self.owners[index].1 = Some(mode);
                    self.local.push_back((name.clone(), Local::Stream { sequence: 0 }));
                }
                OwnerAction::UpdateBaseline => self.local.push_back((name.clone(), Local::BaselineUpdated)),
                OwnerAction::DiscardCandidate | OwnerAction::End(..) => {}
            }
        }
    }

    fn receive(&mut self, index: usize, event: ReceiverEvent) {
        let name = receiver_name(index);
        for action in self.receivers[index].0.handle(event) {
            match action {
                ReceiverAction::ToCoordinator(message) => self.route(&name, vec![PeerName::coordinator()], message),
                ReceiverAction::ToRelay(message) => self.route(&name, vec![PeerName::relay()], message),
                ReceiverAction::Prewarm(_) => self.local.push_back((name.clone(), Local::Prewarmed(index))),
                ReceiverAction::Stage(_) | ReceiverAction::DropStaged => {}
                ReceiverAction::Apply(keys) => self.local.push_back((name.clone(), Local::Applied(keys))),
                ReceiverAction::Finish => self.local.push_back((name.clone(), Local::Finished)),
            }
        }
    }

    fn finish_local(&mut self, name: PeerName, local: Local) {
        match local {
            Local::Stream { sequence } => {
                let index = name.owner_index().unwrap();
                if self.fault == Fault::OwnerFails && index == 1 && sequence == self.payloads[1] {
                    return self.own(1, OwnerEvent::Failed("export raised".to_owned()));
                }
                let Some(attempt) = self.owners[index as usize].0.attempt() else {
                    return;
                };
                if sequence < self.payloads[index as usize] {
                    if self.owners[index as usize].0.may_send() {
                        self.own(index as usize, OwnerEvent::PayloadReady { sequence, bytes: 60 });
                        let message = Message::Payload { attempt, key: PayloadKey { sequence, owner: index } };
                        self.route(&name, vec![], message.clone());
                        if self.fault == Fault::ConflictingPayload && index == 0 {
                            self.route(&name, vec![], message);
                        }
                        self.local.push_back((name, Local::Stream { sequence: sequence + 1 }));
                    } else {
                        self.local.push_back((name, Local::Stream { sequence }));
                    }
                } else {
                    let totals = StreamTotals { payloads: self.payloads[index as usize], ..Default::default() };
                    self.own(index as usize, OwnerEvent::StreamEnded(totals));
                }
            }
            Local::BaselineUpdated => self.own(name.owner_index().unwrap() as usize, OwnerEvent::BaselineUpdated),
            Local::Prewarmed(index) => {
                let classes = catalog().into_iter().enumerate().map(|(position, tensor)| {
                    let unsupported = self.fault == Fault::Unsupported && index == 1 && position == 3;
                    let class = if unsupported { LoaderClass::Unsupported } else { LoaderClass::Xor };
                    TensorClass { name: tensor.name, class, reason: "casts".to_owned() }
                });
                let classes = classes.collect();
                self.receive(index, ReceiverEvent::Prewarmed(Ok(classes)));
            }
            Local::Applied(keys) => {
                let index = receiver_index(&name);
                let fails = self.fault == Fault::ReceiverApply && index == 0;
                self.receivers[index].1.extend(&keys);
                let work = ReceiverWork { payloads: keys.len() as u64, items: 1, ..Default::default() };
                let result = if fails { Err("the loader wrote twice".to_owned()) } else { Ok(()) };
                self.receive(index, ReceiverEvent::Applied { work, result });
            }
            Local::Finished => self.receive(receiver_index(&name), ReceiverEvent::Finished(Ok(0.0))),
            Local::GateClosed => {
                let answer = match self.fault {
                    Fault::GateStaysOpen => Err("connection refused".to_owned()),
                    _ => Ok(()),
                };
                self.gate_open = answer.is_err();
                self.coordinate(Event::GateClosed(answer));
            }
            Local::GateOpened => {
                self.gate_open = true;
                self.coordinate(Event::GateOpened(Ok(())));
            }
            Local::Commit { expected, new } => {
                assert_eq!(expected, self.record);
                let outcome = if self.fault == Fault::CommitFails {
                    CommitOutcome::Failed("disk full".to_owned())
                } else {
                    self.record = Some(new);
                    CommitOutcome::Success
                };
                self.coordinate(Event::CommitDone(outcome));
            }
        }
    }

    fn deliver(&mut self, (from, to): (PeerName, PeerName), message: Message) {
        if to == PeerName::coordinator() {
            self.coordinate(Event::Message { from, message });
        } else if let Some(index) = to.owner_index() {
            self.own(index as usize, OwnerEvent::Message(message));
        } else {
            let index = receiver_index(&to);
            match message {
                Message::Payload { attempt, key } => {
                    let digest = match self.fault {
                        Fault::ConflictingPayload => [self.rng.below(250) as u8; 16],
                        _ => [key.sequence as u8; 16],
                    };
                    self.receive(index, ReceiverEvent::Payload { attempt, key, digest });
                }
                message => self.receive(index, ReceiverEvent::Message(message)),
            }
        }
    }

    /// Runs until nothing is left to do.
    fn run(&mut self, fault_after: usize) {
        for step in 0..20_000 {
            if step == fault_after {
                match self.fault {
                    Fault::ReceiverGone if !self.finished_last() => self.vanish(receiver_name(1)),
                    Fault::OwnerGone if !self.finished_last() => self.vanish(PeerName::owner(1)),
                    Fault::Abort => self.coordinate(Event::Abort { reason: "interrupted".to_owned() }),
                    _ => {}
                }
            }
            let links: Vec<_> =
                self.links.iter().filter(|(_, queue)| !queue.is_empty()).map(|(k, _)| k.clone()).collect();
            let choices = links.len() + usize::from(!self.local.is_empty());
            if choices == 0 {
                return;
            }
            let choice = self.rng.below(choices);
            if choice < links.len() {
                let message = self.links.get_mut(&links[choice]).unwrap().pop_front().unwrap();
                self.deliver(links[choice].clone(), message);
            } else {
                let position = self.rng.below(self.local.len());
                let (name, local) = self.local.remove(position).unwrap();
                self.finish_local(name, local);
            }
        }
        panic!("the refit does not come to rest");
    }

    fn finished_last(&self) -> bool {
        !self.finished.is_empty()
    }

    fn check(&self) {
        let result = self.finished.last().expect("every refit ends");
        match result {
            Ok(report) => {
                let held = Some(report.committed);
                assert_eq!(self.record.map(|record| record.held), held);
                let mut expected: Vec<PayloadKey> = (0..OWNERS)
                    .flat_map(|owner| {
                        (0..self.payloads[owner as usize]).map(move |sequence| PayloadKey { sequence, owner })
                    })
                    .collect();
                expected.sort();
                for (receiver, applied) in &self.receivers {
                    assert_eq!(receiver.held(), held);
                    assert_eq!(*applied, expected, "each payload once, in declared order");
                }
                for (owner, _) in &self.owners {
                    assert_eq!(owner.held(), held);
                }
                assert!(self.gate_open);
            }
            Err(failure) => {
                let wrote = self.receivers.iter().any(|(_, applied)| !applied.is_empty());
                match failure.weights {
                    WeightsAfter::Untouched => assert!(!wrote && self.gate_open, "{failure}"),
                    WeightsAfter::Unusable => assert!(!self.gate_open, "{failure}"),
                    WeightsAfter::Committed => {
                        assert!(self.record.is_some() && self.gate_open, "{failure}")
                    }
                }
                for (index, (receiver, applied)) in self.receivers.iter().enumerate() {
                    let alive = !self.gone.contains(&receiver_name(index));
                    if alive && !applied.is_empty() && failure.weights != WeightsAfter::Committed {
                        assert_eq!(receiver.held(), None, "a partial write holds no version");
                    }
                }
            }
        }
    }
}

fn faults() -> impl Strategy<Value = Fault> {
    prop::sample::select(vec![
        Fault::None,
        Fault::ReceiverApply,
        Fault::ReceiverGone,
        Fault::OwnerFails,
        Fault::OwnerGone,
        Fault::GateStaysOpen,
        Fault::CommitFails,
        Fault::Unsupported,
        Fault::DuplicatePayloads,
        Fault::ConflictingPayload,
        Fault::Abort,
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_refit_ends_exactly_or_says_what_it_left(
        seed in any::<u64>(),
        fault in faults(),
        application in prop::sample::select(vec![Application::Synchronous, Application::Asynchronous]),
        payloads in [0u32..6, 0u32..6],
        fault_after in 0usize..200,
        warm in any::<bool>(),
    ) {
        let mut net = Net::new(seed, Fault::None, application, payloads);
        if warm {
            // The fault then meets a mixed refit, which may be applied asynchronously.
            net.begin(None, 9);
            net.run(usize::MAX);
            net.check();
            net.finished.clear();
            net.receivers.iter_mut().for_each(|(_, applied)| applied.clear());
        }
        net.fault = fault;
        net.begin(None, 1);
        net.run(fault_after);
        if net.finished.is_empty() {
            // Peers went away before the start: only the deadline ends this wait.
            prop_assert!(matches!(fault, Fault::ReceiverGone | Fault::OwnerGone));
            return Ok(());
        }
        prop_assert_eq!(net.finished.len(), 1);
        net.check();
        if matches!(fault, Fault::None | Fault::DuplicatePayloads) {
            prop_assert!(net.finished[0].is_ok(), "{:?}", net.finished[0]);
        }
        let must_fail = match fault {
            Fault::OwnerFails | Fault::GateStaysOpen | Fault::CommitFails => true,
            Fault::ReceiverApply => payloads != [0, 0],
            // Prewarm runs once for a catalog.
            Fault::Unsupported => !warm,
            _ => false,
        };
        prop_assert!(!must_fail || net.finished[0].is_err());
        if warm && application == Application::Asynchronous
            && matches!(fault, Fault::OwnerFails | Fault::ConflictingPayload | Fault::GateStaysOpen)
            && let Err(failure) = &net.finished[0]
        {
            // What is wrong with a tensor or a payload is found before anything is written.
            prop_assert_eq!(failure.weights, WeightsAfter::Untouched);
        }

        // Whatever happened, a following refit without faults ends well if everybody is still there.
        if !net.gone.is_empty() {
            return Ok(());
        }
        let committed = net.record.map(|record| record.held);
        let aligned = committed.is_some()
            && net.owners.iter().all(|(owner, _)| owner.held() == committed)
            && net.receivers.iter().all(|(receiver, _)| receiver.held() == committed);
        prop_assert!(aligned || net.finished[0].is_err());
        net.fault = Fault::None;
        net.receivers.iter_mut().for_each(|(_, applied)| applied.clear());
        net.begin(None, 2);
        net.run(usize::MAX);
        prop_assert_eq!(net.finished.len(), 2);
        if fault == Fault::Unsupported && !warm {
            // The catalog has not changed, so neither has the verdict.
            prop_assert!(net.finished[1].is_err());
            return Ok(());
        }
        net.check();
        let report = net.finished[1].clone().expect("nothing stands in the way");
        prop_assert_eq!(report.mode, if aligned { Mode::Mixed } else { Mode::Dense });
    }
}

#[test]
fn a_mode_that_is_not_exact_is_refused() {
    let mut net = Net::new(1, Fault::None, Application::Asynchronous, [1, 1]);
    net.begin(Some(Mode::Mixed), 1);
    net.run(usize::MAX);
    let failure = net.finished[0].clone().unwrap_err();
    assert_eq!(failure.weights, WeightsAfter::Untouched);
    assert!(failure.reason.contains("holds no committed version") && failure.reason.contains("dense"), "{failure}");
}

#[test]
fn missing_peers_are_named_at_the_deadline() {
    let mut coordinator = Coordinator::new(CoordinatorConfig {
        owners: 1,
        receivers: 2,
        application: Application::Synchronous,
        deadlines: Deadlines::default(),
    });
    let actions = coordinator.handle(
        Duration::ZERO,
        Event::Begin {
            mode: None,
            attempt: AttemptId([1; 16]),
            baseline: BaselineId([1; 16]),
            nonce: BaselineId([1; 16]),
            record: None,
        },
    );
    let Action::Arm { timer, .. } = &actions[0] else { panic!("{actions:?}") };
    let actions = coordinator.handle(Duration::from_secs(300), Event::Deadline(*timer));
    let text = format!("{actions:?}");
    assert!(text.contains("owner/0") && text.contains("0 of 2 connected"), "{text}");
}

#[test]
fn a_held_version_is_shown_in_words() {
    let held = Held { version: 3, baseline: BaselineId([0; 16]) };
    assert!(held.to_string().starts_with("version 3 "));
}
