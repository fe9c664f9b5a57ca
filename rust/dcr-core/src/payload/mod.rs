//! Payload format version 1 (appendix D; `docs/payload-format.md` is the specification).
//!
//! A payload carries one owner's items for some tensors: a fixed header of [`HEADER_LEN`] bytes and one
//! zstd-compressed body of metadata, locations and values. [`decode`] is strict: every offset and length is
//! checked, nothing may be left over, and no more memory is used than the declared length and the caller's
//! limit allow. Malformed bytes give a [`PayloadError`], never a panic.
//!
//! The digest covers the compressed body and not the header. Whoever receives a payload over a network must
//! authenticate the first [`HEADER_LEN`] bytes (attempt, owner, sequence, digest) separately: a flipped bit in an
//! identifier decodes to another identifier.

mod body;
mod decode;
mod encode;
mod error;
mod header;
mod item;

use blake2::digest::consts::U16;
use blake2::{Blake2b, Digest};

pub use decode::{DEFAULT_BODY_LIMIT, decode, decode_with_limit};
pub use encode::encode;
pub use error::{ItemError, PayloadError};
pub use header::{CODEC_ZSTD, FORMAT_VERSION, HEADER_LEN, Header, MAGIC, peek};
pub use item::{Encoding, Item, Payload, PayloadId, Positions};

/// BLAKE2b-128 (unkeyed), the digest of a compressed body.
pub fn digest(bytes: &[u8]) -> [u8; 16] {
    Blake2b::<U16>::digest(bytes).into()
}
