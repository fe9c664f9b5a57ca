//! What an intercepted `copy_` does while the native loader handles one item (section 6.1, table A.2).
//!
//! The interceptor scatters an item into scratch; the loader then copies views of scratch into resident tensors, and
//! a hook hands each copy to [`Interceptor::on_copy`]. Copies into other memory pass through. A copy into resident
//! memory is performed here, on active elements only, or breaks a rule: then nothing is written, the violation is
//! recorded in words, and no later copy of the attempt writes.
//!
//! Nothing in here panics or unwinds, so it can be called from a C++ hook.

mod op;
mod perform;
mod placeholder;
mod raw;
mod resident;

use std::collections::BTreeSet;

use thiserror::Error;

pub use resident::ResidentRange;

use crate::dtype::DType;
use crate::geometry::{Footprint, Shape, extent};
use crate::payload::{Encoding, Item, ItemError, Positions};
use crate::tensor::TensorMeta;
use raw::Region;
use resident::{Place, ResidentMap};

/// Violations kept in words for one item; the rest are counted.
const MAX_VIOLATIONS: usize = 16;

/// One side of a copy, as the tensor library describes it.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Address of element 0.
    pub data: usize,
    /// Type of the elements; `None` if dcr does not know it.
    pub dtype: Option<DType>,
    /// Whether the memory is the CPU's.
    pub device_is_cpu: bool,
    /// Size of each dimension.
    pub sizes: &'a [i64],
    /// Step of each dimension, in elements.
    pub strides: &'a [i64],
}

impl<'a> View<'a> {
    fn shape(&self) -> Shape<'a> {
        Shape { sizes: self.sizes, strides: self.strides }
    }
}

/// What the hook does with a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not a resident destination: the tensor library performs the copy.
    PassThrough,
    /// Performed or refused here: the tensor library must not perform it.
    Handled,
}

/// What happened to one item.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ItemOutcome {
    /// Copies performed.
    pub copies: u64,
    /// Resident elements that active entries were applied to.
    pub elements: u64,
    /// Resident tensors that copies were performed on, in order of name.
    pub written: Vec<String>,
    /// One line for each broken rule. Not empty: the attempt has failed.
    pub violations: Vec<String>,
}

/// Why the interceptor cannot take memory or an item.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InterceptError {
    /// A range that cannot be memory.
    #[error("{name}: {len} bytes at {start:#x} are not a range of memory")]
    Range {
        /// Name of the range.
        name: String,
        /// Its start.
        start: usize,
        /// Its length.
        len: usize,
    },
    /// Scratch and resident memory overlap.
    #[error("the scratch buffer overlaps resident tensor {name:?}; it must be memory of its own")]
    ScratchIsResident {
        /// The resident tensor.
        name: String,
    },
    /// No scratch has been set.
    #[error("tensor {name:?} cannot be applied: no scratch buffer has been set")]
    NoScratch {
        /// The item's tensor.
        name: String,
    },
    /// The scratch is smaller than the tensor.
    #[error("tensor {name:?} needs {needed} bytes of scratch, but it has {len}; prewarm sizes it")]
    ScratchTooSmall {
        /// The item's tensor.
        name: String,
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        len: u64,
    },
    /// The previous item has not been ended.
    #[error("tensor {name:?} is still being applied; its item must end first")]
    ItemOpen {
        /// The open item's tensor.
        name: String,
    },
    /// Every candidate for the placeholder is an active value.
    #[error("tensor {name:?}: every {dtype} placeholder pattern occurs among its new values; use a dense item")]
    NoPlaceholder {
        /// The item's tensor.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A rule was broken earlier in this attempt.
    #[error("tensor {name:?} is not applied: the attempt has failed ({first})")]
    Failed {
        /// The item's tensor.
        name: String,
        /// The first violation.
        first: String,
    },
    /// The item is wrong in itself.
    #[error(transparent)]
    Item(#[from] ItemError),
}

/// What is known of the scratch between items: bytes `0..upto` repeat `pattern`.
#[derive(Default)]
struct Clean {
    pattern: Vec<u8>,
    upto: usize,
}

/// The item being applied.
struct Active {
    meta: TensorMeta,
    encoding: Encoding,
    nbytes: usize,
    /// Placeholder of inactive elements, one element wide; empty for a dense item.
    pattern: Vec<u8>,
    positions: Positions,
    values: Vec<u8>,
    /// Whether widening the values is ambiguous.
    signalling_f16: bool,
    done: Vec<Done>,
    outcome: ItemOutcome,
    written: BTreeSet<usize>,
}

/// A copy already performed for the item.
struct Done {
    footprint: Footprint,
    dst: u64,
    src: u64,
    dims: Vec<crate::geometry::Dim>,
}

/// Performs the intercepted copies of one receiver, one item at a time. Addresses are given once by
/// [`set_resident`](Interceptor::set_resident) and [`set_scratch`](Interceptor::set_scratch).
pub struct Interceptor {
    resident: ResidentMap,
    scratch: Option<Region>,
    clean: Clean,
    active: Option<Active>,
    failed: Option<String>,
    verify: bool,
}

impl Default for Interceptor {
    fn default() -> Self {
        Interceptor::new()
    }
}

impl Interceptor {
    /// An interceptor without memory: every copy passes through.
    pub fn new() -> Interceptor {
        Interceptor {
            resident: ResidentMap::default(),
            scratch: None,
            clean: Clean::default(),
            active: None,
            failed: None,
            verify: true,
        }
    }

    /// Whether [`end_item`](Interceptor::end_item) reads the whole of an XOR or overwrite item's scratch to see that
    /// the loader has not written to it. On by default; without it only the active positions are checked.
    pub fn verify_scratch(&mut self, on: bool) {
        self.verify = on;
    }

    /// Starts an attempt: forgets the violation that failed the one before, and an item it left open.
    pub fn begin_attempt(&mut self) {
        if self.active.is_some() {
            self.end_item();
        }
        self.failed = None;
    }

    /// The first violation of the attempt, if any.
    pub fn failure(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    /// Checks the item and fills scratch with it: masks among zeros for XOR; new values among a placeholder that none
    /// of them equals, a NaN for float types, for overwrite; all values for dense. On an error the scratch holds no
    /// item and copies into resident memory are violations.
    pub fn begin_item(&mut self, item: &Item) -> Result<(), InterceptError> {
        self.check_no_item()?;
        let name = || item.meta.name.clone();
        if let Some(first) = &self.failed {
            return Err(InterceptError::Failed { name: name(), first: first.clone() });
        }
        item.validate()?;
        let nbytes = item.meta.nbytes().map_err(ItemError::from)?;
        let Some(scratch) = &mut self.scratch else {
            return Err(InterceptError::NoScratch { name: name() });
        };
        if nbytes as u64 > scratch.len() {
            return Err(InterceptError::ScratchTooSmall { name: name(), needed: nbytes, len: scratch.len() });
        }
        let (dtype, width) = (item.meta.dtype, item.meta.dtype.width());
        let pattern = match item.encoding {
            Encoding::Xor => vec![0; width],
            Encoding::Overwrite => match placeholder::choose(dtype, &item.values) {
                Some(word) => word.to_le_bytes().into_iter().take(width).collect(),
                None => return Err(InterceptError::NoPlaceholder { name: name(), dtype }),
            },
            Encoding::Dense => Vec::new(),
        };
        if item.encoding == Encoding::Dense {
            self.clean = Clean::default();
        } else {
            self.clean.extend(scratch, &pattern, nbytes);
        }
        scratch.write(&item.positions, &item.values, width);
        let keep = item.encoding != Encoding::Dense;
        self.active = Some(Active {
            meta: item.meta.clone(),
            encoding: item.encoding,
            nbytes,
            pattern,
            positions: if keep { item.positions.clone() } else { Positions::Run { start: 0, count: 0 } },
            values: if keep { item.values.clone() } else { Vec::new() },
            signalling_f16: dtype == DType::F16 && has_signalling_f16(&item.values),
            done: Vec::new(),
            outcome: ItemOutcome::default(),
            written: BTreeSet::new(),
        });
        Ok(())
    }

    /// Ends the item: restores the scratch where it was filled, and reports. A scratch that the loader has changed is a
    /// violation.
    pub fn end_item(&mut self) -> ItemOutcome {
        let Some(active) = self.active.take() else {
            let mut outcome = ItemOutcome::default();
            let line = "an item was ended that had not begun".to_owned();
            self.failed.get_or_insert_with(|| line.clone());
            outcome.violations.push(line);
            return outcome;
        };
        let intact = match &mut self.scratch {
            Some(scratch) if active.encoding != Encoding::Dense => {
                scratch.restore(&active.positions, &active.values, &active.pattern)
                    && (!self.verify || scratch.is_filled(active.nbytes, &active.pattern))
            }
            _ => true,
        };
        let mut outcome = active.outcome;
        if !intact {
            self.clean = Clean::default();
            let line =
                format!("tensor {}: the loader changed its input in place; it must only read it", active.meta.name);
            self.failed.get_or_insert_with(|| line.clone());
            outcome.violations.push(line);
        }
        let written: BTreeSet<&str> = active.written.iter().map(|index| self.resident.name(*index)).collect();
        outcome.written = written.into_iter().map(str::to_owned).collect();
        outcome
    }

    /// Decides on one copy and performs it where it is the interceptor's to perform.
    pub fn on_copy(&mut self, dst: &View<'_>, src: &View<'_>) -> Verdict {
        if dst.shape().is_empty() {
            return Verdict::PassThrough;
        }
        let width = dst.dtype.map_or(1, DType::width);
        let bytes = extent(dst.data as u64, width, dst.shape());
        // A destination that makes no sense is still refused if it starts in resident memory.
        let bytes = bytes.unwrap_or(dst.data as u64..(dst.data as u64).saturating_add(1));
        let (index, region, name) = match self.resident.find(&bytes) {
            Place::Elsewhere => return Verdict::PassThrough,
            Place::Inside(index, name, range) => (Some(index), Some(Region::of_resident(range)), name),
            Place::Across(name) => (None, None, name),
        };
        if self.failed.is_some() {
            return Verdict::Handled;
        }
        let (Some(active), Some(scratch)) = (&mut self.active, &self.scratch) else {
            self.failed = Some(format!("resident tensor {name}: a copy into it outside of any item"));
            return Verdict::Handled;
        };
        let performed = match region {
            Some(mut region) => active.perform(dst, src, &mut region, scratch),
            None => Err("it reaches beyond the resident tensor".into()),
        };
        match performed {
            Ok(elements) => {
                active.outcome.copies += 1;
                active.outcome.elements += elements;
                active.written.extend(index);
            }
            Err(rule) => {
                let line = format!("tensor {}: copy into resident tensor {name}: {rule}", active.meta.name);
                if active.outcome.violations.len() < MAX_VIOLATIONS {
                    active.outcome.violations.push(line.clone());
                }
                self.failed = Some(line);
            }
        }
        Verdict::Handled
    }

    fn check_no_item(&self) -> Result<(), InterceptError> {
        match &self.active {
            Some(active) => Err(InterceptError::ItemOpen { name: active.meta.name.clone() }),
            None => Ok(()),
        }
    }
}

impl Clean {
    /// Makes bytes `0..nbytes` of the scratch repeat `pattern`, filling only what does not yet.
    fn extend(&mut self, scratch: &mut Region, pattern: &[u8], nbytes: usize) {
        let zeros = |pattern: &[u8]| pattern.iter().all(|byte| *byte == 0);
        let same = self.pattern == pattern || (zeros(&self.pattern) && zeros(pattern));
        // A pattern of another width must start on its own boundary.
        let from = if same { self.upto.min(nbytes) / pattern.len() * pattern.len() } else { 0 };
        scratch.fill(from, nbytes, pattern);
        self.upto = if same { self.upto.max(nbytes) } else { nbytes };
        self.pattern = pattern.to_vec();
    }
}

fn has_signalling_f16(values: &[u8]) -> bool {
    values.as_chunks().0.iter().any(|bits| op::is_signalling_f16(u16::from_le_bytes(*bits)))
}
