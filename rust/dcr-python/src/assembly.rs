//! `Assembly`: one canonical tensor from the parts that several ranks converted.
#![allow(unsafe_code)]

use dcr_core::assembly;
use dcr_core::projection::Piece;
use dcr_core::tensor::TensorMeta;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::memory::{Described, HostTensor, parse_dtype};

/// A canonical tensor under assembly.
#[pyclass(frozen, module = "dcr._native")]
pub struct Assembly {
    meta: TensorMeta,
    inner: Mutex<Option<assembly::Assembly>>,
}

fn wrong(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pymethods]
impl Assembly {
    /// The canonical tensor of this name, shape and dtype, of which nothing is there yet.
    #[new]
    fn new(name: String, shape: Vec<u64>, dtype: &str) -> PyResult<Self> {
        let meta = TensorMeta { name, shape, dtype: parse_dtype(dtype).map_err(wrong)? };
        let inner = assembly::Assembly::new(meta.clone()).map_err(wrong)?;
        Ok(Self { meta, inner: Mutex::new(Some(inner)) })
    }

    /// Adds the part at `offset` that training rank `rank` converted; what it shares with earlier parts must agree.
    fn add(&self, py: Python<'_>, rank: u32, offset: Vec<u64>, part: Described) -> PyResult<()> {
        let (name, extent, dtype, pointer, length) = part;
        let part = HostTensor::new(name, extent, &dtype, pointer, length)?;
        let canonical = TensorMeta { dtype: part.meta.dtype, name: part.meta.name.clone(), ..self.meta.clone() };
        let piece = Piece::new(canonical, offset, part.meta.shape.clone(), 0).map_err(wrong)?;
        // SAFETY: the caller holds the part during the call.
        let add = || self.inner.lock().as_mut().map(|inner| inner.add(rank, piece, unsafe { part.bytes() }));
        py.detach(add).ok_or_else(|| wrong("this tensor is assembled already"))?.map_err(wrong)
    }

    /// The tensor's bytes, once every element is covered; `ValueError` says which are not.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        let inner = self.inner.lock().take().ok_or_else(|| wrong("this tensor is assembled already"))?;
        Ok(PyByteArray::new(py, &inner.finish().map_err(wrong)?))
    }
}
