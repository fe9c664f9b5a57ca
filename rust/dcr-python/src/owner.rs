//! `Owner`: one training rank's side of a refit.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use dcr_core::baseline::Role;
use dcr_node::{ConstructOptions, Link, OwnerNode, OwnerOptions, Sink};
use dcr_protocol::{Mode, StreamTotals};
use parking_lot::{Mutex, RwLock};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::{refit_error, seconds};
use crate::memory::{Described, host_tensors, offers};
use crate::projection::Projection;

/// A role by its name.
fn parse_role(name: &str) -> PyResult<Role> {
    match name {
        "canonical" => Ok(Role::Canonical),
        "shard" => Ok(Role::Shard),
        "residual" => Ok(Role::Residual),
        other => Err(PyValueError::new_err(format!("{other:?} is not a role; roles are canonical, shard, residual"))),
    }
}

/// The totals of a stream.
fn totals_dict<'py>(py: Python<'py>, totals: &StreamTotals) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("payloads", totals.payloads)?;
    dict.set_item("payload_bytes", totals.payload_bytes)?;
    dict.set_item("changed", totals.changed)?;
    dict.set_item("elements", totals.elements)?;
    dict.set_item("bytes", totals.bytes)?;
    dict.set_item("residual_tensors", totals.residual_tensors)?;
    dict.set_item("xor_items", totals.xor_items)?;
    dict.set_item("overwrite_items", totals.overwrite_items)?;
    dict.set_item("compare_s", totals.compare_s)?;
    dict.set_item("encode_s", totals.encode_s)?;
    dict.set_item("blocked_s", totals.blocked_s)?;
    Ok(dict)
}

/// One owner: compares its tensors with the source baseline and streams what changed.
#[pyclass(frozen, module = "dcr._native")]
pub struct Owner {
    node: RwLock<OwnerNode>,
    rehearsed: Arc<Mutex<Vec<Vec<u8>>>>,
}

#[pymethods]
impl Owner {
    /// Owner number `index` of `owners`. Sizes are bytes: a chunk is compared at once, a bucket of chunks becomes a
    /// payload, at most `window_bytes` of payload are on their way. `threads` compare and encode (0: one for each core),
    /// `bucket_queue` buckets wait for their turn, and `baseline_folder` keeps the baseline in files.
    #[new]
    #[pyo3(signature = (index, owners, *, chunk_bytes=None, bucket_bytes=None, window_bytes=None, bucket_queue=None,
                        threads=None, baseline_folder=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        index: u32,
        owners: u32,
        chunk_bytes: Option<u64>,
        bucket_bytes: Option<u64>,
        window_bytes: Option<u64>,
        bucket_queue: Option<usize>,
        threads: Option<usize>,
        baseline_folder: Option<PathBuf>,
    ) -> PyResult<Self> {
        let OwnerOptions { construct, window_bytes: window } = OwnerOptions::default();
        let construct = ConstructOptions {
            chunk_bytes: chunk_bytes.unwrap_or(construct.chunk_bytes),
            bucket_bytes: bucket_bytes.unwrap_or(construct.bucket_bytes),
            bucket_queue: bucket_queue.unwrap_or(construct.bucket_queue),
            threads: threads.unwrap_or(construct.threads),
            baseline_folder,
        };
        let options = OwnerOptions { construct, window_bytes: window_bytes.unwrap_or(window) };
        let node = OwnerNode::new(index, owners, options);
        let node = node.map_err(|error| refit_error(py, &error))?;
        Ok(Self { node: RwLock::new(node), rehearsed: Arc::default() })
    }

    /// Copies the stored bits of an owned, contiguous host tensor into the baseline. `role` is "canonical", "shard" or
    /// "residual"; a shard comes with its projection.
    #[pyo3(signature = (tensor, role="canonical", projection=None))]
    fn track(
        &self,
        py: Python<'_>,
        tensor: Described,
        role: &str,
        projection: Option<PyRef<'_, Projection>>,
    ) -> PyResult<()> {
        let role = parse_role(role)?;
        let tensors = host_tensors(py, vec![tensor])?;
        let projection = projection.map(|projection| projection.inner().clone());
        // SAFETY: the caller holds the tensor during the call and does not write to it.
        let offers = unsafe { offers(&tensors) };
        let result = py.detach(|| self.node.read().track(&offers[0], role, projection));
        result.map_err(|error| refit_error(py, &error))
    }

    /// Remembers the bits of a residual task's shard, for its change flag.
    fn track_flag(&self, py: Python<'_>, tensor: Described) -> PyResult<()> {
        let tensors = host_tensors(py, vec![tensor])?;
        // SAFETY: the caller holds the tensor during the call and does not write to it.
        let offers = unsafe { offers(&tensors) };
        let result = py.detach(|| self.node.read().track_flag(&offers[0]));
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

    /// Begins a stream of mode "mixed", "overwrite" or "dense" whose payloads are kept here (or only counted, without
    /// `keep`) instead of being sent.
    #[pyo3(signature = (mode="mixed", keep=true, overwrite_only=BTreeSet::new()))]
    fn rehearse(&self, py: Python<'_>, mode: &str, keep: bool, overwrite_only: BTreeSet<String>) -> PyResult<()> {
        let mode = match mode {
            "mixed" => Mode::Mixed,
            "overwrite" => Mode::Overwrite,
            "dense" => Mode::Dense,
            other => return Err(PyValueError::new_err(format!("{other:?} is not a mode"))),
        };
        self.rehearsed.lock().clear();
        let rehearsed = Arc::clone(&self.rehearsed);
        let sink: Sink = Arc::new(move |_, payload| {
            if keep {
                rehearsed.lock().push(payload);
            }
            Ok(())
        });
        let result = py.detach(|| self.node.read().rehearse(mode, overwrite_only, sink));
        result.map_err(|error| refit_error(py, &error))
    }

    /// The payloads of the rehearsed stream.
    fn rehearsed<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.rehearsed.lock().iter().map(|payload| PyBytes::new(py, payload)).collect()
    }

    /// Takes what the rehearsed stream found as the committed version; only for an owner without a relay.
    fn commit_rehearsed(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.node.read().commit_rehearsed()).map_err(|error| refit_error(py, &error))
    }

    /// For each residual shard, whether its stored bits differ from the committed ones.
    fn flags(&self, py: Python<'_>, tensors: Vec<Described>) -> PyResult<Vec<bool>> {
        let tensors = host_tensors(py, tensors)?;
        // SAFETY: the caller holds the tensors during the call and does not write to them.
        let result = py.detach(|| self.node.read().flags(&unsafe { offers(&tensors) }));
        result.map_err(|error| refit_error(py, &error))
    }

    /// Compares owned, contiguous host tensors with the baseline and streams what changed.
    fn offer(&self, py: Python<'_>, tensors: Vec<Described>) -> PyResult<()> {
        let tensors = host_tensors(py, tensors)?;
        // SAFETY: the caller holds the tensors during the call and does not write to them.
        let result = py.detach(|| self.node.read().offer(&unsafe { offers(&tensors) }));
        result.map_err(|error| refit_error(py, &error))
    }

    /// Streams whole canonical tensors, in a dense refit, of which the baseline holds shards only.
    fn offer_dense(&self, py: Python<'_>, tensors: Vec<Described>) -> PyResult<()> {
        let tensors = host_tensors(py, tensors)?;
        // SAFETY: the caller holds the tensors during the call and does not write to them.
        let result = py.detach(|| self.node.read().offer_dense(&unsafe { offers(&tensors) }));
        result.map_err(|error| refit_error(py, &error))
    }

    /// Sends what is left; returns the totals of the stream. `required` names the residual tensors that had to be
    /// offered, and in a dense refit also those that had to be sent whole.
    #[pyo3(signature = (required=Vec::new()))]
    fn end_stream<'py>(&self, py: Python<'py>, required: Vec<String>) -> PyResult<Bound<'py, PyDict>> {
        let result = py.detach(|| self.node.read().end_stream(&required));
        let totals = result.map_err(|error| refit_error(py, &error))?;
        totals_dict(py, &totals)
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
