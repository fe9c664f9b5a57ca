//! Tensors that Python hands over as (pointer, length, dtype, shape).
#![allow(unsafe_code)]

use dcr_core::dtype::DType;
use dcr_core::tensor::TensorMeta;
use dcr_node::Offer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A tensor as Python describes it: name, shape, dtype, data pointer, bytes.
pub type Described = (String, Vec<u64>, String, usize, usize);

/// Checks what Python describes; a `ValueError` carries the name of the tensor in its attribute `tensor`.
pub fn host_tensors(py: Python<'_>, described: Vec<Described>) -> PyResult<Vec<HostTensor>> {
    let check = |(name, shape, dtype, pointer, length): Described| {
        HostTensor::new(name.clone(), shape, &dtype, pointer, length).inspect_err(|error| {
            // Without the attribute the message still names the tensor.
            let _ = error.value(py).setattr("tensor", name);
        })
    };
    described.into_iter().map(check).collect()
}

/// The tensors with their bytes.
///
/// # Safety
/// As [`HostTensor::bytes`], for each of them.
pub unsafe fn offers(tensors: &[HostTensor]) -> Vec<Offer<'_>> {
    // SAFETY: the caller's promise.
    tensors.iter().map(|tensor| Offer { meta: tensor.meta.clone(), bytes: unsafe { tensor.bytes() } }).collect()
}

/// A dtype by torch's or safetensors' name.
pub fn parse_dtype(name: &str) -> Result<DType, dcr_core::dtype::UnknownDType> {
    DType::from_torch(name).or_else(|_| DType::from_name(name))
}

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
        let dtype = parse_dtype(dtype).map_err(|error| PyValueError::new_err(format!("tensor `{name}`: {error}")))?;
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
