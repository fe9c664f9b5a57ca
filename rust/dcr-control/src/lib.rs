//! The durable commit record K = (v, g): one trait, one module per store (paper, section 6.3).

mod embedded;

use std::path::PathBuf;

use async_trait::async_trait;
use dcr_protocol::CommitRecord;
use thiserror::Error;

pub use embedded::EmbeddedStore;

/// Why the commit record could not be read or changed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The record's file or folder cannot be used.
    #[error("commit record {}: cannot {doing}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        doing: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file is not a commit record.
    #[error(
        "commit record {}: not a commit record ({reason}): restore it, or remove it to start again with a dense refit",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The store's own task was ended.
    #[error("the commit store stopped before it answered")]
    Stopped,
}

/// The answer to a compare-and-set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// The record is the new one now.
    Done,
    /// The record was not the expected one, but this.
    Differs(Option<CommitRecord>),
}

/// A place for the commit record.
#[async_trait]
pub trait CommitStore: Send + Sync {
    /// The record now; `None` before the first commit.
    async fn read(&self) -> Result<Option<CommitRecord>, ControlError>;

    /// Replaces the record if it still is `expected`. After an error the outcome is unknown: read again.
    async fn compare_and_set(&self, expected: Option<CommitRecord>, new: CommitRecord) -> Result<Swap, ControlError>;
}
