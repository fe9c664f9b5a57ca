//! Index maps and residual assembly, against closed forms and against a walk over every element.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use dcr_core::assembly::{Assembly, AssemblyError};
use dcr_core::dtype::DType;
use dcr_core::projection::{Piece, Projection, ProjectionError, first_difference};
use dcr_core::tensor::TensorMeta;
use proptest::prelude::*;

fn meta(name: &str, shape: &[u64]) -> TensorMeta {
    TensorMeta::new(name, shape, DType::Bf16)
}

/// Multi-indices of an array of this shape in row-major order.
fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
    shape.iter().fold(vec![vec![]], |all, size| {
        all.iter().flat_map(|index| (0..*size).map(|last| [index.as_slice(), &[last]].concat())).collect()
    })
}

/// The canonical flat index of each element of a block, by walking over the whole canonical tensor.
fn walked(shape: &[u64], offset: &[u64], extent: &[u64]) -> Vec<u64> {
    let inside = |index: &Vec<u64>| {
        index.iter().zip(offset).zip(extent).all(|((at, first), size)| (*first..first + size).contains(at))
    };
    (0..).zip(indices(shape)).filter(|(_, index)| inside(index)).map(|(flat, _)| flat).collect()
}

#[test]
fn the_example_of_figure_5() {
    // A row shard that begins at row i0 of w columns: element (i, y) goes to (i0 + i)w + y.
    let map = Projection::split(meta("n", &[2, 5]), 0, 3, 4).unwrap();
    assert_eq!(map.canonical(7), Some((&meta("n", &[8, 5]), (6 + 1) * 5 + 2)));
    assert_eq!(map.canonical(10), None);
    assert_eq!(map.elements(), 10);
}

#[test]
fn impossible_maps_are_refused() {
    let outside = Projection::block(meta("w", &[4, 4]), [2, 0], [3, 4]);
    assert!(matches!(outside, Err(ProjectionError::Outside { .. })));
    let overflow = Projection::block(meta("w", &[4]), [u64::MAX], [2]);
    assert!(matches!(overflow, Err(ProjectionError::Outside { .. })));
    let rank = Projection::block(meta("w", &[4, 4]), [0], [4]);
    assert!(matches!(rank, Err(ProjectionError::Outside { .. })));
    assert!(matches!(Projection::split(meta("w", &[4]), 1, 0, 1), Err(ProjectionError::Axis { axis: 1, .. })));
    assert!(matches!(Projection::split(meta("w", &[4]), 0, 2, 2), Err(ProjectionError::Part { part: 2, .. })));
    assert!(matches!(Projection::split(meta("w", &[4]), 0, 0, 0), Err(ProjectionError::Part { parts: 0, .. })));
    assert!(matches!(Projection::split(meta("w", &[1 << 60, 8]), 0, 1, 64), Err(ProjectionError::Tensor(_))));
    let odd = Projection::gated(meta("g", &[3, 2]), "u", 0, 1).unwrap_err();
    assert!(matches!(&odd, ProjectionError::Halves { .. }), "{odd}");
    assert!(matches!(Projection::gated(meta("g", &[]), "u", 0, 1), Err(ProjectionError::Halves { .. })));
    assert!(matches!(Projection::whole(meta("", &[3])), Err(ProjectionError::Tensor(_))));
}

#[test]
fn empty_and_scalar_shards_have_maps() {
    let empty = Projection::split(meta("w", &[0, 3]), 0, 1, 2).unwrap();
    assert_eq!((empty.elements(), empty.canonical(0)), (0, None));
    assert_eq!(empty.pieces()[0].runs().count(), 0);
    let scalar = Projection::whole(meta("s", &[])).unwrap();
    assert_eq!(scalar.canonical(0), Some((&meta("s", &[]), 0)));
    let inner = Projection::block(meta("w", &[3, 0]), [1, 0], [1, 0]).unwrap();
    assert_eq!(inner.elements(), 0);
}

proptest! {
    /// The closed forms of docs/training.md, for every rank of every mapping class.
    #[test]
    fn mapping_classes_have_their_closed_forms(rows in 1u64..7, columns in 1u64..7, parts in 1u64..6, dims in 1usize..3) {
        let local = if dims == 1 { vec![rows] } else { vec![rows, columns] };
        let n: u64 = local.iter().product();
        for t in 0..parts {
            let column = Projection::split(meta("w", &local), 0, t, parts).unwrap();
            let all: Vec<u64> = (0..n).collect();
            for j in 0..n {
                prop_assert_eq!(column.canonical(j).unwrap().1, j + t * n);
            }
            prop_assert_eq!(column.pieces()[0].project(&all), (0..n).map(|j| j + t * n).collect::<Vec<_>>());
            if dims == 2 {
                let (c, row) = (columns, Projection::split(meta("w", &local), 1, t, parts).unwrap());
                let expected: Vec<u64> = (0..n).map(|j| (j / c) * (c * parts) + t * c + j % c).collect();
                prop_assert_eq!(row.pieces()[0].project(&all), expected.clone());
                for j in 0..n {
                    prop_assert_eq!(row.canonical(j).unwrap().1, expected[j as usize]);
                }
            }
            let mut doubled = local.clone();
            doubled[0] *= 2;
            let gated = Projection::gated(meta("gate", &doubled), "up", t, parts).unwrap();
            for j in 0..2 * n {
                let h = n;
                let expected = if j < h { ("gate", j + t * h) } else { ("up", (j - h) + t * h) };
                let (tensor, k) = gated.canonical(j).unwrap();
                prop_assert_eq!((tensor.name.as_str(), k), expected);
            }
        }
    }

    /// All parts together cover the canonical tensor, each element once.
    #[test]
    fn parts_partition_the_tensor(
        local in proptest::collection::vec(1u64..5, 1..4),
        axis in 0usize..3,
        parts in 1u64..6,
    ) {
        let axis = axis % local.len();
        let mut seen = Vec::new();
        for part in 0..parts {
            let map = Projection::split(meta("w", &local), axis, part, parts).unwrap();
            let n = map.elements();
            seen.extend(map.pieces()[0].project(&(0..n).collect::<Vec<_>>()));
        }
        seen.sort_unstable();
        let total = local.iter().product::<u64>() * parts;
        prop_assert_eq!(seen, (0..total).collect::<Vec<_>>());
    }

    #[test]
    fn blocks_agree_with_a_walk(
        dims in proptest::collection::vec((1u64..5, 0u64..4, 0u64..4), 0..5),
        first in 0u64..9,
        keep in proptest::collection::vec(any::<bool>(), 300),
    ) {
        let shape: Vec<u64> = dims.iter().map(|(extent, before, after)| before + extent + after).collect();
        let offset: Vec<u64> = dims.iter().map(|(_, before, _)| *before).collect();
        let extent: Vec<u64> = dims.iter().map(|(extent, _, _)| *extent).collect();
        let expected = walked(&shape, &offset, &extent);
        let piece = Piece::new(meta("w", &shape), offset, extent, first).unwrap();
        prop_assert_eq!(piece.local(), first..first + expected.len() as u64);
        let picked: Vec<usize> = (0..expected.len()).filter(|at| keep[at % 300]).collect();
        let positions: Vec<u64> = picked.iter().map(|at| first + *at as u64).collect();
        prop_assert_eq!(piece.project(&positions), picked.iter().map(|at| expected[*at]).collect::<Vec<_>>());
        let runs: Vec<(u64, u64)> =
            piece.runs().flat_map(|(from, to, count)| (0..count).map(move |at| (from + at, to + at))).collect();
        let pairs: Vec<(u64, u64)> = (first..).zip(expected).collect();
        prop_assert_eq!(runs, pairs);
    }

    /// Overlapping blocks of one tensor assemble to it; a changed bit in an overlap, and a missing block, are found.
    #[test]
    fn assembly_is_whole_and_agrees_or_says_why(
        shape in proptest::collection::vec(1u64..6, 1..4),
        cuts in proptest::collection::vec((0u64..6, 0u64..6, 0u64..6, 0u64..6, 0u64..6, 0u64..6), 1..6),
        spoil in any::<prop::sample::Index>(),
    ) {
        let tensor = meta("u", &shape);
        let total: u64 = shape.iter().product();
        let bits: Vec<u8> = (0..total).flat_map(|at| (at as u16 ^ 0x8000).to_le_bytes()).collect();
        let block = |cut: &(u64, u64, u64, u64, u64, u64)| {
            let cut = [(cut.0, cut.1), (cut.2, cut.3), (cut.4, cut.5)];
            let offset: Vec<u64> = shape.iter().zip(cut).map(|(size, (at, _))| at % size).collect();
            let extent: Vec<u64> =
                shape.iter().zip(&offset).zip(cut).map(|((size, at), (_, more))| 1 + more % (size - at)).collect();
            let covers = walked(&shape, &offset, &extent);
            let values: Vec<u8> = covers.iter().flat_map(|at| (*at as u16 ^ 0x8000).to_le_bytes()).collect();
            (Piece::new(tensor.clone(), offset, extent, 0).unwrap(), covers, values)
        };
        let blocks: Vec<_> = cuts.iter().map(block).collect();
        let mut covered: Vec<u64> = blocks.iter().flat_map(|(_, covers, _)| covers.clone()).collect();
        covered.sort_unstable();
        covered.dedup();
        let assemble = |blocks: &[(Piece, Vec<u64>, Vec<u8>)]| {
            let mut assembly = Assembly::new(tensor.clone()).unwrap();
            for (rank, (piece, _, values)) in (0..).zip(blocks) {
                assembly.add(rank, piece.clone(), values)?;
            }
            assembly.finish()
        };
        match assemble(&blocks) {
            Ok(assembled) => {
                prop_assert_eq!(covered.len() as u64, total);
                prop_assert_eq!(&assembled, &bits);
            }
            Err(AssemblyError::Uncovered { missing, element, .. }) => {
                prop_assert_eq!(missing, total - covered.len() as u64);
                prop_assert_eq!(element, (0..total).find(|at| !covered.contains(at)).unwrap());
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
        // With the whole tensor as the last part, one flipped bit of an earlier part is found by name.
        let mut spoilt = blocks.clone();
        let which = spoil.index(spoilt.len());
        let at = spoil.index(spoilt[which].1.len());
        let element = spoilt[which].1[at];
        spoilt[which].2[2 * at] ^= 1;
        let whole = Piece::new(tensor.clone(), vec![0; shape.len()], shape.clone(), 0).unwrap();
        spoilt.push((whole.clone(), (0..total).collect(), bits.clone()));
        let error = assemble(&spoilt).unwrap_err();
        let AssemblyError::Disagree { element: found, first, second, .. } = &error else { panic!("{error}") };
        prop_assert_eq!(*found, element);
        prop_assert!(*first == which as u32 || *second == which as u32, "{}", error);
        let (piece, _, values) = &blocks[0];
        prop_assert_eq!(first_difference(piece, values, &bits, 2), None);
        let (piece, _, values) = &spoilt[which];
        prop_assert_eq!(first_difference(piece, values, &bits, 2), Some(element));
    }
}

#[test]
fn parts_of_other_tensors_and_lengths_are_refused() {
    let mut assembly = Assembly::new(meta("u", &[4])).unwrap();
    let other = Piece::new(meta("u", &[5]), [0], [5], 0).unwrap();
    assert!(matches!(assembly.add(3, other, &[0; 10]), Err(AssemblyError::Other { rank: 3, .. })));
    let part = Piece::new(meta("u", &[4]), [1], [2], 0).unwrap();
    let error = assembly.add(3, part.clone(), &[0; 5]).unwrap_err();
    assert_eq!(error.to_string(), "tensor \"u\": training rank 3 gave 5 bytes for a part that has 4");
    assembly.add(3, part, &[0; 4]).unwrap();
    let error = assembly.finish().unwrap_err().to_string();
    assert!(error.contains("2 of 4 elements") && error.contains("element 0") && error.contains("[3]"), "{error}");
}
