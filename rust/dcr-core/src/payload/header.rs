//! The fixed header.

use super::error::PayloadError;
use super::item::PayloadId;

/// Bytes of the header in front of the compressed body.
pub const HEADER_LEN: usize = 72;
/// First bytes of every payload.
pub const MAGIC: [u8; 4] = *b"DCRP";
/// The version of the format that this crate writes and reads.
pub const FORMAT_VERSION: u16 = 1;
/// The body is one zstd frame.
pub const CODEC_ZSTD: u16 = 1;

/// The fixed header, readable without decompressing anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The payload's identifiers.
    pub id: PayloadId,
    /// Codec of the body, [`CODEC_ZSTD`].
    pub codec: u16,
    /// Number of items.
    pub items: u32,
    /// Bytes of the body before compression.
    pub uncompressed_len: u64,
    /// Bytes of the body in the payload.
    pub compressed_len: u64,
    /// BLAKE2b-128 of the compressed body.
    pub digest: [u8; 16],
}

impl Header {
    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&FORMAT_VERSION.to_le_bytes());
        put(&(HEADER_LEN as u16).to_le_bytes());
        put(&self.id.attempt);
        put(&self.id.owner.to_le_bytes());
        put(&self.id.sequence.to_le_bytes());
        put(&self.codec.to_le_bytes());
        put(&0u16.to_le_bytes());
        put(&self.items.to_le_bytes());
        put(&self.uncompressed_len.to_le_bytes());
        put(&self.compressed_len.to_le_bytes());
        put(&self.digest);
        bytes
    }
}

/// Reads the header at the start of `bytes`. Neither the length of what follows nor the digest is checked: that is
/// [`decode`](super::decode)'s work.
pub fn peek(bytes: &[u8]) -> Result<Header, PayloadError> {
    let Some((header, _)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        return Err(PayloadError::Short { len: bytes.len() });
    };
    let found = field::<4>(header, 0);
    if found != MAGIC {
        return Err(PayloadError::Magic { found });
    }
    let version = u16::from_le_bytes(field(header, 4));
    if version != FORMAT_VERSION {
        return Err(PayloadError::Version { version });
    }
    let len = u16::from_le_bytes(field(header, 6));
    if usize::from(len) != HEADER_LEN {
        return Err(PayloadError::HeaderLength { len });
    }
    let codec = u16::from_le_bytes(field(header, 32));
    if codec != CODEC_ZSTD {
        return Err(PayloadError::Codec { codec });
    }
    let value = u16::from_le_bytes(field(header, 34));
    if value != 0 {
        return Err(PayloadError::Reserved { place: "of the header", value });
    }
    Ok(Header {
        id: PayloadId {
            attempt: field(header, 8),
            owner: u32::from_le_bytes(field(header, 24)),
            sequence: u32::from_le_bytes(field(header, 28)),
        },
        codec,
        items: u32::from_le_bytes(field(header, 36)),
        uncompressed_len: u64::from_le_bytes(field(header, 40)),
        compressed_len: u64::from_le_bytes(field(header, 48)),
        digest: field(header, 56),
    })
}

/// `N` bytes from the constant offset `at`, which lies inside the header.
fn field<const N: usize>(header: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}
