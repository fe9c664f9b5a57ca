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
    let mut base = 0;
    for (old, new) in old.chunks(BLOCK).zip(new.chunks(BLOCK)) {
        if old != new {
            let elements = old.as_chunks::<W>().0.iter().zip(new.as_chunks::<W>().0);
            for (index, (old, new)) in elements.enumerate() {
                if old != new {
                    out.push(base + index as u64);
                }
            }
        }
        base += (BLOCK / W) as u64;
    }
}
