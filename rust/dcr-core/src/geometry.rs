//! Which bytes a strided view touches. Pure arithmetic on addresses; nothing is read or written.

use std::ops::Range;

/// Most dimensions of a view.
pub(crate) const MAX_DIMS: usize = 16;
/// Most contiguous runs that are enumerated to decide an overlap exactly; beyond, views that may overlap count as
/// overlapping.
pub(crate) const MAX_RUNS: u64 = 4 << 20;

/// The rule that a view breaks, as the end of a sentence.
pub(crate) type Rule = &'static str;

/// One dimension of a copy: elements, and the byte steps in source and destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dim {
    pub size: usize,
    pub src: isize,
    pub dst: isize,
}

/// A view's sizes and strides, in elements, as torch gives them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape<'a> {
    pub sizes: &'a [i64],
    pub strides: &'a [i64],
}

impl Shape<'_> {
    fn check(&self) -> Result<(), Rule> {
        if self.sizes.len() != self.strides.len() {
            return Err("it has a different number of sizes and strides");
        }
        if self.sizes.len() > MAX_DIMS {
            return Err("it has more than 16 dimensions");
        }
        if self.sizes.iter().any(|size| *size < 0) {
            return Err("it has a negative size");
        }
        Ok(())
    }

    /// Whether the view has no element.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }
}

/// The bytes from the first to the last element of a view of elements of `width` bytes whose element 0 is at `data`.
pub(crate) fn extent(data: u64, width: usize, shape: Shape<'_>) -> Result<Range<u64>, Rule> {
    const TOO_FAR: Rule = "it reaches beyond the address space";
    shape.check()?;
    if shape.is_empty() {
        return Ok(data..data);
    }
    let (mut low, mut high) = (i128::from(data), i128::from(data));
    for (size, stride) in shape.sizes.iter().zip(shape.strides) {
        let step = i128::from(size - 1).checked_mul(i128::from(*stride)).ok_or(TOO_FAR)?;
        let step = step.checked_mul(width as i128).ok_or(TOO_FAR)?;
        let end = if step < 0 { &mut low } else { &mut high };
        *end = end.checked_add(step).ok_or(TOO_FAR)?;
    }
    let high = high.checked_add(width as i128).ok_or(TOO_FAR)?;
    match (u64::try_from(low), u64::try_from(high)) {
        (Ok(low), Ok(high)) => Ok(low..high),
        _ => Err(TOO_FAR),
    }
}

/// Pairs every destination element with its source element, expanding the source as `copy_` does. Dimensions of one
/// element are dropped, neighbours merged, and the source's smallest step comes last. Both extents must have been
/// found to fit in memory before.
pub(crate) fn pair(dst: Shape<'_>, dst_width: usize, src: Shape<'_>, src_width: usize) -> Result<Vec<Dim>, Rule> {
    const SHAPES: Rule = "its input cannot be expanded to its shape";
    dst.check()?;
    src.check()?;
    let Some(missing) = dst.sizes.len().checked_sub(src.sizes.len()) else {
        return Err(SHAPES);
    };
    let mut dims = Vec::with_capacity(dst.sizes.len());
    for (index, (size, stride)) in dst.sizes.iter().zip(dst.strides).enumerate() {
        let source = index.checked_sub(missing).map(|index| (src.sizes[index], src.strides[index]));
        let src_stride = match source {
            Some((src_size, src_stride)) if src_size == *size => src_stride,
            Some((1, _)) | None => 0,
            Some(_) => return Err(SHAPES),
        };
        if *size != 1 {
            dims.push(Dim {
                size: *size as usize,
                src: (src_stride as isize).wrapping_mul(src_width as isize),
                dst: (*stride as isize).wrapping_mul(dst_width as isize),
            });
        }
    }
    // Repeated sources go outermost: what they repeat is then one run.
    dims.sort_by_key(|dim| {
        let src = if dim.src == 0 { usize::MAX } else { dim.src.unsigned_abs() };
        std::cmp::Reverse((src, dim.dst.unsigned_abs()))
    });
    let mut merged: Vec<Dim> = Vec::with_capacity(dims.len());
    for dim in dims {
        let size = dim.size as isize;
        match merged.last_mut() {
            Some(outer)
                if Some(outer.src) == dim.src.checked_mul(size) && Some(outer.dst) == dim.dst.checked_mul(size) =>
            {
                *outer = Dim { size: outer.size.saturating_mul(dim.size), ..dim };
            }
            _ => merged.push(dim),
        }
    }
    Ok(merged)
}

/// The set of bytes of a view, as equally long contiguous runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// First byte to one past the last.
    pub bounds: Range<u64>,
    /// Bytes of one run.
    run: u64,
    /// Number of runs and the step between them, from the largest step to the smallest.
    outer: Vec<(u64, u64)>,
    /// Whether the runs come in increasing order without touching each other twice.
    nested: bool,
    runs: u64,
}

impl Footprint {
    /// The bytes of a view that writes no byte twice; an error if it does, or if that cannot be decided.
    pub fn new(data: u64, width: usize, shape: Shape<'_>) -> Result<Footprint, Rule> {
        const SELF: Rule = "its elements overlap each other";
        let bounds = extent(data, width, shape)?;
        if bounds.is_empty() {
            return Ok(Footprint { bounds, run: 0, outer: Vec::new(), nested: true, runs: 0 });
        }
        let mut dims = Vec::with_capacity(shape.sizes.len());
        for (size, stride) in shape.sizes.iter().zip(shape.strides) {
            match (size, stride) {
                (1, _) => {}
                (_, 0) => return Err(SELF),
                // The set of bytes does not depend on the direction. The extent was found to fit in 64 bits.
                _ => dims.push((*size as u64, stride.unsigned_abs() * width as u64)),
            }
        }
        dims.sort_by_key(|(_, step)| *step);
        let (mut run, mut span, mut nested, mut runs) = (width as u64, width as u64, true, 1u64);
        let mut outer: Vec<(u64, u64)> = Vec::with_capacity(dims.len());
        for (size, step) in dims {
            nested &= step >= span;
            span += step * (size - 1);
            if outer.is_empty() && step == run {
                run = step * size;
            } else if let Some((count, _)) = outer.last_mut().filter(|(count, at)| Some(step) == count.checked_mul(*at))
            {
                *count *= size;
                runs = runs.saturating_mul(size);
            } else {
                outer.push((size, step));
                runs = runs.saturating_mul(size);
            }
        }
        outer.reverse();
        let footprint = Footprint { bounds, run, outer, nested, runs };
        if !nested {
            if runs > MAX_RUNS {
                return Err(SELF);
            }
            let mut starts = footprint.starts();
            starts.sort_unstable();
            if starts.windows(2).any(|pair| pair[1] - pair[0] < run) {
                return Err(SELF);
            }
        }
        Ok(footprint)
    }

    /// One run.
    pub fn contiguous(bytes: Range<u64>) -> Footprint {
        let run = bytes.end.saturating_sub(bytes.start);
        Footprint { bounds: bytes, run, outer: Vec::new(), nested: true, runs: u64::from(run > 0) }
    }

    /// Number of contiguous runs.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Appends every run in increasing order. Callers bound [`runs`](Footprint::runs) first.
    pub fn push_runs(&self, out: &mut Vec<Range<u64>>) {
        let mut starts = self.starts();
        if !self.nested {
            starts.sort_unstable();
        }
        out.extend(starts.into_iter().map(|start| start..start + self.run));
    }

    fn starts(&self) -> Vec<u64> {
        if self.runs == 0 {
            return Vec::new();
        }
        let mut starts = vec![self.bounds.start];
        for (count, step) in &self.outer {
            let next = starts.iter().flat_map(|start| (0..*count).map(move |index| start + index * step));
            starts = next.collect();
        }
        starts
    }

    /// Whether the two share a byte. Exact while both together have at most [`MAX_RUNS`] runs; beyond, views whose
    /// bounds meet count as overlapping.
    pub fn overlaps(&self, other: &Footprint) -> bool {
        if self.runs == 0 || other.runs == 0 || !meet(&self.bounds, &other.bounds) {
            return false;
        }
        if self.runs.saturating_add(other.runs) > MAX_RUNS {
            return true;
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        self.push_runs(&mut left);
        other.push_runs(&mut right);
        let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            if meet(a, b) {
                return true;
            }
            if a.start < b.start {
                left.next()
            } else {
                right.next()
            };
        }
        false
    }
}

/// Whether two ranges share a byte.
pub(crate) fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Every byte offset of a view, one entry a byte and element.
    fn bytes(data: u64, width: usize, shape: Shape<'_>) -> Vec<u64> {
        let mut starts = vec![data as i64];
        for (size, stride) in shape.sizes.iter().zip(shape.strides) {
            let step = stride * width as i64;
            starts = starts.iter().flat_map(|at| (0..*size).map(move |index| at + index * step)).collect();
        }
        starts.iter().flat_map(|start| *start as u64..*start as u64 + width as u64).collect()
    }

    fn view() -> impl Strategy<Value = (u64, usize, Vec<i64>, Vec<i64>)> {
        let dims = prop::collection::vec((0i64..5, -9i64..10), 0..4);
        let small = (2000u64..2040, prop::sample::select(vec![1usize, 2, 4]), dims);
        small.prop_map(|(data, width, dims)| {
            let (sizes, strides) = dims.into_iter().unzip();
            (data, width, sizes, strides)
        })
    }

    proptest! {
        #[test]
        fn footprints_agree_with_listing_every_byte(a in view(), b in view()) {
            let list = |view: &(u64, usize, Vec<i64>, Vec<i64>)| {
                let shape = Shape { sizes: &view.2, strides: &view.3 };
                let all = bytes(view.0, view.1, shape);
                let set: HashSet<u64> = all.iter().copied().collect();
                let footprint = Footprint::new(view.0, view.1, shape);
                (set.len() == all.len(), set, footprint)
            };
            let (distinct, set, footprint) = list(&a);
            prop_assert_eq!(distinct, footprint.is_ok());
            let (_, other, other_footprint) = list(&b);
            if let (Ok(one), Ok(two)) = (footprint, other_footprint) {
                let mut runs = Vec::new();
                one.push_runs(&mut runs);
                prop_assert_eq!(runs.len() as u64, one.runs());
                prop_assert!(runs.windows(2).all(|pair| pair[0].end <= pair[1].start));
                let covered: HashSet<u64> = runs.into_iter().flatten().collect();
                prop_assert_eq!(&covered, &set);
                if let (Some(low), Some(high)) = (set.iter().min(), set.iter().max()) {
                    prop_assert_eq!(&one.bounds, &(*low..high + 1));
                }
                prop_assert_eq!(one.overlaps(&two), !set.is_disjoint(&other));
                prop_assert_eq!(two.overlaps(&one), !set.is_disjoint(&other));
            }
        }
    }

    fn shape<'a>(sizes: &'a [i64], strides: &'a [i64]) -> Shape<'a> {
        Shape { sizes, strides }
    }

    #[test]
    fn nonsense_views_are_refused() {
        let far = i64::MAX;
        assert!(extent(0, 8, shape(&[far, far], &[far, far])).is_err());
        assert!(extent(0, 8, shape(&[far; 16], &[far; 16])).is_err());
        assert!(extent(0, 8, shape(&[far; 16], &[i64::MIN; 16])).is_err());
        assert!(extent(0, 1, shape(&[2], &[-1])).is_err());
        assert!(extent(u64::MAX, 2, shape(&[1], &[1])).is_err());
        assert!(extent(0, 1, shape(&[-1], &[1])).is_err());
        assert!(extent(0, 1, shape(&[1, 1], &[1])).is_err());
        assert!(extent(0, 1, shape(&[1; 17], &[1; 17])).is_err());
        assert_eq!(extent(5, 2, shape(&[0, far], &[far, far])), Ok(5..5));
        assert_eq!(extent(5, 2, shape(&[], &[])), Ok(5..7));
    }

    #[test]
    fn views_too_large_to_list_count_as_overlapping() {
        // Odd and even elements of one buffer: disjoint, and decided exactly while few.
        let few = |data| Footprint::new(data, 1, shape(&[1000], &[2])).unwrap();
        assert!(!few(0).overlaps(&few(1)));
        let many = |data| Footprint::new(data, 1, shape(&[3 << 20], &[2])).unwrap();
        assert!(many(0).overlaps(&many(1)));
        assert!(!many(0).overlaps(&many(1 << 30)));
        // Not nested, and too many to list.
        let unclear = Footprint::new(0, 1, shape(&[3000, 3000], &[2, 3001]));
        assert!(unclear.is_err());
    }

    #[test]
    fn contiguous_dimensions_merge() {
        let merged = pair(shape(&[2, 3, 4], &[12, 4, 1]), 2, shape(&[2, 3, 4], &[12, 4, 1]), 2).unwrap();
        assert_eq!(merged, [Dim { size: 24, src: 2, dst: 2 }]);
        let column = pair(shape(&[4, 2], &[1, 9]), 4, shape(&[4, 2], &[2, 1]), 2).unwrap();
        assert_eq!(column, [Dim { size: 4, src: 4, dst: 4 }, Dim { size: 2, src: 2, dst: 36 }]);
        assert!(pair(shape(&[4, 2], &[2, 1]), 2, shape(&[2, 4], &[4, 1]), 2).is_err());
        assert!(pair(shape(&[4], &[1]), 2, shape(&[1, 4], &[4, 1]), 2).is_err());
        let repeated = pair(shape(&[5, 4], &[4, 1]), 2, shape(&[1, 4], &[4, 1]), 2).unwrap();
        assert_eq!(repeated, [Dim { size: 5, src: 0, dst: 8 }, Dim { size: 4, src: 2, dst: 2 }]);
    }
}
