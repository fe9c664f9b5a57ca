//! Errors as Python sees them.

use std::time::Duration;

use dcr_node::NodeError;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;

create_exception!(
    dcr._native,
    RefitError,
    PyException,
    "A refit, or a part of it, could not be done; one line says what happened and what to do. \
     `weights` is \"untouched\", \"unusable\" or \"committed\": what the receivers' storage holds now. `timed_out` is True when a \
     wait ended because its time was up, and nothing else is wrong. `tensor` is the name of the tensor it is about, or None."
);

/// A node's error as a `RefitError`.
pub fn refit_error(py: Python<'_>, error: &NodeError) -> PyErr {
    let exception = RefitError::new_err(error.to_string());
    let weights = match error.weights() {
        dcr_protocol::WeightsAfter::Untouched => "untouched",
        dcr_protocol::WeightsAfter::Unusable => "unusable",
        dcr_protocol::WeightsAfter::Committed => "committed",
    };
    let value = exception.value(py);
    let timed_out = matches!(error, NodeError::Timeout { .. });
    let tensor = match error {
        NodeError::Tensor { tensor, .. } => Some(tensor.name.as_str()),
        _ => None,
    };
    let set = || {
        value.setattr("weights", weights)?;
        value.setattr("timed_out", timed_out)?;
        value.setattr("tensor", tensor)
    };
    match set() {
        Ok(()) => exception,
        Err(other) => other,
    }
}

/// A number of seconds from Python as a duration.
pub fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| PyValueError::new_err(format!("{value} is not a number of seconds")))
}
