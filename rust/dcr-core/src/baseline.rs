//! The source baseline of one owner (section 4.1, appendix A.1): trackers of task shards and canonical tensors of the
//! residual baseline, all as stored bits of the committed version, with one staged candidate each.

use std::collections::BTreeMap;
use std::io;
use std::ops::{DerefMut, Range};

use thiserror::Error;

use crate::changes::Changes;
use crate::compare::CompareError;
use crate::dtype::DType;
use crate::payload::{Encoding, Item, Positions};
use crate::projection::Projection;
use crate::tensor::{TensorError, TensorMeta};

/// Why a tensor cannot be tracked or compared. "Tensor" is a shard of a conversion task, or a canonical tensor.
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
    /// The index map is of another shard.
    #[error(
        "tensor {name:?} of shape {shape:?} and dtype {dtype} cannot be projected: its index map has {elements} elements of {mapped}"
    )]
    Projection {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its dtype.
        dtype: DType,
        /// Elements that the index map covers.
        elements: u64,
        /// The canonical dtype.
        mapped: DType,
    },
    /// There is no memory for a copy.
    #[error("no memory for {bytes} bytes of tensor {name:?}: {reason}")]
    Memory {
        /// The tensor.
        name: String,
        /// Bytes wanted.
        bytes: usize,
        /// What the system said.
        reason: String,
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

/// What a tracked tensor is, and so how its changes are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A whole canonical tensor that its owner compares as it is: an affine task with one canonical tensor.
    Canonical,
    /// A shard of an affine task. In a dense refit its canonical tensors come from the full conversion.
    Shard,
    /// A canonical tensor of the residual baseline: always overwritten, and only converted when a flag selects it.
    Residual,
}

/// Writable memory for the baseline.
pub type Memory = Box<dyn DerefMut<Target = [u8]> + Send + Sync>;

/// Where a baseline's memory comes from: so many bytes for the tensor of this name.
pub type Allocate = Box<dyn Fn(&str, usize) -> io::Result<Memory> + Send + Sync>;

struct Tracked {
    meta: TensorMeta,
    projection: Projection,
    role: Role,
    bits: Memory,
    staged: Option<Changes>,
}

/// Bits of the committed version of every tensor of one owner, with one staged candidate a tensor.
pub struct Baseline {
    tensors: BTreeMap<String, Tracked>,
    allocate: Allocate,
}

/// A tensor's changes against the baseline: what the next commit will write.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    tracked: &'a Tracked,
    changes: &'a Changes,
}

impl Default for Baseline {
    fn default() -> Self {
        Baseline::new(Box::new(in_memory))
    }
}

/// Memory of this process.
pub fn in_memory(_: &str, bytes: usize) -> io::Result<Memory> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).map_err(io::Error::other)?;
    memory.resize(bytes, 0);
    Ok(Box::new(memory))
}

impl Baseline {
    /// An empty baseline with memory from `allocate`.
    pub fn new(allocate: Allocate) -> Baseline {
        Baseline { tensors: BTreeMap::new(), allocate }
    }

    /// Copies the bits of a whole canonical tensor into the baseline. Each tensor is tracked once.
    pub fn track(&mut self, meta: TensorMeta, bytes: &[u8]) -> Result<(), BaselineError> {
        self.track_as(meta, Role::Canonical, None, bytes)
    }

    /// Copies a tensor's bits into the baseline. Without a projection it is a whole canonical tensor.
    pub fn track_as(
        &mut self,
        meta: TensorMeta,
        role: Role,
        projection: Option<Projection>,
        bytes: &[u8],
    ) -> Result<(), BaselineError> {
        meta.validate()?;
        check(&meta, &meta, bytes)?;
        if self.tensors.contains_key(&meta.name) {
            return Err(BaselineError::Tracked { name: meta.name });
        }
        let projection = match projection {
            Some(projection) => projection,
            None => Projection::whole(meta.clone()).map_err(|_| BaselineError::Unknown { name: meta.name.clone() })?,
        };
        let mapped = projection.pieces().iter().map(|piece| piece.tensor().dtype).find(|dtype| *dtype != meta.dtype);
        if projection.elements() != meta.numel()? || mapped.is_some() {
            let (elements, mapped) = (projection.elements(), mapped.unwrap_or(meta.dtype));
            let TensorMeta { name, shape, dtype } = meta;
            return Err(BaselineError::Projection { name, shape, dtype, elements, mapped });
        }
        let mut bits = (self.allocate)(&meta.name, bytes.len()).map_err(|error| {
            let (name, bytes, reason) = (meta.name.clone(), bytes.len(), error.to_string());
            BaselineError::Memory { name, bytes, reason }
        })?;
        bits.copy_from_slice(bytes);
        self.tensors.insert(meta.name.clone(), Tracked { meta, projection, role, bits, staged: None });
        Ok(())
    }

    /// Checks that the tensor is tracked with this shape and dtype, and that `new` is as long as they say.
    pub fn check(&self, meta: &TensorMeta, new: &[u8]) -> Result<(), BaselineError> {
        check(&self.find(&meta.name)?.meta, meta, new)
    }

    /// Compares the elements of `range` of a tensor with the baseline; `new` is the whole tensor. Nothing is staged.
    pub fn changes(&self, meta: &TensorMeta, new: &[u8], range: Range<usize>) -> Result<Changes, BaselineError> {
        self.check(meta, new)?;
        let tracked = self.find(&meta.name)?;
        let changes = Changes::find(&tracked.bits, new, meta.dtype.width(), range);
        changes.map_err(|source| BaselineError::Compare { name: meta.name.clone(), source })
    }

    /// Stages the changes that comparing a tensor has found, in place of an earlier candidate. The baseline itself
    /// changes only in [`commit`](Baseline::commit).
    pub fn stage(&mut self, name: &str, changes: Changes) -> Result<Candidate<'_>, BaselineError> {
        let unknown = || BaselineError::Unknown { name: name.to_owned() };
        self.tensors.get_mut(name).ok_or_else(unknown)?.staged = Some(changes);
        self.candidate(name).ok_or_else(unknown)
    }

    /// Compares a whole tensor with the baseline and stages what changed.
    pub fn compare(&mut self, meta: &TensorMeta, new: &[u8]) -> Result<Candidate<'_>, BaselineError> {
        let changes = self.changes(meta, new, 0..new.len() / meta.dtype.width())?;
        self.stage(&meta.name, changes)
    }

    /// The candidate staged for a tensor, if there is one.
    pub fn candidate(&self, name: &str) -> Option<Candidate<'_>> {
        let tracked = self.tensors.get(name)?;
        Some(Candidate { tracked, changes: tracked.staged.as_ref()? })
    }

    /// Writes every staged candidate into the baseline and forgets it. Values are absolute, so a commit that was
    /// interrupted can be repeated, and one with nothing staged does nothing.
    pub fn commit(&mut self) {
        self.pending().for_each(Pending::commit);
    }

    /// The staged candidates, to be committed on several threads.
    pub fn pending(&mut self) -> impl Iterator<Item = Pending<'_>> + Send {
        self.tensors.values_mut().filter(|tracked| tracked.staged.is_some()).map(Pending)
    }

    /// Forgets every staged candidate.
    pub fn discard(&mut self) {
        for tracked in self.tensors.values_mut() {
            tracked.staged = None;
        }
    }

    /// The descriptions and roles of the tracked tensors, ordered by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorMeta, Role)> {
        self.tensors.values().map(|tracked| (&tracked.meta, tracked.role))
    }

    /// The role of a tracked tensor.
    pub fn role(&self, name: &str) -> Option<Role> {
        self.tensors.get(name).map(|tracked| tracked.role)
    }

    /// The canonical tensors that the tracked ones are parts of; one may come more than once.
    pub fn canonical(&self) -> impl Iterator<Item = &TensorMeta> {
        self.tensors.values().flat_map(|tracked| tracked.projection.pieces().iter().map(|piece| piece.tensor()))
    }

    /// The committed bits of a tensor.
    pub fn bits(&self, name: &str) -> Option<&[u8]> {
        self.tensors.get(name).map(|tracked| &**tracked.bits)
    }

    /// Bytes that hold committed bits.
    pub fn bytes_held(&self) -> usize {
        self.tensors.values().map(|tracked| tracked.bits.len()).sum()
    }

    /// Bytes of host memory that hold staged candidates.
    pub fn bytes_staged(&self) -> usize {
        self.tensors.values().filter_map(|tracked| tracked.staged.as_ref()).map(Changes::bytes).sum()
    }

    fn find(&self, name: &str) -> Result<&Tracked, BaselineError> {
        self.tensors.get(name).ok_or_else(|| BaselineError::Unknown { name: name.to_owned() })
    }
}

/// A staged candidate that waits for the commit.
pub struct Pending<'a>(&'a mut Tracked);

impl Pending<'_> {
    /// Writes it into the baseline and forgets it.
    pub fn commit(self) {
        if let Some(changes) = &self.0.staged {
            changes.write_to(&mut self.0.bits, self.0.meta.dtype.width());
        }
        self.0.staged = None;
    }
}

impl Candidate<'_> {
    /// The tensor.
    pub fn meta(&self) -> &TensorMeta {
        &self.tracked.meta
    }

    /// Its role.
    pub fn role(&self) -> Role {
        self.tracked.role
    }

    /// The elements whose stored bits changed, with their new values.
    pub fn changes(&self) -> &Changes {
        self.changes
    }

    /// Whether nothing changed.
    pub fn is_unchanged(&self) -> bool {
        self.changes.is_empty()
    }

    /// All bytes of the new tensor.
    pub fn dense_values(&self) -> Vec<u8> {
        let mut bits = self.tracked.bits.to_vec();
        self.changes.write_to(&mut bits, self.tracked.meta.dtype.width());
        bits
    }

    /// The changed elements as items, in the encoding that `encoding` picks for each canonical tensor; one for each
    /// canonical tensor with changes. Residual tensors are always overwritten.
    pub fn items(&self, encoding: impl Fn(&TensorMeta) -> Encoding) -> Vec<Item> {
        let pieces = self.tracked.projection.pieces().iter();
        let items = pieces.filter_map(|piece| {
            let encoding = match self.tracked.role {
                Role::Residual => Encoding::Overwrite,
                Role::Canonical | Role::Shard => encoding(piece.tensor()),
            };
            self.changes.item(piece, &self.tracked.bits, encoding)
        });
        items.collect()
    }

    /// Every element of a whole canonical tensor, for a dense refit; None for a shard.
    pub fn dense_item(&self) -> Option<Item> {
        if self.tracked.role == Role::Shard {
            return None;
        }
        let meta = self.tracked.meta.clone();
        let values = self.dense_values();
        let count = (values.len() / meta.dtype.width()) as u64;
        Some(Item { meta, encoding: Encoding::Dense, positions: Positions::Run { start: 0, count }, values })
    }
}

/// Checks that a tensor is what is tracked, and that its bytes are all there.
pub(crate) fn check(tracked: &TensorMeta, meta: &TensorMeta, bytes: &[u8]) -> Result<(), BaselineError> {
    let name = || meta.name.clone();
    if tracked.shape != meta.shape {
        let (tracked, found) = (tracked.shape.clone(), meta.shape.clone());
        return Err(BaselineError::Shape { name: name(), tracked, found });
    }
    if tracked.dtype != meta.dtype {
        return Err(BaselineError::DType { name: name(), tracked: tracked.dtype, found: meta.dtype });
    }
    let expected = meta.nbytes()?;
    if bytes.len() != expected {
        return Err(BaselineError::Bytes { name: name(), found: bytes.len(), expected });
    }
    Ok(())
}
