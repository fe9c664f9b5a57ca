//! What one intercepted copy does to one element, and to a contiguous run of them.

/// `S` and `D` are the widths of source and destination elements in bytes.
pub(super) trait Op<const S: usize, const D: usize> {
    /// Applies one source element and returns whether the destination was written.
    fn element(&self, dst: &mut [u8; D], src: [u8; S]) -> bool;

    /// Whether a block of at most 64 source bytes has no active element.
    fn is_idle(&self, src: &[u8]) -> bool;

    /// Applies contiguous elements and returns how many were written.
    fn run(&self, dst: &mut [u8], src: &[u8]) -> u64 {
        let mut written = 0;
        for (dst, src) in dst.chunks_mut(64 / S * D).zip(src.chunks(64)) {
            if self.is_idle(src) {
                continue;
            }
            for (dst, src) in dst.as_chunks_mut::<D>().0.iter_mut().zip(src.as_chunks::<S>().0) {
                written += u64::from(self.element(dst, *src));
            }
        }
        written
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

    fn is_idle(&self, src: &[u8]) -> bool {
        is_pattern(src, &[0; 64])
    }
}

/// Writes elements that differ from the placeholder.
pub(super) struct Overwrite<const S: usize, F> {
    block: [u8; 64],
    placeholder: [u8; S],
    convert: F,
}

impl<const S: usize, F> Overwrite<S, F> {
    pub fn new(placeholder: [u8; S], convert: F) -> Self {
        let mut block = [0; 64];
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

    fn is_idle(&self, src: &[u8]) -> bool {
        is_pattern(src, &self.block)
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

    fn is_idle(&self, _: &[u8]) -> bool {
        false
    }
}

fn is_pattern(src: &[u8], block: &[u8; 64]) -> bool {
    match src.first_chunk::<64>() {
        Some(src) => src == block,
        None => block.starts_with(src),
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
