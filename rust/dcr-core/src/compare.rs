//! Comparison of stored bits: +0 and -0 differ, and so do NaNs with different payloads.

use thiserror::Error;

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

/// Blocks of this many bytes are compared at once and skipped when equal.
const BLOCK: usize = 64;
/// Bytes that are looked at together inside a block that differs.
const WORD: usize = 8;

/// Appends to `out` the flat index of every element whose stored bits differ, in increasing order, and returns how
/// many there are. `width` is the bytes of one element. On an error nothing is appended.
pub fn changed(old: &[u8], new: &[u8], width: usize, out: &mut Vec<u64>) -> Result<usize, CompareError> {
    check(old, new, width)?;
    let before = out.len();
    match width {
        1 => scan::<1>(old, new, out),
        2 => scan::<2>(old, new, out),
        4 => scan::<4>(old, new, out),
        _ => scan::<8>(old, new, out),
    }
    Ok(out.len() - before)
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

fn scan<const W: usize>(old: &[u8], new: &[u8], out: &mut Vec<u64>) {
    let (old_blocks, old_rest) = old.as_chunks::<BLOCK>();
    let (new_blocks, new_rest) = new.as_chunks::<BLOCK>();
    let mut base = 0;
    for (old, new) in old_blocks.iter().zip(new_blocks) {
        if old != new {
            let words = old.as_chunks::<WORD>().0.iter().zip(new.as_chunks::<WORD>().0);
            for (index, (old, new)) in words.enumerate() {
                let difference = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
                push_lanes::<W>(difference, base + (index * (WORD / W)) as u64, out);
            }
        }
        base += (BLOCK / W) as u64;
    }
    let rest = old_rest.as_chunks::<W>().0.iter().zip(new_rest.as_chunks::<W>().0);
    for (index, (old, new)) in rest.enumerate() {
        if old != new {
            out.push(base + index as u64);
        }
    }
}

/// Appends the index of every element of a word that is not zero; element 0 is in the lowest bytes.
fn push_lanes<const W: usize>(mut word: u64, base: u64, out: &mut Vec<u64>) {
    let bits = 8 * W as u32;
    let ones = u64::MAX >> (64 - bits);
    while word != 0 {
        let lane = word.trailing_zeros() / bits;
        out.push(base + u64::from(lane));
        word &= !(ones << (lane * bits));
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
