//! `Interceptor`: decides and performs the native loader's intercepted copies; `classify`: what prewarm found.
#![allow(unsafe_code)]

use std::sync::Arc;

use dcr_core::classify::{DryRun, OtherWrite, RecordedCopy, classify as classify_runs};
use dcr_core::dtype::DType;
use dcr_core::interceptor::{self, ItemOutcome, ResidentRange, Verdict, View};
use dcr_core::tensor::TensorMeta;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::item::Item;

/// Performs the intercepted copies of one receiver, one item at a time.
#[pyclass(frozen, module = "dcr._native")]
pub struct Interceptor {
    /// Shared with the C++ hook while its guard is held.
    pub inner: Arc<Mutex<interceptor::Interceptor>>,
}

/// What happened to one item.
#[pyclass(frozen, module = "dcr._native")]
pub struct Outcome {
    outcome: ItemOutcome,
}

#[pymethods]
impl Outcome {
    /// Copies performed.
    #[getter]
    fn copies(&self) -> u64 {
        self.outcome.copies
    }

    /// Resident elements that active entries were applied to.
    #[getter]
    fn elements(&self) -> u64 {
        self.outcome.elements
    }

    /// Names of the resident tensors that copies were performed on.
    #[getter]
    fn written(&self) -> Vec<String> {
        self.outcome.written.clone()
    }

    /// One line for each broken rule; not empty means that the attempt has failed.
    #[getter]
    fn violations(&self) -> Vec<String> {
        self.outcome.violations.clone()
    }
}

fn wrong(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pymethods]
impl Interceptor {
    /// An interceptor without memory: every copy passes through.
    #[new]
    fn new() -> Self {
        Self { inner: Arc::default() }
    }

    /// The parameters and buffers of the serving model: (address, bytes, name). They must stay where they are until
    /// the next call.
    fn set_resident(&self, ranges: Vec<(usize, usize, String)>) -> PyResult<()> {
        let ranges = ranges.into_iter().map(|(start, len, name)| ResidentRange { start, len, name }).collect();
        // SAFETY: the caller vouches for the model's memory; it checks addresses before each attempt.
        unsafe { self.inner.lock().set_resident(ranges) }.map_err(wrong)
    }

    /// The scratch buffer: host memory that the caller keeps alive until the next call.
    fn set_scratch(&self, start: usize, len: usize) -> PyResult<()> {
        // SAFETY: the caller owns the buffer and hands it to the loader alone.
        unsafe { self.inner.lock().set_scratch(start, len) }.map_err(wrong)
    }

    /// Starts an attempt: forgets the violation of the one before.
    fn begin_attempt(&self) {
        self.inner.lock().begin_attempt();
    }

    /// Checks an item and fills scratch with it.
    fn begin_item(&self, py: Python<'_>, item: &Item) -> PyResult<()> {
        py.detach(|| self.inner.lock().begin_item(item.inner())).map_err(wrong)
    }

    /// Ends the item and reports.
    fn end_item(&self, py: Python<'_>) -> Outcome {
        Outcome { outcome: py.detach(|| self.inner.lock().end_item()) }
    }

    /// The first violation of the attempt.
    #[getter]
    fn failure(&self) -> Option<String> {
        self.inner.lock().failure().map(str::to_owned)
    }

    /// Decides on one copy; true when it was performed or refused here and torch must not perform it. Strides are in
    /// elements, dtypes are torch's names, None for one that dcr does not know.
    #[expect(clippy::too_many_arguments, reason = "two views, as torch describes them")]
    fn on_copy(
        &self,
        dst_ptr: usize,
        dst_dtype: Option<&str>,
        dst_on_cpu: bool,
        dst_sizes: Vec<i64>,
        dst_strides: Vec<i64>,
        src_ptr: usize,
        src_dtype: Option<&str>,
        src_on_cpu: bool,
        src_sizes: Vec<i64>,
        src_strides: Vec<i64>,
    ) -> bool {
        let dtype = |name: Option<&str>| name.and_then(|name| DType::from_torch(name).ok());
        let dst = View {
            data: dst_ptr,
            dtype: dtype(dst_dtype),
            device_is_cpu: dst_on_cpu,
            sizes: &dst_sizes,
            strides: &dst_strides,
        };
        let src = View {
            data: src_ptr,
            dtype: dtype(src_dtype),
            device_is_cpu: src_on_cpu,
            sizes: &src_sizes,
            strides: &src_strides,
        };
        self.inner.lock().on_copy(&dst, &src) == Verdict::Handled
    }
}

/// A copy into resident storage that a dry run recorded: resident name; destination address, dtype, sizes, strides;
/// byte offset of the source in scratch or None; source dtype, sizes, strides.
type CopyRecord = (String, usize, Option<String>, Vec<i64>, Vec<i64>, Option<u64>, Option<String>, Vec<i64>, Vec<i64>);
/// Another write into resident storage: operator, resident name, address, bytes.
type WriteRecord = (String, String, usize, usize);

/// Classifies the tensors of a dry run (table A.2). Each is (name, shape, dtype, copies, writes, reported as loaded);
/// the result is (name, class, reason) in the same order.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "one tuple a tensor, as the docs say")]
pub fn classify(
    py: Python<'_>,
    runs: Vec<(String, Vec<u64>, String, Vec<CopyRecord>, Vec<WriteRecord>, bool)>,
) -> PyResult<Vec<(String, &'static str, String)>> {
    let dtype = |name: Option<String>| name.and_then(|name| DType::from_torch(&name).ok());
    let runs = runs.into_iter().map(|(name, shape, kind, copies, writes, reported)| {
        let kind = DType::from_name(&kind).map_err(wrong)?;
        let copies = copies.into_iter().map(|copy| {
            let (resident, dst, dst_dtype, dst_sizes, dst_strides, src_offset, src_dtype, src_sizes, src_strides) =
                copy;
            RecordedCopy {
                resident,
                dst,
                dst_dtype: dtype(dst_dtype),
                dst_sizes,
                dst_strides,
                src_offset,
                src_dtype: dtype(src_dtype),
                src_sizes,
                src_strides,
            }
        });
        let writes =
            writes.into_iter().map(|(op, resident, start, len)| OtherWrite { op, resident, start, len }).collect();
        Ok(DryRun { meta: TensorMeta { name, shape, dtype: kind }, copies: copies.collect(), writes, reported })
    });
    let runs = runs.collect::<PyResult<Vec<_>>>()?;
    let classes = py.detach(|| classify_runs(&runs));
    let classes = runs.into_iter().zip(classes);
    Ok(classes.map(|(run, class)| (run.meta.name, class.name(), class.reason().to_owned())).collect())
}
