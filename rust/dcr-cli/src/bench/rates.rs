//! How fast owners compare, next to how fast this machine reads the same buffers.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use dcr_core::baseline::{Baseline, Role};
use dcr_core::dtype::DType;
use dcr_core::tensor::TensorMeta;
use dcr_node::{ConstructOptions, Construction, Offer, Sink, StreamOrder, compare};
use dcr_protocol::{AttemptId, Mode};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rayon::ThreadPool;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::median;

/// Elements of one tensor: a matrix of 2048 rows and as many columns.
const TENSOR: usize = 4 << 20;

/// Reads, compares and constructs `bytes` of BF16 values of which `share` change.
pub fn measure(bytes: usize, share: f64, threads: usize, rounds: u32) -> Result<Value, String> {
    let (old, new) = buffers(bytes, share);
    let names: Vec<TensorMeta> = old.chunks(2 * TENSOR).enumerate().map(|(n, part)| meta(n, part.len() / 2)).collect();
    let offers = |bits: &'static [u8]| names.iter().cloned().zip(bits.chunks(2 * TENSOR));
    let offers = |bits| offers(bits).map(|(meta, bytes)| Offer { meta, bytes }).collect::<Vec<_>>();
    // Kept until the process ends: the closures of several threads borrow them.
    let (old, new): (&'static [u8], &'static [u8]) = (old.leak(), new.leak());
    let (before, now) = (offers(old), offers(new));

    let mut baseline = Baseline::default();
    for offer in &before {
        baseline.track(offer.meta.clone(), offer.bytes).map_err(|error| error.to_string())?;
    }
    let all = match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let mut counts = vec![1, all];
    counts.dedup();
    let mut runs = Vec::new();
    let mut bits_per_change = 0.0;
    for threads in counts {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| error.to_string())?;
        let mut construction =
            Construction::new(ConstructOptions { threads, ..Default::default() }).map_err(|error| error.to_string())?;
        for offer in &before {
            construction.track(offer, Role::Canonical, None).map_err(|error| error.to_string())?;
        }
        let (mut read, mut compared, mut constructed) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            // Neighbours in time, so that what else the machine does meets all of them.
            read.push(seconds(|| read_both(&pool, old, new)));
            compared.push(seconds(|| compare(&pool, &baseline, &now).map(|found| found.len())));
            let started = Instant::now();
            let totals = stream(&mut construction, &now).map_err(|error| error.to_string())?;
            constructed.push(started.elapsed().as_secs_f64());
            bits_per_change = 8.0 * totals.payload_bytes as f64 / totals.changed.max(1) as f64;
        }
        let rate = |seconds: Vec<f64>| 2.0 * bytes as f64 / 1e9 / median(seconds);
        let ratios = read.iter().zip(&compared).map(|(read, compared)| read / compared).collect();
        runs.push(json!({
            "threads": threads,
            "compare_of_read": median(ratios),
            "read_gb_s": rate(read),
            "compare_gb_s": rate(compared),
            "construct_gb_s": rate(constructed),
        }));
    }
    Ok(json!({
        "megabytes": bytes >> 20,
        "share": share,
        "rounds": rounds,
        "bits_per_change": bits_per_change,
        "runs": runs,
    }))
}

fn meta(number: usize, elements: usize) -> TensorMeta {
    let shape = if elements == TENSOR { vec![2048, 2048] } else { vec![elements as u64] };
    TensorMeta::new(format!("layers.{number}.weight"), shape, DType::Bf16)
}

/// Weights with a standard deviation of 0.02, and the same after a step that moves `share` of them a little.
fn buffers(bytes: usize, share: f64) -> (Vec<u8>, Vec<u8>) {
    let mut random = SmallRng::seed_from_u64(42);
    let mut old = Vec::with_capacity(bytes);
    let mut new = Vec::with_capacity(bytes);
    for _ in 0..bytes / 2 {
        // The sum of four uniform numbers is close enough to a normal one.
        let sum: f32 = (0..4).map(|_| random.random::<f32>() - 0.5).sum();
        let bits = (sum * 0.0346).to_bits();
        let word = (bits >> 16) as u16;
        let step: u16 = if random.random::<f64>() >= share { 0 } else { 1 + random.random::<u16>() % 3 / 2 };
        let moved = if random.random() { word.wrapping_add(step) } else { word.wrapping_sub(step) };
        old.extend_from_slice(&word.to_le_bytes());
        new.extend_from_slice(&moved.to_le_bytes());
    }
    (old, new)
}

fn seconds<T>(work: impl FnOnce() -> T) -> f64 {
    let started = Instant::now();
    black_box(work());
    started.elapsed().as_secs_f64()
}

/// Reads every byte of both buffers once, as fast as the pool's threads can.
fn read_both(pool: &ThreadPool, old: &[u8], new: &[u8]) -> u64 {
    const STRETCH: usize = 2 << 20;
    let sum = |part: &[u8]| {
        let mut lanes = [0u64; 8];
        for block in part.as_chunks::<64>().0 {
            for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
                *lane ^= u64::from_le_bytes(*word);
            }
        }
        lanes.iter().fold(0, |all, lane| all ^ lane)
    };
    let pairs = old.par_chunks(STRETCH).zip(new.par_chunks(STRETCH));
    pool.install(|| pairs.map(|(old, new)| sum(old) ^ sum(new)).reduce(|| 0, |one, other| one ^ other))
}

fn stream(
    construction: &mut Construction,
    offers: &[Offer<'_>],
) -> Result<dcr_protocol::StreamTotals, dcr_node::NodeError> {
    let sink: Sink = Arc::new(|_, payload| {
        black_box(payload);
        Ok(())
    });
    let order =
        StreamOrder { attempt: AttemptId([0; 16]), owner: 0, mode: Mode::Mixed, overwrite_only: Default::default() };
    construction.begin(order, sink)?;
    construction.offer(offers)?;
    construction.end(&[])
}
