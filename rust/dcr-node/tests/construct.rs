//! Delta construction without a network: what is emitted, in which payloads, and how it fails.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use dcr_core::baseline::Role;
use dcr_core::dtype::DType;
use dcr_core::payload::{Encoding, Item, Payload, decode};
use dcr_core::projection::Projection;
use dcr_core::tensor::TensorMeta;
use dcr_node::{ConstructOptions, Construction, NodeError, Offer, Sink, StreamOrder};
use dcr_protocol::{AttemptId, Mode};
use parking_lot::Mutex;
use proptest::prelude::*;

type Bits = BTreeMap<String, Vec<u8>>;

fn meta(name: &str, elements: usize) -> TensorMeta {
    TensorMeta::new(name, [elements as u64], DType::Bf16)
}

fn offers(tensors: &Bits) -> Vec<Offer<'_>> {
    tensors.iter().map(|(name, bytes)| Offer { meta: meta(name, bytes.len() / 2), bytes }).collect()
}

fn order(mode: Mode, overwrite_only: &[&str]) -> StreamOrder {
    let overwrite_only = overwrite_only.iter().map(|name| (*name).to_owned()).collect();
    StreamOrder { attempt: AttemptId([7; 16]), owner: 3, mode, overwrite_only }
}

/// A sink that keeps what it gets.
fn kept() -> (Sink, Arc<Mutex<Vec<Payload>>>) {
    let payloads = Arc::<Mutex<Vec<Payload>>>::default();
    let keep = Arc::clone(&payloads);
    let sink: Sink = Arc::new(move |sequence, bytes| {
        let payload = decode(&bytes).unwrap();
        assert_eq!((payload.id.attempt, payload.id.owner, payload.id.sequence), ([7; 16], 3, sequence));
        keep.lock().push(payload);
        Ok(())
    });
    (sink, payloads)
}

fn options(chunk_bytes: u64, bucket_bytes: u64) -> ConstructOptions {
    ConstructOptions { chunk_bytes, bucket_bytes, threads: 2, ..Default::default() }
}

fn tracked(tensors: &Bits, options: ConstructOptions) -> Construction {
    let mut construction = Construction::new(options).unwrap();
    for offer in offers(tensors) {
        let role = if offer.meta.name.starts_with("residual") { Role::Residual } else { Role::Canonical };
        construction.track(&offer, role, None).unwrap();
    }
    construction
}

fn run(construction: &mut Construction, order: StreamOrder, tensors: &Bits) -> Result<Vec<Payload>, NodeError> {
    let (sink, payloads) = kept();
    construction.begin(order, sink)?;
    construction.offer(&offers(tensors))?;
    let totals = construction.end(&[])?;
    let payloads = std::mem::take(&mut *payloads.lock());
    assert_eq!(totals.payloads as usize, payloads.len());
    assert_eq!(totals.bytes, tensors.values().map(|bytes| bytes.len() as u64).sum::<u64>());
    Ok(payloads)
}

fn apply(item: &Item, bits: &mut Bits) {
    let resident = bits.get_mut(&item.meta.name).unwrap();
    for (position, value) in item.positions.iter().zip(item.values.chunks(2)) {
        for (byte, value) in value.iter().enumerate() {
            let at = &mut resident[2 * position as usize + byte];
            *at = if item.encoding == Encoding::Xor { *at ^ value } else { *value };
        }
    }
}

fn names(payload: &Payload) -> Vec<&str> {
    payload.items.iter().map(|item| item.meta.name.as_str()).collect()
}

#[test]
fn buckets_count_whole_chunks_that_have_changes() {
    // Ten tensors of 100 bytes; chunks of two; buckets of 400 bytes. b and f change: chunks (a, b), (c, d), ...
    let old: Bits = "abcdefghij".chars().map(|name| (name.to_string(), vec![0; 100])).collect();
    let mut construction = tracked(&old, options(200, 400));
    let mut new = old.clone();
    for name in ["b", "f", "g", "j"] {
        new.get_mut(name).unwrap()[10] = 1;
    }
    let payloads = run(&mut construction, order(Mode::Mixed, &["f"]), &new).unwrap();
    // (c, d) has no change and counts nothing; (a, b) and (e, f) fill a bucket, (g, h) and (i, j) the next.
    assert_eq!(payloads.iter().map(names).collect::<Vec<_>>(), [["b", "f"], ["g", "j"]]);
    let encodings: Vec<_> = payloads[0].items.iter().map(|item| item.encoding).collect();
    assert_eq!(encodings, [Encoding::Xor, Encoding::Overwrite]);
    // A tensor larger than chunk and bucket is its own chunk and bucket.
    let mut construction = tracked(&old, options(1, 1));
    assert_eq!(run(&mut construction, order(Mode::Mixed, &[]), &new).unwrap().len(), 4);
}

#[test]
fn two_shards_of_one_tensor_travel_in_two_payloads() {
    let mut construction = Construction::new(options(1000, 1000)).unwrap();
    let old: Bits = [("left".to_owned(), vec![0; 8]), ("right".to_owned(), vec![0; 8])].into();
    for (part, offer) in (0..).zip(offers(&old)) {
        let map = Projection::split(meta("w", 4), 0, part, 2).unwrap();
        construction.track(&offer, Role::Shard, Some(map)).unwrap();
    }
    let new: Bits = [("left".to_owned(), vec![1; 8]), ("right".to_owned(), vec![2; 8])].into();
    let payloads = run(&mut construction, order(Mode::Mixed, &[]), &new).unwrap();
    assert_eq!(payloads.iter().map(names).collect::<Vec<_>>(), [["w"], ["w"]]);
    let mut bits: Bits = [("w".to_owned(), vec![0; 16])].into();
    payloads.iter().flat_map(|payload| &payload.items).for_each(|item| apply(item, &mut bits));
    assert_eq!(bits["w"], [[1; 8], [2; 8]].concat());
    // In a dense refit the canonical tensor comes from the full conversion, and shards emit nothing.
    let (sink, payloads) = kept();
    construction.begin(order(Mode::Dense, &[]), sink).unwrap();
    construction.offer(&offers(&new)).unwrap();
    let whole = [[1; 8], [2; 8]].concat();
    construction.offer_dense(&[Offer { meta: meta("w", 8), bytes: &whole }]).unwrap();
    construction.end(&["w".to_owned()]).unwrap();
    let payloads = payloads.lock();
    assert_eq!((payloads.len(), names(&payloads[0])), (1, vec!["w"]));
    assert_eq!((payloads[0].items[0].encoding, &payloads[0].items[0].values), (Encoding::Dense, &whole));
}

#[test]
fn only_required_residual_tensors_have_to_be_converted() {
    let old: Bits = ["a", "residual.q", "residual.v"].map(|name| (name.to_owned(), vec![0; 8])).into();
    let mut construction = tracked(&old, options(1000, 1000));
    let shard = [1, 2, 3, 4];
    construction.track_flag(&Offer { meta: meta("qkv", 2), bytes: &shard }).unwrap();
    let mut some = old.clone();
    some.remove("residual.v");
    some.get_mut("residual.q").unwrap()[0] = 9;
    let required = ["residual.q".to_owned()];

    let mut stream = |tensors: &Bits, required: &[String], look: bool, mode| {
        let (sink, payloads) = kept();
        construction.begin(order(mode, &[]), sink).unwrap();
        if look {
            assert_eq!(construction.flags(&[Offer { meta: meta("qkv", 2), bytes: &shard }]).unwrap(), [false]);
        }
        construction.offer(&offers(tensors)).unwrap();
        construction.end(required).map(|totals| (totals, std::mem::take(&mut *payloads.lock())))
    };
    let (totals, payloads) = stream(&some, &required, true, Mode::Mixed).unwrap();
    assert_eq!((totals.residual_tensors, totals.changed, totals.elements), (1, 1, 12));
    let item = &payloads[0].items[0];
    assert_eq!((item.meta.name.as_str(), item.encoding), ("residual.q", Encoding::Overwrite));

    let fail = |result: Result<_, NodeError>| result.map(|_: (_, _)| ()).unwrap_err().to_string();
    let both = ["residual.q".to_owned(), "residual.v".to_owned()];
    let missing = fail(stream(&some, &both, true, Mode::Mixed));
    assert!(missing.contains("`residual.v`") && missing.contains("had to be converted"), "{missing}");
    let unseen = fail(stream(&some, &required, false, Mode::Mixed));
    assert!(unseen.contains("`qkv`") && unseen.contains("not looked at"), "{unseen}");
    let dense = fail(stream(&some, &[], true, Mode::Dense));
    assert!(dense.contains("`residual.v`"), "{dense}");
    some.remove("a");
    let affine = fail(stream(&some, &required, true, Mode::Mixed));
    assert!(affine.contains("`a`") && affine.contains("not offered"), "{affine}");
}

#[test]
fn failures_leave_the_baseline_as_it_was() {
    let old: Bits = ["a", "b"].map(|name| (name.to_owned(), vec![0; 8])).into();
    let mut construction = tracked(&old, options(1, 1));
    let new: Bits = ["a", "b"].map(|name| (name.to_owned(), vec![1; 8])).into();
    let (sink, _) = kept();
    assert!(construction.offer(&offers(&new)).unwrap_err().to_string().contains("no refit is prepared"));
    assert!(construction.end(&[]).is_err());
    construction.begin(order(Mode::Mixed, &[]), sink).unwrap();
    let twice = [offers(&new), offers(&new)].concat();
    assert!(construction.offer(&twice).unwrap_err().to_string().contains("offered twice"));
    let dense = construction.offer_dense(&offers(&new)).unwrap_err();
    assert!(dense.to_string().contains("only a dense refit"), "{dense}");
    let shape: Bits = [("a".to_owned(), vec![1; 6])].into();
    let (sink, _) = kept();
    construction.begin(order(Mode::Mixed, &[]), sink).unwrap();
    let error = construction.offer(&offers(&shape)).unwrap_err().to_string();
    assert!(error.contains("`a`") && error.contains("[3]") && error.contains("[4]"), "{error}");
    // A sink that fails is told by whatever comes next, and nobody hangs.
    let broken: Sink = Arc::new(|_, _| Err(NodeError::Attempt("the receivers are gone".to_owned())));
    construction.begin(order(Mode::Mixed, &[]), broken).unwrap();
    let failed = construction.offer(&offers(&new)).and_then(|()| construction.end(&[]).map(|_| ()));
    assert_eq!(failed.unwrap_err().to_string(), "the receivers are gone");
    construction.discard();
    construction.commit();
    for (name, bytes) in &old {
        assert_eq!(construction.baseline().bits(name), Some(bytes.as_slice()));
    }
    let payloads = run(&mut construction, order(Mode::Overwrite, &[]), &new).unwrap();
    assert_eq!(payloads.len(), 2);
}

#[test]
fn the_queue_of_buckets_is_bounded_and_payloads_stay_in_order() {
    let old: Bits = (0..12).map(|number| (format!("{number:02}"), vec![0; 8])).collect();
    let new: Bits = old.keys().map(|name| (name.clone(), vec![1; 8])).collect();
    let mut construction = tracked(&old, ConstructOptions { bucket_queue: 2, ..options(1, 1) });
    let (release, gate): (_, Receiver<()>) = sync_channel(100);
    let (gate, taken) = (Mutex::new(gate), Arc::new(AtomicUsize::new(0)));
    let sequences = Arc::<Mutex<Vec<u32>>>::default();
    let (count, order_of) = (Arc::clone(&taken), Arc::clone(&sequences));
    let sink: Sink = Arc::new(move |sequence, _| {
        gate.lock().recv().unwrap();
        count.fetch_add(1, Ordering::SeqCst);
        order_of.lock().push(sequence);
        Ok(())
    });
    construction.begin(order(Mode::Mixed, &[]), sink).unwrap();
    let offered = Arc::new(AtomicUsize::new(0));
    let progress = Arc::clone(&offered);
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            for offer in offers(&new) {
                construction.offer(std::slice::from_ref(&offer)).unwrap();
                progress.fetch_add(1, Ordering::SeqCst);
            }
            construction.end(&[]).unwrap().payloads
        });
        for released in 0..12 {
            // One is in the sender's hands, two wait, and the next blocks whoever offers it.
            assert!(offered.load(Ordering::SeqCst) <= released + 3);
            release.send(()).unwrap();
            while taken.load(Ordering::SeqCst) <= released {
                std::thread::yield_now();
            }
        }
        assert_eq!(worker.join().unwrap(), 12);
    });
    assert_eq!(*sequences.lock(), (0..12).collect::<Vec<_>>());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever the sizes: old bits and the payloads make the new bits, with every change named exactly once.
    #[test]
    fn payloads_make_the_new_bits(
        sizes in proptest::collection::vec(0usize..400, 1..20),
        density in 0u32..100,
        seed in any::<u32>(),
        chunk in 1u64..3000,
        bucket in 1u64..3000,
        overwrite in any::<bool>(),
        folder in any::<bool>(),
    ) {
        let mut state = u64::from(seed) | 1;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 16) as u32
        };
        let old: Bits =
            sizes.iter().enumerate().map(|(n, size)| (n.to_string(), (0..2 * size).map(|_| random() as u8).collect())).collect();
        let mut new = old.clone();
        let mut changed = BTreeSet::new();
        for (name, bytes) in &mut new {
            for at in 0..bytes.len() / 2 {
                if random() % 100 < density {
                    bytes[2 * at + 1] ^= 1 + (random() % 255) as u8;
                    changed.insert((name.clone(), at as u64));
                }
            }
        }
        let place = tempfile::tempdir().unwrap();
        let baseline_folder = folder.then(|| place.path().to_owned());
        let mut construction = tracked(&old, ConstructOptions { baseline_folder, ..options(chunk, bucket) });
        let mode = if overwrite { Mode::Overwrite } else { Mode::Mixed };
        for (from, to) in [(&old, &new), (&new, &old)] {
            let payloads = run(&mut construction, order(mode, &[]), to).unwrap();
            let items: Vec<&Item> = payloads.iter().flat_map(|payload| &payload.items).collect();
            let named: Vec<(String, u64)> =
                items.iter().flat_map(|item| item.positions.iter().map(|at| (item.meta.name.clone(), at))).collect();
            prop_assert_eq!(named.len(), changed.len());
            prop_assert_eq!(named.into_iter().collect::<BTreeSet<_>>(), changed.clone());
            let mut bits = from.clone();
            items.into_iter().for_each(|item| apply(item, &mut bits));
            prop_assert_eq!(&bits, to);
            construction.commit();
        }
    }
}
