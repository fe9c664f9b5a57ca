//! Tensors that Python hands over as (pointer, length, dtype, shape).
#![allow(unsafe_code)]

use dcr_core::dtype::DType;
use dcr_core::tensor::TensorMeta;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A contiguous host tensor that belongs to Python and is kept alive by the caller during the call.
pub struct HostTensor {
    /// Its metadata.
    pub meta: TensorMeta,
    pointer: usize,
    length: usize,
}

impl HostTensor {
    /// Checks that the declared bytes are what dtype and shape take.
    pub fn new(name: String, shape: Vec<u64>, dtype: &str, pointer: usize, length: usize) -> PyResult<Self> {
        let dtype = DType::from_torch(dtype)
            .or_else(|_| DType::from_name(dtype))
            .map_err(|error| PyValueError::new_err(format!("tensor `{name}`: {error}")))?;
        let meta = TensorMeta { name, shape, dtype };
        let wrong = |reason: String| PyValueError::new_err(format!("tensor `{}`: {reason}", meta.name));
        let bytes = meta.nbytes().map_err(|error| wrong(error.to_string()))?;
        if bytes != length {
            return Err(wrong(format!("{length} bytes are given but {:?} {} take {bytes}", meta.shape, dtype.name())));
        }
        if pointer == 0 && length != 0 {
            return Err(wrong("its memory is not on the host (null pointer)".to_owned()));
        }
        Ok(Self { meta, pointer, length })
    }

    /// The stored bits.
    ///
    /// # Safety
    /// The memory that was declared must be readable and unchanged while the slice is used.
    pub unsafe fn bytes(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: `new` checked that the pointer is not null; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.pointer as *const u8, self.length) }
    }
}
