//! Heap memory that is reached by address, as parameters and scratch are.
#![allow(dead_code, unsafe_code)]

use dcr_core::dtype::DType;
use dcr_core::interceptor::{Interceptor, ResidentRange, View};
use dcr_core::payload::{Encoding, Item, Positions};
use dcr_core::tensor::TensorMeta;

/// Bytes on the heap, used through their address only.
pub struct Memory {
    address: usize,
    len: usize,
    pointer: *mut [u8],
}

impl Memory {
    pub fn new(bytes: &[u8]) -> Memory {
        // Eight more bytes, so that an address can be odd.
        let pointer = Box::into_raw(bytes.to_vec().into_boxed_slice());
        Memory { address: pointer.cast::<u8>().expose_provenance(), len: bytes.len(), pointer }
    }

    pub fn address(&self) -> usize {
        self.address
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn bytes(&self) -> Vec<u8> {
        let at = std::ptr::with_exposed_provenance::<u8>(self.address);
        // SAFETY: the bytes were allocated in `new` and are initialised.
        unsafe { std::slice::from_raw_parts(at, self.len) }.to_vec()
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.address + at);
        // SAFETY: inside the allocation.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box in `new`.
        drop(unsafe { Box::from_raw(self.pointer) });
    }
}

/// An interceptor over one resident buffer, named in parts, and one scratch.
pub fn interceptor(resident: &Memory, parts: &[(&str, usize, usize)], scratch: &Memory) -> Interceptor {
    let ranges = parts.iter().map(|(name, start, len)| ResidentRange {
        start: resident.address() + start,
        len: *len,
        name: (*name).into(),
    });
    let mut interceptor = Interceptor::new();
    // SAFETY: both outlive the interceptor in every test, and nobody else uses them while it runs.
    unsafe {
        interceptor.set_resident(ranges.collect()).unwrap();
        interceptor.set_scratch(scratch.address(), scratch.len()).unwrap();
    }
    interceptor
}

pub fn view<'a>(data: usize, dtype: DType, sizes: &'a [i64], strides: &'a [i64]) -> View<'a> {
    View { data, dtype: Some(dtype), device_is_cpu: true, sizes, strides }
}

pub fn item(name: &str, shape: &[u64], dtype: DType, encoding: Encoding, at: &[u64], values: &[u8]) -> Item {
    let meta = TensorMeta::new(name, shape, dtype);
    Item { meta, encoding, positions: Positions::from_sorted(at.to_vec()), values: values.to_vec() }
}

pub fn words(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
