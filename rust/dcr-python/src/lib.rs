//! The Python module `dcr._native`.
use pyo3::prelude::*;

/// `dcr._native`.
#[pymodule]
fn _native(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
