//! The optional libtorch seam: tensors of the running torch as memory, through tch.
//!
//! Nothing else of dcr links libtorch's C++ ABI. tch works with one torch release only and says nothing when it meets
//! another, so [`check_version`] comes before everything else.

use thiserror::Error;

#[cfg(feature = "libtorch")]
mod tensor;

#[cfg(feature = "libtorch")]
pub use tensor::{HostTensor, host_tensor};

/// The torch release that this crate is built for.
pub const BUILT_FOR: &str = "2.13.0";

/// Why a tensor cannot be handed over.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TorchError {
    /// The running torch is not the one that tch was built for.
    #[error("dcr-torch is built for torch {BUILT_FOR} and torch {running} is running: rebuild it against that torch")]
    Version {
        /// The running release.
        running: String,
    },
    /// The tensor is not plain host memory.
    #[error("tensor {name:?}: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Refuses every torch but [`BUILT_FOR`]. `running` is `torch.__version__`, with or without a local part (`+cu130`).
pub fn check_version(running: &str) -> Result<(), TorchError> {
    match running.split('+').next() {
        Some(BUILT_FOR) => Ok(()),
        _ => Err(TorchError::Version { running: running.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_release_is_taken() {
        assert_eq!(check_version("2.13.0"), Ok(()));
        assert_eq!(check_version("2.13.0+cu130"), Ok(()));
        for other in ["2.13.1", "2.13", "2.13.00", "2.15.0", "", "+2.13.0"] {
            assert!(check_version(other).is_err(), "{other}");
        }
    }
}
