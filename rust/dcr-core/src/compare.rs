//! Comparison of stored bits: +0 and -0 differ, and so do NaNs with different payloads.

use thiserror::Error;

use crate::lanes::{self, differences};

/// Why two buffers cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CompareError {
    /// The buffers differ in length.
    #[error("the old values are {old} bytes and the new ones {new}; they must be the same tensor")]
    Length {
        /// Bytes of the old values.
        old: usize,
        /// Bytes of the new values.
        new: usize,
    },
    /// An element width other than 1, 2, 4 or 8.
    #[error("elements of {width} bytes cannot be compared; widths are 1, 2, 4 and 8")]
    Width {
        /// The width given.
        width: usize,
    },
    /// The length is not a whole number of elements.
    #[error("{len} bytes are not a whole number of elements of {width} bytes")]
    Partial {
        /// Bytes given.
        len: usize,
        /// Bytes of one element.
        width: usize,
    },
}

/// Elements that are compared before their changes are handed on: few enough to stay in the first cache.
const BLOCK: usize = 2048;
/// Elements of one mask.
const GROUP: usize = 64;
/// Changes of a group that are written without asking how many there are.
const FEW: usize = 4;

/// Appends to `out` the flat index of every element whose stored bits differ, in increasing order, and returns how
/// many there are. `width` is the bytes of one element. On an error nothing is appended.
pub fn changed(old: &[u8], new: &[u8], width: usize, out: &mut Vec<u64>) -> Result<usize, CompareError> {
    check(old, new, width)?;
    let before = out.len();
    scan(old, new, width, |found, _, _| out.extend_from_slice(found));
    Ok(out.len() - before)
}

/// As [`changed`], with `first` added to every index, and the new bits of those elements appended to `values`.
pub fn changed_values(
    old: &[u8],
    new: &[u8],
    width: usize,
    first: u64,
    positions: &mut Vec<u64>,
    values: &mut Vec<u8>,
) -> Result<(), CompareError> {
    check(old, new, width)?;
    scan(old, new, width, |found, base, block| {
        positions.extend(found.iter().map(|position| position + first));
        match width {
            1 => gather::<1>(found, base, block, values),
            2 => gather::<2>(found, base, block, values),
            4 => gather::<4>(found, base, block, values),
            _ => gather::<8>(found, base, block, values),
        }
    });
    Ok(())
}

/// Whether any stored bit differs.
pub fn any_changed(old: &[u8], new: &[u8]) -> Result<bool, CompareError> {
    check(old, new, 1)?;
    Ok(old != new)
}

fn check(old: &[u8], new: &[u8], width: usize) -> Result<(), CompareError> {
    if !matches!(width, 1 | 2 | 4 | 8) {
        return Err(CompareError::Width { width });
    }
    if old.len() != new.len() {
        return Err(CompareError::Length { old: old.len(), new: new.len() });
    }
    if !old.len().is_multiple_of(width) {
        return Err(CompareError::Partial { len: old.len(), width });
    }
    Ok(())
}

/// The bits of the elements at `found`, which lie in `block`; its first element has index `base`.
fn gather<const W: usize>(found: &[u64], base: u64, block: &[u8], values: &mut Vec<u8>) {
    let elements = block.as_chunks::<W>().0;
    values.reserve(W * found.len());
    found.iter().for_each(|position| values.extend_from_slice(&elements[(position - base) as usize]));
}

/// Hands on, block by block, the indices of changed elements, the index of the block's first element, and the block's
/// new bits.
fn scan(old: &[u8], new: &[u8], width: usize, take: impl FnMut(&[u64], u64, &[u8])) {
    lanes::fastest(
        #[inline(always)]
        move || match width {
            1 => scan_blocks::<1, GROUP>(old, new, take),
            2 => scan_blocks::<2, { 2 * GROUP }>(old, new, take),
            4 => scan_blocks::<4, { 4 * GROUP }>(old, new, take),
            _ => scan_blocks::<8, { 8 * GROUP }>(old, new, take),
        },
    );
}

/// As [`scan`] for elements of `W` bytes, `G` bytes a group.
///
/// A branch for each changed element costs more than all else when changes are rare and scattered: the processor guesses
/// wrong each time. So groups are compared without any, into masks, and a few indices of each mask are written whether
/// they are there or not; only groups with more take a branch.
#[inline(always)]
fn scan_blocks<const W: usize, const G: usize>(old: &[u8], new: &[u8], mut take: impl FnMut(&[u64], u64, &[u8])) {
    let mut found = [0u64; BLOCK + FEW];
    let mut base = 0;
    for (old, new) in old.chunks(BLOCK * W).zip(new.chunks(BLOCK * W)) {
        let mut count = 0;
        let mut at = base;
        let (old_groups, old_rest) = old.as_chunks::<G>();
        let (new_groups, new_rest) = new.as_chunks::<G>();
        for (old, new) in old_groups.iter().zip(new_groups) {
            write_indices(differences::<W, G>(old, new), at, &mut found, &mut count);
            at += GROUP as u64;
        }
        let rest = old_rest.as_chunks::<W>().0.iter().zip(new_rest.as_chunks::<W>().0);
        let mask = rest.enumerate().fold(0, |mask, (index, (old, new))| mask | (u64::from(old != new) << index));
        write_indices(mask, at, &mut found, &mut count);
        if count > 0 {
            take(&found[..count], base, new);
        }
        base += (new.len() / W) as u64;
    }
}

/// Writes the indices of a mask's set bits behind the `count` that are there.
#[inline(always)]
fn write_indices(mut mask: u64, base: u64, found: &mut [u64; BLOCK + FEW], count: &mut usize) {
    let total = mask.count_ones() as usize;
    let mut written = *count;
    for slot in &mut found[written..written + FEW] {
        // Past the last set bit this writes an index that the next group overwrites.
        *slot = base + u64::from(mask.trailing_zeros());
        mask &= mask.wrapping_sub(1);
    }
    *count += total;
    written += FEW;
    while mask != 0 {
        found[written] = base + u64::from(mask.trailing_zeros());
        mask &= mask - 1;
        written += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_bits_count_and_not_values() {
        let old: Vec<u8> = [0.0f32, f32::NAN, 1.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let new = [-0.0f32, f32::from_bits(f32::NAN.to_bits() ^ 1), 1.0];
        let new: Vec<u8> = new.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut out = vec![7];
        assert_eq!(changed(&old, &new, 4, &mut out), Ok(2));
        assert_eq!(out, [7, 0, 1]);
        assert_eq!(any_changed(&old, &new), Ok(true));
        assert_eq!(any_changed(&old, &old), Ok(false));
    }

    #[test]
    fn every_bit_of_every_width_counts() {
        for width in [1, 2, 4, 8] {
            // Two full blocks and a rest, so that a bit of each kind of place is flipped.
            let old: Vec<u8> = (0..2 * BLOCK + 3 * width).map(|byte| byte as u8).collect();
            for bit in 0..8 * old.len() {
                let mut new = old.clone();
                new[bit / 8] ^= 1 << (bit % 8);
                let mut out = Vec::new();
                assert_eq!(changed(&old, &new, width, &mut out), Ok(1));
                assert_eq!(out, [(bit / 8 / width) as u64], "width {width} bit {bit}");
                assert_eq!(any_changed(&old, &new), Ok(true));
            }
        }
    }

    #[test]
    fn nothing_to_compare() {
        let mut out = Vec::new();
        assert_eq!(changed(&[], &[], 8, &mut out), Ok(0));
        assert_eq!(any_changed(&[], &[]), Ok(false));
    }

    #[test]
    fn what_cannot_be_compared_is_an_error() {
        let mut out = Vec::new();
        let length = changed(&[0; 4], &[0; 6], 2, &mut out);
        assert_eq!(length, Err(CompareError::Length { old: 4, new: 6 }));
        assert_eq!(any_changed(&[0], &[]), Err(CompareError::Length { old: 1, new: 0 }));
        for width in [0, 3, 5, 16] {
            assert_eq!(changed(&[0; 48], &[1; 48], width, &mut out), Err(CompareError::Width { width }));
        }
        let partial = changed(&[0; 6], &[1; 6], 4, &mut out);
        assert_eq!(partial, Err(CompareError::Partial { len: 6, width: 4 }));
        assert!(out.is_empty());
    }

    proptest::proptest! {
        #[test]
        fn agrees_with_looking_at_each_element(
            width in proptest::sample::select(vec![1usize, 2, 4, 8]),
            elements in 0usize..200,
            density in 0u64..=100,
            seed: u64,
        ) {
            let mut state = seed;
            let mut random = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                state >> 33
            };
            let old: Vec<u8> = (0..elements * width).map(|_| random() as u8).collect();
            let mut new = old.clone();
            for byte in &mut new {
                if random() % 100 < density {
                    *byte = random() as u8;
                }
            }
            let expected: Vec<u64> = (0..elements)
                .filter(|index| (0..width).any(|byte| old[index * width + byte] != new[index * width + byte]))
                .map(|index| index as u64)
                .collect();
            let mut out = Vec::new();
            proptest::prop_assert_eq!(changed(&old, &new, width, &mut out), Ok(expected.len()));
            proptest::prop_assert_eq!(any_changed(&old, &new), Ok(!expected.is_empty()));
            proptest::prop_assert_eq!(out, expected);
        }
    }
}
