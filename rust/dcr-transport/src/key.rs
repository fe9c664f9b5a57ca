//! The run key: whoever can send a payload can change the model, so every frame carries a tag made with it.

use std::{env, fmt, fs};

use blake2::Blake2bMac;
use blake2::digest::consts::U16;
use blake2::digest::{KeyInit, Mac};

use crate::{RelayAddress, TransportError};

/// Environment variable that holds the path of the key file.
pub const KEY_FILE_ENV: &str = "DCR_RUN_KEY_FILE";
/// Environment variable that holds the key itself.
pub const KEY_ENV: &str = "DCR_RUN_KEY";
/// Environment variable that allows running without a key on loopback addresses.
pub const LOOPBACK_ENV: &str = "DCR_INSECURE_LOOPBACK";

/// A secret of 32 bytes, shared by all processes of a run. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct RunKey([u8; 32]);

impl fmt::Debug for RunKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunKey(…)")
    }
}

impl RunKey {
    /// Wraps 32 secret bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads a key of 64 hexadecimal digits.
    pub fn parse(text: &str, origin: &str) -> Result<Self, TransportError> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text.trim(), &mut bytes).map_err(|_| {
            TransportError::Key(format!("{origin} does not hold 64 hexadecimal digits: make one with `dcr key`"))
        })?;
        Ok(Self(bytes))
    }

    /// The key that the environment names; without one, only loopback addresses, and only when
    /// `insecure_loopback` or `DCR_INSECURE_LOOPBACK=1` says so.
    pub fn from_environment(address: &RelayAddress, insecure_loopback: bool) -> Result<Self, TransportError> {
        if let Some(path) = env::var_os(KEY_FILE_ENV).filter(|path| !path.is_empty()) {
            let shown = path.to_string_lossy().into_owned();
            let text = fs::read_to_string(&path)
                .map_err(|error| TransportError::Key(format!("cannot read {KEY_FILE_ENV}={shown}: {error}")))?;
            return Self::parse(&text, &shown);
        }
        if let Some(text) = env::var_os(KEY_ENV).filter(|text| !text.is_empty()) {
            return Self::parse(&text.to_string_lossy(), KEY_ENV);
        }
        if !insecure_loopback && env::var(LOOPBACK_ENV).as_deref() != Ok("1") {
            return Err(TransportError::Key(format!(
                "none given: set {KEY_FILE_ENV} to a file made with `dcr key`, the same on every machine \
                 (or {LOOPBACK_ENV}=1 for a trial on one machine)"
            )));
        }
        if !address.is_loopback() {
            return Err(TransportError::Key(format!(
                "none given, and {address} is not a loopback address: set {KEY_FILE_ENV} to a file made with `dcr key`"
            )));
        }
        Ok(Self(*b"dcr: no key, loopback addresses "))
    }

    /// The tag of these parts.
    pub(crate) fn tag(&self, parts: &[&[u8]]) -> Option<[u8; 16]> {
        self.mac(parts).map(|mac| mac.finalize().into_bytes().into())
    }

    /// Whether `tag` is the tag of these parts; compared in constant time.
    pub(crate) fn verifies(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        self.mac(parts).is_some_and(|mac| mac.verify_slice(tag).is_ok())
    }

    fn mac(&self, parts: &[&[u8]]) -> Option<Blake2bMac<U16>> {
        let mut mac = <Blake2bMac<U16> as KeyInit>::new_from_slice(&self.0).ok()?;
        for part in parts {
            // With its length before it, no part can lend bytes to its neighbour.
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        Some(mac)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn tags_depend_on_key_and_on_where_parts_end() {
        let (one, other) = (RunKey::new([1; 32]), RunKey::new([2; 32]));
        let tag = one.tag(&[b"ab", b"c"]).unwrap();
        assert!(one.verifies(&[b"ab", b"c"], &tag));
        assert!(!other.verifies(&[b"ab", b"c"], &tag));
        assert!(!one.verifies(&[b"a", b"bc"], &tag));
        assert!(!one.verifies(&[b"ab", b"c"], &tag[..15]));
    }

    #[test]
    fn keys_are_64_digits_and_never_shown() {
        let key = RunKey::parse(&format!("{}\n", "0a".repeat(32)), "file").unwrap();
        assert_eq!(key, RunKey::new([10; 32]));
        assert_eq!(format!("{key:?}"), "RunKey(…)");
        let error = RunKey::parse("0a", "key.txt").unwrap_err().to_string();
        assert!(error.contains("key.txt") && error.contains("dcr key"), "{error}");
    }
}
