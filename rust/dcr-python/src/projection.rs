//! Index maps, ownership and fingerprints for the training side.
#![allow(unsafe_code)]

use dcr_core::fingerprint::fingerprint;
use dcr_core::ownership::{self, Share};
use dcr_core::projection::{self, Piece};
use dcr_core::tensor::TensorMeta;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::memory::{Described, HostTensor, host_tensors, parse_dtype};

/// Canonical name, shape, dtype (safetensors' name), offset and extent of a block.
type Block = (String, Vec<u64>, &'static str, Vec<u64>, Vec<u64>);

/// The index map of an affine conversion task: from its shard's flat indices to canonical coordinates.
#[pyclass(frozen, module = "dcr._native")]
pub struct Projection {
    inner: projection::Projection,
}

impl Projection {
    /// The map itself.
    pub fn inner(&self) -> &projection::Projection {
        &self.inner
    }
}

fn wrong(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn made(result: Result<projection::Projection, projection::ProjectionError>) -> PyResult<Projection> {
    Ok(Projection { inner: result.map_err(wrong)? })
}

fn meta(name: String, shape: Vec<u64>, dtype: &str) -> PyResult<TensorMeta> {
    Ok(TensorMeta { name, shape, dtype: parse_dtype(dtype).map_err(wrong)? })
}

#[pymethods]
impl Projection {
    /// A shard that is a whole canonical tensor.
    #[staticmethod]
    fn whole(name: String, shape: Vec<u64>, dtype: &str) -> PyResult<Self> {
        made(projection::Projection::whole(meta(name, shape, dtype)?))
    }

    /// A shard of shape `shape` that is part `part` of `parts` along `axis` of a canonical tensor.
    #[staticmethod]
    fn split(name: String, shape: Vec<u64>, dtype: &str, axis: usize, part: u64, parts: u64) -> PyResult<Self> {
        made(projection::Projection::split(meta(name, shape, dtype)?, axis, part, parts))
    }

    /// A shard of shape `shape` with part `part` of `parts` of the rows of `gate`, then those of `up`.
    #[staticmethod]
    fn gated(gate: String, up: &str, shape: Vec<u64>, dtype: &str, part: u64, parts: u64) -> PyResult<Self> {
        made(projection::Projection::gated(meta(gate, shape, dtype)?, up, part, parts))
    }

    /// A shard that is the block of sizes `extent` at `offset` of a canonical tensor of shape `shape`.
    #[staticmethod]
    fn block(name: String, shape: Vec<u64>, dtype: &str, offset: Vec<u64>, extent: Vec<u64>) -> PyResult<Self> {
        made(projection::Projection::block(meta(name, shape, dtype)?, offset, extent))
    }

    /// Its blocks, in the order in which the shard holds them: (name, canonical shape, dtype, offset, extent).
    #[getter]
    fn blocks(&self) -> Vec<Block> {
        let block = |piece: &Piece| {
            let tensor = piece.tensor();
            let (offset, extent) = (piece.offset().to_vec(), piece.extent().to_vec());
            (tensor.name.clone(), tensor.shape.clone(), tensor.dtype.name(), offset, extent)
        };
        self.inner.pieces().iter().map(block).collect()
    }

    /// Where the shard's element `local` goes: canonical name and flat index.
    fn canonical(&self, local: u64) -> Option<(String, u64)> {
        self.inner.canonical(local).map(|(tensor, index)| (tensor.name.clone(), index))
    }

    /// The canonical flat index of the first element on which the shard and a canonical tensor differ in their bits;
    /// None where they agree. Raises `ValueError` where the shapes do not fit.
    fn first_difference(&self, py: Python<'_>, shard: Described, canonical: Described) -> PyResult<Option<u64>> {
        let tensors = host_tensors(py, vec![shard, canonical])?;
        let (shard, canonical): (&HostTensor, &HostTensor) = (&tensors[0], &tensors[1]);
        let pieces = self.inner.pieces().iter().filter(|piece| piece.tensor().name == canonical.meta.name);
        let pieces: Vec<&Piece> = pieces.collect();
        let fits = shard.meta.numel().ok() == Some(self.inner.elements())
            && pieces.iter().all(|piece| *piece.tensor() == canonical.meta && shard.meta.dtype == canonical.meta.dtype);
        if !fits {
            return Err(wrong(format!(
                "`{}` of shape {:?} and dtype {} is not where its shard belongs",
                canonical.meta.name, canonical.meta.shape, canonical.meta.dtype
            )));
        }
        let width = shard.meta.dtype.width();
        // SAFETY: the caller holds both tensors during the call.
        let (here, there) = unsafe { (shard.bytes(), canonical.bytes()) };
        Ok(py.detach(|| pieces.iter().find_map(|piece| projection::first_difference(piece, here, there, width))))
    }
}

/// The owner of each share (name, bytes, candidate ranks): the same on every rank.
#[pyfunction]
pub fn assign_owners(py: Python<'_>, shares: Vec<(String, u64, Vec<u32>)>, owners: u32) -> PyResult<Vec<u32>> {
    let share = |(name, bytes, candidates)| Share { name, bytes, candidates };
    let shares: Vec<Share> = shares.into_iter().map(share).collect();
    py.detach(|| ownership::assign(&shares, owners)).map_err(wrong)
}

/// The fingerprint of each tensor's stored bits.
#[pyfunction]
pub fn fingerprints<'py>(py: Python<'py>, tensors: Vec<Described>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let tensors = host_tensors(py, tensors)?;
    // SAFETY: the caller holds the tensors during the call.
    let found: Vec<_> = py.detach(|| tensors.iter().map(|tensor| fingerprint(unsafe { tensor.bytes() })).collect());
    Ok(found.iter().map(|found| PyBytes::new(py, found)).collect())
}
