//! The C++ `copy_` hook, for Python.

use std::sync::Arc;

use dcr_core::interceptor;
use dcr_hook::{Guard, HookError};
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::interceptor::Interceptor;

/// Registers the hook for a dispatch key of the running torch: None when it works, else the reason in one line.
#[pyfunction]
pub fn install_copy_hook(key_name: &str, key_number: u16) -> Option<String> {
    dcr_hook::install(key_name, key_number).err().map(|error| error.to_string())
}

/// A context manager: hands every `copy_` of the thread that enters it to an interceptor.
#[pyclass(unsendable, module = "dcr._native")]
pub struct CopyHookGuard {
    interceptor: Arc<Mutex<interceptor::Interceptor>>,
    guard: Option<Guard>,
}

fn failed(error: HookError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

#[pymethods]
impl CopyHookGuard {
    #[new]
    fn new(interceptor: &Interceptor) -> Self {
        Self { interceptor: Arc::clone(&interceptor.inner), guard: None }
    }

    fn __enter__(mut this: PyRefMut<'_, Self>) -> PyResult<PyRefMut<'_, Self>> {
        let guard = Guard::enter(Arc::clone(&this.interceptor)).map_err(failed)?;
        this.guard = Some(guard);
        Ok(this)
    }

    /// Ends the interception, after an exception too. Raises RuntimeError when a fault in dcr left copies undone.
    fn __exit__(
        &mut self,
        _type: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.guard.take().map_or(Ok(()), Guard::close).map_err(failed)
    }
}
