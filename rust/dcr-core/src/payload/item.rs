//! What a payload holds.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::ItemError;
use crate::tensor::TensorMeta;

/// How an item's values act on resident elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// Masks, XORed into the resident bits. Applying one twice undoes it.
    Xor,
    /// The new values of the changed elements.
    Overwrite,
    /// The new values of every element, for a dense refit.
    Dense,
}

impl Encoding {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::Xor => "xor",
            Encoding::Overwrite => "overwrite",
            Encoding::Dense => "dense",
        }
    }

    /// The code in a payload.
    pub const fn code(self) -> u8 {
        match self {
            Encoding::Xor => 1,
            Encoding::Overwrite => 2,
            Encoding::Dense => 3,
        }
    }

    /// The encoding with this payload code.
    pub const fn from_code(code: u8) -> Option<Encoding> {
        match code {
            1 => Some(Encoding::Xor),
            2 => Some(Encoding::Overwrite),
            3 => Some(Encoding::Dense),
            _ => None,
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Identifies a payload: the same identifiers with other bytes are an error that fails the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PayloadId {
    /// The attempt.
    pub attempt: [u8; 16],
    /// The owner that made the payload.
    pub owner: u32,
    /// The payload's number within owner and attempt.
    pub sequence: u32,
}

impl fmt::Display for PayloadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.attempt {
            write!(f, "{byte:02x}")?;
        }
        write!(f, "/{}/{}", self.owner, self.sequence)
    }
}

/// Which elements of a tensor an item names, as flat indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Positions {
    /// `count` elements from `start` on.
    Run {
        /// First flat index; 0 if `count` is 0.
        start: u64,
        /// Number of elements.
        count: u64,
    },
    /// Strictly increasing flat indices.
    Scattered(Vec<u64>),
}

impl Positions {
    /// The shortest form of strictly increasing `positions`: a run where they are contiguous.
    pub fn from_sorted(positions: Vec<u64>) -> Positions {
        match as_run(&positions) {
            Some((start, count)) => Positions::Run { start, count },
            None => Positions::Scattered(positions),
        }
    }

    /// Number of elements.
    pub fn count(&self) -> u64 {
        match self {
            Positions::Run { count, .. } => *count,
            Positions::Scattered(positions) => positions.len() as u64,
        }
    }

    /// Whether no element is named.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The flat indices in increasing order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let (run, scattered) = match self {
            Positions::Run { start, count } => (*start..start.saturating_add(*count), [].as_slice()),
            Positions::Scattered(positions) => (0..0, positions.as_slice()),
        };
        run.chain(scattered.iter().copied())
    }

    /// Start and count if the elements are contiguous; `(0, 0)` if there are none.
    pub(crate) fn contiguous(&self) -> Option<(u64, u64)> {
        match self {
            Positions::Run { count: 0, .. } => Some((0, 0)),
            Positions::Run { start, count } => Some((*start, *count)),
            Positions::Scattered(positions) => as_run(positions),
        }
    }
}

fn as_run(positions: &[u64]) -> Option<(u64, u64)> {
    let (Some(first), Some(last)) = (positions.first(), positions.last()) else {
        return Some((0, 0));
    };
    let count = positions.len() as u64;
    // Strictly increasing, so first and last settle it.
    (last.checked_sub(*first) == Some(count - 1)).then_some((*first, count))
}

/// One owner's entries for one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The canonical tensor.
    pub meta: TensorMeta,
    /// How the values act.
    pub encoding: Encoding,
    /// The elements named.
    pub positions: Positions,
    /// One value or mask a position, in order, little-endian: `count * width` bytes.
    pub values: Vec<u8>,
}

impl Item {
    /// Checks everything that can be wrong with an item on its own.
    pub fn validate(&self) -> Result<(), ItemError> {
        self.meta.validate()?;
        let numel = self.meta.numel()?;
        let name = || self.meta.name.clone();
        match &self.positions {
            Positions::Run { start, count } => {
                if start.checked_add(*count).is_none_or(|end| end > numel) {
                    return Err(ItemError::RunOutside { name: name(), start: *start, count: *count, numel });
                }
            }
            Positions::Scattered(positions) => {
                let pairs = positions.iter().zip(positions.iter().skip(1));
                if let Some((previous, position)) = pairs.into_iter().find(|(a, b)| a >= b) {
                    let (previous, position) = (*previous, *position);
                    return Err(ItemError::NotIncreasing { name: name(), previous, position });
                }
                if let Some(position) = positions.last().filter(|last| **last >= numel) {
                    return Err(ItemError::Outside { name: name(), position: *position, numel });
                }
            }
        }
        let count = self.positions.count();
        // Every position is below numel here, and numel * width fits.
        let expected = count * self.meta.dtype.width() as u64;
        if self.values.len() as u64 != expected {
            let len = self.values.len() as u64;
            return Err(ItemError::ValueBytes { name: name(), len, expected, count });
        }
        if self.encoding == Encoding::Dense && count != numel {
            return Err(ItemError::DenseIncomplete { name: name(), count, numel });
        }
        Ok(())
    }
}

/// A decoded payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Its identifiers.
    pub id: PayloadId,
    /// Its items, in payload order; no tensor occurs twice.
    pub items: Vec<Item>,
}
