//! The only module that touches memory owned by others.
//!
//! A [`Region`] is a promise, given once by an unsafe call, that a range of addresses may be read and written. Its
//! methods check every access against that range, so the rest of the interceptor is safe code.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::slice;

use super::op::{BLOCK, Op};
use super::resident::{ResidentMap, ResidentRange};
use super::{InterceptError, Interceptor};
use crate::geometry::Dim;
use crate::payload::Positions;

/// Memory that may be read and written.
#[derive(Clone, Debug)]
pub(super) struct Region {
    bounds: Range<u64>,
}

/// A strided copy between two regions: addresses of the first elements and the dimensions.
pub(super) struct Plan {
    pub dst: u64,
    pub src: u64,
    pub dims: Vec<Dim>,
}

impl Interceptor {
    /// Sets the memory of the serving model's parameters and buffers, in place of what was set before.
    ///
    /// # Errors
    /// A range that wraps around the address space or starts at address 0 with a length, or one that meets the
    /// scratch; an item that is still open.
    ///
    /// # Safety
    /// Until the next call, or until the interceptor is dropped, every range must be memory that may be read and
    /// written, and nobody else may write it or hold a Rust reference to it while [`on_copy`](Self::on_copy) runs.
    /// Ranges of another device are allowed: copies to them are never performed, as long as their views say that
    /// they are not on the CPU.
    pub unsafe fn set_resident(&mut self, ranges: Vec<ResidentRange>) -> Result<(), InterceptError> {
        self.check_no_item()?;
        let resident = ResidentMap::new(ranges)?;
        check_disjoint(self.scratch.as_ref(), &resident)?;
        self.resident = resident;
        Ok(())
    }

    /// Sets the scratch buffer that holds one item at a time; its contents need no preparation.
    ///
    /// # Errors
    /// A range that wraps around the address space or starts at address 0 with a length, or one that meets
    /// resident memory; an item that is still open.
    ///
    /// # Safety
    /// Until the next call, or until the interceptor is dropped, the range must be CPU memory that may be read and
    /// written, and nobody else may write it while a method of the interceptor runs. Between
    /// [`begin_item`](Self::begin_item) and [`end_item`](Self::end_item) only the native loader may use it.
    pub unsafe fn set_scratch(&mut self, start: usize, len: usize) -> Result<(), InterceptError> {
        self.check_no_item()?;
        let end = start.checked_add(len).filter(|_| start != 0 || len == 0);
        let Some(end) = end else {
            return Err(InterceptError::Range { name: "scratch".into(), start, len });
        };
        let region = Region { bounds: start as u64..end as u64 };
        check_disjoint(Some(&region), &self.resident)?;
        self.scratch = Some(region);
        self.clean = Default::default();
        Ok(())
    }
}

fn check_disjoint(scratch: Option<&Region>, resident: &ResidentMap) -> Result<(), InterceptError> {
    match scratch.and_then(|scratch| resident.meeting(&scratch.bounds)) {
        Some(name) => Err(InterceptError::ScratchIsResident { name: name.into() }),
        None => Ok(()),
    }
}

impl Region {
    /// The region of one resident range, which [`Interceptor::set_resident`] vouched for.
    pub fn of_resident(bounds: &Range<u64>) -> Region {
        Region { bounds: bounds.clone() }
    }

    pub fn start(&self) -> u64 {
        self.bounds.start
    }

    pub fn len(&self) -> u64 {
        self.bounds.end - self.bounds.start
    }

    fn bytes(&self, from: usize, len: usize) -> Option<&[u8]> {
        self.holds(from, len).then(|| {
            let address = self.bounds.start as usize + from;
            // SAFETY: the bytes lie in the region, which may be read; nobody writes it meanwhile.
            unsafe { slice::from_raw_parts(with_exposed_provenance(address), len) }
        })
    }

    fn bytes_mut(&mut self, from: usize, len: usize) -> Option<&mut [u8]> {
        self.holds(from, len).then(|| {
            let address = self.bounds.start as usize + from;
            // SAFETY: the bytes lie in the region, which may be written; nobody else uses it meanwhile.
            unsafe { slice::from_raw_parts_mut(with_exposed_provenance_mut(address), len) }
        })
    }

    fn holds(&self, from: usize, len: usize) -> bool {
        // An empty region may be at address 0, which no slice may have.
        self.bounds.start != 0 && from.checked_add(len).is_some_and(|end| end as u64 <= self.len())
    }

    /// Fills bytes `from..to` with the element `pattern`. Both are multiples of the element's width.
    pub fn fill(&mut self, from: usize, to: usize, pattern: &[u8]) {
        let Some(bytes) = to.checked_sub(from).and_then(|len| self.bytes_mut(from, len)) else {
            return;
        };
        match pattern {
            [byte, rest @ ..] if rest.iter().all(|other| other == byte) => bytes.fill(*byte),
            _ => fill_pattern(bytes, pattern),
        }
    }

    /// Whether bytes `0..to` hold nothing but the element `pattern`.
    pub fn is_filled(&self, to: usize, pattern: &[u8]) -> bool {
        let Some(bytes) = self.bytes(0, to) else {
            return to == 0;
        };
        let mut block = [0; 64];
        fill_pattern(&mut block, pattern);
        let (blocks, rest) = bytes.as_chunks::<64>();
        blocks.iter().all(|chunk| *chunk == block) && block.starts_with(rest)
    }

    /// Writes the elements at `positions`, of `width` bytes each.
    pub fn write(&mut self, positions: &Positions, values: &[u8], width: usize) {
        let len = self.len() as usize;
        let Some(bytes) = self.bytes_mut(0, len) else {
            return;
        };
        match width {
            1 => scatter::<1>(bytes, positions, values),
            2 => scatter::<2>(bytes, positions, values),
            4 => scatter::<4>(bytes, positions, values),
            _ => scatter::<8>(bytes, positions, values),
        }
    }

    /// Writes `pattern` at `positions` and returns whether every element there still had its value.
    pub fn restore(&mut self, positions: &Positions, values: &[u8], pattern: &[u8]) -> bool {
        let len = self.len() as usize;
        let Some(bytes) = self.bytes_mut(0, len) else {
            return positions.is_empty();
        };
        match pattern.len() {
            1 => unscatter::<1>(bytes, positions, values, pattern),
            2 => unscatter::<2>(bytes, positions, values, pattern),
            4 => unscatter::<4>(bytes, positions, values, pattern),
            _ => unscatter::<8>(bytes, positions, values, pattern),
        }
    }
}

/// The elements of a run.
fn stretch<const W: usize>(bytes: &mut [u8], start: u64, count: u64) -> &mut [[u8; W]] {
    let end = start.saturating_add(count) as usize;
    bytes.as_chunks_mut::<W>().0.get_mut(start as usize..end).unwrap_or_default()
}

fn scatter<const W: usize>(bytes: &mut [u8], positions: &Positions, values: &[u8]) {
    let values = values.as_chunks::<W>().0;
    match positions {
        Positions::Run { start, count } => {
            stretch(bytes, *start, *count).iter_mut().zip(values).for_each(|(to, value)| *to = *value);
        }
        Positions::Scattered(positions) => {
            let elements = bytes.as_chunks_mut::<W>().0;
            for (position, value) in positions.iter().zip(values) {
                if let Some(to) = elements.get_mut(*position as usize) {
                    *to = *value;
                }
            }
        }
    }
}

fn unscatter<const W: usize>(bytes: &mut [u8], positions: &Positions, values: &[u8], pattern: &[u8]) -> bool {
    let (values, pattern) = (values.as_chunks::<W>().0, pattern.first_chunk::<W>().unwrap_or(&[0; W]));
    match positions {
        Positions::Run { start, count } => {
            let elements = stretch(bytes, *start, *count);
            let intact = elements == values;
            elements.fill(*pattern);
            intact
        }
        Positions::Scattered(positions) => {
            let elements = bytes.as_chunks_mut::<W>().0;
            let mut intact = true;
            for (position, value) in positions.iter().zip(values) {
                if let Some(at) = elements.get_mut(*position as usize) {
                    intact &= at == value;
                    *at = *pattern;
                }
            }
            intact
        }
    }
}

fn fill_pattern(bytes: &mut [u8], pattern: &[u8]) {
    for chunk in bytes.chunks_mut(pattern.len().max(1)) {
        chunk.iter_mut().zip(pattern).for_each(|(to, from)| *to = *from);
    }
}

/// Performs `op` on every element of `plan` and returns how many destination elements it wrote. Nothing is done, and
/// `None` returned, if the plan leaves one of the regions.
pub(super) fn copy<const S: usize, const D: usize>(
    op: &impl Op<S, D>,
    dst: &mut Region,
    src: &Region,
    plan: &Plan,
) -> Option<u64> {
    let (outer, inner) = match plan.dims.split_last() {
        Some((inner, outer)) => (outer, *inner),
        None => (&[][..], Dim { size: 1, src: S as isize, dst: D as isize }),
    };
    let reach = |start, step: fn(&Dim) -> isize, width| reach(start, &plan.dims, step, width);
    let reads = reach(plan.src, |dim| dim.src, S)?;
    let writes = reach(plan.dst, |dim| dim.dst, D)?;
    let inside = |region: &Region, range: &Range<u64>| {
        region.bounds.start != 0 && region.bounds.start <= range.start && range.end <= region.bounds.end
    };
    if !inside(src, &reads) || !inside(dst, &writes) || crate::geometry::meet(&reads, &writes) {
        return None;
    }
    if plan.dims.iter().any(|dim| dim.size == 0) {
        return Some(0);
    }

    let src: *const u8 = with_exposed_provenance(plan.src as usize);
    let dst: *mut u8 = with_exposed_provenance_mut(plan.dst as usize);
    let mut index = [0usize; crate::geometry::MAX_DIMS];
    let (mut src_at, mut dst_at, mut written) = (0isize, 0isize, 0u64);
    loop {
        // SAFETY: `reads` and `writes` cover every offset that the counters below can take; both lie in regions that
        // may be read and written, and they do not meet, so the slices inside do not alias.
        written += unsafe { line(op, dst.offset(dst_at), src.offset(src_at), &inner) };
        let mut place = outer.len();
        loop {
            let Some(next) = place.checked_sub(1) else {
                return Some(written);
            };
            place = next;
            let dim = &outer[place];
            index[place] += 1;
            src_at = src_at.wrapping_add(dim.src);
            dst_at = dst_at.wrapping_add(dim.dst);
            if index[place] < dim.size {
                break;
            }
            index[place] = 0;
            src_at = src_at.wrapping_sub(dim.src.wrapping_mul(dim.size as isize));
            dst_at = dst_at.wrapping_sub(dim.dst.wrapping_mul(dim.size as isize));
        }
    }
}

/// The bytes that a plan touches on one side.
fn reach(start: u64, dims: &[Dim], step: fn(&Dim) -> isize, width: usize) -> Option<Range<u64>> {
    let (mut low, mut high) = (i128::from(start), i128::from(start) + width as i128);
    for dim in dims {
        let Some(last) = dim.size.checked_sub(1) else {
            return Some(start..start);
        };
        let reach = (last as i128).checked_mul(step(dim) as i128)?;
        let end = if reach < 0 { &mut low } else { &mut high };
        *end = end.checked_add(reach)?;
    }
    Some(u64::try_from(low).ok()?..u64::try_from(high).ok()?)
}

/// One innermost dimension.
///
/// # Safety
/// All elements of `dim` from `src` may be read and from `dst` written, and the two do not meet.
unsafe fn line<const S: usize, const D: usize>(op: &impl Op<S, D>, dst: *mut u8, src: *const u8, dim: &Dim) -> u64 {
    if dim.src != S as isize {
        let mut written = 0;
        for index in 0..dim.size as isize {
            // SAFETY: element `index` of both sides, as above.
            written += unsafe { element(op, dst.offset(index * dim.dst), src.offset(index * dim.src)) };
        }
        return written;
    }
    // SAFETY: the source elements are contiguous.
    let from = unsafe { slice::from_raw_parts(src, dim.size * S) };
    if dim.dst == D as isize {
        // SAFETY: the destination elements are contiguous too.
        let to = unsafe { slice::from_raw_parts_mut(dst, dim.size * D) };
        return op.run(to, from);
    }
    let mut written = 0;
    for (number, block) in from.chunks(BLOCK).enumerate() {
        // Most blocks of a sparse item are idle, and most words of the others: find them in the source alone.
        if op.idle().is_some_and(|idle| idle.starts_with(block)) {
            continue;
        }
        for (index, element_of_block) in block.as_chunks::<S>().0.iter().enumerate() {
            if op.idle().is_some_and(|idle| idle.starts_with(element_of_block)) {
                continue;
            }
            let at = (number * (BLOCK / S) + index) as isize;
            // SAFETY: element `at` of both sides, as above.
            written += unsafe { element(op, dst.offset(at * dim.dst), src.offset(at * dim.src)) };
        }
    }
    written
}

/// One element.
///
/// # Safety
/// `S` bytes at `src` may be read and `D` bytes at `dst` written, and the two do not meet.
unsafe fn element<const S: usize, const D: usize>(op: &impl Op<S, D>, dst: *mut u8, src: *const u8) -> u64 {
    // SAFETY: byte arrays need no alignment; the rest is the caller's promise.
    let (to, from) = unsafe { (&mut *dst.cast::<[u8; D]>(), *src.cast::<[u8; S]>()) };
    u64::from(op.element(to, from))
}
