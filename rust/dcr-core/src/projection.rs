//! Index maps of affine conversion tasks: from a shard's flat indices to canonical coordinates (section 4.2,
//! appendix A.1).
//!
//! Every mapping class that is projected directly places *blocks*: a shard, or one half of a gate/up shard, is a
//! rectangle of one canonical tensor, stored contiguously. So one geometry serves Direct, Replicated,
//! ColumnParallel, RowParallel and GatedMLP mappings, and sharded tensors of other trainers as well.

use std::ops::Range;

use thiserror::Error;

use crate::tensor::{TensorError, TensorMeta};

/// Why an index map cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProjectionError {
    /// A canonical tensor's description is wrong in itself.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The block is not inside its canonical tensor.
    #[error("a block of {extent:?} at {offset:?} is not inside tensor {name:?} of shape {shape:?}")]
    Outside {
        /// The canonical tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// First index of the block in each dimension.
        offset: Vec<u64>,
        /// Sizes of the block.
        extent: Vec<u64>,
    },
    /// The axis to split does not exist.
    #[error("tensor {name:?}: a shard of shape {shape:?} has no dimension {axis} to be split along")]
    Axis {
        /// The canonical tensor.
        name: String,
        /// The shard's shape.
        shape: Vec<u64>,
        /// The axis.
        axis: usize,
    },
    /// The part does not exist.
    #[error("tensor {name:?}: there is no part {part} of {parts}")]
    Part {
        /// The canonical tensor.
        name: String,
        /// Number of the part.
        part: u64,
        /// Number of parts.
        parts: u64,
    },
    /// A gate/up shard has an odd number of rows.
    #[error("tensors {gate:?} and {up:?}: a shard of shape {shape:?} cannot be halved into gate and up")]
    Halves {
        /// The gate projection.
        gate: String,
        /// The up projection.
        up: String,
        /// The shard's shape.
        shape: Vec<u64>,
    },
}

/// A block of a canonical tensor that lies contiguously, in row-major order, in a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    tensor: TensorMeta,
    offset: Vec<u64>,
    extent: Vec<u64>,
    /// Flat index in the shard of the block's first element.
    first: u64,
    /// Number of elements.
    count: u64,
    /// Elements that are contiguous in the canonical tensor as well; at least 1.
    run: u64,
    /// Canonical flat index of the block's first element.
    base: u64,
    /// Number of runs and canonical distance between them, for each dimension outside a run; outermost first.
    outer: Vec<(u64, u64)>,
}

impl Piece {
    /// The block of sizes `extent` at `offset` of `tensor`, stored from flat index `first` of a shard on.
    pub fn new(
        tensor: TensorMeta,
        offset: impl Into<Vec<u64>>,
        extent: impl Into<Vec<u64>>,
        first: u64,
    ) -> Result<Piece, ProjectionError> {
        tensor.validate()?;
        let (offset, extent) = (offset.into(), extent.into());
        let rank = tensor.shape.len();
        let fits = |axis: usize| offset[axis].checked_add(extent[axis]).is_some_and(|end| end <= tensor.shape[axis]);
        if offset.len() != rank || extent.len() != rank || !(0..rank).all(fits) {
            let (name, shape) = (tensor.name, tensor.shape);
            return Err(ProjectionError::Outside { name, shape, offset, extent });
        }
        // Dimensions from `split` on make one run: all of them but the first are whole.
        let whole = (0..rank).rev().take_while(|axis| extent[*axis] == tensor.shape[*axis]).count();
        let split = (rank - whole).saturating_sub(1);
        // Strides cannot overflow: the whole tensor is addressable, and an empty one has no elements to address.
        let count = extent.iter().fold(1u64, |product, size| product.saturating_mul(*size));
        let stride =
            |axis: usize| tensor.shape[axis + 1..].iter().fold(1u64, |product, size| product.saturating_mul(*size));
        let base = (0..rank).fold(0u64, |sum, axis| sum.saturating_add(offset[axis].saturating_mul(stride(axis))));
        let run = extent[split.min(rank)..].iter().fold(1u64, |product, size| product.saturating_mul(*size)).max(1);
        let outer = (0..split).map(|axis| (extent[axis], stride(axis))).collect();
        Ok(Piece { tensor, offset, extent, first, count, run, base, outer })
    }

    /// The canonical tensor.
    pub fn tensor(&self) -> &TensorMeta {
        &self.tensor
    }

    /// First index of the block in each dimension of the canonical tensor.
    pub fn offset(&self) -> &[u64] {
        &self.offset
    }

    /// Sizes of the block.
    pub fn extent(&self) -> &[u64] {
        &self.extent
    }

    /// Flat indices in the shard.
    pub fn local(&self) -> Range<u64> {
        self.first..self.first + self.count
    }

    /// Whether the block is the whole canonical tensor.
    pub fn is_whole(&self) -> bool {
        self.extent == self.tensor.shape
    }

    /// The canonical flat index of flat index `local` of the shard; None if that is not in this block.
    pub fn canonical(&self, local: u64) -> Option<u64> {
        let index = self.local().contains(&local).then(|| local - self.first)?;
        Some(self.run_start(index / self.run) + index % self.run)
    }

    /// The canonical flat indices of increasing shard indices, all in this block; they increase too.
    pub fn project(&self, positions: &[u64]) -> Vec<u64> {
        let mut projected = Vec::with_capacity(positions.len());
        // Neighbours are mostly in one run, so a division is made only where the next run begins.
        let (mut begin, mut end, mut shift) = (0, 0, 0u64);
        for position in positions {
            let index = position - self.first;
            if !(begin..end).contains(&index) {
                let number = index / self.run;
                begin = number * self.run;
                end = begin + self.run;
                shift = self.run_start(number).wrapping_sub(begin);
            }
            projected.push(index.wrapping_add(shift));
        }
        projected
    }

    /// The contiguous stretches: first index in the shard, first index in the canonical tensor, number of elements.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let count = if self.count == 0 { 0 } else { self.count / self.run };
        (0..count).map(|number| (self.first + number * self.run, self.run_start(number), self.run))
    }

    fn run_start(&self, mut number: u64) -> u64 {
        let mut start = self.base;
        for (extent, stride) in self.outer.iter().rev() {
            start += number % extent * stride;
            number /= extent;
        }
        start
    }
}

/// The index map π of one conversion task: every element of its shard to one canonical element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projection {
    pieces: Vec<Piece>,
}

impl Projection {
    /// A shard that is a whole canonical tensor: Direct and Replicated mappings.
    pub fn whole(tensor: TensorMeta) -> Result<Projection, ProjectionError> {
        let (offset, extent) = (vec![0; tensor.shape.len()], tensor.shape.clone());
        Projection::block(tensor, offset, extent)
    }

    /// A shard that is the block of sizes `extent` at `offset` of a canonical tensor.
    pub fn block(
        tensor: TensorMeta,
        offset: impl Into<Vec<u64>>,
        extent: impl Into<Vec<u64>>,
    ) -> Result<Projection, ProjectionError> {
        Ok(Projection { pieces: vec![Piece::new(tensor, offset, extent, 0)?] })
    }

    /// A shard, described by `shard` (its shape, the canonical name and dtype), that is part number `part` of `parts`
    /// equal ones along `axis`: ColumnParallel mappings (axis 0) and RowParallel ones (axis 1).
    pub fn split(shard: TensorMeta, axis: usize, part: u64, parts: u64) -> Result<Projection, ProjectionError> {
        Ok(Projection { pieces: vec![split_piece(shard, axis, part, parts, 0)?] })
    }

    /// A shard whose first half of rows is a part of one canonical tensor, `shard.name`, and whose second half is the
    /// same part of another, `up`: GatedMLP mappings.
    pub fn gated(shard: TensorMeta, up: &str, part: u64, parts: u64) -> Result<Projection, ProjectionError> {
        let rows = shard.shape.first().copied().unwrap_or(1);
        if !rows.is_multiple_of(2) {
            return Err(ProjectionError::Halves { gate: shard.name, up: up.to_owned(), shape: shard.shape });
        }
        let half = |name: &str| {
            let mut shape = shard.shape.clone();
            shape[0] = rows / 2;
            TensorMeta::new(name, shape, shard.dtype)
        };
        let gate = split_piece(half(&shard.name), 0, part, parts, 0)?;
        let up = split_piece(half(up), 0, part, parts, gate.count)?;
        Ok(Projection { pieces: vec![gate, up] })
    }

    /// The blocks, in the order in which the shard holds them.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Number of elements of the shard.
    pub fn elements(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.count).sum()
    }

    /// Where the element with flat index `local` of the shard goes: canonical tensor and flat index in it.
    pub fn canonical(&self, local: u64) -> Option<(&TensorMeta, u64)> {
        let mut places = self.pieces.iter().filter_map(|piece| Some((&piece.tensor, piece.canonical(local)?)));
        places.next()
    }
}

fn split_piece(shard: TensorMeta, axis: usize, part: u64, parts: u64, first: u64) -> Result<Piece, ProjectionError> {
    if part >= parts {
        return Err(ProjectionError::Part { name: shard.name, part, parts });
    }
    let TensorMeta { name, shape: extent, dtype } = shard;
    let Some(size) = extent.get(axis).copied() else {
        return Err(ProjectionError::Axis { name, shape: extent, axis });
    };
    let (mut shape, mut offset) = (extent.clone(), vec![0; extent.len()]);
    shape[axis] = size.saturating_mul(parts);
    offset[axis] = size.saturating_mul(part);
    Piece::new(TensorMeta { name, shape, dtype }, offset, extent, first)
}

/// The first element of `piece` whose bits in `shard` differ from those in `canonical`, as a canonical flat index;
/// None where all agree. `width` is the bytes of an element; both slices must be as long as their tensors.
pub fn first_difference(piece: &Piece, shard: &[u8], canonical: &[u8], width: usize) -> Option<u64> {
    let bytes = |first: u64, count: u64| first as usize * width..(first + count) as usize * width;
    piece.runs().find_map(|(from, to, count)| {
        let (here, there) = (&shard[bytes(from, count)], &canonical[bytes(to, count)]);
        if here == there {
            return None;
        }
        let same = here.chunks(width).zip(there.chunks(width)).take_while(|(here, there)| here == there).count();
        Some(to + same as u64)
    })
}
