//! Finding the resident tensor that a copy writes to.

use std::ops::Range;

use super::InterceptError;
use crate::geometry::meet;

/// Memory of one parameter or buffer of the serving model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidentRange {
    /// Address of the first byte.
    pub start: usize,
    /// Bytes.
    pub len: usize,
    /// Name of the parameter or buffer, for reports.
    pub name: String,
}

/// Resident ranges ordered by address. Ranges may overlap, as those of tied weights do.
#[derive(Debug, Default)]
pub(super) struct ResidentMap {
    ranges: Vec<(Range<u64>, String)>,
    /// The largest end among the ranges up to and including each one.
    ends: Vec<u64>,
}

/// Where a destination lies.
pub(super) enum Place<'a> {
    /// Outside all resident memory.
    Elsewhere,
    /// Inside this range.
    Inside(usize, &'a str, &'a Range<u64>),
    /// Partly in this range, and in no range wholly.
    Across(&'a str),
}

impl ResidentMap {
    pub fn new(ranges: Vec<ResidentRange>) -> Result<ResidentMap, InterceptError> {
        let mut checked = Vec::with_capacity(ranges.len());
        for ResidentRange { start, len, name } in ranges {
            match start.checked_add(len) {
                Some(_) if len == 0 => {}
                Some(end) if start != 0 => checked.push((start as u64..end as u64, name)),
                _ => return Err(InterceptError::Range { name, start, len }),
            }
        }
        checked.sort_by(|(a, x), (b, y)| (a.start, a.end, x).cmp(&(b.start, b.end, y)));
        let ends = checked.iter().scan(0, |end, (range, _)| {
            *end = range.end.max(*end);
            Some(*end)
        });
        Ok(ResidentMap { ends: ends.collect(), ranges: checked })
    }

    pub fn name(&self, index: usize) -> &str {
        self.ranges.get(index).map_or("", |(_, name)| name)
    }

    /// The smallest range that contains `bytes`, or any that meets it.
    pub fn find(&self, bytes: &Range<u64>) -> Place<'_> {
        let after = self.ranges.partition_point(|(range, _)| range.start < bytes.end);
        let mut best: Option<usize> = None;
        let mut across: Option<usize> = None;
        for index in (0..after).rev() {
            if self.ends[index] <= bytes.start {
                break;
            }
            let range = &self.ranges[index].0;
            let len = |index: usize| self.ranges[index].0.end - self.ranges[index].0.start;
            if range.start <= bytes.start && bytes.end <= range.end {
                if best.is_none_or(|best| len(index) < len(best)) {
                    best = Some(index);
                }
            } else if meet(range, bytes) {
                across = Some(index);
            }
        }
        match (best, across) {
            (Some(index), _) => Place::Inside(index, &self.ranges[index].1, &self.ranges[index].0),
            (None, Some(index)) => Place::Across(&self.ranges[index].1),
            (None, None) => Place::Elsewhere,
        }
    }

    /// The name of a range that meets `bytes`.
    pub fn meeting(&self, bytes: &Range<u64>) -> Option<&str> {
        match self.find(bytes) {
            Place::Elsewhere => None,
            Place::Inside(_, name, _) | Place::Across(name) => Some(name),
        }
    }
}
