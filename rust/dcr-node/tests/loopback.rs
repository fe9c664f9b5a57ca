//! Whole refits over real ZeroMQ sockets on loopback: two owners, two receivers, a coordinator and a relay.
//!
//! The receivers' storage is plain memory and the reference is the trainer's dense bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use dcr_core::baseline::Role;
use dcr_core::dtype::DType;
use dcr_core::payload::{Encoding, Item, PayloadId, Positions, encode};
use dcr_core::projection::Projection;
use dcr_core::tensor::TensorMeta;
use dcr_node::{
    ConstructOptions, CoordinatorNode, CoordinatorOptions, Link, NodeError, Offer, OwnerNode, OwnerOptions,
    ReceiverNode, TaskKind,
};
use dcr_protocol::{
    Application, AttemptId, Deadlines, LoaderClass, Message, Mode, PayloadKey, PeerName, Report, TensorClass,
    WeightsAfter,
};
use dcr_transport::{Endpoint, EndpointEvent, HeldCell, Outgoing, Relay, RelayConfig, RunKey};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

const PATIENCE: Duration = Duration::from_secs(60);

type Weights = BTreeMap<String, Vec<u16>>;

/// A relay on a thread of its own.
struct RelayThread {
    runtime: Runtime,
    link: Link,
}

fn relay(key: RunKey) -> RelayThread {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let config = RelayConfig { listen: "tcp://127.0.0.1:0".parse().unwrap(), key: key.clone(), budget: 1 << 30 };
    let relay = runtime.block_on(Relay::bind(config)).unwrap();
    let link = Link { relay: relay.address().parse().unwrap(), key };
    runtime.spawn(relay.run());
    RelayThread { runtime, link }
}

/// A receiver whose native loader writes into a map.
struct Rollout {
    node: Arc<ReceiverNode>,
    storage: Arc<Mutex<Weights>>,
    fail_next_apply: Arc<AtomicUsize>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Rollout {
    fn start(link: &Link, rank: usize) -> Self {
        let node = Arc::new(ReceiverNode::start(link, &format!("receiver/test/rank{rank}")).unwrap());
        let (storage, fail_next_apply) = (Arc::<Mutex<Weights>>::default(), Arc::new(AtomicUsize::new(0)));
        let thread = {
            let (node, storage, fail) = (Arc::clone(&node), Arc::clone(&storage), Arc::clone(&fail_next_apply));
            thread::spawn(move || serve(&node, &storage, &fail))
        };
        Self { node, storage, fail_next_apply, thread: Some(thread) }
    }
}

impl Drop for Rollout {
    fn drop(&mut self) {
        self.node.close();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn serve(node: &ReceiverNode, storage: &Mutex<Weights>, fail: &AtomicUsize) {
    loop {
        let Some(task) = node.next_task(Duration::from_millis(200)) else { continue };
        match &task.kind {
            TaskKind::Shutdown => return,
            TaskKind::Prewarm(catalog) => {
                let class = |name: &str| if name.contains("cast") { LoaderClass::Overwrite } else { LoaderClass::Xor };
                let classes = catalog.iter().map(|tensor| TensorClass {
                    name: tensor.name.clone(),
                    class: class(&tensor.name),
                    reason: String::new(),
                });
                node.prewarmed(task.id, Ok(classes.collect()));
            }
            TaskKind::Apply(items) => {
                if fail.swap(0, Ordering::SeqCst) == 1 {
                    node.applied(task.id, 0, 0.0, Err("the loader wrote twice into `w`".to_owned()));
                    continue;
                }
                items.iter().for_each(|item| apply(item, &mut storage.lock()));
                node.applied(task.id, items.len() as u64, 0.001, Ok(()));
            }
            TaskKind::Finish => node.finished(task.id, Ok(0.001)),
        }
    }
}

fn apply(item: &Item, storage: &mut Weights) {
    let numel = item.meta.numel().unwrap() as usize;
    let resident = storage.entry(item.meta.name.clone()).or_insert_with(|| vec![0xdead; numel]);
    for (position, value) in item.positions.iter().zip(item.values.chunks(2)) {
        let value = u16::from_le_bytes([value[0], value[1]]);
        match item.encoding {
            Encoding::Xor => resident[position as usize] ^= value,
            Encoding::Overwrite | Encoding::Dense => resident[position as usize] = value,
        }
    }
}

fn weights() -> Weights {
    let names = (0..9).map(|index| if index % 4 == 0 { format!("cast.{index}") } else { format!("plain.{index}") });
    names.enumerate().map(|(i, name)| (name, (0..1000 + i).map(|j| (i * 7919 + j * 31) as u16).collect())).collect()
}

/// Changes a few values of every tensor but one, among them a sign of zero and a NaN payload.
fn step(weights: &mut Weights, round: u16) {
    for (index, values) in weights.values_mut().enumerate().skip(1) {
        for offset in (index..values.len()).step_by(97) {
            values[offset] ^= 0x8001 ^ round;
        }
        values[0] = 0x7fc1 + round;
        values[1] ^= 0x8000;
    }
}

fn bytes(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn meta(name: &str, values: &[u16]) -> TensorMeta {
    TensorMeta { name: name.to_owned(), shape: vec![values.len() as u64], dtype: DType::Bf16 }
}

/// A tensor that both owners hold a half of, as shards of an affine task.
const SHARDED: &str = "plain.2";

/// What an owner holds: every second tensor, and its half of the sharded one. Name of the task, its own values.
fn held(index: u32, weights: &Weights) -> Vec<(String, Vec<u16>)> {
    let share = |(number, (name, values)): (usize, (&String, &Vec<u16>))| {
        if name == SHARDED {
            let half = values.len() / 2;
            return Some(("task.2".to_owned(), values[index as usize * half..][..half].to_vec()));
        }
        (number % 2 == index as usize).then(|| (name.clone(), values.clone()))
    };
    weights.iter().enumerate().filter_map(share).collect()
}

fn owner(link: &Link, index: u32, weights: &Weights) -> OwnerNode {
    let construct = ConstructOptions { chunk_bytes: 700, bucket_bytes: 1500, threads: 2, ..Default::default() };
    let mut owner = OwnerNode::new(index, 2, OwnerOptions { construct, window_bytes: 2000 }).unwrap();
    for (name, values) in held(index, weights) {
        let bytes = bytes(&values);
        let offer = Offer { meta: meta(&name, &values), bytes: &bytes };
        if name == "task.2" {
            let map = Projection::split(meta(SHARDED, &values), 0, index.into(), 2).unwrap();
            owner.track(&offer, Role::Shard, Some(map)).unwrap();
        } else {
            owner.track(&offer, Role::Canonical, None).unwrap();
        }
    }
    owner.register(link, PATIENCE).unwrap();
    owner
}

struct Training {
    coordinator: CoordinatorNode,
    owners: Vec<OwnerNode>,
}

fn training(
    link: &Link,
    weights: &Weights,
    record: &std::path::Path,
    gates: Vec<String>,
    application: Application,
) -> Training {
    let deadlines = Deadlines { peers: Duration::from_secs(20), ..Deadlines::default() };
    let options = CoordinatorOptions { owners: 2, receivers: 2, application, record: record.into(), gates, deadlines };
    let coordinator = CoordinatorNode::start(link, options).unwrap();
    coordinator.wait_connected(PATIENCE).unwrap();
    Training { coordinator, owners: (0..2).map(|index| owner(link, index, weights)).collect() }
}

impl Training {
    fn refit(&self, weights: &Weights, mode: Option<Mode>) -> Result<Report, NodeError> {
        self.coordinator.begin(mode).unwrap();
        thread::scope(|scope| {
            for (index, owner) in (0..).zip(&self.owners) {
                scope.spawn(move || {
                    let run = || -> Result<(), NodeError> {
                        let prepared = owner.await_prepared(PATIENCE)?;
                        let held = held(index, weights);
                        let stored: Vec<Vec<u8>> = held.iter().map(|(_, values)| bytes(values)).collect();
                        let pairs = held.iter().zip(&stored);
                        let offers = pairs.map(|((name, values), bytes)| Offer { meta: meta(name, values), bytes });
                        let offers: Vec<Offer<'_>> = offers.collect();
                        owner.offer(&offers)?;
                        let mut required = Vec::new();
                        if prepared.mode == Mode::Dense && index == 0 {
                            let whole = bytes(&weights[SHARDED]);
                            owner.offer_dense(&[Offer { meta: meta(SHARDED, &weights[SHARDED]), bytes: &whole }])?;
                            required.push(SHARDED.to_owned());
                        }
                        owner.end_stream(&required)?;
                        owner.await_end(PATIENCE).map(|_| ())
                    };
                    if let Err(error) = run() {
                        owner.fail(&error.to_string());
                    }
                });
            }
            self.coordinator.wait(PATIENCE)
        })
    }
}

/// A server with vLLM's two gate routes; counts calls.
fn gate_server() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let calls = Arc::<Mutex<Vec<String>>>::default();
    let log = Arc::clone(&calls);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut buffer = [0; 4096];
            let read = stream.read(&mut buffer).unwrap();
            let request = String::from_utf8_lossy(&buffer[..read]).into_owned();
            log.lock().push(request.split_whitespace().nth(1).unwrap_or("").to_owned());
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").unwrap();
        }
    });
    (url, calls)
}

#[test]
fn refits_end_bit_identical_to_a_dense_copy() {
    for application in [Application::Synchronous, Application::Asynchronous] {
        refits(application);
    }
}

fn refits(application: Application) {
    let relay = relay(RunKey::new([1; 32]));
    let folder = tempfile::tempdir().unwrap();
    let (url, calls) = gate_server();
    let rollouts: Vec<_> = (0..2).map(|rank| Rollout::start(&relay.link, rank)).collect();
    let mut truth = weights();
    let training = training(&relay.link, &truth, &folder.path().join("record"), vec![url], application);

    let report = training.refit(&truth, None).unwrap();
    assert_eq!((report.mode, report.committed.version, report.totals.changed), (Mode::Dense, 1, 0));
    for (round, mode) in [(1, None), (2, None), (3, Some(Mode::Overwrite)), (4, None)] {
        step(&mut truth, round);
        let report = training.refit(&truth, mode).unwrap();
        assert_eq!(report.mode, mode.unwrap_or(Mode::Mixed));
        assert_eq!(report.committed.version, u64::from(round) + 1);
        assert!(report.totals.payloads > 4, "several payloads of each owner: {:?}", report.totals);
        assert!(report.totals.changed > 0 && report.totals.changed < report.totals.elements / 20);
        for rollout in &rollouts {
            assert_eq!(*rollout.storage.lock(), truth, "round {round}");
        }
    }
    let one = ["/pause?mode=wait&clear_cache=true", "/resume"];
    assert_eq!(*calls.lock(), one.repeat(5));
    // Nothing changed: nothing travels, and a version is committed all the same.
    let report = training.refit(&truth, None).unwrap();
    assert_eq!((report.totals.payloads, report.totals.changed, report.committed.version), (0, 0, 6));
    drop(relay.runtime);
}

#[test]
fn a_failure_while_applying_is_repaired_by_a_dense_refit() {
    let relay = relay(RunKey::new([2; 32]));
    let folder = tempfile::tempdir().unwrap();
    let (url, calls) = gate_server();
    let rollouts: Vec<_> = (0..2).map(|rank| Rollout::start(&relay.link, rank)).collect();
    let mut truth = weights();
    let training = training(&relay.link, &truth, &folder.path().join("record"), vec![url], Application::Synchronous);
    training.refit(&truth, None).unwrap();

    step(&mut truth, 1);
    rollouts[1].fail_next_apply.store(1, Ordering::SeqCst);
    let error = training.refit(&truth, None).unwrap_err();
    assert_eq!(error.weights(), WeightsAfter::Unusable);
    let text = error.to_string();
    assert!(text.contains("receiver/test/rank1") && text.contains("wrote twice") && text.contains("dense"), "{text}");
    assert_eq!(calls.lock().last().unwrap(), "/pause?mode=wait&clear_cache=true", "the gate stays closed");

    let report = training.refit(&truth, None).unwrap();
    assert_eq!((report.mode, report.committed.version), (Mode::Dense, 2));
    for rollout in &rollouts {
        assert_eq!(*rollout.storage.lock(), truth);
    }
    assert_eq!(calls.lock().last().unwrap(), "/resume");
}

#[test]
fn a_tensor_that_changed_its_shape_writes_nothing() {
    let relay = relay(RunKey::new([3; 32]));
    let folder = tempfile::tempdir().unwrap();
    let rollouts: Vec<_> = (0..2).map(|rank| Rollout::start(&relay.link, rank)).collect();
    let mut truth = weights();
    let training = training(&relay.link, &truth, &folder.path().join("record"), vec![], Application::Asynchronous);
    training.refit(&truth, None).unwrap();
    let before = truth.clone();
    step(&mut truth, 1);
    let name = truth.keys().next().unwrap().clone();
    truth.get_mut(&name).unwrap().push(1);
    let error = training.refit(&truth, None).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("shape"), "{error}");
    assert!(error.contains("no weight was written"), "{error}");
    for rollout in &rollouts {
        assert_eq!(*rollout.storage.lock(), before);
    }
    // The tensor's shape is what it was again: the next refit is an ordinary one.
    truth.get_mut(&name).unwrap().pop();
    assert_eq!(training.refit(&truth, None).unwrap().mode, Mode::Mixed);
}

/// An owner that says what it should and sends whatever it likes as its only payload.
fn rogue(link: &Link, tensors: Vec<TensorMeta>, body: impl Fn(AttemptId) -> Vec<u8> + Send + 'static) -> Runtime {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let link = link.clone();
    runtime.spawn(async move {
        let (endpoint, mut events) = Endpoint::start(link.relay, link.key, PeerName::owner(0), HeldCell::default());
        let send = |to: Vec<PeerName>, message, body| endpoint.send(Outgoing { to, message, body });
        let coordinator = || vec![PeerName::coordinator()];
        while let Some(event) = events.recv().await {
            let EndpointEvent::Frame(frame) = event else { continue };
            match frame.envelope.message {
                Message::CatalogRequest => {
                    send(coordinator(), Message::Catalog { tensors: tensors.clone() }, None);
                }
                Message::PrepareOwner { attempt, .. } => {
                    send(coordinator(), Message::OwnerPrepared { attempt }, None);
                    let key = PayloadKey { sequence: 0, owner: 0 };
                    send(vec![], Message::Payload { attempt, key }, Some(body(attempt).into()));
                }
                Message::Stop { attempt, .. } => {
                    send(coordinator(), Message::Stopped { attempt, wrote: false }, None);
                }
                _ => {}
            }
        }
    });
    runtime
}

fn dense_item(meta: &TensorMeta) -> Item {
    let count = meta.numel().unwrap();
    let values = vec![1; count as usize * meta.dtype.width()];
    Item { meta: meta.clone(), encoding: Encoding::Dense, positions: Positions::Run { start: 0, count }, values }
}

#[test]
fn a_bad_payload_is_named_and_writes_nothing() {
    let good = TensorMeta { name: "w".to_owned(), shape: vec![8], dtype: DType::Bf16 };
    let encoded = |attempt: AttemptId, sequence: u32, meta: TensorMeta| {
        let id = PayloadId { attempt: attempt.0, owner: 0, sequence };
        encode(&id, &[dense_item(&meta)]).unwrap()
    };
    type Body = Box<dyn Fn(AttemptId) -> Vec<u8> + Send>;
    let (one, two, three, four) = (good.clone(), good.clone(), good.clone(), good.clone());
    let cases: Vec<(Body, &str)> = vec![
        (Box::new(move |a| encoded(a, 0, one.clone())[..90].to_vec()), "body"),
        (Box::new(|_| b"nonsense".to_vec()), "too few"),
        (Box::new(move |a| encoded(a, 1, two.clone())), "another attempt, owner or sequence"),
        (
            Box::new(move |a| encoded(a, 0, TensorMeta { name: "v".into(), ..three.clone() })),
            "`v` is not in the catalog",
        ),
        (Box::new(move |a| encoded(a, 0, TensorMeta { shape: vec![9], ..four.clone() })), "`w` is BF16 [9] but"),
        (
            Box::new(move |a| encoded(a, 0, TensorMeta { name: "w".into(), shape: vec![8], dtype: DType::F16 })),
            "`w` is F16 [8] but",
        ),
    ];
    for (index, (body, words)) in cases.into_iter().enumerate() {
        let relay = relay(RunKey::new([9; 32]));
        let folder = tempfile::tempdir().unwrap();
        let rollout = Rollout::start(&relay.link, 0);
        let _rogue = rogue(&relay.link, vec![good.clone()], body);
        let options = CoordinatorOptions {
            owners: 1,
            receivers: 1,
            application: Application::Asynchronous,
            record: folder.path().join("record"),
            gates: vec![],
            deadlines: Deadlines::default(),
        };
        let coordinator = CoordinatorNode::start(&relay.link, options).unwrap();
        coordinator.wait_connected(PATIENCE).unwrap();
        coordinator.begin(None).unwrap();
        let error = coordinator.wait(PATIENCE).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("payload 0 of owner/0"), "case {index}: {error}");
        assert!(error.contains("no weight was written") && !error.contains('\n'), "case {index}: {error}");
        assert!(rollout.storage.lock().is_empty(), "case {index}");
    }
}

#[test]
fn a_missing_relay_and_a_wrong_key_are_named() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let link = Link { relay: format!("tcp://{free}").parse().unwrap(), key: RunKey::new([4; 32]) };
    let mut lonely = OwnerNode::new(0, 1, OwnerOptions::default()).unwrap();
    let error = lonely.register(&link, Duration::from_secs(8)).unwrap_err().to_string();
    assert!(error.contains(&free.to_string()) && error.contains("dcr relay"), "{error}");

    let relay = relay(RunKey::new([5; 32]));
    let link = Link { key: RunKey::new([6; 32]), ..relay.link.clone() };
    let mut stranger = OwnerNode::new(0, 1, OwnerOptions::default()).unwrap();
    let error = stranger.register(&link, Duration::from_secs(3)).unwrap_err().to_string();
    assert!(error.contains("run key"), "{error}");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", taken.local_addr().unwrap());
    let config = RelayConfig { listen: address.parse().unwrap(), key: RunKey::new([7; 32]), budget: 1 };
    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
    let error = runtime.block_on(Relay::bind(config)).err().unwrap().to_string();
    assert!(error.contains(&address) && error.contains("in use"), "{error}");
}
