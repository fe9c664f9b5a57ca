//! Every rule of table A.2 that holds at run time, and a test that breaks it: nothing may be written, one line must
//! name the resident tensor, and no later copy of the attempt may write.
#![allow(clippy::unwrap_used, clippy::expect_used, unsafe_code)]

mod common;

use common::{Memory, interceptor, item, view, words};
use dcr_core::dtype::DType;
use dcr_core::interceptor::{InterceptError, Interceptor, ResidentRange, Verdict, View};
use dcr_core::payload::{Encoding, Item};

const BF16: DType = DType::Bf16;

/// Parameter `p` (bytes 0..32), buffer `q` (bytes 32..64), 32 bytes that are no resident tensor, and a scratch.
struct Bench {
    resident: Memory,
    scratch: Memory,
    interceptor: Interceptor,
}

impl Bench {
    fn new() -> Bench {
        let resident = Memory::new(&(0..96).collect::<Vec<u8>>());
        let scratch = Memory::new(&[0xaa; 64]);
        let interceptor = interceptor(&resident, &[("p", 0, 32), ("q", 32, 32)], &scratch);
        Bench { resident, scratch, interceptor }
    }

    fn begin(&mut self, encoding: Encoding) -> Item {
        let item = eight(encoding);
        self.interceptor.begin_item(&item).unwrap();
        item
    }

    fn dst<'a>(&self, at: usize, sizes: &'a [i64], strides: &'a [i64]) -> View<'a> {
        view(self.resident.address() + at, BF16, sizes, strides)
    }

    fn src<'a>(&self, at: usize, sizes: &'a [i64], strides: &'a [i64]) -> View<'a> {
        view(self.scratch.address() + at, BF16, sizes, strides)
    }

    /// Expects the copy to be refused with `rule`, for good.
    fn refused(mut self, dst: View<'_>, src: View<'_>, rule: &str) {
        let before = self.resident.bytes();
        assert_eq!(self.interceptor.on_copy(&dst, &src), Verdict::Handled);
        assert_eq!(self.resident.bytes(), before, "{rule}");
        // A perfectly good copy comes too late.
        assert_eq!(self.interceptor.on_copy(&self.dst(0, &[8], &[1]), &self.src(0, &[8], &[1])), Verdict::Handled);
        assert_eq!(self.resident.bytes(), before, "{rule}");
        assert!(self.interceptor.failure().unwrap().contains(rule));
        let outcome = self.interceptor.end_item();
        let [violation] = outcome.violations.as_slice() else {
            panic!("{rule}: {:?}", outcome.violations);
        };
        assert!(violation.contains(rule), "{violation}");
        assert!(violation.contains("tensor w: copy into resident tensor p"), "{violation}");
        assert!(!violation.contains('\n'));
        assert!(matches!(self.interceptor.begin_item(&eight(Encoding::Xor)), Err(InterceptError::Failed { .. })));
        // The next attempt starts afresh.
        self.interceptor.begin_attempt();
        self.begin(Encoding::Overwrite);
        self.interceptor.on_copy(&self.dst(0, &[8], &[1]), &self.src(0, &[8], &[1]));
        let outcome = self.interceptor.end_item();
        assert_eq!((outcome.copies, outcome.elements, outcome.violations.len()), (1, 2, 0));
    }
}

/// Tensor `w` of eight elements; 1 and 6 are active.
fn eight(encoding: Encoding) -> Item {
    match encoding {
        Encoding::Dense => item("w", &[8], BF16, encoding, &[0, 1, 2, 3, 4, 5, 6, 7], &words(&[9; 8])),
        _ => item("w", &[8], BF16, encoding, &[1, 6], &words(&[0x7fc0, 0x8000])),
    }
}

const ALL: [Encoding; 3] = [Encoding::Xor, Encoding::Overwrite, Encoding::Dense];

#[test]
fn scratch_holds_masks_placeholders_or_values() {
    let mut bench = Bench::new();
    bench.begin(Encoding::Xor);
    assert_eq!(bench.scratch.bytes()[..16], words(&[0, 0x7fc0, 0, 0, 0, 0, 0x8000, 0]));
    bench.interceptor.end_item();
    assert_eq!(bench.scratch.bytes()[..16], [0; 16]);
    bench.begin(Encoding::Overwrite);
    // 0x7fc0 is an active value, so the next NaN serves.
    let q = 0x7fc1;
    assert_eq!(bench.scratch.bytes()[..16], words(&[q, 0x7fc0, q, q, q, q, 0x8000, q]));
    bench.interceptor.end_item();
    bench.begin(Encoding::Dense);
    assert_eq!(bench.scratch.bytes()[..16], words(&[9; 8]));
    bench.interceptor.end_item();
    assert_eq!(bench.scratch.bytes()[16..], [0xaa; 48]);
}

#[test]
fn copies_elsewhere_pass_through() {
    let mut bench = Bench::new();
    bench.begin(Encoding::Xor);
    let src = bench.src(0, &[8], &[1]);
    // A clone of scratch, a copy into memory after the last resident tensor, and an empty copy.
    let clone = [0u8; 16];
    let temporary = view(clone.as_ptr().addr(), BF16, &[8], &[1]);
    assert_eq!(bench.interceptor.on_copy(&temporary, &src), Verdict::PassThrough);
    assert_eq!(bench.interceptor.on_copy(&bench.dst(64, &[8], &[1]), &src), Verdict::PassThrough);
    assert_eq!(bench.interceptor.on_copy(&bench.dst(0, &[0], &[1]), &src), Verdict::PassThrough);
    // Nonsense that does not start in resident memory is the tensor library's to refuse.
    let nonsense = bench.dst(64, &[-1], &[1]);
    assert_eq!(bench.interceptor.on_copy(&nonsense, &src), Verdict::PassThrough);
    let outcome = bench.interceptor.end_item();
    assert_eq!((outcome.copies, outcome.violations.len()), (0, 0));
    assert_eq!(bench.resident.bytes(), (0..96).collect::<Vec<u8>>());
    let mut unset = Interceptor::new();
    assert_eq!(unset.on_copy(&bench.dst(0, &[8], &[1]), &src), Verdict::PassThrough);
}

#[test]
fn several_copies_count_and_name_what_they_wrote() {
    let mut bench = Bench::new();
    bench.begin(Encoding::Xor);
    bench.interceptor.on_copy(&bench.dst(32, &[4], &[1]), &bench.src(8, &[4], &[1]));
    bench.interceptor.on_copy(&bench.dst(0, &[4], &[1]), &bench.src(0, &[4], &[1]));
    bench.interceptor.on_copy(&bench.dst(8, &[4], &[1]), &bench.src(0, &[4], &[1]));
    let outcome = bench.interceptor.end_item();
    assert_eq!((outcome.copies, outcome.elements), (3, 3));
    assert_eq!(outcome.written, ["p", "q"]);
    let bytes = bench.resident.bytes();
    assert_eq!(bytes[2..4], [2 ^ 0xc0, 3 ^ 0x7f]);
    assert_eq!(bytes[36..38], [36, 37 ^ 0x80]);
}

#[test]
fn input_must_share_scratch() {
    let sizes = [8];
    for encoding in ALL {
        let mut bench = Bench::new();
        bench.begin(encoding);
        let copy = words(&[1; 8]);
        let elsewhere = view(copy.as_ptr().addr(), BF16, &sizes, &[1]);
        let dst = bench.dst(0, &sizes, &[1]);
        bench.refused(dst, elsewhere, "does not share the item's scratch");

        // Scratch beyond the item's tensor is not the item.
        let mut bench = Bench::new();
        bench.begin(encoding);
        let (dst, src) = (bench.dst(0, &sizes, &[1]), bench.src(2, &sizes, &[1]));
        bench.refused(dst, src, "does not share the item's scratch");

        let mut bench = Bench::new();
        bench.begin(encoding);
        let (dst, src) = (bench.dst(0, &[4], &[1]), bench.src(1, &[4], &[1]));
        bench.refused(dst, src, "does not start at an element");

        // Nor is memory before it, whichever way the view goes.
        for (at, sizes, strides) in [(-2isize, [4], [1]), (-2, [1], [1]), (0, [2], [-1])] {
            let mut bench = Bench::new();
            bench.begin(encoding);
            let before = bench.scratch.address().wrapping_add_signed(at);
            let (dst, src) = (bench.dst(0, &sizes, &[1]), view(before, BF16, &sizes, &strides));
            bench.refused(dst, src, "does not share the item's scratch");
        }

        // From one resident tensor to another.
        let mut bench = Bench::new();
        bench.begin(encoding);
        let (dst, src) = (bench.dst(0, &[4], &[1]), bench.dst(32, &[4], &[1]));
        bench.refused(dst, src, "does not share the item's scratch");
    }
}

#[test]
fn dtypes_must_agree() {
    for encoding in ALL {
        let cases = [
            (Some(DType::F16), Some(BF16), "casts BF16 to F16"),
            (Some(DType::I16), Some(BF16), "casts BF16 to I16"),
            (Some(DType::I16), Some(DType::I16), "its input is I16, not the tensor's BF16"),
            (None, Some(BF16), "a dtype that dcr does not know"),
            (Some(BF16), None, "a dtype that dcr does not know"),
        ];
        for (to, from, rule) in cases {
            let mut bench = Bench::new();
            bench.begin(encoding);
            let dst = View { dtype: to, ..bench.dst(0, &[8], &[1]) };
            let src = View { dtype: from, ..bench.src(0, &[8], &[1]) };
            bench.refused(dst, src, rule);
        }
    }
    let mut bench = Bench::new();
    bench.begin(Encoding::Xor);
    let dst = View { dtype: Some(DType::F32), ..bench.dst(0, &[8], &[1]) };
    let src = bench.src(0, &[8], &[1]);
    bench.refused(dst, src, "casts BF16 to F32, which XOR masks do not survive");
}

#[test]
fn bfloat16_widens_exactly() {
    let mut bench = Bench::new();
    bench.begin(Encoding::Overwrite);
    let dst = View { dtype: Some(DType::F32), ..bench.dst(0, &[8], &[1]) };
    bench.interceptor.on_copy(&dst, &bench.src(0, &[8], &[1]));
    assert!(bench.interceptor.end_item().violations.is_empty());
    let mut expected: Vec<u8> = (0..96).collect();
    expected[4..8].copy_from_slice(&0x7fc0_0000u32.to_le_bytes());
    expected[24..28].copy_from_slice(&0x8000_0000u32.to_le_bytes());
    assert_eq!(bench.resident.bytes(), expected);
}

#[test]
fn signalling_half_precision_does_not_widen() {
    for (bits, refused) in [(0x7c01, true), (0xfdff, true), (0x7e00, false), (0x7c00, false)] {
        let mut bench = Bench::new();
        let half = item("w", &[8], DType::F16, Encoding::Overwrite, &[3], &words(&[bits]));
        bench.interceptor.begin_item(&half).unwrap();
        let dst = View { dtype: Some(DType::F32), ..bench.dst(0, &[8], &[1]) };
        let src = View { dtype: Some(DType::F16), ..bench.src(0, &[8], &[1]) };
        if refused {
            bench.refused(dst, src, "signalling half-precision NaN");
        } else {
            bench.interceptor.on_copy(&dst, &src);
            assert!(bench.interceptor.end_item().violations.is_empty());
        }
    }
}

#[test]
fn shapes_must_expand() {
    for encoding in ALL {
        let cases: [[&[i64]; 4]; 4] = [
            [&[8], &[1], &[4], &[1]],
            [&[2, 4], &[4, 1], &[4, 2], &[2, 1]],
            [&[4], &[1], &[1, 4], &[4, 1]],
            [&[1], &[1], &[2], &[1]],
        ];
        for [to, to_strides, from, from_strides] in cases {
            let mut bench = Bench::new();
            bench.begin(encoding);
            let (dst, src) = (bench.dst(0, to, to_strides), bench.src(0, from, from_strides));
            bench.refused(dst, src, "cannot be expanded to its shape");
        }
    }
}

#[test]
fn destinations_must_stay_in_the_tensor() {
    let mut bench = Bench::new();
    bench.begin(Encoding::Dense);
    let (dst, src) = (bench.dst(28, &[4], &[1]), bench.src(0, &[4], &[1]));
    bench.refused(dst, src, "reaches beyond the resident tensor");
    let mut bench = Bench::new();
    bench.begin(Encoding::Dense);
    let (dst, src) = (bench.dst(0, &[1 << 62, 4], &[1 << 62, 1]), bench.src(0, &[4], &[1]));
    bench.refused(dst, src, "reaches beyond the address space");
    let mut bench = Bench::new();
    bench.begin(Encoding::Dense);
    let (dst, src) = (bench.dst(0, &[-4], &[1]), bench.src(0, &[4], &[1]));
    bench.refused(dst, src, "negative size");
    let mut bench = Bench::new();
    bench.begin(Encoding::Dense);
    let (dst, src) = (bench.dst(0, &[4, 1], &[1]), bench.src(0, &[4], &[1]));
    bench.refused(dst, src, "different number of sizes and strides");
    let mut bench = Bench::new();
    bench.begin(Encoding::Dense);
    let (dst, src) = (bench.dst(0, &[1; 17], &[1; 17]), bench.src(0, &[4], &[1]));
    bench.refused(dst, src, "more than 16 dimensions");
}

#[test]
fn elements_must_not_overlap_each_other() {
    for encoding in ALL {
        for (sizes, strides) in [([2, 4], [0, 1]), ([2, 4], [2, 1]), ([3, 2], [1, 2])] {
            let mut bench = Bench::new();
            bench.begin(encoding);
            let (dst, src) = (bench.dst(0, &sizes, &strides), bench.src(0, &[1, 1], &[1, 1]));
            bench.refused(dst, src, "its elements overlap each other");
        }
    }
}

#[test]
fn memory_must_be_the_cpus() {
    for encoding in ALL {
        for side in 0..2 {
            let mut bench = Bench::new();
            bench.begin(encoding);
            let mut views = [bench.dst(0, &[8], &[1]), bench.src(0, &[8], &[1])];
            views[side].device_is_cpu = false;
            bench.refused(views[0], views[1], "must both be in CPU memory");
        }
    }
}

/// A second copy onto the same bytes: XOR would undo itself; an overwrite of other elements would leave the earlier
/// copy's where a full load would not. Dense items write everything, as a full load does.
#[test]
fn copies_of_an_item_must_not_overlap() {
    let two = |encoding: Encoding, second: (usize, usize)| {
        let mut bench = Bench::new();
        bench.begin(encoding);
        bench.interceptor.on_copy(&bench.dst(0, &[4], &[2]), &bench.src(0, &[4], &[1]));
        let before = bench.resident.bytes();
        let (to, from) = second;
        bench.interceptor.on_copy(&bench.dst(to, &[4], &[2]), &bench.src(from, &[4], &[1]));
        let after = bench.resident.bytes();
        let outcome = bench.interceptor.end_item();
        assert_eq!(outcome.violations.is_empty(), outcome.copies == 2);
        if outcome.copies == 1 {
            assert!(outcome.violations[0].contains("overlaps an earlier"), "{:?}", outcome.violations);
            assert_eq!(before, after);
        }
        outcome.copies
    };
    // Interleaved: bounds meet, bytes do not.
    assert!(ALL.into_iter().all(|encoding| two(encoding, (2, 8)) == 2));
    assert_eq!(two(Encoding::Xor, (4, 8)), 1);
    assert_eq!(two(Encoding::Overwrite, (4, 8)), 1);
    assert_eq!(two(Encoding::Dense, (4, 8)), 2);
    // The very same copy again.
    assert_eq!(two(Encoding::Xor, (0, 0)), 1);
    assert_eq!(two(Encoding::Overwrite, (0, 0)), 2);
    // The same destination from other elements.
    assert_eq!(two(Encoding::Overwrite, (0, 8)), 1);
    // One byte of overlap.
    assert_eq!(two(Encoding::Xor, (1, 8)), 1);
}

#[test]
fn the_loader_must_not_change_scratch() {
    for (encoding, at) in [(Encoding::Xor, 2), (Encoding::Xor, 8), (Encoding::Overwrite, 2), (Encoding::Overwrite, 8)] {
        let mut bench = Bench::new();
        bench.begin(encoding);
        bench.scratch.write(at, &[0x12]);
        let outcome = bench.interceptor.end_item();
        assert_eq!(outcome.violations.len(), 1);
        assert!(outcome.violations[0].contains("the loader changed its input in place"));
        assert!(bench.interceptor.failure().is_some());
        // The dirt does not reach the next attempt.
        bench.interceptor.begin_attempt();
        bench.begin(Encoding::Xor);
        assert_eq!(bench.scratch.bytes()[..16], words(&[0, 0x7fc0, 0, 0, 0, 0, 0x8000, 0]));
    }
    // Without the full check, active positions are still looked at.
    for (at, seen) in [(2, true), (8, false)] {
        let mut bench = Bench::new();
        bench.interceptor.verify_scratch(false);
        bench.begin(Encoding::Xor);
        bench.scratch.write(at, &[0x12]);
        assert_eq!(bench.interceptor.end_item().violations.is_empty(), !seen);
    }
}

#[test]
fn copies_outside_an_item_are_violations() {
    let mut bench = Bench::new();
    let before = bench.resident.bytes();
    let verdict = bench.interceptor.on_copy(&bench.dst(0, &[8], &[1]), &bench.src(0, &[8], &[1]));
    assert_eq!(verdict, Verdict::Handled);
    assert_eq!(bench.resident.bytes(), before);
    assert!(bench.interceptor.failure().unwrap().contains("resident tensor p"));
    assert!(bench.interceptor.begin_item(&eight(Encoding::Xor)).is_err());
    let mut bench = Bench::new();
    assert_eq!(bench.interceptor.end_item().violations.len(), 1);
    assert!(bench.interceptor.failure().is_some());
}

#[test]
fn items_that_cannot_be_begun() {
    let mut bench = Bench::new();
    let begin = |bench: &mut Bench, item: &Item| bench.interceptor.begin_item(item).unwrap_err();
    let large = item("w", &[33], BF16, Encoding::Xor, &[0], &words(&[1]));
    assert!(matches!(begin(&mut bench, &large), InterceptError::ScratchTooSmall { needed: 66, len: 64, .. }));
    let wrong = item("w", &[8], BF16, Encoding::Xor, &[8], &words(&[1]));
    assert!(matches!(begin(&mut bench, &wrong), InterceptError::Item(_)));
    let nans = item("w", &[8], DType::F8E4M3, Encoding::Overwrite, &[0, 1], &[0x7f, 0xff]);
    assert!(matches!(begin(&mut bench, &nans), InterceptError::NoPlaceholder { .. }));
    bench.begin(Encoding::Xor);
    assert!(matches!(begin(&mut bench, &eight(Encoding::Xor)), InterceptError::ItemOpen { .. }));
    let none = Interceptor::new().begin_item(&eight(Encoding::Xor));
    assert_eq!(none, Err(InterceptError::NoScratch { name: "w".into() }));
    // SAFETY: nothing of it is used.
    let open = unsafe { bench.interceptor.set_scratch(bench.scratch.address(), 8) };
    assert_eq!(open, Err(InterceptError::ItemOpen { name: "w".into() }));
    // An attempt that starts over an open item closes it.
    bench.interceptor.begin_attempt();
    bench.begin(Encoding::Xor);
}

#[test]
fn memory_that_cannot_be_set() {
    let range = |start, len| ResidentRange { start, len, name: "p".into() };
    let memory = Memory::new(&[0; 64]);
    let mut interceptor = Interceptor::new();
    // SAFETY: the memory is valid where the call succeeds, and nothing is done with it.
    unsafe {
        let wraps = interceptor.set_resident(vec![range(usize::MAX, 2)]);
        assert!(matches!(wraps, Err(InterceptError::Range { .. })));
        assert!(matches!(interceptor.set_scratch(0, 2), Err(InterceptError::Range { .. })));
        assert!(matches!(interceptor.set_scratch(usize::MAX, 2), Err(InterceptError::Range { .. })));
        interceptor.set_resident(vec![range(memory.address(), 32), range(0, 0)]).unwrap();
        let same = interceptor.set_scratch(memory.address() + 31, 8);
        assert_eq!(same, Err(InterceptError::ScratchIsResident { name: "p".into() }));
        interceptor.set_scratch(memory.address() + 32, 32).unwrap();
        assert!(interceptor.set_resident(vec![range(memory.address(), 33)]).is_err());
    }
}

#[test]
fn a_new_scratch_is_filled_afresh() {
    let mut bench = Bench::new();
    bench.begin(Encoding::Xor);
    bench.interceptor.end_item();
    let other = Memory::new(&[0xbb; 64]);
    // SAFETY: it outlives its use below.
    unsafe { bench.interceptor.set_scratch(other.address(), other.len()) }.unwrap();
    bench.begin(Encoding::Xor);
    assert_eq!(other.bytes()[..16], words(&[0, 0x7fc0, 0, 0, 0, 0, 0x8000, 0]));
}

/// Tied and nested parameters: the smallest tensor that holds the destination is named.
#[test]
fn nested_ranges() {
    let resident = Memory::new(&[0; 64]);
    let scratch = Memory::new(&[0; 64]);
    let parts = [("all", 0, 64), ("half", 0, 32), ("inner", 4, 4), ("tied", 16, 32), ("far", 48, 16)];
    let mut interceptor = interceptor(&resident, &parts, &scratch);
    for (at, count, name) in [(0, 8, "half"), (16, 16, "tied"), (40, 8, "all"), (48, 8, "far"), (0, 32, "all")] {
        let dense: Vec<u64> = (0..count as u64).collect();
        let item = item("w", &[count as u64], BF16, Encoding::Dense, &dense, &vec![1; 2 * count as usize]);
        interceptor.begin_item(&item).unwrap();
        let sizes = [count];
        let dst = view(resident.address() + at, BF16, &sizes, &[1]);
        interceptor.on_copy(&dst, &view(scratch.address(), BF16, &sizes, &[1]));
        assert_eq!(interceptor.end_item().written, [name]);
    }
}

#[test]
fn empty_and_scalar_tensors() {
    let mut bench = Bench::new();
    let none = item("none", &[0, 3], BF16, Encoding::Dense, &[], &[]);
    bench.interceptor.begin_item(&none).unwrap();
    bench.interceptor.on_copy(&bench.dst(0, &[0, 3], &[3, 1]), &bench.src(0, &[0, 3], &[3, 1]));
    assert_eq!(bench.interceptor.end_item(), Default::default());
    let scalar = item("one", &[], BF16, Encoding::Overwrite, &[0], &words(&[0x1234]));
    bench.interceptor.begin_item(&scalar).unwrap();
    bench.interceptor.on_copy(&bench.dst(30, &[], &[]), &bench.src(0, &[], &[]));
    assert_eq!(bench.interceptor.end_item().elements, 1);
    assert_eq!(bench.resident.bytes()[30..32], [0x34, 0x12]);
    // No changes at all: a copy that writes nothing.
    let nothing = item("two", &[8], BF16, Encoding::Xor, &[], &[]);
    bench.interceptor.begin_item(&nothing).unwrap();
    bench.interceptor.on_copy(&bench.dst(0, &[8], &[1]), &bench.src(0, &[8], &[1]));
    let outcome = bench.interceptor.end_item();
    assert_eq!((outcome.copies, outcome.elements), (1, 0));
}
