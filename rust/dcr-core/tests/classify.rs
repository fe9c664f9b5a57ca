//! Classes from dry runs.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use dcr_core::classify::{Class, DryRun, OtherWrite, RecordedCopy, classify};
use dcr_core::dtype::DType;
use dcr_core::tensor::TensorMeta;

const BF16: DType = DType::Bf16;

/// A copy of a whole contiguous BF16 matrix to `dst`.
fn copy(dst: usize, sizes: [i64; 2]) -> RecordedCopy {
    RecordedCopy {
        resident: "p".into(),
        dst,
        dst_dtype: Some(BF16),
        dst_sizes: sizes.to_vec(),
        dst_strides: vec![sizes[1], 1],
        src_offset: Some(0),
        src_dtype: Some(BF16),
        src_sizes: sizes.to_vec(),
        src_strides: vec![sizes[1], 1],
    }
}

fn run(name: &str, sizes: [i64; 2], copies: Vec<RecordedCopy>) -> DryRun {
    let meta = TensorMeta::new(name, sizes.map(|size| size as u64), BF16);
    DryRun { meta, reported: !copies.is_empty(), copies, writes: Vec::new() }
}

fn one(copy: RecordedCopy) -> Class {
    let sizes = [8, 4];
    classify(&[run("w", sizes, vec![copy])]).remove(0)
}

fn reason(class: &Class) -> &str {
    assert_eq!(class.name(), "unsupported", "{class:?}");
    class.reason()
}

#[test]
fn plain_copies_take_xor() {
    assert_eq!(one(copy(1000, [8, 4])), Class::Xor);
    // A slice of rows of the transposed tensor, fused into a wider parameter.
    let transposed = RecordedCopy {
        dst_sizes: vec![4, 3],
        dst_strides: vec![20, 1],
        src_offset: Some(2 * 4 * 2),
        src_sizes: vec![4, 3],
        src_strides: vec![1, 4],
        ..copy(1000, [8, 4])
    };
    assert_eq!(one(transposed), Class::Xor);
    let scalar = RecordedCopy {
        dst_sizes: vec![],
        dst_strides: vec![],
        src_sizes: vec![],
        src_strides: vec![],
        ..copy(1000, [8, 4])
    };
    assert_eq!(one(scalar), Class::Xor);
}

#[test]
fn casts_take_overwrites_or_nothing() {
    let to = |dst| one(RecordedCopy { dst_dtype: dst, ..copy(1000, [8, 4]) });
    assert_eq!(to(Some(DType::F32)), Class::Overwrite);
    assert!(reason(&to(Some(DType::F16))).contains("casts BF16 to F16"));
    assert!(reason(&to(Some(DType::F64))).contains("casts BF16 to F64"));
    assert!(reason(&to(None)).contains("does not know"));
    let half = RecordedCopy { src_dtype: Some(DType::F16), dst_dtype: Some(DType::F32), ..copy(1000, [8, 4]) };
    assert!(reason(&one(half.clone())).contains("its input is F16"));
    let mut f16 = run("w", [8, 4], vec![half]);
    f16.meta.dtype = DType::F16;
    assert_eq!(classify(&[f16]), [Class::Overwrite]);
    // One plain copy and one cast.
    let cast = RecordedCopy { dst_dtype: Some(DType::F32), ..copy(5000, [8, 4]) };
    assert_eq!(classify(&[run("w", [8, 4], vec![copy(1000, [8, 4]), cast.clone()])]), [Class::Overwrite]);
    assert_eq!(classify(&[run("w", [8, 4], vec![cast, copy(1000, [8, 4])])]), [Class::Overwrite]);
}

#[test]
fn inputs_must_be_the_tensor_in_scratch() {
    let from = |change: &dyn Fn(&mut RecordedCopy)| {
        let mut copy = copy(1000, [8, 4]);
        change(&mut copy);
        reason(&one(copy)).to_owned()
    };
    let temporary = from(&|copy| copy.src_offset = None);
    assert!(temporary.contains("does not share scratch storage (table A.2)") && temporary.contains("tensor p"));
    assert!(from(&|copy| copy.src_offset = Some(2)).contains("beyond the tensor"));
    assert!(from(&|copy| copy.src_offset = Some(u64::MAX)).contains("beyond the address space"));
    let odd = from(&|copy| {
        copy.src_offset = Some(1);
        (copy.src_sizes, copy.dst_sizes) = (vec![7, 4], vec![7, 4]);
    });
    assert!(odd.contains("does not start at an element"));
    assert!(from(&|copy| copy.src_sizes = vec![4, 4]).contains("expanded"));
    assert!(from(&|copy| copy.dst_strides = vec![3, 1]).contains("overlap each other"));
    assert!(from(&|copy| copy.dst_strides = vec![1]).contains("number of sizes and strides"));
}

#[test]
fn skips_are_what_is_neither_copied_nor_reported() {
    assert_eq!(classify(&[run("expert", [8, 4], vec![])]), [Class::Skip]);
    let reported = DryRun { reported: true, ..run("expert", [8, 4], vec![]) };
    assert!(reason(&classify(&[reported])[0]).contains("reports it as loaded, but no copy"));
    let empty = DryRun { reported: true, ..run("none", [0, 4], vec![]) };
    assert_eq!(classify(&[empty]), [Class::Skip]);
    let empty = DryRun { reported: true, ..run("none", [0, 4], vec![copy(0, [0, 4])]) };
    assert_eq!(classify(&[empty]), [Class::Xor]);
    assert!(reason(&classify(&[run("", [8, 4], vec![])])[0]).contains("empty name"));
    assert_eq!(classify(&[]), []);
}

#[test]
fn fills_are_harmless_beside_copies() {
    let with = |op: &str, start: usize| {
        let write = OtherWrite { op: op.into(), resident: "p".into(), start, len: 64 };
        let embedding = DryRun { writes: vec![write], ..run("embed", [8, 4], vec![copy(1000, [8, 4])]) };
        // The other tensor is the neighbour that a fill must not reach either.
        classify(&[embedding, run("next", [8, 4], vec![copy(2000, [8, 4])])])
    };
    for op in ["aten::fill_.Scalar", "aten.fill_.Scalar", "fill_", "aten::zero_", "aten.zero_.default"] {
        assert_eq!(with(op, 1064), [Class::Xor, Class::Xor], "{op}");
        for start in [1063, 937, 1000, 2063, 1990] {
            let classes = with(op, start);
            assert!(reason(&classes[0]).contains("where a copy writes too"), "{op} {start}");
            assert_eq!(classes[1], Class::Xor);
        }
    }
    for op in ["aten::mul_.Tensor", "aten::index_put_", "aten::fill_diagonal_", "aten::copy_"] {
        assert!(reason(&with(op, 1064)[0]).contains("besides copy_"), "{op}");
    }
    let untouched = OtherWrite { op: "aten::zero_".into(), resident: "p".into(), start: 0, len: 8 };
    let skipped = DryRun { writes: vec![untouched], ..run("skipped", [8, 4], vec![]) };
    assert_eq!(classify(&[skipped]), [Class::Skip]);
}

#[test]
fn tensors_that_share_bytes_take_overwrites() {
    // Tied weights, and a neighbour that touches neither.
    let tied = [
        run("embed", [8, 4], vec![copy(1000, [8, 4])]),
        run("other", [8, 4], vec![copy(1064, [8, 4])]),
        run("head", [8, 4], vec![copy(1000, [8, 4])]),
    ];
    assert_eq!(classify(&tied), [Class::Overwrite, Class::Xor, Class::Overwrite]);
    // One byte in common.
    let touching = [
        run("a", [8, 4], vec![copy(1000, [8, 4])]),
        run("b", [8, 4], vec![copy(1063, [8, 4])]),
        run("c", [8, 4], vec![copy(1127, [8, 4])]),
    ];
    assert_eq!(classify(&touching), [Class::Overwrite, Class::Overwrite, Class::Xor]);
    // An unsupported tensor stays so, and what it would have written is not known to be harmful.
    let cast = RecordedCopy { dst_dtype: Some(DType::F16), ..copy(1000, [8, 4]) };
    let mixed = [run("a", [8, 4], vec![cast]), run("b", [8, 4], vec![copy(1000, [8, 4])])];
    assert_eq!(classify(&mixed).iter().map(Class::name).collect::<Vec<_>>(), ["unsupported", "xor"]);
}

/// The overlap with a long copy is seen across shorter ones in between.
#[test]
fn overlaps_reach_past_neighbours() {
    let small = |name, dst| run(name, [1, 4], vec![copy(dst, [1, 4])]);
    let long = run("long", [8, 4], vec![copy(1000, [8, 4])]);
    let classes = classify(&[small("a", 1000), long.clone(), small("b", 1016), small("c", 1056), small("d", 1064)]);
    assert_eq!(classes, [Class::Overwrite, Class::Overwrite, Class::Overwrite, Class::Overwrite, Class::Xor]);

    let twice = run("long", [8, 4], vec![copy(1000, [8, 4]), copy(1020, [8, 4])]);
    let classes = classify(&[twice, run("other", [8, 4], vec![copy(1010, [8, 4])])]);
    assert!(reason(&classes[0]).contains("from different elements"));
    assert_eq!(classes[1], Class::Overwrite);
}

/// Gate and up interleaved by columns: bounds meet, bytes do not.
#[test]
fn interleaved_tensors_take_xor() {
    let half = |dst| RecordedCopy { dst_strides: vec![8, 1], ..copy(dst, [8, 4]) };
    let fused = [run("gate", [8, 4], vec![half(1000)]), run("up", [8, 4], vec![half(1008)])];
    assert_eq!(classify(&fused), [Class::Xor, Class::Xor]);
    let shifted = [run("gate", [8, 4], vec![half(1000)]), run("up", [8, 4], vec![half(1006)])];
    assert_eq!(classify(&shifted), [Class::Overwrite, Class::Overwrite]);
}

/// Too many runs to look at: tensors whose bounds meet may overlap, others do not.
#[test]
fn huge_strided_copies_count_as_overlapping() {
    let sizes = [3 << 20, 1];
    let strided = |dst| RecordedCopy { dst_strides: vec![2, 1], ..copy(dst, sizes) };
    let runs = [
        run("even", sizes, vec![strided(1 << 20)]),
        run("odd", sizes, vec![strided((1 << 20) + 2)]),
        run("far", sizes, vec![strided(1 << 30)]),
    ];
    assert_eq!(classify(&runs), [Class::Overwrite, Class::Overwrite, Class::Xor]);
}

#[test]
fn copies_of_one_tensor_may_repeat_but_not_mix() {
    let twice = run("w", [8, 4], vec![copy(1000, [8, 4]), copy(1000, [8, 4])]);
    assert_eq!(classify(&[twice]), [Class::Overwrite]);
    let apart = run("w", [8, 4], vec![copy(1000, [8, 4]), copy(1064, [8, 4])]);
    assert_eq!(classify(&[apart]), [Class::Xor]);
    let mixed = run("w", [8, 4], vec![copy(1000, [8, 4]), copy(1032, [8, 4])]);
    assert!(reason(&classify(&[mixed])[0]).contains("from different elements"));
}
