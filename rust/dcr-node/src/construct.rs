//! Delta construction of one owner (sections 4, 5 and 7.2): chunks are compared on a thread pool while earlier buckets
//! are encoded beside them and payloads leave in order. Every queue is bounded.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use dcr_core::baseline::{Baseline, Role};
use dcr_core::changes::Changes;
use dcr_core::fingerprint::Fingerprints;
use dcr_core::payload::{self, Encoding, Item, PayloadId, Positions};
use dcr_core::projection::Projection;
use dcr_core::tensor::TensorMeta;
use dcr_protocol::{AttemptId, Mode, StreamTotals};
use parking_lot::Mutex;
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::NodeError;
use crate::memory;

/// Sizes of the pipeline (appendix C, pipeline settings).
#[derive(Clone, Debug)]
pub struct ConstructOptions {
    /// A chunk of whole tensors is compared at once; it is closed once it totals this many bytes.
    pub chunk_bytes: u64,
    /// A bucket becomes a payload once the chunks with changes in it total this many bytes.
    pub bucket_bytes: u64,
    /// Buckets that are being encoded, or wait to be sent, beside the one that is being filled.
    pub bucket_queue: usize,
    /// Threads that compare and encode; 0 takes one for each core.
    pub threads: usize,
    /// A folder for the baseline's memory; None keeps it in memory.
    pub baseline_folder: Option<std::path::PathBuf>,
}

impl Default for ConstructOptions {
    fn default() -> Self {
        Self { chunk_bytes: 256 << 20, bucket_bytes: 512 << 20, bucket_queue: 2, threads: 0, baseline_folder: None }
    }
}

/// Bytes of a tensor that one thread compares at a time.
const STRETCH: usize = 2 << 20;

/// A tensor as it is now: a shard of a task, or a canonical tensor.
#[derive(Clone, Debug)]
pub struct Offer<'a> {
    /// Its name, shape and dtype.
    pub meta: TensorMeta,
    /// Its stored bits.
    pub bytes: &'a [u8],
}

/// What a stream of payloads is for.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamOrder {
    /// The attempt.
    pub attempt: AttemptId,
    /// The owner's number.
    pub owner: u32,
    /// Encoding of the changed set.
    pub mode: Mode,
    /// Canonical tensors to overwrite although the mode is mixed.
    pub overwrite_only: BTreeSet<String>,
}

/// Takes finished payloads in the order of their sequence numbers; may block until there is room.
pub type Sink = Arc<dyn Fn(u32, Vec<u8>) -> Result<(), NodeError> + Send + Sync>;

/// The source baseline of an owner, and the stream that is being built from it.
pub struct Construction {
    pool: Arc<ThreadPool>,
    options: ConstructOptions,
    baseline: Baseline,
    fingerprints: Fingerprints,
    stream: Option<Stream>,
}

struct Stream {
    order: StreamOrder,
    /// Tensors of the baseline that were compared.
    offered: BTreeSet<String>,
    /// Canonical tensors that were sent whole without being compared.
    sent_whole: BTreeSet<String>,
    bucket: Vec<Item>,
    bucket_names: HashSet<String>,
    bucket_bytes: u64,
    totals: StreamTotals,
    encoder: Encoder,
}

impl Construction {
    /// Without any tensor yet.
    pub fn new(options: ConstructOptions) -> Result<Self, NodeError> {
        let system = |doing| move |error| NodeError::System { doing, source: std::io::Error::other(error) };
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|index| format!("dcr-compare-{index}"))
            .build()
            .map_err(system("start the threads that compare"))?;
        let baseline = match &options.baseline_folder {
            Some(folder) => Baseline::new(memory::in_folder(folder)?),
            None => Baseline::default(),
        };
        Ok(Self { pool: Arc::new(pool), options, baseline, fingerprints: Fingerprints::new(), stream: None })
    }

    /// Copies a tensor's stored bits into the baseline. Without a projection it is a whole canonical tensor.
    pub fn track(&mut self, offer: &Offer<'_>, role: Role, projection: Option<Projection>) -> Result<(), NodeError> {
        let tracked = self.baseline.track_as(offer.meta.clone(), role, projection, offer.bytes);
        tracked.map_err(|error| wrong(&offer.meta, error))
    }

    /// Remembers the bits of a residual task's shard, for its change flag.
    pub fn track_flag(&mut self, offer: &Offer<'_>) -> Result<(), NodeError> {
        self.fingerprints.track(offer.meta.clone(), offer.bytes).map_err(|error| wrong(&offer.meta, error))
    }

    /// The source baseline.
    pub fn baseline(&self) -> &Baseline {
        &self.baseline
    }

    /// Begins a stream of payloads; what an earlier one left is dropped.
    pub fn begin(&mut self, order: StreamOrder, sink: Sink) -> Result<(), NodeError> {
        self.stream = None;
        self.discard();
        let encoder = Encoder::start(Arc::clone(&self.pool), self.options.bucket_queue, sink)?;
        self.stream = Some(Stream {
            order,
            offered: BTreeSet::new(),
            sent_whole: BTreeSet::new(),
            bucket: Vec::new(),
            bucket_names: HashSet::new(),
            bucket_bytes: 0,
            totals: StreamTotals::default(),
            encoder,
        });
        Ok(())
    }

    /// The change flags of residual tasks' shards: whether each one's bits differ from the committed ones.
    pub fn flags(&mut self, offers: &[Offer<'_>]) -> Result<Vec<bool>, NodeError> {
        self.running()?;
        let fingerprints = &self.fingerprints;
        let compute = |offer: &Offer<'_>| {
            fingerprints.compute(&offer.meta, offer.bytes).map_err(|error| wrong(&offer.meta, error))
        };
        let found: Result<Vec<_>, _> = self.pool.install(|| offers.par_iter().map(compute).collect());
        let found = found?;
        Ok(offers.iter().zip(found).map(|(offer, found)| self.fingerprints.stage(&offer.meta.name, found)).collect())
    }

    /// Compares tensors with the baseline, chunk by chunk, and streams what changed. The tensors' memory is not used any
    /// more when this returns. Blocks while the queue of buckets is full.
    pub fn offer(&mut self, offers: &[Offer<'_>]) -> Result<(), NodeError> {
        let chunk_bytes = self.options.chunk_bytes;
        let mut rest = offers;
        while !rest.is_empty() {
            let mut bytes = 0;
            let below = |offer: &&Offer<'_>| {
                let open = bytes < chunk_bytes;
                bytes += offer.bytes.len() as u64;
                open
            };
            let count = rest.iter().take_while(below).count().max(1);
            let (chunk, after) = rest.split_at(count);
            self.chunk(chunk)?;
            rest = after;
        }
        Ok(())
    }

    /// Sends canonical tensors whole, in a dense refit, that the baseline holds as shards.
    pub fn offer_dense(&mut self, offers: &[Offer<'_>]) -> Result<(), NodeError> {
        let bucket_bytes = self.options.bucket_bytes;
        let stream = self.stream.as_mut().ok_or(NOT_PREPARED)?;
        if stream.order.mode != Mode::Dense {
            return Err(NodeError::Misuse("only a dense refit sends tensors that are not compared"));
        }
        for offer in offers {
            stream.encoder.check()?;
            note(&mut stream.sent_whole, offer)?;
            let item = Item {
                meta: offer.meta.clone(),
                encoding: Encoding::Dense,
                positions: Positions::Run { start: 0, count: (offer.bytes.len() / offer.meta.dtype.width()) as u64 },
                values: offer.bytes.to_vec(),
            };
            item.validate().map_err(|error| wrong(&offer.meta, error))?;
            stream.add(vec![item], offer.bytes.len() as u64, bucket_bytes)?;
        }
        Ok(())
    }

    /// Sends what is left and waits until everything has been taken. `required` are the canonical tensors that had to be
    /// offered besides the shards and canonical tensors that always have to be.
    pub fn end(&mut self, required: &[String]) -> Result<StreamTotals, NodeError> {
        self.running()?;
        let Some(mut stream) = self.stream.take() else { return Err(NOT_PREPARED) };
        stream.encoder.check()?;
        let always = |role| role != Role::Residual || stream.order.mode == Mode::Dense;
        let tracked = self.baseline.tensors().filter(|(_, role)| always(*role)).map(|(meta, _)| meta);
        if let Some(missing) = tracked.into_iter().find(|meta| !stream.offered.contains(&meta.name)) {
            return Err(wrong(missing, "was tracked but not offered in this refit"));
        }
        if let Some(missing) = self.fingerprints.unstaged().next() {
            return Err(wrong(missing, "was tracked but not looked at in this refit"));
        }
        // A shard may bear its canonical tensor's name: comparing it does not send the tensor.
        let compared = |name: &String| {
            stream.offered.contains(name) && self.baseline.role(name).is_some_and(|role| role != Role::Shard)
        };
        let given = |name: &&String| compared(name) || stream.sent_whole.contains(*name);
        if let Some(name) = required.iter().find(|name| !given(name)) {
            let meta = self.baseline.tensors().map(|(meta, _)| meta).find(|meta| meta.name == **name).cloned();
            let meta = meta.unwrap_or_else(|| TensorMeta::new(name.as_str(), [], dcr_core::dtype::DType::U8));
            return Err(wrong(&meta, "had to be converted in this refit, but no conversion gave it"));
        }
        stream.close_bucket()?;
        let sent = stream.encoder.finish()?;
        let mut totals = stream.totals;
        totals.payload_bytes = sent.payload_bytes;
        totals.encode_s += sent.encode_s;
        totals.blocked_s = sent.blocked_s;
        for (meta, _) in self.baseline.tensors() {
            totals.elements += meta.numel().unwrap_or(0);
            totals.bytes += meta.nbytes().unwrap_or(0) as u64;
        }
        Ok(totals)
    }

    /// Takes the staged candidate as the committed version. Can be repeated.
    pub fn commit(&mut self) {
        let baseline = &mut self.baseline;
        self.pool.install(|| baseline.pending().par_bridge().for_each(|pending| pending.commit()));
        self.fingerprints.commit();
    }

    /// Forgets the staged candidate.
    pub fn discard(&mut self) {
        self.baseline.discard();
        self.fingerprints.discard();
    }

    fn running(&self) -> Result<&Stream, NodeError> {
        self.stream.as_ref().ok_or(NOT_PREPARED)
    }

    fn chunk(&mut self, chunk: &[Offer<'_>]) -> Result<(), NodeError> {
        let stream = self.stream.as_mut().ok_or(NOT_PREPARED)?;
        stream.encoder.check()?;
        chunk.iter().try_for_each(|offer| note(&mut stream.offered, offer))?;
        let started = Instant::now();
        let compared = compare(&self.pool, &self.baseline, chunk)?;
        let stream = self.stream.as_mut().ok_or(NOT_PREPARED)?;
        for (offer, changes) in chunk.iter().zip(compared) {
            stream.totals.changed += changes.positions.count();
            let staged = self.baseline.stage(&offer.meta.name, changes).map_err(|error| wrong(&offer.meta, error))?;
            stream.totals.residual_tensors += u64::from(staged.role() == Role::Residual);
        }
        stream.totals.compare_s += started.elapsed().as_secs_f64();

        let started = Instant::now();
        let (baseline, order) = (&self.baseline, &stream.order);
        let items = |offer: &Offer<'_>| -> Vec<Item> {
            let Some(candidate) = baseline.candidate(&offer.meta.name) else { return Vec::new() };
            match order.mode {
                Mode::Dense => candidate.dense_item().into_iter().collect(),
                Mode::Overwrite => candidate.items(|_| Encoding::Overwrite),
                Mode::Mixed => candidate.items(|tensor| match order.overwrite_only.contains(&tensor.name) {
                    true => Encoding::Overwrite,
                    false => Encoding::Xor,
                }),
            }
        };
        let items: Vec<Item> = self.pool.install(|| chunk.par_iter().flat_map_iter(items).collect());
        stream.totals.encode_s += started.elapsed().as_secs_f64();
        let bytes = chunk.iter().map(|offer| offer.bytes.len() as u64).sum();
        stream.add(items, bytes, self.options.bucket_bytes)
    }
}

impl Stream {
    /// Adds a chunk's records to the bucket. A chunk without any adds nothing, one with some counts in full, so that the
    /// size of a bucket does not depend on luck.
    fn add(&mut self, items: Vec<Item>, bytes: u64, bucket_bytes: u64) -> Result<(), NodeError> {
        if items.is_empty() {
            return Ok(());
        }
        for item in items {
            // A payload names a tensor once; two shards of one tensor travel in two payloads.
            if self.bucket_names.contains(&item.meta.name) {
                self.close_bucket()?;
            }
            self.bucket_names.insert(item.meta.name.clone());
            match item.encoding {
                Encoding::Xor => self.totals.xor_items += 1,
                Encoding::Overwrite | Encoding::Dense => self.totals.overwrite_items += 1,
            }
            self.bucket.push(item);
        }
        self.bucket_bytes += bytes;
        if self.bucket_bytes >= bucket_bytes { self.close_bucket() } else { Ok(()) }
    }

    /// Hands the bucket to the encoder.
    fn close_bucket(&mut self) -> Result<(), NodeError> {
        if self.bucket.is_empty() {
            return Ok(());
        }
        let id = PayloadId { attempt: self.order.attempt.0, owner: self.order.owner, sequence: self.totals.payloads };
        self.totals.payloads += 1;
        self.bucket_bytes = 0;
        self.bucket_names.clear();
        self.encoder.encode(id, std::mem::take(&mut self.bucket))
    }
}

fn note(names: &mut BTreeSet<String>, offer: &Offer<'_>) -> Result<(), NodeError> {
    match names.insert(offer.meta.name.clone()) {
        true => Ok(()),
        false => Err(wrong(&offer.meta, "offered twice in one refit")),
    }
}

const NOT_PREPARED: NodeError = NodeError::Misuse("no refit is prepared: call await_prepared first");

fn wrong(meta: &TensorMeta, reason: impl ToString) -> NodeError {
    NodeError::Tensor { tensor: Box::new(meta.clone()), reason: reason.to_string() }
}

/// Compares a chunk on the pool; large tensors are divided, small ones are not. The changes of each tensor, in order.
pub fn compare(pool: &ThreadPool, baseline: &Baseline, chunk: &[Offer<'_>]) -> Result<Vec<Changes>, NodeError> {
    let mut stretches: Vec<(usize, Range<usize>)> = Vec::new();
    for (index, offer) in chunk.iter().enumerate() {
        baseline.check(&offer.meta, offer.bytes).map_err(|error| wrong(&offer.meta, error))?;
        let width = offer.meta.dtype.width();
        let (elements, step) = (offer.bytes.len() / width, STRETCH / width);
        let starts = (0..elements.max(1)).step_by(step);
        stretches.extend(starts.map(|start| (index, start..elements.min(start + step))));
    }
    let find = |(index, range): &(usize, Range<usize>)| {
        let offer = &chunk[*index];
        baseline.changes(&offer.meta, offer.bytes, range.clone()).map_err(|error| wrong(&offer.meta, error))
    };
    let found: Result<Vec<Changes>, NodeError> = pool.install(|| stretches.par_iter().map(find).collect());
    let mut parts: Vec<Vec<Changes>> = chunk.iter().map(|_| Vec::new()).collect();
    for ((index, _), changes) in stretches.into_iter().zip(found?) {
        parts[index].push(changes);
    }
    Ok(pool.install(|| parts.into_par_iter().map(Changes::join).collect()))
}

/// What has left an encoder.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    payload_bytes: u64,
    encode_s: f64,
    blocked_s: f64,
}

struct Encoded {
    bytes: Vec<u8>,
    seconds: f64,
}

/// A bucket that a thread of the pool encodes.
struct Pending {
    sequence: u32,
    encoded: Receiver<Result<Encoded, NodeError>>,
}

/// Encodes buckets on the pool, and sends payloads in their order from a thread of its own.
struct Encoder {
    pool: Arc<ThreadPool>,
    queue: Option<SyncSender<Pending>>,
    sender: Option<JoinHandle<Sent>>,
    failure: Arc<Mutex<Option<NodeError>>>,
}

impl Encoder {
    fn start(pool: Arc<ThreadPool>, depth: usize, sink: Sink) -> Result<Self, NodeError> {
        let (queue, pending) = sync_channel::<Pending>(depth.max(1));
        let failure = Arc::<Mutex<Option<NodeError>>>::default();
        let told = Arc::clone(&failure);
        let send = move || {
            let mut sent = Sent::default();
            for Pending { sequence, encoded } in pending {
                // After a failure the queue is emptied, so that nobody waits for room in it.
                if told.lock().is_some() {
                    continue;
                }
                let lost = || Err(NodeError::Misuse("a thread that encodes has ended early"));
                let result = encoded.recv().unwrap_or_else(|_| lost()).and_then(|encoded| {
                    sent.payload_bytes += encoded.bytes.len() as u64;
                    sent.encode_s += encoded.seconds;
                    let started = Instant::now();
                    sink(sequence, encoded.bytes)?;
                    sent.blocked_s += started.elapsed().as_secs_f64();
                    Ok(())
                });
                if let Err(error) = result {
                    *told.lock() = Some(error);
                }
            }
            sent
        };
        let sender = std::thread::Builder::new().name("dcr-send".to_owned()).spawn(send);
        let sender = sender.map_err(|source| NodeError::System { doing: "start the thread that sends", source })?;
        Ok(Self { pool, queue: Some(queue), sender: Some(sender), failure })
    }

    /// The first failure, if there was one; told once.
    fn check(&self) -> Result<(), NodeError> {
        self.failure.lock().as_mut().map_or(Ok(()), |failure| {
            Err(std::mem::replace(failure, NodeError::Misuse("the stream of this refit has failed already")))
        })
    }

    fn encode(&self, id: PayloadId, items: Vec<Item>) -> Result<(), NodeError> {
        let (done, encoded) = sync_channel(1);
        let pending = Pending { sequence: id.sequence, encoded };
        let work = move || {
            let started = Instant::now();
            let result = payload::encode(&id, &items).map_err(|error| {
                let first = items.first().map(|item| item.meta.clone());
                let first = first.unwrap_or_else(|| TensorMeta::new("", [], dcr_core::dtype::DType::U8));
                wrong(&first, format!("its bucket: {error}"))
            });
            // Nobody may listen any more, after a failure.
            let _ = done.send(result.map(|bytes| Encoded { bytes, seconds: started.elapsed().as_secs_f64() }));
        };
        // Room first: the items of a bucket that waits for room are not encoded yet, so memory stays bounded.
        if let Some(queue) = &self.queue
            && queue.send(pending).is_err()
        {
            return Err(NodeError::Misuse("the thread that sends has ended early"));
        }
        self.pool.spawn(work);
        Ok(())
    }

    /// Waits until everything has been taken.
    fn finish(&mut self) -> Result<Sent, NodeError> {
        self.queue = None;
        let sent = self.sender.take().map(JoinHandle::join);
        self.check()?;
        match sent {
            Some(Ok(sent)) => Ok(sent),
            _ => Err(NodeError::Misuse("the thread that sends has ended early")),
        }
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(sender) = self.sender.take() {
            let _ = sender.join();
        }
    }
}
