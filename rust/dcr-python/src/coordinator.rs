//! `Coordinator`: drives refits.

use std::path::PathBuf;

use dcr_node::{CoordinatorNode, CoordinatorOptions, Link, NodeError};
use dcr_protocol::{Application, Deadlines, Mode};
use parking_lot::RwLock;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{refit_error, seconds};

/// The coordinator of a run: one for all owners and receivers.
#[pyclass(frozen, module = "dcr._native")]
pub struct Coordinator {
    node: RwLock<Option<CoordinatorNode>>,
}

#[pymethods]
impl Coordinator {
    /// Connects to the relay (`relay`, else `DCR_RELAY`). `record` is the file of the commit record, `gates` the
    /// base URLs of the vLLM servers, `receivers` how many rollout ranks must be connected before a refit.
    /// `application` is "asynchronous" (stage and check everything, then close the gate and apply) or "synchronous".
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    #[pyo3(signature = (
        owners, receivers, record, gates, application="asynchronous", relay=None, timeout_s=60.0,
        peers_timeout_s=None,
    ))]
    fn new(
        py: Python<'_>,
        owners: u32,
        receivers: usize,
        record: PathBuf,
        gates: Vec<String>,
        application: &str,
        relay: Option<&str>,
        timeout_s: f64,
        peers_timeout_s: Option<f64>,
    ) -> PyResult<Self> {
        if owners == 0 {
            return Err(PyValueError::new_err("a refit needs at least one owner"));
        }
        let application = match application {
            "asynchronous" => Application::Asynchronous,
            "synchronous" => Application::Synchronous,
            other => {
                let reason = format!("application {other:?} is neither asynchronous nor synchronous");
                return Err(PyValueError::new_err(reason));
            }
        };
        let patience = seconds(timeout_s)?;
        let mut deadlines = Deadlines::default();
        if let Some(peers) = peers_timeout_s {
            deadlines.peers = seconds(peers)?;
        }
        let result = py.detach(|| -> Result<CoordinatorNode, NodeError> {
            let link = Link::from_environment(relay)?;
            let options = CoordinatorOptions { owners, receivers, application, record, gates, deadlines };
            let node = CoordinatorNode::start(&link, options)?;
            node.wait_connected(patience)?;
            Ok(node)
        });
        let node = result.map_err(|error| refit_error(py, &error))?;
        Ok(Self { node: RwLock::new(Some(node)) })
    }

    /// Starts a refit: mode "auto", "mixed", "overwrite" or "dense".
    #[pyo3(signature = (mode="auto"))]
    fn start(&self, py: Python<'_>, mode: &str) -> PyResult<()> {
        let mode = match mode {
            "auto" => None,
            "mixed" => Some(Mode::Mixed),
            "overwrite" => Some(Mode::Overwrite),
            "dense" => Some(Mode::Dense),
            other => {
                let reason = format!("refit mode {other:?} is not one of auto, mixed, overwrite, dense");
                return Err(PyValueError::new_err(reason));
            }
        };
        self.with(py, |node| node.begin(mode))
    }

    /// Waits for the end of the refit; returns its report as JSON.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<String> {
        let patience = seconds(timeout_s)?;
        let report = self.with(py, |node| node.wait(patience))?;
        serde_json::to_string(&report).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Ends the running refit for the caller's reason; `wait` then raises.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        self.with(py, |node| {
            node.abort(reason);
            Ok(())
        })
    }

    /// Closes the connection.
    fn close(&self, py: Python<'_>) {
        py.detach(|| *self.node.write() = None);
    }
}

impl Coordinator {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&CoordinatorNode) -> Result<T, NodeError> + Send,
    ) -> PyResult<T> {
        let result = py.detach(|| match &*self.node.read() {
            Some(node) => call(node),
            None => Err(NodeError::Misuse("this coordinator is closed")),
        });
        result.map_err(|error| refit_error(py, &error))
    }
}
