//! How fast the pure parts are on this machine, next to memcpy in the same run:
//! `cargo run --release -p dcr-core --example speed`.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::hint::black_box;
use std::time::Instant;

use dcr_core::compare;
use dcr_core::dtype::DType;
use dcr_core::interceptor::{Interceptor, ResidentRange, View};
use dcr_core::payload::{self, Encoding, Item, PayloadId, Positions};
use dcr_core::tensor::TensorMeta;

const ROWS: i64 = 4096;
const COLUMNS: i64 = 16384;
const ELEMENTS: usize = (ROWS * COLUMNS) as usize;
const BYTES: usize = 2 * ELEMENTS;

/// Seconds of the fastest of a few calls.
fn best<T>(mut work: impl FnMut() -> T) -> f64 {
    let seconds = (0..9).map(|_| {
        let start = Instant::now();
        black_box(work());
        start.elapsed().as_secs_f64()
    });
    seconds.fold(f64::INFINITY, f64::min)
}

fn main() {
    let mut state = 1u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let old: Vec<u8> = (0..ELEMENTS).flat_map(|_| (random() as u16 & 0xbfff).to_le_bytes()).collect();
    let mut copy = vec![0; BYTES];
    let seconds = best(|| {
        copy.copy_from_slice(black_box(&old));
        black_box(&mut copy);
    });
    let memcpy = BYTES as f64 / 1e9 / seconds;
    println!("memcpy of {} MB: {memcpy:.1} GB/s; everything on one thread, ratios to it", BYTES >> 20);
    println!("rates: GB/s of tensor bytes, and M changes/s");

    for percent in [0u64, 1, 3] {
        let mut new = old.clone();
        for element in new.as_chunks_mut::<2>().0 {
            if random() % 100 < percent {
                // Small steps, as training makes: mostly the low bits change.
                element[0] ^= 1 << (random() % 8).min(random() % 8);
            }
        }
        let mut positions = Vec::new();
        let report = |what: &str, seconds: f64, changes: usize| {
            let rate = BYTES as f64 / 1e9 / seconds;
            let changes = changes as f64 / 1e6 / seconds;
            println!("{percent}% {what:<34} {rate:6.2} GB/s  {:5.2} x memcpy {changes:8.1} M/s", rate / memcpy);
        };
        if percent == 0 {
            let seconds = best(|| compare::any_changed(&old, black_box(&new)).unwrap());
            report("any_changed", seconds, 0);
        }
        let seconds = best(|| {
            positions.clear();
            compare::changed(&old, black_box(&new), 2, &mut positions).unwrap()
        });
        let count = positions.len();
        report("changed", seconds, count);
        if count == 0 {
            continue;
        }

        let words = |bytes: &[u8]| -> Vec<u8> {
            positions.iter().flat_map(|at| bytes.as_chunks::<2>().0[*at as usize]).collect()
        };
        let values = words(&new);
        let masks = words(&old).iter().zip(&values).map(|(old, new)| old ^ new).collect();
        let meta = TensorMeta::new("w", [ROWS as u64, COLUMNS as u64], DType::Bf16);
        let positions = Positions::from_sorted(positions);
        let xor = Item { meta, encoding: Encoding::Xor, positions, values: masks };
        let overwrite = Item { encoding: Encoding::Overwrite, values, ..xor.clone() };
        let id = PayloadId { attempt: [0; 16], owner: 0, sequence: 0 };
        let mut bytes = Vec::new();
        let seconds = best(|| bytes = payload::encode(&id, std::slice::from_ref(&xor)).unwrap());
        report("encode (zstd and digest included)", seconds, count);
        println!("   {:.2} bits a change", 8.0 * bytes.len() as f64 / count as f64);
        let seconds = best(|| payload::decode(&bytes).unwrap());
        report("decode", seconds, count);

        let resident = old.clone().leak();
        let scratch = vec![0u8; BYTES].leak();
        let mut interceptor = Interceptor::new();
        let (to, from) = (resident.as_mut_ptr().expose_provenance(), scratch.as_mut_ptr().expose_provenance());
        // SAFETY: both are leaked, and used by nobody else from here on.
        unsafe {
            let range = ResidentRange { start: to, len: BYTES, name: "p".into() };
            interceptor.set_resident(vec![range]).unwrap();
            interceptor.set_scratch(from, BYTES).unwrap();
        }
        let layouts: [(&str, [i64; 2]); 2] = [("", [COLUMNS, 1]), (" transposed", [1, ROWS])];
        for (item, what) in [(&xor, "apply xor"), (&overwrite, "apply overwrite")] {
            for (layout, strides) in layouts {
                let sizes = [ROWS, COLUMNS];
                let dtype = Some(DType::Bf16);
                let dst = View { data: to, dtype, device_is_cpu: true, sizes: &sizes, strides: &strides };
                let src = View { data: from, strides: &[COLUMNS, 1], ..dst };
                let seconds = best(|| {
                    interceptor.begin_item(item).unwrap();
                    interceptor.on_copy(&dst, &src);
                    let outcome = interceptor.end_item();
                    assert_eq!((outcome.copies, outcome.violations.len()), (1, 0));
                });
                report(&format!("{what}{layout}"), seconds, count);
            }
        }
    }
}
