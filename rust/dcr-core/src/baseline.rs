//! The owner's copy of the committed version's bits (the *source baseline*), and the candidates staged over it.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::compare::{self, CompareError};
use crate::dtype::DType;
use crate::payload::{Encoding, Item, Positions};
use crate::tensor::{TensorError, TensorMeta};

/// Why a tensor cannot be tracked or compared.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BaselineError {
    /// The description of the tensor is wrong in itself.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The tensor is already tracked.
    #[error("tensor {name:?} is tracked already; each tensor is tracked once, before the first refit")]
    Tracked {
        /// The tensor.
        name: String,
    },
    /// The tensor is not tracked.
    #[error("tensor {name:?} is not tracked; only tensors given before the first refit can be offered")]
    Unknown {
        /// The tensor.
        name: String,
    },
    /// The tensor's shape is not the tracked one.
    #[error("tensor {name:?} has shape {found:?}, but {tracked:?} is tracked; shapes must not change")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape tracked.
        tracked: Vec<u64>,
        /// The shape offered.
        found: Vec<u64>,
    },
    /// The tensor's dtype is not the tracked one.
    #[error("tensor {name:?} has dtype {found}, but {tracked} is tracked; dtypes must not change")]
    DType {
        /// The tensor.
        name: String,
        /// The dtype tracked.
        tracked: DType,
        /// The dtype offered.
        found: DType,
    },
    /// The bytes given do not match the shape and dtype.
    #[error("tensor {name:?}: {found} bytes were given, but its shape and dtype need {expected}")]
    Bytes {
        /// The tensor.
        name: String,
        /// Bytes given.
        found: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// There is no memory for a copy.
    #[error("no memory for {bytes} bytes of tensor {name:?}")]
    Memory {
        /// The tensor.
        name: String,
        /// Bytes wanted.
        bytes: usize,
    },
    /// The comparison failed.
    #[error("tensor {name:?}: {source}")]
    Compare {
        /// The tensor.
        name: String,
        /// Why.
        source: CompareError,
    },
}

struct Tracked {
    meta: TensorMeta,
    bits: Vec<u8>,
    staged: Option<Staged>,
}

struct Staged {
    positions: Positions,
    values: Vec<u8>,
}

/// Bits of the committed version of every tensor of one owner, in host memory, with one staged candidate a tensor.
#[derive(Default)]
pub struct Baseline {
    tensors: BTreeMap<String, Tracked>,
}

/// A tensor's changes against the baseline: what the next commit will write.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    meta: &'a TensorMeta,
    bits: &'a [u8],
    staged: &'a Staged,
}

impl Baseline {
    /// An empty baseline.
    pub fn new() -> Baseline {
        Baseline::default()
    }

    /// Copies the tensor's bits into the baseline. Each tensor is tracked once.
    pub fn track(&mut self, meta: TensorMeta, bytes: &[u8]) -> Result<(), BaselineError> {
        meta.validate()?;
        check_bytes(&meta, bytes)?;
        if self.tensors.contains_key(&meta.name) {
            return Err(BaselineError::Tracked { name: meta.name });
        }
        let mut bits = Vec::new();
        if bits.try_reserve_exact(bytes.len()).is_err() {
            return Err(BaselineError::Memory { name: meta.name, bytes: bytes.len() });
        }
        bits.extend_from_slice(bytes);
        self.tensors.insert(meta.name.clone(), Tracked { meta, bits, staged: None });
        Ok(())
    }

    /// Compares the tensor's new bits with the baseline and stages the changes, in place of an earlier candidate of
    /// the same tensor. The baseline itself changes only in [`commit`](Baseline::commit).
    pub fn compare(&mut self, meta: &TensorMeta, new: &[u8]) -> Result<Candidate<'_>, BaselineError> {
        let Some(tracked) = self.tensors.get_mut(&meta.name) else {
            return Err(BaselineError::Unknown { name: meta.name.clone() });
        };
        if tracked.meta.shape != meta.shape {
            let (tracked, found) = (tracked.meta.shape.clone(), meta.shape.clone());
            return Err(BaselineError::Shape { name: meta.name.clone(), tracked, found });
        }
        if tracked.meta.dtype != meta.dtype {
            let (tracked, found) = (tracked.meta.dtype, meta.dtype);
            return Err(BaselineError::DType { name: meta.name.clone(), tracked, found });
        }
        check_bytes(meta, new)?;
        let width = meta.dtype.width();
        let mut positions = Vec::new();
        compare::changed(&tracked.bits, new, width, &mut positions)
            .map_err(|source| BaselineError::Compare { name: meta.name.clone(), source })?;
        let positions = Positions::from_sorted(positions);
        let values = gather(new, &positions, width);
        let staged = tracked.staged.insert(Staged { positions, values });
        Ok(Candidate { meta: &tracked.meta, bits: &tracked.bits, staged })
    }

    /// The candidate staged for a tensor, if there is one.
    pub fn candidate(&self, name: &str) -> Option<Candidate<'_>> {
        let tracked = self.tensors.get(name)?;
        let staged = tracked.staged.as_ref()?;
        Some(Candidate { meta: &tracked.meta, bits: &tracked.bits, staged })
    }

    /// Writes every staged candidate into the baseline and forgets it. Values are absolute, so a commit that was
    /// interrupted can be repeated, and one with nothing staged does nothing.
    pub fn commit(&mut self) {
        for tracked in self.tensors.values_mut() {
            if let Some(staged) = &tracked.staged {
                scatter(&mut tracked.bits, &staged.positions, &staged.values, tracked.meta.dtype.width());
            }
            tracked.staged = None;
        }
    }

    /// Forgets every staged candidate.
    pub fn discard(&mut self) {
        for tracked in self.tensors.values_mut() {
            tracked.staged = None;
        }
    }

    /// The descriptions of the tracked tensors, ordered by name.
    pub fn metas(&self) -> impl Iterator<Item = &TensorMeta> {
        self.tensors.values().map(|tracked| &tracked.meta)
    }

    /// The committed bits of a tensor.
    pub fn bits(&self, name: &str) -> Option<&[u8]> {
        self.tensors.get(name).map(|tracked| tracked.bits.as_slice())
    }

    /// Bytes of host memory that hold committed bits.
    pub fn bytes_held(&self) -> usize {
        self.tensors.values().map(|tracked| tracked.bits.len()).sum()
    }

    /// Bytes of host memory that hold staged candidates.
    pub fn bytes_staged(&self) -> usize {
        let staged = self.tensors.values().filter_map(|tracked| tracked.staged.as_ref());
        staged.map(|staged| staged.values.len() + positions_bytes(&staged.positions)).sum()
    }
}

impl Candidate<'_> {
    /// The tensor.
    pub fn meta(&self) -> &TensorMeta {
        self.meta
    }

    /// The elements whose stored bits changed.
    pub fn positions(&self) -> &Positions {
        &self.staged.positions
    }

    /// The new values of those elements, in order.
    pub fn values(&self) -> &[u8] {
        &self.staged.values
    }

    /// Whether nothing changed.
    pub fn is_unchanged(&self) -> bool {
        self.staged.positions.is_empty()
    }

    /// The masks of the changed elements: old bits XOR new bits.
    pub fn xor_values(&self) -> Vec<u8> {
        let mut masks = gather(self.bits, &self.staged.positions, self.meta.dtype.width());
        for (mask, new) in masks.iter_mut().zip(&self.staged.values) {
            *mask ^= new;
        }
        masks
    }

    /// All bytes of the new tensor.
    pub fn dense_values(&self) -> Vec<u8> {
        let mut bits = self.bits.to_vec();
        scatter(&mut bits, &self.staged.positions, &self.staged.values, self.meta.dtype.width());
        bits
    }

    /// The candidate as an item. XOR and overwrite items name the changed elements, dense ones every element.
    pub fn item(&self, encoding: Encoding) -> Item {
        let (positions, values) = match encoding {
            Encoding::Xor => (self.staged.positions.clone(), self.xor_values()),
            Encoding::Overwrite => (self.staged.positions.clone(), self.staged.values.clone()),
            Encoding::Dense => {
                let values = self.dense_values();
                let count = (values.len() / self.meta.dtype.width()) as u64;
                (Positions::Run { start: 0, count }, values)
            }
        };
        Item { meta: self.meta.clone(), encoding, positions, values }
    }
}

fn check_bytes(meta: &TensorMeta, bytes: &[u8]) -> Result<(), BaselineError> {
    let expected = meta.nbytes()?;
    if bytes.len() != expected {
        let (name, found) = (meta.name.clone(), bytes.len());
        return Err(BaselineError::Bytes { name, found, expected });
    }
    Ok(())
}

fn positions_bytes(positions: &Positions) -> usize {
    match positions {
        Positions::Run { .. } => 0,
        Positions::Scattered(positions) => 8 * positions.len(),
    }
}

/// The elements at `positions`, which come from a comparison of `bits` and so lie inside it.
fn gather(bits: &[u8], positions: &Positions, width: usize) -> Vec<u8> {
    match positions {
        Positions::Run { start, count } => {
            let start = *start as usize * width;
            bits[start..start + *count as usize * width].to_vec()
        }
        Positions::Scattered(positions) => match width {
            1 => gather_scattered::<1>(bits, positions),
            2 => gather_scattered::<2>(bits, positions),
            4 => gather_scattered::<4>(bits, positions),
            _ => gather_scattered::<8>(bits, positions),
        },
    }
}

fn gather_scattered<const W: usize>(bits: &[u8], positions: &[u64]) -> Vec<u8> {
    let elements = bits.as_chunks::<W>().0;
    positions.iter().flat_map(|position| elements[*position as usize]).collect()
}

fn scatter(bits: &mut [u8], positions: &Positions, values: &[u8], width: usize) {
    match positions {
        Positions::Run { start, .. } => {
            let start = *start as usize * width;
            bits[start..start + values.len()].copy_from_slice(values);
        }
        Positions::Scattered(positions) => match width {
            1 => scatter_scattered::<1>(bits, positions, values),
            2 => scatter_scattered::<2>(bits, positions, values),
            4 => scatter_scattered::<4>(bits, positions, values),
            _ => scatter_scattered::<8>(bits, positions, values),
        },
    }
}

fn scatter_scattered<const W: usize>(bits: &mut [u8], positions: &[u64], values: &[u8]) {
    let elements = bits.as_chunks_mut::<W>().0;
    for (position, value) in positions.iter().zip(values.as_chunks::<W>().0) {
        elements[*position as usize] = *value;
    }
}
