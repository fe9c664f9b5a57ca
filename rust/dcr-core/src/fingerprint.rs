//! Change flags of residual tasks (section 4.3): whether a shard's stored bits are those of the committed version.
//!
//! A residual task needs no copy of its shard: the residual baseline holds the canonical tensors that it converts to,
//! and the only question left is whether any bit of the shard changed. A 256-bit digest answers that in 32 bytes, so the
//! baseline as a whole stays at one copy of the checkpoint, however much of it is residual.

use std::collections::BTreeMap;

use crate::baseline::{BaselineError, check};
use crate::tensor::TensorMeta;

/// BLAKE3 of a shard's stored bits.
pub type Fingerprint = [u8; 32];

/// BLAKE3 of bytes, in the way this crate tells versions of a shard apart.
pub fn fingerprint(bytes: &[u8]) -> Fingerprint {
    *blake3::hash(bytes).as_bytes()
}

struct Known {
    meta: TensorMeta,
    committed: Fingerprint,
    staged: Option<Fingerprint>,
}

/// The committed fingerprints of one owner's residual shards, with one staged candidate each.
#[derive(Default)]
pub struct Fingerprints {
    shards: BTreeMap<String, Known>,
}

impl Fingerprints {
    /// None yet.
    pub fn new() -> Fingerprints {
        Fingerprints::default()
    }

    /// Takes a shard's present bits as committed. Each shard is tracked once.
    pub fn track(&mut self, meta: TensorMeta, bytes: &[u8]) -> Result<(), BaselineError> {
        meta.validate()?;
        if self.shards.contains_key(&meta.name) {
            return Err(BaselineError::Tracked { name: meta.name });
        }
        check(&meta, &meta, bytes)?;
        let committed = fingerprint(bytes);
        self.shards.insert(meta.name.clone(), Known { meta, committed, staged: None });
        Ok(())
    }

    /// The fingerprint of a shard's new bits, once its shape and dtype are found to be the tracked ones.
    pub fn compute(&self, meta: &TensorMeta, bytes: &[u8]) -> Result<Fingerprint, BaselineError> {
        let known = self.shards.get(&meta.name).ok_or_else(|| BaselineError::Unknown { name: meta.name.clone() })?;
        check(&known.meta, meta, bytes)?;
        Ok(fingerprint(bytes))
    }

    /// Stages a computed fingerprint; whether the shard changed since the committed version.
    pub fn stage(&mut self, name: &str, found: Fingerprint) -> bool {
        let Some(known) = self.shards.get_mut(name) else { return false };
        known.staged = Some(found);
        known.committed != found
    }

    /// Takes every staged fingerprint as committed; can be repeated.
    pub fn commit(&mut self) {
        for known in self.shards.values_mut() {
            known.committed = known.staged.take().unwrap_or(known.committed);
        }
    }

    /// Forgets every staged fingerprint.
    pub fn discard(&mut self) {
        for known in self.shards.values_mut() {
            known.staged = None;
        }
    }

    /// The tracked shards whose fingerprints have not been staged.
    pub fn unstaged(&self) -> impl Iterator<Item = &TensorMeta> {
        self.shards.values().filter(|known| known.staged.is_none()).map(|known| &known.meta)
    }
}
