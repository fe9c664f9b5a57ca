//! `Item` and payload functions: what an apply task hands to the loader, and how tests make their own.
#![allow(unsafe_code)]

use std::sync::Arc;

use dcr_core::baseline::Baseline;
use dcr_core::payload::{self, Encoding, PayloadId, Positions};
use dcr_protocol::AttemptId;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::memory::HostTensor;

/// One owner's entries for one canonical tensor.
#[pyclass(frozen, module = "dcr._native")]
#[derive(Clone)]
pub struct Item {
    items: Arc<Vec<payload::Item>>,
    index: usize,
}

impl Item {
    /// Item number `index` of a payload's items, without a copy.
    pub fn shared(items: Arc<Vec<payload::Item>>, index: usize) -> Self {
        Self { items, index }
    }

    /// The item itself.
    pub fn inner(&self) -> &payload::Item {
        &self.items[self.index]
    }
}

#[pymethods]
impl Item {
    /// Canonical name.
    #[getter]
    fn name(&self) -> &str {
        &self.inner().meta.name
    }

    /// Canonical shape.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.inner().meta.shape.clone()
    }

    /// Dtype name as in safetensors.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.inner().meta.dtype.name()
    }

    /// "xor", "overwrite" or "dense".
    #[getter]
    fn encoding(&self) -> &'static str {
        self.inner().encoding.name()
    }

    /// Number of entries.
    #[getter]
    fn elements(&self) -> u64 {
        self.inner().positions.count()
    }

    /// The entries' flat indices in the canonical tensor, as little-endian 64-bit integers.
    fn positions<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let positions: Vec<u8> = self.inner().positions.iter().flat_map(u64::to_le_bytes).collect();
        PyBytes::new(py, &positions)
    }

    /// The entries' masks or values, little-endian, in the order of the positions.
    fn values<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner().values)
    }
}

fn wrong(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The item that turns one contiguous host tensor into another of the same dtype and shape.
#[pyfunction]
pub fn make_item(
    name: String,
    shape: Vec<u64>,
    dtype: &str,
    old_ptr: usize,
    new_ptr: usize,
    nbytes: usize,
    encoding: &str,
) -> PyResult<Item> {
    let old = HostTensor::new(name.clone(), shape.clone(), dtype, old_ptr, nbytes)?;
    let new = HostTensor::new(name, shape, dtype, new_ptr, nbytes)?;
    // SAFETY: the caller holds both tensors during the call.
    let (old_bytes, new_bytes) = unsafe { (old.bytes(), new.bytes()) };
    let encoding = match encoding {
        "xor" => Encoding::Xor,
        "overwrite" => Encoding::Overwrite,
        "dense" => Encoding::Dense,
        other => return Err(wrong(format!("{other:?} is not an encoding"))),
    };
    let mut baseline = Baseline::default();
    baseline.track(old.meta.clone(), old_bytes).map_err(wrong)?;
    let candidate = baseline.compare(&new.meta, new_bytes).map_err(wrong)?;
    let changed = match encoding {
        Encoding::Dense => candidate.dense_item(),
        _ => candidate.items(|_| encoding).pop(),
    };
    let nothing = Positions::Run { start: 0, count: 0 };
    let empty = payload::Item { meta: new.meta.clone(), encoding, positions: nothing, values: Vec::new() };
    Ok(Item::shared(Arc::new(vec![changed.unwrap_or(empty)]), 0))
}

/// An item from its parts; `positions` are flat indices, `values` their little-endian bytes. Not checked: encoding a
/// payload or applying it does that.
#[pyfunction]
pub fn raw_item(
    name: String,
    shape: Vec<u64>,
    dtype: &str,
    encoding: &str,
    positions: Vec<u64>,
    values: Vec<u8>,
) -> PyResult<Item> {
    let dtype = dcr_core::dtype::DType::from_name(dtype).map_err(wrong)?;
    let meta = dcr_core::tensor::TensorMeta { name, shape, dtype };
    let encoding = match encoding {
        "xor" => Encoding::Xor,
        "overwrite" => Encoding::Overwrite,
        "dense" => Encoding::Dense,
        other => return Err(wrong(format!("{other:?} is not an encoding"))),
    };
    let positions = Positions::from_sorted(positions);
    Ok(Item::shared(Arc::new(vec![payload::Item { meta, encoding, positions, values }]), 0))
}

/// The items as one payload of format version 1.
#[pyfunction]
pub fn encode_payload<'py>(
    py: Python<'py>,
    attempt: &str,
    owner: u32,
    sequence: u32,
    items: Vec<PyRef<'py, Item>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let attempt: AttemptId = attempt.parse().map_err(wrong)?;
    let items: Vec<_> = items.iter().map(|item| item.inner().clone()).collect();
    let id = PayloadId { attempt: attempt.0, owner, sequence };
    let bytes = py.detach(|| payload::encode(&id, &items)).map_err(wrong)?;
    Ok(PyBytes::new(py, &bytes))
}

/// The items of a payload.
#[pyfunction]
pub fn decode_payload(py: Python<'_>, payload: &[u8]) -> PyResult<Vec<Item>> {
    let items = py.detach(|| payload::decode(payload)).map_err(wrong)?.items;
    let items = Arc::new(items);
    Ok((0..items.len()).map(|index| Item::shared(Arc::clone(&items), index)).collect())
}
