//! The rules of table A.2, applied to one dry run.

use std::ops::Range;

use super::{Class, DryRun, OtherWrite, RecordedCopy};
use crate::dtype::DType;
use crate::geometry::{Dim, Footprint, MAX_RUNS, Shape, extent, meet, pair};

/// A copy that is fine by itself.
struct Placed {
    tensor: usize,
    footprint: Footprint,
    dst: u64,
    src: u64,
    dims: Vec<Dim>,
}

pub(super) fn classify(runs: &[DryRun]) -> Vec<Class> {
    let mut placed = Vec::new();
    let mut classes: Vec<Class> =
        runs.iter().enumerate().map(|(tensor, run)| alone(tensor, run, &mut placed)).collect();
    placed.sort_by_key(|copy| copy.footprint.bounds.start);
    for cluster in clusters(&placed) {
        overlaps(cluster, &mut classes);
    }
    for (class, run) in classes.iter_mut().zip(runs) {
        if let Some(reason) = run.writes.iter().find_map(|write| harmful(write, &placed)) {
            refuse(class, reason);
        }
    }
    classes
}

/// The class of a tensor from its own copies; good copies are added to `placed`.
fn alone(tensor: usize, run: &DryRun, placed: &mut Vec<Placed>) -> Class {
    let numel = match run.meta.validate().and_then(|()| run.meta.numel()) {
        Ok(numel) => numel,
        Err(error) => return Class::Unsupported(error.to_string()),
    };
    let mut class = Class::Skip;
    for copy in &run.copies {
        match place(tensor, run, copy) {
            Ok((copy, keeps_bits)) => {
                placed.extend(copy);
                if !keeps_bits {
                    class = worse(class, Class::Overwrite);
                } else if class == Class::Skip {
                    class = Class::Xor;
                }
            }
            Err(rule) => {
                let reason = format!("copy into resident tensor {}: {rule}", copy.resident);
                class = worse(class, Class::Unsupported(reason));
            }
        }
    }
    if run.copies.is_empty() && run.reported && numel > 0 {
        let reason = "the loader reports it as loaded, but no copy was intercepted";
        return Class::Unsupported(reason.into());
    }
    class
}

/// Checks one copy; also says whether it preserves stored bits. An empty copy has no place.
fn place(tensor: usize, run: &DryRun, copy: &RecordedCopy) -> Result<(Option<Placed>, bool), String> {
    let (Some(dst_dtype), Some(src_dtype)) = (copy.dst_dtype, copy.src_dtype) else {
        return Err("source or destination has a dtype that dcr does not know".into());
    };
    let dst = Shape { sizes: &copy.dst_sizes, strides: &copy.dst_strides };
    let src = Shape { sizes: &copy.src_sizes, strides: &copy.src_strides };
    if dst.is_empty() {
        return Ok((None, true));
    }
    let Some(offset) = copy.src_offset else {
        return Err("its input does not share scratch storage (table A.2)".into());
    };
    if src_dtype != run.meta.dtype {
        return Err(format!("its input is {src_dtype}, not the tensor's {}", run.meta.dtype));
    }
    let keeps_bits = src_dtype == dst_dtype;
    let widens = dst_dtype == DType::F32 && matches!(src_dtype, DType::Bf16 | DType::F16);
    if !keeps_bits && !widens {
        return Err(format!("it casts {src_dtype} to {dst_dtype}; only BF16 and F16 to F32 are exact"));
    }
    let nbytes = run.meta.nbytes().map_err(|error| error.to_string())?;
    let reads = extent(offset, src_dtype.width(), src)?;
    if reads.end > nbytes as u64 {
        return Err("its input reaches beyond the tensor in scratch".into());
    }
    if !offset.is_multiple_of(src_dtype.width() as u64) {
        return Err("its input does not start at an element of the scratch".into());
    }
    let footprint = Footprint::new(copy.dst as u64, dst_dtype.width(), dst)?;
    let dims = pair(dst, dst_dtype.width(), src, src_dtype.width())?;
    Ok((Some(Placed { tensor, footprint, dst: copy.dst as u64, src: offset, dims }), keeps_bits))
}

/// Splits copies ordered by address into groups whose bounds meet.
fn clusters(placed: &[Placed]) -> impl Iterator<Item = &[Placed]> {
    let mut end = 0;
    let mut starts = Vec::new();
    for (index, copy) in placed.iter().enumerate() {
        if copy.footprint.bounds.start >= end {
            starts.push(index);
        }
        end = end.max(copy.footprint.bounds.end);
    }
    let ends = starts.clone().into_iter().skip(1).chain([placed.len()]);
    starts.into_iter().zip(ends).filter_map(|(start, end)| placed.get(start..end))
}

/// Lowers the classes of tensors whose copies overlap within one cluster.
fn overlaps(cluster: &[Placed], classes: &mut [Class]) {
    if cluster.len() < 2 {
        return;
    }
    let runs = cluster.iter().fold(0u64, |sum, copy| sum.saturating_add(copy.footprint.runs()));
    if runs > MAX_RUNS {
        // Too many to look at: those whose bounds meet count as overlapping.
        for (index, a) in cluster.iter().enumerate() {
            let after = cluster.iter().skip(index + 1);
            for b in after.take_while(|b| b.footprint.bounds.start < a.footprint.bounds.end) {
                if meet(&a.footprint.bounds, &b.footprint.bounds) {
                    lower(a, b, classes);
                }
            }
        }
        return;
    }
    let mut all: Vec<(Range<u64>, &Placed)> = Vec::new();
    let mut bytes = Vec::new();
    for copy in cluster {
        bytes.clear();
        copy.footprint.push_runs(&mut bytes);
        all.extend(bytes.iter().map(|range| (range.clone(), copy)));
    }
    all.sort_by_key(|(range, _)| (range.start, range.end));
    let mut open: Vec<&(Range<u64>, &Placed)> = Vec::new();
    for run in &all {
        open.retain(|earlier| earlier.0.end > run.0.start);
        for earlier in &open {
            lower(earlier.1, run.1, classes);
        }
        open.push(run);
    }
}

/// Two overlapping copies: XOR is out. Within one tensor, an overwrite survives only the same copy again, because a
/// later copy writes just its active elements where a full load would write them all.
fn lower(a: &Placed, b: &Placed, classes: &mut [Class]) {
    let same_copy = a.dst == b.dst && a.src == b.src && a.dims == b.dims;
    for tensor in [a.tensor, b.tensor] {
        let Some(class) = classes.get_mut(tensor) else {
            continue;
        };
        if a.tensor == b.tensor && !same_copy {
            refuse(class, "two of its copies write the same bytes from different elements".into());
        } else if *class == Class::Xor {
            *class = Class::Overwrite;
        }
    }
}

/// Why a write by another operator cannot be allowed.
fn harmful(write: &OtherWrite, placed: &[Placed]) -> Option<String> {
    let OtherWrite { op, resident, start, len } = write;
    let name = op.strip_prefix("aten::").or_else(|| op.strip_prefix("aten.")).unwrap_or(op);
    let name = name.split('.').next().unwrap_or(name);
    if !matches!(name, "fill_" | "zero_") {
        return Some(format!("{op} writes into resident tensor {resident} besides copy_"));
    }
    let bytes = *start as u64..(*start as u64).saturating_add(*len as u64);
    let written = Footprint::contiguous(bytes);
    let hit = placed.iter().any(|copy| copy.footprint.overlaps(&written));
    hit.then(|| format!("{op} writes into resident tensor {resident} where a copy writes too"))
}

fn refuse(class: &mut Class, reason: String) {
    if !matches!(class, Class::Unsupported(_)) {
        *class = Class::Unsupported(reason);
    }
}

/// The more restrictive of two classes; of two reasons the first.
fn worse(a: Class, b: Class) -> Class {
    match (&a, &b) {
        (Class::Unsupported(_), _) | (Class::Overwrite, Class::Xor | Class::Overwrite | Class::Skip) => a,
        _ => b,
    }
}
