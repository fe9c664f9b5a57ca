//! The ways in which a payload can be wrong.

use thiserror::Error;

use super::header::{CODEC_ZSTD, FORMAT_VERSION, HEADER_LEN};
use crate::tensor::TensorError;

/// What is wrong with an item, whether about to be encoded or just decoded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ItemError {
    /// Name, rank or size of the tensor.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A run reaches beyond the tensor.
    #[error("tensor {name:?}: a run of {count} elements from {start} does not fit in {numel} elements")]
    RunOutside {
        /// The tensor.
        name: String,
        /// First element of the run.
        start: u64,
        /// Elements in the run.
        count: u64,
        /// Elements of the tensor.
        numel: u64,
    },
    /// A position beyond the tensor.
    #[error("tensor {name:?}: position {position} is outside its {numel} elements")]
    Outside {
        /// The tensor.
        name: String,
        /// The position.
        position: u64,
        /// Elements of the tensor.
        numel: u64,
    },
    /// Positions are not strictly increasing.
    #[error("tensor {name:?}: position {position} follows {previous}; positions must increase")]
    NotIncreasing {
        /// The tensor.
        name: String,
        /// The earlier position.
        previous: u64,
        /// The one after it.
        position: u64,
    },
    /// The value bytes do not match the positions.
    #[error("tensor {name:?}: {len} bytes of values for {count} positions; {expected} are needed")]
    ValueBytes {
        /// The tensor.
        name: String,
        /// Bytes there are.
        len: u64,
        /// Bytes needed.
        expected: u64,
        /// Positions.
        count: u64,
    },
    /// A dense item does not name every element.
    #[error("tensor {name:?}: a dense item with {count} of {numel} elements; it must hold all of them")]
    DenseIncomplete {
        /// The tensor.
        name: String,
        /// Elements it names.
        count: u64,
        /// Elements of the tensor.
        numel: u64,
    },
}

/// Why a payload cannot be encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PayloadError {
    /// Fewer bytes than a header.
    #[error("{len} bytes are too few for a payload: its header alone is {HEADER_LEN}")]
    Short {
        /// Bytes given.
        len: usize,
    },
    /// The first bytes are not the payload magic.
    #[error("not a dcr payload: it starts with {found:02x?} instead of \"DCRP\"")]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// Another version of the format.
    #[error("payload format version {version} is not supported; this build reads version {FORMAT_VERSION}")]
    Version {
        /// The version found.
        version: u16,
    },
    /// The header length field is not that of this version.
    #[error("the payload declares a header of {len} bytes; version {FORMAT_VERSION} has {HEADER_LEN}")]
    HeaderLength {
        /// The length declared.
        len: u16,
    },
    /// A codec this build does not know.
    #[error("payload codec {codec} is not supported; this build knows {CODEC_ZSTD} (zstd)")]
    Codec {
        /// The codec found.
        codec: u16,
    },
    /// Reserved bytes are not zero.
    #[error("reserved bytes {place} hold {value:#x}; they must be zero")]
    Reserved {
        /// Where: "of the header" or "of an item".
        place: &'static str,
        /// Their value.
        value: u16,
    },
    /// The bytes end before the body does, or go on after it.
    #[error("the payload's compressed body is {found} bytes; its header declares {declared}")]
    BodyLength {
        /// Bytes after the header.
        found: u64,
        /// Bytes declared.
        declared: u64,
    },
    /// The body's digest differs from the header's.
    #[error("the payload's body does not match its digest; it was damaged on the way")]
    Digest,
    /// The declared uncompressed length is above the limit.
    #[error("the payload declares {declared} bytes when uncompressed; the limit is {limit}")]
    TooLarge {
        /// Bytes declared.
        declared: u64,
        /// The caller's limit.
        limit: u64,
    },
    /// There is no memory for a declared length.
    #[error("no memory for {bytes} bytes of a payload")]
    Memory {
        /// Bytes wanted.
        bytes: u64,
    },
    /// The body is not one zstd frame.
    #[error("the payload's body cannot be decompressed: {reason}")]
    Decompress {
        /// What zstd says.
        reason: String,
    },
    /// Bytes follow the zstd frame.
    #[error("the zstd frame ends after {frame} of the {declared} bytes of the payload's body")]
    AfterFrame {
        /// Bytes of the frame.
        frame: u64,
        /// Bytes of the body.
        declared: u64,
    },
    /// The uncompressed body does not have the declared length.
    #[error("the payload's body has {found} bytes when uncompressed; its header declares {declared}")]
    UncompressedLength {
        /// Bytes found.
        found: u64,
        /// Bytes declared.
        declared: u64,
    },
    /// The lengths of metadata, locations and values do not add up to the body.
    #[error(
        "metadata ({metadata} bytes), locations ({locations}) and values ({values}) do not fill the body's {body} bytes"
    )]
    Sections {
        /// Bytes of metadata declared.
        metadata: u64,
        /// Bytes of locations declared.
        locations: u64,
        /// Bytes of values declared.
        values: u64,
        /// Bytes of the body.
        body: u64,
    },
    /// A field reaches beyond its section.
    #[error("item {item}: the {section} end inside its {field}")]
    Truncated {
        /// Number of the item, from 0.
        item: u32,
        /// The section.
        section: &'static str,
        /// The field that did not fit.
        field: &'static str,
    },
    /// A section has bytes that no item uses.
    #[error("{left} bytes are left over in the {section}")]
    LeftOver {
        /// The section.
        section: &'static str,
        /// Bytes left.
        left: u64,
    },
    /// An offset does not follow the previous item's bytes.
    #[error("tensor {name:?}: its {section} start at {found}; they must follow the item before, at {expected}")]
    Offset {
        /// The tensor.
        name: String,
        /// The section.
        section: &'static str,
        /// The offset found.
        found: u64,
        /// The only valid one.
        expected: u64,
    },
    /// A name is not UTF-8.
    #[error("item {item}: its tensor name is not UTF-8")]
    NameEncoding {
        /// Number of the item, from 0.
        item: u32,
    },
    /// An unknown dtype code.
    #[error("tensor {name:?}: unknown dtype code {code}")]
    DType {
        /// The tensor.
        name: String,
        /// The code.
        code: u8,
    },
    /// An unknown encoding code.
    #[error("tensor {name:?}: unknown encoding code {code}")]
    Encoding {
        /// The tensor.
        name: String,
        /// The code.
        code: u8,
    },
    /// An unknown location type.
    #[error("tensor {name:?}: unknown location type {code}")]
    LocationType {
        /// The tensor.
        name: String,
        /// The code.
        code: u8,
    },
    /// A run of no elements that does not start at 0.
    #[error("tensor {name:?}: a run of no elements starts at {start}; it must start at 0")]
    EmptyRun {
        /// The tensor.
        name: String,
        /// Its start.
        start: u64,
    },
    /// A gap leads beyond every possible position.
    #[error("tensor {name:?}: its gaps add up to more than a position can be")]
    GapOverflow {
        /// The tensor.
        name: String,
    },
    /// The same tensor twice.
    #[error("tensor {name:?} occurs twice in one payload")]
    Duplicate {
        /// The tensor.
        name: String,
    },
    /// More items than can be counted.
    #[error("{items} items do not fit in one payload")]
    TooManyItems {
        /// Items given.
        items: usize,
    },
    /// zstd failed while compressing.
    #[error("the payload's body cannot be compressed: {reason}")]
    Compress {
        /// What zstd says.
        reason: String,
    },
    /// An item is wrong in itself.
    #[error(transparent)]
    Item(#[from] ItemError),
}

impl From<TensorError> for PayloadError {
    fn from(error: TensorError) -> Self {
        PayloadError::Item(ItemError::Tensor(error))
    }
}
