//! What a comparison found: the changed elements of one shard with their new values.

use std::ops::Range;

use crate::compare::{self, CompareError};
use crate::payload::{Encoding, Item, Positions};
use crate::projection::Piece;

/// The changed elements of a shard, or of a stretch of it, in increasing order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// Flat indices in the shard.
    pub positions: Positions,
    /// The new stored bits of those elements, one after the other.
    pub values: Vec<u8>,
}

impl Changes {
    /// Compares the elements of `range`; `old` and `new` are the whole shard. Stretches of one shard can be compared side
    /// by side and [joined](Changes::join).
    pub fn find(old: &[u8], new: &[u8], width: usize, range: Range<usize>) -> Result<Changes, CompareError> {
        let bytes = range.start * width..range.end * width;
        let (Some(old), Some(new)) = (old.get(bytes.clone()), new.get(bytes)) else {
            return Err(CompareError::Length { old: old.len(), new: new.len() });
        };
        let (mut positions, mut values) = (Vec::new(), Vec::new());
        compare::changed_values(old, new, width, range.start as u64, &mut positions, &mut values)?;
        Ok(Changes { positions: Positions::from_sorted(positions), values })
    }

    /// Changes of neighbouring stretches, in order, as one.
    pub fn join(mut parts: Vec<Changes>) -> Changes {
        if parts.len() == 1
            && let Some(only) = parts.pop()
        {
            return only;
        }
        let mut positions = Vec::with_capacity(parts.iter().map(|part| part.positions.count() as usize).sum());
        let mut values = Vec::with_capacity(parts.iter().map(|part| part.values.len()).sum());
        for part in parts {
            positions.extend(part.positions.iter());
            values.extend_from_slice(&part.values);
        }
        Changes { positions: Positions::from_sorted(positions), values }
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Bytes of host memory that the changes take.
    pub fn bytes(&self) -> usize {
        let positions = match &self.positions {
            Positions::Run { .. } => 0,
            Positions::Scattered(positions) => 8 * positions.len(),
        };
        positions + self.values.len()
    }

    /// Writes the new values into the shard's old bits. Values are absolute, so this can be repeated.
    pub fn write_to(&self, bits: &mut [u8], width: usize) {
        match &self.positions {
            Positions::Run { start, .. } => {
                let start = *start as usize * width;
                bits[start..start + self.values.len()].copy_from_slice(&self.values);
            }
            Positions::Scattered(positions) => match width {
                1 => scatter::<1>(bits, positions, &self.values),
                2 => scatter::<2>(bits, positions, &self.values),
                4 => scatter::<4>(bits, positions, &self.values),
                _ => scatter::<8>(bits, positions, &self.values),
            },
        }
    }

    /// The changes that lie in one block of the shard, as an item of the block's canonical tensor; None without any.
    ///
    /// `old` is the whole shard before the change, which XOR masks are made with.
    pub fn item(&self, piece: &Piece, old: &[u8], encoding: Encoding) -> Option<Item> {
        let width = piece.tensor().dtype.width();
        let local = piece.local();
        let (positions, within) = match &self.positions {
            Positions::Run { start, count } => {
                let (first, end) = (local.start.max(*start), local.end.min(start + count));
                let positions: Vec<u64> = (first..end).collect();
                (positions, first.saturating_sub(*start) as usize)
            }
            Positions::Scattered(all) => {
                let first = all.partition_point(|position| *position < local.start);
                let end = all.partition_point(|position| *position < local.end);
                (all[first..end].to_vec(), first)
            }
        };
        if positions.is_empty() {
            return None;
        }
        let mut values = self.values[within * width..(within + positions.len()) * width].to_vec();
        if encoding == Encoding::Xor {
            match width {
                1 => xor::<1>(&mut values, old, &positions),
                2 => xor::<2>(&mut values, old, &positions),
                4 => xor::<4>(&mut values, old, &positions),
                _ => xor::<8>(&mut values, old, &positions),
            }
        }
        let positions = if piece.is_whole() && local.start == 0 { positions } else { piece.project(&positions) };
        let positions = Positions::from_sorted(positions);
        Some(Item { meta: piece.tensor().clone(), encoding, positions, values })
    }
}

fn xor<const W: usize>(values: &mut [u8], old: &[u8], positions: &[u64]) {
    let elements = old.as_chunks::<W>().0;
    for (value, position) in values.as_chunks_mut::<W>().0.iter_mut().zip(positions) {
        value.iter_mut().zip(&elements[*position as usize]).for_each(|(value, old)| *value ^= old);
    }
}

fn scatter<const W: usize>(bits: &mut [u8], positions: &[u64], values: &[u8]) {
    let elements = bits.as_chunks_mut::<W>().0;
    for (position, value) in positions.iter().zip(values.as_chunks::<W>().0) {
        elements[*position as usize] = *value;
    }
}
