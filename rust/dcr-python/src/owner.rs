//! `Owner`: one training rank's side of a refit.
#![allow(unsafe_code)]

use dcr_node::{Link, OwnerNode, OwnerOptions};
use parking_lot::RwLock;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{refit_error, seconds};
use crate::memory::HostTensor;

/// One owner: compares its tensors with the source baseline and streams what changed.
#[pyclass(frozen, module = "dcr._native")]
pub struct Owner {
    node: RwLock<OwnerNode>,
}

#[pymethods]
impl Owner {
    /// Owner number `index` of `owners`. A bucket is closed at `bucket_bytes` of compared tensors, and at most
    /// `window_bytes` of payload may be on their way.
    #[new]
    #[pyo3(signature = (index, owners, bucket_bytes=None, window_bytes=None))]
    fn new(
        py: Python<'_>,
        index: u32,
        owners: u32,
        bucket_bytes: Option<u64>,
        window_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let default = OwnerOptions::default();
        let options = OwnerOptions {
            bucket_bytes: bucket_bytes.unwrap_or(default.bucket_bytes),
            window_bytes: window_bytes.unwrap_or(default.window_bytes),
        };
        let node = OwnerNode::new(index, owners, options).map_err(|error| refit_error(py, &error))?;
        Ok(Self { node: RwLock::new(node) })
    }

    /// Whether this owner owns the tensor of this name.
    fn owns(&self, name: &str) -> bool {
        self.node.read().owns(name)
    }

    /// Copies the stored bits of an owned, contiguous host tensor into the baseline.
    fn track(
        &self,
        py: Python<'_>,
        name: String,
        shape: Vec<u64>,
        dtype: &str,
        data_ptr: usize,
        nbytes: usize,
    ) -> PyResult<()> {
        let tensor = HostTensor::new(name, shape, dtype, data_ptr, nbytes)?;
        // SAFETY: the caller holds the tensor during the call and does not write to it.
        let result = py.detach(|| self.node.read().track(tensor.meta.clone(), unsafe { tensor.bytes() }));
        result.map_err(|error| refit_error(py, &error))
    }

    /// Connects to the relay (`relay`, else `DCR_RELAY`) within `timeout_s` seconds.
    #[pyo3(signature = (timeout_s=60.0, relay=None))]
    fn register(&self, py: Python<'_>, timeout_s: f64, relay: Option<&str>) -> PyResult<()> {
        let patience = seconds(timeout_s)?;
        let result = py.detach(|| {
            let link = Link::from_environment(relay)?;
            self.node.write().register(&link, patience)
        });
        result.map_err(|error| refit_error(py, &error))
    }

    /// Waits for `prepare`; returns attempt, version and mode.
    fn await_prepared<'py>(&self, py: Python<'py>, timeout_s: f64) -> PyResult<Bound<'py, PyDict>> {
        let patience = seconds(timeout_s)?;
        let result = py.detach(|| self.node.read().await_prepared(patience));
        let prepared = result.map_err(|error| refit_error(py, &error))?;
        let dict = PyDict::new(py);
        dict.set_item("attempt", prepared.attempt.to_string())?;
        dict.set_item("version", prepared.version)?;
        dict.set_item("mode", prepared.mode.name())?;
        Ok(dict)
    }

    /// Compares an owned, contiguous host tensor with the baseline and streams what changed.
    fn offer(
        &self,
        py: Python<'_>,
        name: String,
        shape: Vec<u64>,
        dtype: &str,
        data_ptr: usize,
        nbytes: usize,
    ) -> PyResult<()> {
        let tensor = HostTensor::new(name, shape, dtype, data_ptr, nbytes)?;
        // SAFETY: the caller holds the tensor during the call and does not write to it.
        let result = py.detach(|| self.node.read().offer(&tensor.meta, unsafe { tensor.bytes() }));
        result.map_err(|error| refit_error(py, &error))
    }

    /// Sends what is left; returns the totals of the stream.
    fn end_stream<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let result = py.detach(|| self.node.read().end_stream());
        let totals = result.map_err(|error| refit_error(py, &error))?;
        let dict = PyDict::new(py);
        dict.set_item("payloads", totals.payloads)?;
        dict.set_item("payload_bytes", totals.payload_bytes)?;
        dict.set_item("changed", totals.changed)?;
        dict.set_item("elements", totals.elements)?;
        dict.set_item("bytes", totals.bytes)?;
        Ok(dict)
    }

    /// Waits for the commit and the baseline update; returns version and baseline.
    fn await_end<'py>(&self, py: Python<'py>, timeout_s: f64) -> PyResult<Bound<'py, PyDict>> {
        let patience = seconds(timeout_s)?;
        let result = py.detach(|| self.node.read().await_end(patience));
        let held = result.map_err(|error| refit_error(py, &error))?;
        let dict = PyDict::new(py);
        dict.set_item("version", held.version)?;
        dict.set_item("baseline", held.baseline.to_string())?;
        Ok(dict)
    }

    /// Fails the running attempt for the caller's reason.
    fn fail(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.node.read().fail(reason));
    }

    /// Bytes that the baseline holds in host memory.
    #[getter]
    fn baseline_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.node.read().baseline_bytes())
    }

    /// Closes the connection.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.node.write().close());
    }
}
