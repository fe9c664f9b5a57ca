//! Copies on real memory against a reference that computes one element at a time.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::collections::HashMap;

use common::{Memory, interceptor, view};
use dcr_core::dtype::DType;
use dcr_core::interceptor::Verdict;
use dcr_core::payload::{Encoding, Item, Positions};
use dcr_core::tensor::TensorMeta;
use proptest::prelude::*;

const LONG: u64 = if cfg!(miri) { 300 } else { 2000 };
const SMALL: u64 = if cfg!(miri) { 4 } else { 9 };

/// Repeatable numbers for everything that need not shrink.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index as u64 + 1) as usize);
        }
    }
}

/// A source view of a contiguous tensor: offset, sizes and strides in elements.
struct Source {
    offset: i64,
    sizes: Vec<i64>,
    strides: Vec<i64>,
}

/// Slices, steps and transposes, as loaders do.
fn source(shape: &[u64], random: &mut Random) -> Source {
    let mut strides = vec![1i64; shape.len()];
    for index in (0..shape.len().saturating_sub(1)).rev() {
        strides[index] = strides[index + 1] * shape[index + 1] as i64;
    }
    let mut source = Source { offset: 0, sizes: Vec::new(), strides: Vec::new() };
    for (size, stride) in shape.iter().zip(strides) {
        let (mut first, mut count, mut step) = (0, *size as i64, 1);
        if count > 1 && random.below(2) == 0 {
            first = random.below(count as u64) as i64;
            step = 1 + random.below(3) as i64;
            count = 1 + random.below(((*size as i64 - first - 1) / step + 1) as u64) as i64;
        }
        source.offset += first * stride;
        source.sizes.push(count);
        source.strides.push(stride * step);
    }
    let mut order: Vec<usize> = (0..shape.len()).collect();
    random.shuffle(&mut order);
    source.sizes = order.iter().map(|index| source.sizes[*index]).collect();
    source.strides = order.iter().map(|index| source.strides[*index]).collect();
    source
}

/// Strides of a destination that holds `sizes` without overlap, dimensions in any order, with holes; and its span.
fn destination(sizes: &[i64], random: &mut Random) -> (Vec<i64>, i64) {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    if random.below(2) == 0 {
        random.shuffle(&mut order);
    } else {
        order.reverse();
    }
    let mut strides = vec![0; sizes.len()];
    let mut span = 1;
    for index in order {
        let hole = if random.below(3) == 0 { random.below(4) as i64 } else { 0 };
        strides[index] = span + hole;
        span += (sizes[index] - 1) * strides[index];
    }
    (strides, span)
}

fn indices(sizes: &[i64]) -> Vec<Vec<i64>> {
    sizes.iter().fold(vec![vec![]], |all, size| {
        all.iter().flat_map(|index| (0..*size).map(move |last| [index.as_slice(), &[last]].concat())).collect()
    })
}

fn dot(index: &[i64], strides: &[i64]) -> i64 {
    index.iter().zip(strides).map(|(index, stride)| index * stride).sum()
}

fn bytes(count: u64, random: &mut Random) -> Vec<u8> {
    // Many NaNs and zeros among them.
    (0..count)
        .map(|_| match random.below(4) {
            0 => 0x7f,
            1 => 0xff,
            2 => 0,
            _ => random.next() as u8,
        })
        .collect()
}

#[derive(Clone, Debug)]
struct Case {
    shape: Vec<u64>,
    dtype: DType,
    encoding: Encoding,
    widen: bool,
    density: u64,
    expand: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    // Miri checks every access, and takes its time.
    let large = u32::from(!cfg!(miri));
    let shape = prop_oneof![
        3 => prop::collection::vec(1u64..SMALL, 0..5),
        large => prop::collection::vec(30u64..70, 2),
        1 => prop::collection::vec(40u64..200 + 500 * u64::from(large), 1),
    ];
    let encoding = prop::sample::select(vec![Encoding::Xor, Encoding::Overwrite, Encoding::Dense]);
    let dtype = prop::sample::select(DType::ALL.to_vec());
    (shape, dtype, encoding, any::<bool>(), 0u64..=8, prop::bool::weighted(0.2), 1u64..).prop_map(
        |(shape, dtype, encoding, widen, density, expand, seed)| {
            let widen = widen && encoding != Encoding::Xor && matches!(dtype, DType::Bf16 | DType::F16);
            Case { shape, dtype, encoding, widen, density, expand, seed }
        },
    )
}

fn make_item(case: &Case, random: &mut Random) -> Item {
    let meta = TensorMeta::new("canonical", case.shape.clone(), case.dtype);
    let numel = meta.numel().unwrap();
    let positions: Vec<u64> =
        (0..numel).filter(|_| case.encoding == Encoding::Dense || random.below(8) < case.density).collect();
    let mut values = bytes(positions.len() as u64 * case.dtype.width() as u64, random);
    if case.widen && case.dtype == DType::F16 {
        // Signalling NaNs are refused; see the rules' tests.
        for value in values.as_chunks_mut::<2>().0 {
            let bits = u16::from_le_bytes(*value);
            if bits & 0x7e00 == 0x7c00 {
                *value = (bits | 0x0200).to_le_bytes();
            }
        }
    }
    if case.dtype.width() == 1 && case.encoding == Encoding::Overwrite {
        // Few patterns: keep one of every type's candidates free.
        values.iter_mut().filter(|value| **value == 0xff || **value == 0xfe).for_each(|value| *value = 0x55);
    }
    Item { meta, encoding: case.encoding, positions: Positions::from_sorted(positions), values }
}

fn widened(dtype: DType, value: &[u8]) -> Vec<u8> {
    let bits = u16::from_le_bytes([value[0], value[1]]);
    let value = match dtype {
        DType::Bf16 => half::bf16::from_bits(bits).to_f32(),
        _ => half::f16::from_bits(bits).to_f32(),
    };
    // half quiets signalling bfloat16 NaNs where torch, and dcr, keep every bit.
    let kept = if dtype == DType::Bf16 { u32::from(bits) << 16 } else { value.to_bits() };
    assert!(kept == value.to_bits() || value.is_nan());
    kept.to_le_bytes().to_vec()
}

fn run(case: &Case) {
    let random = &mut Random(case.seed);
    let item = make_item(case, random);
    let width = case.dtype.width();
    let nbytes = item.meta.nbytes().unwrap();
    let source = source(&case.shape, random);

    let mut sizes = source.sizes.clone();
    let mut expanded = source.strides.clone();
    let (mut given_sizes, mut given_strides) = (source.sizes.clone(), source.strides.clone());
    if case.expand {
        // The source lacks a leading dimension, and repeats along one that it has once.
        if let Some(index) = sizes.iter().position(|size| *size == 1) {
            (sizes[index], expanded[index]) = (3, 0);
        }
        sizes.insert(0, 2);
        expanded.insert(0, 0);
    } else if random.below(2) == 0 {
        sizes.insert(0, 1);
        expanded.insert(0, 12345);
        given_sizes.insert(0, 1);
        given_strides.insert(0, 777);
    }
    let to = if case.widen { DType::F32 } else { case.dtype };
    let (strides, span) = destination(&sizes, random);
    let lead = random.below(20) as usize;
    let tail = random.below(20) as usize;
    let part = span as usize * to.width();
    let before = bytes((lead + part + tail) as u64, random);

    let resident = Memory::new(&before);
    let scratch = Memory::new(&bytes(nbytes as u64 + 16, random));
    let mut interceptor = interceptor(&resident, &[("param", lead, part)], &scratch);
    interceptor.begin_item(&item).unwrap();
    let dst = view(resident.address() + lead, to, &sizes, &strides);
    let from = scratch.address() + source.offset as usize * width;
    let src = view(from, case.dtype, &given_sizes, &given_strides);
    assert_eq!(interceptor.on_copy(&dst, &src), Verdict::Handled);
    let outcome = interceptor.end_item();
    assert_eq!(outcome.violations, Vec::<String>::new());

    let active: HashMap<u64, &[u8]> = item.positions.iter().zip(item.values.chunks(width)).collect();
    let mut expected = before;
    let mut elements = 0;
    for index in indices(&sizes) {
        let element = (source.offset + dot(&index, &expanded)) as u64;
        let Some(value) = active.get(&element) else {
            continue;
        };
        let value = if case.widen { widened(case.dtype, value) } else { value.to_vec() };
        let at = lead + dot(&index, &strides) as usize * to.width();
        elements += u64::from(case.encoding != Encoding::Xor || value.iter().any(|byte| *byte != 0));
        for (to, from) in expected[at..].iter_mut().zip(value) {
            *to = if case.encoding == Encoding::Xor { *to ^ from } else { from };
        }
    }
    assert_eq!(resident.bytes(), expected);
    assert_eq!((outcome.copies, outcome.elements), (1, elements));
    assert_eq!(outcome.written, ["param"]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 24 } else { 2000 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn copies_agree_with_the_reference(case in case()) {
        run(&case);
    }
}

/// Many items one after another: what one leaves in the scratch must not reach the next.
#[test]
fn items_follow_each_other() {
    let random = &mut Random(99);
    let resident = Memory::new(&[0; 4096]);
    let scratch = Memory::new(&bytes(4096, random));
    let mut interceptor = interceptor(&resident, &[("param", 0, 4096)], &scratch);
    let encodings = [Encoding::Xor, Encoding::Overwrite, Encoding::Dense];
    for round in 0..if cfg!(miri) { 6 } else { 600 } {
        let dtype = DType::ALL[random.below(12) as usize];
        let shape = vec![1 + random.below(LONG / dtype.width() as u64)];
        let encoding = encodings[random.below(3) as usize];
        let density = random.below(9);
        let case = Case { shape, dtype, encoding, widen: false, density, expand: false, seed: 1 };
        let item = make_item(&case, random);
        let before = bytes(4096, random);
        resident.write(0, &before);
        interceptor.begin_item(&item).unwrap();
        let sizes = [case.shape[0] as i64];
        let dst = view(resident.address(), dtype, &sizes, &[1]);
        interceptor.on_copy(&dst, &view(scratch.address(), dtype, &sizes, &[1]));
        assert!(interceptor.end_item().violations.is_empty());

        let mut expected = before;
        for (position, value) in item.positions.iter().zip(item.values.chunks(dtype.width())) {
            let at = &mut expected[position as usize * dtype.width()..];
            at.iter_mut().zip(value).for_each(|(to, from)| {
                *to = if encoding == Encoding::Xor { *to ^ from } else { *from };
            });
        }
        assert_eq!(resident.bytes(), expected, "round {round}");
    }
}
