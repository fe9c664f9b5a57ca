//! What a refit leaves behind: a report, or the reason of its failure.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Application, AttemptId, Held, Mode, ReceiverWork, StreamTotals};

/// Seconds from the start of the refit to the end of each stage; 0 for a stage that this refit does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// All owners and receivers are known.
    pub peers: f64,
    /// Receivers have classified their loader paths and accepted.
    pub receivers_prepared: f64,
    /// Owners have accepted and stream.
    pub owners_prepared: f64,
    /// The last owner has sent everything.
    pub streamed: f64,
    /// Every receiver has everything staged (asynchronous application).
    pub staged: f64,
    /// The gate began to close.
    pub gate_closing: f64,
    /// The gate is closed and `open_apply` was sent.
    pub gate_closed: f64,
    /// The last receiver has acknowledged completion.
    pub flushed: f64,
    /// The commit record was changed.
    pub committed: f64,
    /// The last owner has updated its baseline.
    pub baseline_updated: f64,
    /// The gate is open again.
    pub gate_opened: f64,
}

/// The report of a committed refit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The attempt that was committed.
    pub attempt: AttemptId,
    /// How it was encoded.
    pub mode: Mode,
    /// When it was applied.
    pub application: Application,
    /// What is committed now.
    pub committed: Held,
    /// Receivers that hold it.
    pub receivers: Vec<String>,
    /// Totals over the owners.
    pub totals: StreamTotals,
    /// What each owner sent.
    pub owners: Vec<StreamTotals>,
    /// What each receiver did, in the order of `receivers`.
    pub work: Vec<ReceiverWork>,
    /// Canonical tensors in the catalog.
    pub tensors: u64,
    /// When each stage ended.
    pub stages: Stages,
}

/// What a failed refit left in the receivers' storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsAfter {
    /// Nothing was written; the committed version keeps serving.
    Untouched,
    /// A receiver wrote, or may have written, part of a version that was not committed.
    Unusable,
    /// The new version is committed and applied; only what follows the commit failed.
    Committed,
}

/// Why a refit failed, and what that means for the weights.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[error("{reason} ({})", match .weights {
    WeightsAfter::Untouched => "no weight was written; the committed version keeps serving",
    WeightsAfter::Unusable => "weights are unusable: the request gate stays closed until a dense refit",
    WeightsAfter::Committed => "the new version is committed and serving",
})]
pub struct Failure {
    /// One line: what happened, to whom.
    pub reason: String,
    /// What it left behind.
    pub weights: WeightsAfter,
}
