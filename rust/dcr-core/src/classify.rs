//! Which encoding each canonical tensor may use on this receiver, decided from a dry run of the native loader.
//!
//! During prewarm the loader runs once and its writes into resident storage are recorded instead of performed. Table
//! A.2 says which of them an XOR or overwrite item survives.

use crate::dtype::DType;
use crate::tensor::TensorMeta;

/// A `copy_` into resident storage, recorded in a dry run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedCopy {
    /// Resident tensor written to, for reports.
    pub resident: String,
    /// Address of the destination's element 0.
    pub dst: usize,
    /// Destination dtype; `None` if dcr does not know it.
    pub dst_dtype: Option<DType>,
    /// Destination sizes.
    pub dst_sizes: Vec<i64>,
    /// Destination strides, in elements.
    pub dst_strides: Vec<i64>,
    /// Bytes from the start of the scratch to the source's element 0; `None` if the source does not share the
    /// scratch's storage.
    pub src_offset: Option<u64>,
    /// Source dtype; `None` if dcr does not know it.
    pub src_dtype: Option<DType>,
    /// Source sizes.
    pub src_sizes: Vec<i64>,
    /// Source strides, in elements.
    pub src_strides: Vec<i64>,
}

/// Another operator that wrote into resident storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherWrite {
    /// Operator name, such as `aten::fill_.Scalar`.
    pub op: String,
    /// Resident tensor written to, for reports.
    pub resident: String,
    /// Address of the first byte written.
    pub start: usize,
    /// Bytes from the first to the last written.
    pub len: usize,
}

/// What the loader did with one canonical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DryRun {
    /// The tensor.
    pub meta: TensorMeta,
    /// Its copies into resident storage, in order.
    pub copies: Vec<RecordedCopy>,
    /// Its other writes into resident storage.
    pub writes: Vec<OtherWrite>,
    /// Whether the loader reported the tensor as loaded.
    pub reported: bool,
}

/// What may be sent for a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// XOR masks and overwrites.
    Xor,
    /// Overwrites only.
    Overwrite,
    /// Anything: the loader skips the tensor on this rank.
    Skip,
    /// Nothing; the reason in words.
    Unsupported(String),
}

impl Class {
    /// The name used between receiver and coordinator.
    pub const fn name(&self) -> &'static str {
        match self {
            Class::Xor => "xor",
            Class::Overwrite => "overwrite",
            Class::Skip => "skip",
            Class::Unsupported(_) => "unsupported",
        }
    }

    /// Why a tensor is unsupported; empty for the other classes.
    pub fn reason(&self) -> &str {
        match self {
            Class::Unsupported(reason) => reason,
            _ => "",
        }
    }
}

/// The class of each tensor, in the order given.
pub fn classify(runs: &[DryRun]) -> Vec<Class> {
    rules::classify(runs)
}

mod rules;
