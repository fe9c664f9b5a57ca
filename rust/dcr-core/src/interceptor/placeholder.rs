//! The bit pattern that marks inactive positions of an overwrite item's scratch.

use std::ops::RangeInclusive;

use crate::dtype::DType;

/// A pattern that no element of `values` has: a NaN for float types, quiet ones first, and any pattern for the
/// others. `None` if every candidate occurs.
///
/// Bits are compared, not values, so active NaNs with another payload are no obstacle.
pub(super) fn choose(dtype: DType, values: &[u8]) -> Option<u64> {
    let word = match dtype.width() {
        1 => words::<1>,
        2 => words::<2>,
        4 => words::<4>,
        _ => words::<8>,
    };
    candidates(dtype).iter().find_map(|range| {
        let mut used = word(values, range);
        used.sort_unstable();
        used.dedup();
        let unused = range.clone().zip(&used).find(|(candidate, used)| candidate != *used);
        unused.map(|(candidate, _)| candidate).or_else(|| range.clone().nth(used.len()))
    })
}

/// The values in `range`, as little-endian integers.
fn words<const W: usize>(values: &[u8], range: &RangeInclusive<u64>) -> Vec<u64> {
    let words = values.as_chunks::<W>().0.iter().map(|bytes| {
        let mut word = [0; 8];
        word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(word)
    });
    words.filter(|word| range.contains(word)).collect()
}

fn candidates(dtype: DType) -> &'static [RangeInclusive<u64>] {
    match dtype {
        DType::Bf16 => &[0x7fc0..=0x7fff, 0xffc0..=0xffff, 0x7f81..=0x7fbf, 0xff81..=0xffbf],
        DType::F16 => &[0x7e00..=0x7fff, 0xfe00..=0xffff, 0x7c01..=0x7dff, 0xfc01..=0xfdff],
        DType::F32 => &[0x7fc0_0000..=0x7fff_ffff, 0xffc0_0000..=0xffff_ffff],
        DType::F64 => &[0x7ff8_0000_0000_0000..=0x7fff_ffff_ffff_ffff],
        DType::F8E4M3 => &[0x7f..=0x7f, 0xff..=0xff],
        DType::F8E5M2 => &[0x7e..=0x7f, 0xfe..=0xff, 0x7d..=0x7d, 0xfd..=0xfd],
        DType::Bool => &[0x80..=0xff, 0x00..=0x7f],
        DType::I8 | DType::U8 => &[0x80..=0xff, 0x00..=0x7f],
        DType::I16 => &[0x8000..=0xffff, 0x0000..=0x7fff],
        DType::I32 => &[0x8000_0000..=0xffff_ffff],
        DType::I64 => &[0x8000_0000_0000_0000..=0xffff_ffff_ffff_ffff],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(dtype: DType, words: impl IntoIterator<Item = u64>) -> Vec<u8> {
        words.into_iter().flat_map(|word| word.to_le_bytes()[..dtype.width()].to_vec()).collect()
    }

    #[test]
    fn every_candidate_is_nan_in_float_types() {
        for range in candidates(DType::Bf16) {
            assert!(range.clone().all(|bits| half::bf16::from_bits(bits as u16).is_nan()));
        }
        for range in candidates(DType::F16) {
            assert!(range.clone().all(|bits| half::f16::from_bits(bits as u16).is_nan()));
        }
        for range in candidates(DType::F32) {
            let mut ends = [*range.start(), *range.end()].into_iter();
            assert!(ends.all(|bits| f32::from_bits(bits as u32).is_nan()));
        }
        for range in candidates(DType::F64) {
            let mut ends = [*range.start(), *range.end()].into_iter();
            assert!(ends.all(|bits| f64::from_bits(bits).is_nan()));
        }
        // e4m3fn: 0x7f and its negative; e5m2: exponent all ones and a mantissa that is not zero.
        assert_eq!(candidates(DType::F8E4M3), [0x7f..=0x7f, 0xff..=0xff]);
        for range in candidates(DType::F8E5M2) {
            assert!(range.clone().all(|bits| bits & 0x7c == 0x7c && bits & 3 != 0));
        }
    }

    #[test]
    fn active_nans_are_avoided() {
        assert_eq!(choose(DType::Bf16, &[]), Some(0x7fc0));
        let values = bytes(DType::Bf16, [0x7fc1, 0x7fc0, 0x3f80, 0x7fc0, 0x7fc3]);
        assert_eq!(choose(DType::Bf16, &values), Some(0x7fc2));
        assert_eq!(choose(DType::F8E4M3, &[0x7f]), Some(0xff));
        assert_eq!(choose(DType::F8E4M3, &[0xff, 0x7f]), None);
        let quiet = bytes(DType::Bf16, 0x7fc0..=0x7fff);
        assert_eq!(choose(DType::Bf16, &quiet), Some(0xffc0));
        let all = bytes(DType::Bf16, (0x7f81..=0x7fff).chain(0xff81..=0xffff));
        assert_eq!(choose(DType::Bf16, &all), None);
        assert_eq!(choose(DType::U8, &(0..=255).collect::<Vec<u8>>()), None);
        assert_eq!(choose(DType::Bool, &[0, 1]), Some(0x80));
    }
}
