//! What comparison asks of the processor: 64 elements at once without a branch, and its best instructions.
#![allow(unsafe_code)]

/// A bit for each of 64 elements of `W` bytes, set where they differ; element 0 is the lowest bit. `G` is 64 `W`.
#[inline(always)]
pub fn differences<const W: usize, const G: usize>(old: &[u8; G], new: &[u8; G]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: SSE2 belongs to every x86-64 processor.
        unsafe { sse2::differences::<W, G>(old, new) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        portable::<W, G>(old, new)
    }
}

/// Runs work, compiled for the best instructions that this processor has. The closure must be `#[inline(always)]`.
#[inline(always)]
pub fn fastest(work: impl FnOnce()) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,bmi1,popcnt")]
        fn with_avx2(work: impl FnOnce()) {
            work();
        }
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("bmi1") && has!("popcnt") {
            // SAFETY: the processor has just said that it has these features.
            return unsafe { with_avx2(work) };
        }
    }
    work();
}

/// As [`differences`], element by element.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn portable<const W: usize, const G: usize>(old: &[u8; G], new: &[u8; G]) -> u64 {
    if old == new {
        return 0;
    }
    let elements = old.as_chunks::<W>().0.iter().zip(new.as_chunks::<W>().0);
    elements.enumerate().fold(0, |mask, (index, (old, new))| mask | (u64::from(old != new) << index))
}

#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_cmpeq_epi16, _mm_cmpeq_epi32, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32,
        _mm_set_epi64x,
    };

    /// Vectors of 16 bytes are compared element by element, and equal elements narrowed to one byte each.
    #[target_feature(enable = "sse2")]
    #[inline]
    pub fn differences<const W: usize, const G: usize>(old: &[u8; G], new: &[u8; G]) -> u64 {
        if W == 8 {
            // Elements of 8 bytes are rare: pairs of halves.
            let (old, new) = (old.as_chunks::<256>().0, new.as_chunks::<256>().0);
            let halves = [0, 1].map(|half| halved(differences::<4, 256>(&old[half], &new[half])));
            return halves[0] | halves[1] << 32;
        }
        let (old, new) = (old.as_chunks::<16>().0, new.as_chunks::<16>().0);
        let bytes = |at: usize| _mm_cmpeq_epi8(load(&old[at]), load(&new[at]));
        let shorts = |at: usize| _mm_cmpeq_epi16(load(&old[at]), load(&new[at]));
        let words = |at: usize| _mm_cmpeq_epi32(load(&old[at]), load(&new[at]));
        let mut mask = 0;
        for quarter in 0..4 {
            let equal = match W {
                1 => bytes(quarter),
                2 => _mm_packs_epi16(shorts(2 * quarter), shorts(2 * quarter + 1)),
                _ => {
                    let pair = |at: usize| _mm_packs_epi32(words(at), words(at + 1));
                    _mm_packs_epi16(pair(4 * quarter), pair(4 * quarter + 2))
                }
            };
            mask |= (!_mm_movemask_epi8(equal) as u64 & 0xffff) << (16 * quarter);
        }
        mask
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    fn load(bytes: &[u8; 16]) -> __m128i {
        let [low, high] = [0, 1].map(|half| i64::from_le_bytes(bytes.as_chunks::<8>().0[half]));
        _mm_set_epi64x(high, low)
    }

    /// For each pair of bits whether one of them is set, as 32 bits.
    fn halved(mask: u64) -> u64 {
        (0..32).fold(0, |halves, pair| halves | (u64::from(mask >> (2 * pair) & 0b11 != 0) << pair))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn agree<const W: usize, const G: usize>(flips: &[(prop::sample::Index, u8)]) {
        let old: [u8; G] = std::array::from_fn(|at| at as u8);
        let mut new = old;
        for (at, flip) in flips {
            new[at.index(G)] ^= flip;
        }
        let expected = portable::<W, G>(&old, &new);
        assert_eq!(differences::<W, G>(&old, &new), expected, "{W} bytes: {flips:?}");
    }

    proptest! {
        #[test]
        fn lanes_agree_with_elements(flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..200)) {
            agree::<1, 64>(&flips);
            agree::<2, 128>(&flips);
            agree::<4, 256>(&flips);
            agree::<8, 512>(&flips);
        }
    }
}
