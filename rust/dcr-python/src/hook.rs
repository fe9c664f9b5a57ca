//! The C++ `copy_` hook, for Python.

use std::sync::Arc;

use dcr_hook::Guard;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::interceptor::Interceptor;

/// Registers the hook for a dispatch key of the running torch: None when it works, else the reason in one line.
#[pyfunction]
pub fn install_copy_hook(key_name: &str, key_number: u16) -> Option<String> {
    dcr_hook::install(key_name, key_number).err().map(|error| error.to_string())
}

/// Hands every `copy_` of the thread that makes it to an interceptor, until it is closed on the same thread.
#[pyclass(unsendable, module = "dcr._native")]
pub struct CopyHookGuard {
    guard: Option<Guard>,
}

#[pymethods]
impl CopyHookGuard {
    #[new]
    fn new(interceptor: &Interceptor) -> PyResult<Self> {
        let guard = Guard::enter(Arc::clone(&interceptor.inner));
        guard.map(|guard| Self { guard: Some(guard) }).map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Ends the interception.
    fn close(&mut self) {
        self.guard = None;
    }
}
