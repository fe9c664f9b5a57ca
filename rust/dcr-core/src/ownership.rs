//! Which training rank owns a canonical tensor.

use crate::payload::digest;

/// The owner of a canonical tensor: a number below `owners`, equal on every machine and in every release.
///
/// It is the first eight bytes of the name's BLAKE2b-128, read little-endian, modulo `owners`. With `owners` 0 or 1
/// the answer is 0.
pub fn owner_of(name: &str, owners: u32) -> u32 {
    let [a, b, c, d, e, f, g, h, ..] = digest(name.as_bytes());
    let hash = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    (hash % u64::from(owners.max(1))) as u32
}
