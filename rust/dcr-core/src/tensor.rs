//! What is known of a canonical tensor besides its values.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::dtype::DType;

/// Longest name of a canonical tensor, in bytes of UTF-8.
pub const MAX_NAME_LEN: usize = 4096;
/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 16;

/// Name, shape and dtype of a canonical tensor. Elements are counted in row-major order ("flat index").
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorMeta {
    /// The canonical name, as in a checkpoint.
    pub name: String,
    /// Sizes of the dimensions; empty for a scalar.
    pub shape: Vec<u64>,
    /// Type of every element.
    pub dtype: DType,
}

/// Why a tensor's description cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TensorError {
    /// The name has no characters.
    #[error("a tensor with shape {shape:?} has an empty name")]
    EmptyName {
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The name is longer than [`MAX_NAME_LEN`].
    #[error("the tensor name that starts {start:?} is {len} bytes long; {MAX_NAME_LEN} are allowed")]
    LongName {
        /// First characters of the name.
        start: String,
        /// Its length in bytes.
        len: usize,
    },
    /// More than [`MAX_RANK`] dimensions.
    #[error("tensor {name:?} has {rank} dimensions; {MAX_RANK} are allowed")]
    Rank {
        /// The tensor.
        name: String,
        /// Number of its dimensions.
        rank: usize,
    },
    /// The number of elements or bytes is not representable.
    #[error("tensor {name:?} of shape {shape:?} and dtype {dtype} is too large to address")]
    TooLarge {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its dtype.
        dtype: DType,
    },
}

impl TensorMeta {
    /// Describes a tensor; call [`validate`](TensorMeta::validate) before use.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<u64>>, dtype: DType) -> TensorMeta {
        TensorMeta { name: name.into(), shape: shape.into(), dtype }
    }

    /// Number of elements: the product of the shape, 1 for a scalar.
    pub fn numel(&self) -> Result<u64, TensorError> {
        // A zero anywhere makes the tensor empty, even where the other sizes alone would overflow.
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let product = self.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        product.ok_or_else(|| self.too_large())
    }

    /// Number of bytes of all elements; at most `isize::MAX`, the most that one allocation can hold.
    pub fn nbytes(&self) -> Result<usize, TensorError> {
        let bytes = self.numel()?.checked_mul(self.dtype.width() as u64);
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(|| self.too_large())
    }

    /// Checks name, rank and size.
    pub fn validate(&self) -> Result<(), TensorError> {
        if self.name.is_empty() {
            return Err(TensorError::EmptyName { shape: self.shape.clone() });
        }
        if self.name.len() > MAX_NAME_LEN {
            let start = self.name.chars().take(40).collect();
            return Err(TensorError::LongName { start, len: self.name.len() });
        }
        if self.shape.len() > MAX_RANK {
            return Err(TensorError::Rank { name: self.name.clone(), rank: self.shape.len() });
        }
        self.nbytes().map(|_| ())
    }

    fn too_large(&self) -> TensorError {
        TensorError::TooLarge { name: self.name.clone(), shape: self.shape.clone(), dtype: self.dtype }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        assert_eq!(TensorMeta::new("a", [2, 3], DType::Bf16).numel(), Ok(6));
        assert_eq!(TensorMeta::new("a", [2, 3], DType::F64).nbytes(), Ok(48));
        assert_eq!(TensorMeta::new("a", [], DType::U8).numel(), Ok(1));
        assert_eq!(TensorMeta::new("a", [u64::MAX, 0, u64::MAX], DType::U8).numel(), Ok(0));
        let huge = TensorMeta::new("a", [1 << 32, 1 << 32], DType::U8);
        assert!(matches!(huge.numel(), Err(TensorError::TooLarge { .. })));
        let bytes = TensorMeta::new("a", [1 << 61], DType::F64);
        assert_eq!(bytes.numel(), Ok(1 << 61));
        assert!(matches!(bytes.nbytes(), Err(TensorError::TooLarge { .. })));
        let just_over = TensorMeta::new("a", [1 << 63], DType::U8);
        assert!(matches!(just_over.validate(), Err(TensorError::TooLarge { .. })));
    }

    #[test]
    fn names_and_ranks_are_checked() {
        assert!(matches!(TensorMeta::new("", [1], DType::U8).validate(), Err(TensorError::EmptyName { .. })));
        assert_eq!(TensorMeta::new("x".repeat(4096), [1], DType::U8).validate(), Ok(()));
        let long = TensorMeta::new("é".repeat(2049), [1], DType::U8).validate().unwrap_err();
        assert!(matches!(&long, TensorError::LongName { len: 4098, .. }), "{long}");
        assert_eq!(TensorMeta::new("x", vec![1; 16], DType::U8).validate(), Ok(()));
        let rank = TensorMeta::new("x", vec![1; 17], DType::U8).validate();
        assert!(matches!(rank, Err(TensorError::Rank { rank: 17, .. })));
    }
}
