//! What one intercepted copy does to one element, and to blocks of contiguous elements.

/// Source bytes that are looked at together.
pub(super) const BLOCK: usize = 64;

/// `S` and `D` are the widths of source and destination elements in bytes.
pub(super) trait Op<const S: usize, const D: usize> {
    /// Applies one source element and returns whether the destination was written.
    fn element(&self, dst: &mut [u8; D], src: [u8; S]) -> bool;

    /// What a source block without active elements holds; `None` if every element is active.
    fn idle(&self) -> Option<&[u8; BLOCK]>;

    /// Applies a block of contiguous elements, with an active one among them, and returns how many were written.
    fn block(&self, dst: &mut [u8], src: &[u8; BLOCK]) -> u64 {
        self.elements(dst, src)
    }

    /// Applies contiguous elements one by one.
    fn elements(&self, dst: &mut [u8], src: &[u8]) -> u64 {
        let pairs = dst.as_chunks_mut::<D>().0.iter_mut().zip(src.as_chunks::<S>().0);
        pairs.map(|(dst, src)| u64::from(self.element(dst, *src))).sum()
    }

    /// Applies contiguous elements and returns how many were written. Idle blocks of the destination are not touched.
    fn run(&self, dst: &mut [u8], src: &[u8]) -> u64 {
        let (blocks, rest) = src.as_chunks::<BLOCK>();
        let step = BLOCK / S * D;
        let mut written = 0;
        for (dst, src) in dst.chunks_exact_mut(step).zip(blocks) {
            if self.idle() != Some(src) {
                written += self.block(dst, src);
            }
        }
        let rest_dst = dst.get_mut(blocks.len() * step..).unwrap_or_default();
        written + self.elements(rest_dst, rest)
    }
}

/// XOR in place; zero masks are inactive.
pub(super) struct Xor;

impl<const W: usize> Op<W, W> for Xor {
    fn element(&self, dst: &mut [u8; W], src: [u8; W]) -> bool {
        if src == [0; W] {
            return false;
        }
        dst.iter_mut().zip(src).for_each(|(dst, src)| *dst ^= src);
        true
    }

    fn idle(&self) -> Option<&[u8; BLOCK]> {
        Some(&[0; BLOCK])
    }

    fn block(&self, dst: &mut [u8], src: &[u8; BLOCK]) -> u64 {
        dst.iter_mut().zip(src).for_each(|(dst, src)| *dst ^= src);
        match W {
            1 => count(src, |&[a]: &[u8; 1]| a != 0),
            2 => count(src, |src| u16::from_le_bytes(*src) != 0),
            4 => count(src, |src| u32::from_le_bytes(*src) != 0),
            _ => count(src, |src| u64::from_le_bytes(*src) != 0),
        }
    }
}

fn count<const W: usize>(src: &[u8; BLOCK], active: impl Fn(&[u8; W]) -> bool) -> u64 {
    // At most 64, so a byte is enough and keeps the vector lanes narrow.
    u64::from(src.as_chunks::<W>().0.iter().map(|src| u8::from(active(src))).sum::<u8>())
}

/// Writes elements that differ from the placeholder.
pub(super) struct Overwrite<const S: usize, F> {
    block: [u8; BLOCK],
    placeholder: [u8; S],
    convert: F,
}

impl<const S: usize, F> Overwrite<S, F> {
    pub fn new(placeholder: [u8; S], convert: F) -> Self {
        let mut block = [0; BLOCK];
        block.as_chunks_mut::<S>().0.fill(placeholder);
        Overwrite { block, placeholder, convert }
    }
}

impl<const S: usize, const D: usize, F: Fn([u8; S]) -> [u8; D]> Op<S, D> for Overwrite<S, F> {
    fn element(&self, dst: &mut [u8; D], src: [u8; S]) -> bool {
        if src == self.placeholder {
            return false;
        }
        *dst = (self.convert)(src);
        true
    }

    fn idle(&self) -> Option<&[u8; BLOCK]> {
        Some(&self.block)
    }

    fn block(&self, dst: &mut [u8], src: &[u8; BLOCK]) -> u64 {
        let mut written = 0u8;
        // Without a branch: keep what is there where the source is the placeholder.
        for (dst, src) in dst.as_chunks_mut::<D>().0.iter_mut().zip(src.as_chunks::<S>().0) {
            let active = *src != self.placeholder;
            written += u8::from(active);
            *dst = if active { (self.convert)(*src) } else { *dst };
        }
        u64::from(written)
    }
}

/// Writes every element.
pub(super) struct Dense<F> {
    pub convert: F,
}

impl<const S: usize, const D: usize, F: Fn([u8; S]) -> [u8; D]> Op<S, D> for Dense<F> {
    fn element(&self, dst: &mut [u8; D], src: [u8; S]) -> bool {
        *dst = (self.convert)(src);
        true
    }

    fn idle(&self) -> Option<&[u8; BLOCK]> {
        None
    }
}

/// Keeps the bits.
pub(super) fn same<const W: usize>(bits: [u8; W]) -> [u8; W] {
    bits
}

/// bfloat16 to single precision: exact for every pattern, NaNs included.
pub(super) fn bf16_to_f32(bits: [u8; 2]) -> [u8; 4] {
    [0, 0, bits[0], bits[1]]
}

/// Half to single precision: exact, and NaN payloads are kept. Signalling NaNs are refused before: implementations
/// disagree on them.
pub(super) fn f16_to_f32(bits: [u8; 2]) -> [u8; 4] {
    half::f16::from_le_bytes(bits).to_f32().to_le_bytes()
}

/// Whether half-precision bits are a signalling NaN.
pub(super) fn is_signalling_f16(bits: u16) -> bool {
    bits & 0x7e00 == 0x7c00 && bits & 0x01ff != 0
}
