//! Host tensors as memory.
#![allow(unsafe_code)]

use dcr_core::dtype::DType;
use dcr_core::tensor::TensorMeta;
use tch::{Device, Kind, Tensor};

use crate::TorchError;

/// A contiguous host tensor and its stored bits.
pub struct HostTensor<'a> {
    /// Name, shape and dtype.
    pub meta: TensorMeta,
    /// The stored bits, little-endian.
    pub bytes: &'a [u8],
}

/// The memory of a contiguous tensor on the CPU, without a copy.
pub fn host_tensor<'a>(name: &str, tensor: &'a Tensor) -> Result<HostTensor<'a>, TorchError> {
    let wrong = |reason: String| TorchError::Tensor { name: name.to_owned(), reason };
    if tensor.device() != Device::Cpu {
        return Err(wrong(format!("it is on {:?}, not on the CPU", tensor.device())));
    }
    if !tensor.is_contiguous() {
        return Err(wrong("it is not contiguous".to_owned()));
    }
    let dtype = match tensor.kind() {
        Kind::BFloat16 => DType::Bf16,
        Kind::Half => DType::F16,
        Kind::Float => DType::F32,
        Kind::Double => DType::F64,
        Kind::Float8e4m3fn => DType::F8E4M3,
        Kind::Float8e5m2 => DType::F8E5M2,
        Kind::Int8 => DType::I8,
        Kind::Int16 => DType::I16,
        Kind::Int => DType::I32,
        Kind::Int64 => DType::I64,
        Kind::Uint8 => DType::U8,
        Kind::Bool => DType::Bool,
        other => return Err(wrong(format!("its kind {other:?} is not supported"))),
    };
    let shape = tensor.size().into_iter().map(|size| size.unsigned_abs()).collect::<Vec<_>>();
    let meta = TensorMeta::new(name, shape, dtype);
    let length = meta.nbytes().map_err(|error| wrong(error.to_string()))?;
    let bytes = match length {
        0 => &[][..],
        // SAFETY: contiguous host memory of `length` bytes that lives as long as the tensor, which is borrowed.
        _ => unsafe { std::slice::from_raw_parts(tensor.data_ptr() as *const u8, length) },
    };
    Ok(HostTensor { meta, bytes })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn stored_bits_are_seen_without_a_copy() {
        let tensor = Tensor::from_slice(&[1.0f32, -0.0, f32::NAN]).to_kind(Kind::BFloat16);
        let host = host_tensor("w", &tensor).unwrap();
        assert_eq!((host.meta.shape.as_slice(), host.meta.dtype), (&[3][..], DType::Bf16));
        assert_eq!(&host.bytes[..4], &[0x80, 0x3f, 0x00, 0x80]);
        assert_eq!(host.bytes.as_ptr() as usize, tensor.data_ptr() as usize);
        assert!(host_tensor("w", &tensor.reshape([3, 1]).expand([3, 2], true)).is_err());
    }
}
