//! Canonical names, bit comparison, payload format, baseline and application on raw memory.
//!
//! Everything here is pure: no I/O, no clock, no thread, no randomness, and no tensor library. Memory that
//! belongs to others (parameters, scratch) is reached only by [`interceptor`], whose raw-memory module has the
//! crate's `unsafe` code, but for what comparison asks of the processor.
//!
//! Names follow the paper: *canonical tensor*, *owner*, *item*, *payload*, *attempt*, *placeholder*,
//! *active*, *native skip*.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

// Stored bits are handed over as raw memory, and payloads are little-endian: on a big-endian host every value
// would have to be swapped, which nothing here does.
#[cfg(target_endian = "big")]
compile_error!("dcr-core supports little-endian hosts only");

pub mod assembly;
pub mod baseline;
pub mod changes;
pub mod classify;
pub mod compare;
pub mod dtype;
pub mod fingerprint;
mod geometry;
pub mod interceptor;
mod lanes;
pub mod ownership;
pub mod payload;
pub mod projection;
pub mod tensor;
