//! Element types of canonical tensors and of resident storage.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// An element type. Only its width in bytes and, for placeholders, its NaN patterns matter to a refit: values are
/// compared and moved as stored bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    /// bfloat16, 2 bytes.
    #[serde(rename = "BF16")]
    Bf16,
    /// IEEE half precision, 2 bytes.
    #[serde(rename = "F16")]
    F16,
    /// IEEE single precision, 4 bytes.
    #[serde(rename = "F32")]
    F32,
    /// IEEE double precision, 8 bytes.
    #[serde(rename = "F64")]
    F64,
    /// 8-bit float, 4 exponent bits, finite only (`float8_e4m3fn`), 1 byte.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    /// 8-bit float, 5 exponent bits (`float8_e5m2`), 1 byte.
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    /// Signed integer, 1 byte.
    #[serde(rename = "I8")]
    I8,
    /// Signed integer, 2 bytes.
    #[serde(rename = "I16")]
    I16,
    /// Signed integer, 4 bytes.
    #[serde(rename = "I32")]
    I32,
    /// Signed integer, 8 bytes.
    #[serde(rename = "I64")]
    I64,
    /// Unsigned integer, 1 byte.
    #[serde(rename = "U8")]
    U8,
    /// Truth value, 1 byte.
    #[serde(rename = "BOOL")]
    Bool,
}

/// A dtype that dcr does not carry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("dtype {name:?} is not supported; supported are {}", supported())]
pub struct UnknownDType {
    /// The name as it was given.
    pub name: String,
}

fn supported() -> String {
    DType::ALL.map(DType::name).join(", ")
}

impl DType {
    /// Every dtype, in the order of the payload codes.
    pub const ALL: [DType; 12] = [
        DType::Bf16,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::Bool,
    ];

    /// The name as safetensors files write it, such as `BF16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bf16 => "BF16",
            DType::F16 => "F16",
            DType::F32 => "F32",
            DType::F64 => "F64",
            DType::F8E4M3 => "F8_E4M3",
            DType::F8E5M2 => "F8_E5M2",
            DType::I8 => "I8",
            DType::I16 => "I16",
            DType::I32 => "I32",
            DType::I64 => "I64",
            DType::U8 => "U8",
            DType::Bool => "BOOL",
        }
    }

    /// The dtype with this [`name`](DType::name).
    pub fn from_name(name: &str) -> Result<DType, UnknownDType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| UnknownDType { name: name.into() })
    }

    /// The dtype with this torch name, with or without `torch.` in front.
    pub fn from_torch(name: &str) -> Result<DType, UnknownDType> {
        Ok(match name.strip_prefix("torch.").unwrap_or(name) {
            "bfloat16" => DType::Bf16,
            "float16" | "half" => DType::F16,
            "float32" | "float" => DType::F32,
            "float64" | "double" => DType::F64,
            "float8_e4m3fn" => DType::F8E4M3,
            "float8_e5m2" => DType::F8E5M2,
            "int8" => DType::I8,
            "int16" | "short" => DType::I16,
            "int32" | "int" => DType::I32,
            "int64" | "long" => DType::I64,
            "uint8" => DType::U8,
            "bool" => DType::Bool,
            _ => return Err(UnknownDType { name: name.into() }),
        })
    }

    /// Bytes of one element: 1, 2, 4 or 8.
    pub const fn width(self) -> usize {
        match self {
            DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 | DType::Bool => 1,
            DType::Bf16 | DType::F16 | DType::I16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Whether the type has NaN patterns.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::Bf16 | DType::F16 | DType::F32 | DType::F64 | DType::F8E4M3 | DType::F8E5M2)
    }

    /// The code in a payload, see `docs/payload-format.md`.
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// The dtype with this payload code.
    pub const fn from_code(code: u8) -> Option<DType> {
        if code == 0 || code as usize > DType::ALL.len() {
            return None;
        }
        Some(DType::ALL[code as usize - 1])
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_codes_and_serde_agree() {
        for (index, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(DType::from_name(dtype.name()), Ok(dtype));
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(usize::from(dtype.code()), index + 1);
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::from_code(13), None);
        assert!(DType::from_name("bf16").is_err());
    }

    #[test]
    fn codes_are_pinned() {
        let codes = DType::ALL.map(|dtype| (dtype.name(), dtype.code(), dtype.width()));
        assert_eq!(
            codes,
            [
                ("BF16", 1, 2),
                ("F16", 2, 2),
                ("F32", 3, 4),
                ("F64", 4, 8),
                ("F8_E4M3", 5, 1),
                ("F8_E5M2", 6, 1),
                ("I8", 7, 1),
                ("I16", 8, 2),
                ("I32", 9, 4),
                ("I64", 10, 8),
                ("U8", 11, 1),
                ("BOOL", 12, 1),
            ]
        );
    }

    #[test]
    fn torch_names_with_and_without_prefix() {
        assert_eq!(DType::from_torch("torch.bfloat16"), Ok(DType::Bf16));
        assert_eq!(DType::from_torch("bfloat16"), Ok(DType::Bf16));
        assert_eq!(DType::from_torch("torch.float8_e4m3fn"), Ok(DType::F8E4M3));
        let error = DType::from_torch("torch.complex64").unwrap_err().to_string();
        assert!(error.contains("torch.complex64") && error.contains("BF16"), "{error}");
    }
}
