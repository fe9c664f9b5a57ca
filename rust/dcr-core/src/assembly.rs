//! Residual assembly: one canonical tensor from the parts that the owners converted (section 4.3, appendix A.1).

use std::collections::BTreeMap;

use thiserror::Error;

use crate::projection::Piece;
use crate::tensor::{TensorError, TensorMeta};

/// Why parts do not make up a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AssemblyError {
    /// The tensor's description is wrong in itself.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A part is of another tensor, or of another shape or dtype.
    #[error("training rank {rank} converted a part of {found:?}, but {wanted:?} is being assembled")]
    Other {
        /// The rank.
        rank: u32,
        /// What its part belongs to.
        found: Box<TensorMeta>,
        /// What is assembled.
        wanted: Box<TensorMeta>,
    },
    /// A part's bytes do not match its extent.
    #[error("tensor {name:?}: training rank {rank} gave {found} bytes for a part that has {expected}")]
    Bytes {
        /// The tensor.
        name: String,
        /// The rank.
        rank: u32,
        /// Bytes given.
        found: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// Two parts give one element different bits.
    #[error("tensor {name:?}: training ranks {first} and {second} disagree on the bits of element {element}")]
    Disagree {
        /// The tensor.
        name: String,
        /// The rank whose part came first.
        first: u32,
        /// The rank whose part came second.
        second: u32,
        /// Flat index of the first element on which they disagree.
        element: u64,
    },
    /// Elements that no part covers.
    #[error(
        "tensor {name:?}: {missing} of {elements} elements are in no converted part, the first is element {element}; \
         parts came from training ranks {ranks:?}"
    )]
    Uncovered {
        /// The tensor.
        name: String,
        /// Number of elements that are missing.
        missing: u64,
        /// Number of elements of the tensor.
        elements: u64,
        /// Flat index of the first one.
        element: u64,
        /// The ranks whose parts there are.
        ranks: Vec<u32>,
    },
}

/// A canonical tensor under assembly.
pub struct Assembly {
    meta: TensorMeta,
    bits: Vec<u8>,
    parts: Vec<(u32, Piece)>,
    /// Disjoint stretches of covered elements: the end of each by its first element.
    covered: BTreeMap<u64, u64>,
}

impl Assembly {
    /// A tensor of which nothing is there yet.
    pub fn new(meta: TensorMeta) -> Result<Assembly, AssemblyError> {
        meta.validate()?;
        let bits = vec![0; meta.nbytes()?];
        Ok(Assembly { meta, bits, parts: Vec::new(), covered: BTreeMap::new() })
    }

    /// Adds the part that a rank converted: `bytes` holds the block contiguously. What it shares with earlier parts must
    /// have the same bits.
    pub fn add(&mut self, rank: u32, part: Piece, bytes: &[u8]) -> Result<(), AssemblyError> {
        if *part.tensor() != self.meta {
            let (found, wanted) = (Box::new(part.tensor().clone()), Box::new(self.meta.clone()));
            return Err(AssemblyError::Other { rank, found, wanted });
        }
        let width = self.meta.dtype.width();
        let expected = (part.local().end - part.local().start) as usize * width;
        if bytes.len() != expected {
            return Err(AssemblyError::Bytes { name: self.meta.name.clone(), rank, found: bytes.len(), expected });
        }
        for (from, to, count) in part.runs() {
            let from = (from - part.local().start) as usize * width;
            self.write(rank, to, &bytes[from..from + count as usize * width])?;
        }
        self.parts.push((rank, part));
        Ok(())
    }

    /// The tensor's bytes, once every element is covered.
    pub fn finish(self) -> Result<Vec<u8>, AssemblyError> {
        let elements = self.meta.numel()?;
        let covered: u64 = self.covered.iter().map(|(first, end)| end - first).sum();
        if covered == elements {
            return Ok(self.bits);
        }
        let element = self.covered.get(&0).copied().unwrap_or(0);
        let mut ranks: Vec<u32> = self.parts.iter().map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let (name, missing) = (self.meta.name, elements - covered);
        Err(AssemblyError::Uncovered { name, missing, elements, element, ranks })
    }

    /// Writes elements from `first` on, comparing those that are there already.
    fn write(&mut self, rank: u32, first: u64, bytes: &[u8]) -> Result<(), AssemblyError> {
        let width = self.meta.dtype.width();
        let end = first + (bytes.len() / width) as u64;
        let resident = &mut self.bits[first as usize * width..end as usize * width];
        // Stretches that touch or overlap this one: those that begin at or before its end, back to the first that
        // ends before it begins.
        let touching = self.covered.range(..=end).rev().take_while(|(_, stop)| **stop >= first);
        let touching: Vec<(u64, u64)> = touching.map(|(start, stop)| (*start, *stop)).collect();
        let mut joined = (first, end);
        for (start, stop) in touching {
            let overlap = (start.max(first) - first) as usize * width..(stop.min(end) - first) as usize * width;
            let pairs = bytes[overlap.clone()].chunks(width).zip(resident[overlap.clone()].chunks(width));
            if let Some(index) = pairs.into_iter().position(|(new, old)| new != old) {
                let element = first + (overlap.start / width + index) as u64;
                let name = self.meta.name.clone();
                let holds = |(_, part): &&(u32, Piece)| part.runs().any(|(_, to, n)| (to..to + n).contains(&element));
                let other = self.parts.iter().find(holds).map_or(rank, |(rank, _)| *rank);
                return Err(AssemblyError::Disagree { name, first: other, second: rank, element });
            }
            joined = (joined.0.min(start), joined.1.max(stop));
            self.covered.remove(&start);
        }
        resident.copy_from_slice(bytes);
        self.covered.insert(joined.0, joined.1);
        Ok(())
    }
}
