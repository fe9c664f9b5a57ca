//! The rules for one copy into resident memory, and performing it.

use super::op::{Dense, Overwrite, Xor, bf16_to_f32, f16_to_f32, same};
use super::raw::{Plan, Region, copy};
use super::{Active, Done, View};
use crate::dtype::DType;
use crate::geometry::{Footprint, extent, pair};
use crate::payload::Encoding;

impl Active {
    /// Checks the rules and performs the copy. Returns the resident elements written, or the broken rule; then
    /// nothing was written.
    pub(super) fn perform(
        &mut self,
        dst: &View<'_>,
        src: &View<'_>,
        resident: &mut Region,
        scratch: &Region,
    ) -> Result<u64, String> {
        if !dst.device_is_cpu || !src.device_is_cpu {
            return Err("source and destination must both be in CPU memory".into());
        }
        let (dst_dtype, src_dtype) = self.check_dtypes(dst, src)?;
        let footprint = Footprint::new(dst.data as u64, dst_dtype.width(), dst.shape())?;
        let reads = extent(src.data as u64, src_dtype.width(), src.shape())?;
        let end = scratch.start().saturating_add(self.nbytes as u64);
        if reads.start < scratch.start() || reads.end > end {
            return Err("its input does not share the item's scratch storage".into());
        }
        if !(src.data as u64 - scratch.start()).is_multiple_of(src_dtype.width() as u64) {
            return Err("its input does not start at an element of the scratch".into());
        }
        if src_dtype != dst_dtype && self.signalling_f16 {
            return Err("a signalling half-precision NaN has no agreed single-precision value".into());
        }
        let dims = pair(dst.shape(), dst_dtype.width(), src.shape(), src_dtype.width())?;
        let (to, from) = (dst.data as u64, src.data as u64);
        let repeats = |done: &Done| done.dst == to && done.src == from && done.dims == dims;
        for done in &self.done {
            let meets = || done.footprint.overlaps(&footprint);
            match self.encoding {
                Encoding::Xor if meets() => {
                    return Err("its destination overlaps an earlier copy of the item".into());
                }
                // The later copy writes only what is active in it, where a full load would write everything.
                Encoding::Overwrite if !repeats(done) && meets() => {
                    return Err("its destination overlaps an earlier, different copy of the item".into());
                }
                _ => {}
            }
        }
        let plan = Plan { dst: to, src: from, dims };
        let written = self.run(dst_dtype, src_dtype, resident, scratch, &plan);
        let written = written.ok_or("it leaves the memory it may use")?;
        self.done.push(Done { footprint, dst: to, src: from, dims: plan.dims });
        Ok(written)
    }

    fn check_dtypes(&self, dst: &View<'_>, src: &View<'_>) -> Result<(DType, DType), String> {
        let (Some(dst), Some(src)) = (dst.dtype, src.dtype) else {
            return Err("source or destination has a dtype that dcr does not know".into());
        };
        if src != self.meta.dtype {
            return Err(format!("its input is {src}, not the tensor's {}", self.meta.dtype));
        }
        let widens = dst == DType::F32 && matches!(src, DType::Bf16 | DType::F16);
        match self.encoding {
            _ if dst == src => Ok((dst, src)),
            Encoding::Xor => Err(format!("it casts {src} to {dst}, which XOR masks do not survive")),
            _ if widens => Ok((dst, src)),
            _ => Err(format!("it casts {src} to {dst}; only BF16 and F16 to F32 are exact")),
        }
    }

    fn run(&self, dst: DType, src: DType, to: &mut Region, from: &Region, plan: &Plan) -> Option<u64> {
        match (src, src == dst) {
            (DType::Bf16, false) => self.widen(bf16_to_f32, to, from, plan),
            (DType::F16, false) => self.widen(f16_to_f32, to, from, plan),
            (_, false) => None,
            (_, true) => match src.width() {
                1 => self.keep::<1>(to, from, plan),
                2 => self.keep::<2>(to, from, plan),
                4 => self.keep::<4>(to, from, plan),
                _ => self.keep::<8>(to, from, plan),
            },
        }
    }

    fn keep<const W: usize>(&self, to: &mut Region, from: &Region, plan: &Plan) -> Option<u64> {
        match self.encoding {
            Encoding::Xor => copy::<W, W>(&Xor, to, from, plan),
            Encoding::Overwrite => {
                let op = Overwrite::new(*self.pattern.first_chunk::<W>()?, same::<W>);
                copy::<W, W>(&op, to, from, plan)
            }
            Encoding::Dense => copy::<W, W>(&Dense { convert: same::<W> }, to, from, plan),
        }
    }

    fn widen(&self, convert: impl Fn([u8; 2]) -> [u8; 4], to: &mut Region, from: &Region, plan: &Plan) -> Option<u64> {
        match self.encoding {
            Encoding::Xor => None,
            Encoding::Overwrite => copy(&Overwrite::new(*self.pattern.first_chunk()?, convert), to, from, plan),
            Encoding::Dense => copy(&Dense { convert }, to, from, plan),
        }
    }
}
