//! `Receiver`: one rollout rank's side of a refit.

use std::sync::Arc;

use dcr_node::{Link, ReceiverNode, TaskKind};
use dcr_protocol::{LoaderClass, TensorClass};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{refit_error, seconds};
use crate::item::Item;

/// One receiver: stages payloads on its own threads and hands work to the worker's thread.
#[pyclass(frozen, module = "dcr._native")]
pub struct Receiver {
    node: ReceiverNode,
}

/// Something for the worker's thread to do; answered on the receiver that it came from.
#[pyclass(frozen, module = "dcr._native")]
pub struct Task {
    task: dcr_node::Task,
}

#[pymethods]
impl Task {
    /// "prewarm", "apply", "finish" or "shutdown".
    #[getter]
    fn kind(&self) -> &'static str {
        match self.task.kind {
            TaskKind::Prewarm(_) => "prewarm",
            TaskKind::Apply(_) => "apply",
            TaskKind::Finish => "finish",
            TaskKind::Shutdown => "shutdown",
        }
    }

    /// The attempt that the task belongs to.
    #[getter]
    fn attempt(&self) -> Option<String> {
        self.task.attempt.map(|attempt| attempt.to_string())
    }

    /// The canonical tensors of a prewarm task: (name, shape, dtype name as in safetensors).
    #[getter]
    fn catalog(&self) -> Vec<(String, Vec<u64>, &'static str)> {
        match &self.task.kind {
            TaskKind::Prewarm(catalog) => {
                catalog.iter().map(|meta| (meta.name.clone(), meta.shape.clone(), meta.dtype.name())).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The items of an apply task, in the order in which they must be applied.
    #[getter]
    fn items(&self) -> Vec<Item> {
        match &self.task.kind {
            TaskKind::Apply(items) => (0..items.len()).map(|index| Item::shared(Arc::clone(items), index)).collect(),
            _ => Vec::new(),
        }
    }
}

#[pymethods]
impl Receiver {
    /// A receiver of this name, `receiver/HOST/RANK`. A relay (`relay`, else `DCR_RELAY`) that is not there yet is
    /// waited for in the background.
    #[new]
    #[pyo3(signature = (name, relay=None))]
    fn new(py: Python<'_>, name: &str, relay: Option<&str>) -> PyResult<Self> {
        let result = py.detach(|| ReceiverNode::start(&Link::from_environment(relay)?, name));
        result.map(|node| Self { node }).map_err(|error| refit_error(py, &error))
    }

    /// The next task, or None when there was none for `timeout_s` seconds.
    fn next_task(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<Task>> {
        let patience = seconds(timeout_s)?;
        Ok(py.detach(|| self.node.next_task(patience)).map(|task| Task { task }))
    }

    /// Answers a prewarm task with (name, class, reason) for every tensor, or with an error.
    #[pyo3(signature = (task, classes, error=None))]
    fn prewarmed(
        &self,
        py: Python<'_>,
        task: &Task,
        classes: Vec<(String, String, String)>,
        error: Option<String>,
    ) -> PyResult<()> {
        let classes = classes.into_iter().map(|(name, class, reason)| {
            let class = match class.as_str() {
                "xor" => LoaderClass::Xor,
                "overwrite" => LoaderClass::Overwrite,
                "skip" => LoaderClass::Skip,
                "unsupported" => LoaderClass::Unsupported,
                other => return Err(PyValueError::new_err(format!("{other:?} is not a loader class"))),
            };
            Ok(TensorClass { name, class, reason })
        });
        let classes = classes.collect::<PyResult<Vec<_>>>()?;
        let result = error.map_or(Ok(classes), Err);
        py.detach(|| self.node.prewarmed(task.task.id, result));
        Ok(())
    }

    /// Answers an apply task: so many items went through the loader in so many seconds.
    #[pyo3(signature = (task, items=0, seconds=0.0, error=None))]
    fn applied(&self, py: Python<'_>, task: &Task, items: u64, seconds: f64, error: Option<String>) {
        let result = error.map_or(Ok(()), Err);
        py.detach(|| self.node.applied(task.task.id, items, seconds, result));
    }

    /// Answers a finish task: the device is synchronised and everything was checked in so many seconds.
    #[pyo3(signature = (task, seconds=0.0, error=None))]
    fn finished(&self, py: Python<'_>, task: &Task, seconds: f64, error: Option<String>) {
        let result = error.map_or(Ok(seconds), Err);
        py.detach(|| self.node.finished(task.task.id, result));
    }

    /// Fails the running attempt for a reason outside of any task.
    fn report_failure(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.node.report_failure(reason));
    }

    /// What prewarm found: (name, class, reason).
    fn classes(&self) -> Vec<(String, &'static str, String)> {
        let name = |class| match class {
            LoaderClass::Xor => "xor",
            LoaderClass::Overwrite => "overwrite",
            LoaderClass::Skip => "skip",
            LoaderClass::Unsupported => "unsupported",
        };
        self.node.classes().into_iter().map(|tensor| (tensor.name, name(tensor.class), tensor.reason)).collect()
    }

    /// Closes the connection; `next_task` then returns a shutdown task.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.node.close());
    }
}
