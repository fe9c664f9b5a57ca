//! The source baseline and its staged candidates.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use dcr_core::baseline::{Baseline, BaselineError, Candidate, Role};
use dcr_core::changes::Changes;
use dcr_core::dtype::DType;
use dcr_core::fingerprint::Fingerprints;
use dcr_core::payload::{Encoding, Item, Positions};
use dcr_core::projection::Projection;
use dcr_core::tensor::TensorMeta;
use proptest::prelude::*;

fn words(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn meta(name: &str, shape: &[u64]) -> TensorMeta {
    TensorMeta::new(name, shape, DType::Bf16)
}

fn tracked() -> Baseline {
    let mut baseline = Baseline::default();
    baseline.track(meta("a", &[2, 2]), &words(&[0x3f80, 0, 0x7fc0, 5])).unwrap();
    baseline.track(meta("b", &[3]), &words(&[1, 2, 3])).unwrap();
    baseline
}

/// The one item of a changed canonical tensor in every encoding.
fn items(candidate: Candidate<'_>) -> [Item; 3] {
    let one = |encoding| {
        let mut items = candidate.items(|_| encoding);
        assert_eq!(items.len(), 1);
        items.remove(0)
    };
    [one(Encoding::Xor), one(Encoding::Overwrite), candidate.dense_item().unwrap()]
}

#[test]
fn a_candidate_serves_every_encoding() {
    let mut baseline = tracked();
    // The paper's example mask 0x4040 ^ 0x3f80 = 0x7fc0, a changed sign of zero, a changed NaN payload.
    let new = words(&[0x4040, 0x8000, 0x7fc1, 5]);
    let candidate = baseline.compare(&meta("a", &[2, 2]), &new).unwrap();
    assert!(!candidate.is_unchanged());
    let [xor, overwrite, dense] = items(candidate);
    for (item, encoding) in [(&xor, Encoding::Xor), (&overwrite, Encoding::Overwrite), (&dense, Encoding::Dense)] {
        item.validate().unwrap();
        assert_eq!((item.encoding, item.meta.name.as_str()), (encoding, "a"));
    }
    let three = Positions::Run { start: 0, count: 3 };
    assert_eq!((xor.positions, xor.values), (three.clone(), words(&[0x7fc0, 0x8000, 1])));
    assert_eq!((overwrite.positions, overwrite.values), (three, words(&[0x4040, 0x8000, 0x7fc1])));
    assert_eq!((dense.positions, dense.values), (Positions::Run { start: 0, count: 4 }, new));
}

#[test]
fn commit_writes_and_discard_forgets() {
    let mut baseline = tracked();
    assert_eq!(baseline.bytes_held(), 14);
    baseline.compare(&meta("a", &[2, 2]), &words(&[9, 0, 0x7fc0, 8])).unwrap();
    baseline.compare(&meta("b", &[3]), &words(&[1, 2, 3])).unwrap();
    assert_eq!(baseline.bits("a").unwrap(), words(&[0x3f80, 0, 0x7fc0, 5]));
    assert_eq!(baseline.bytes_staged(), 2 * 8 + 4);
    assert!(baseline.candidate("b").unwrap().is_unchanged());

    baseline.discard();
    assert!(baseline.candidate("a").is_none());
    baseline.commit();
    assert_eq!(baseline.bits("a").unwrap(), words(&[0x3f80, 0, 0x7fc0, 5]));

    // A retry compares again; the later candidate counts.
    baseline.compare(&meta("a", &[2, 2]), &words(&[7, 7, 7, 7])).unwrap();
    baseline.compare(&meta("a", &[2, 2]), &words(&[9, 0, 0x7fc0, 8])).unwrap();
    baseline.commit();
    let committed = words(&[9, 0, 0x7fc0, 8]);
    assert_eq!(baseline.bits("a").unwrap(), committed);
    assert_eq!(baseline.bytes_staged(), 0);
    baseline.commit();
    assert_eq!(baseline.bits("a").unwrap(), committed);
    assert_eq!(baseline.bits("b").unwrap(), words(&[1, 2, 3]));
    assert!(baseline.compare(&meta("a", &[2, 2]), &committed).unwrap().is_unchanged());
    assert_eq!(baseline.bytes_held(), 14);
    assert_eq!(baseline.tensors().map(|(meta, _)| meta.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn mistakes_name_the_tensor() {
    let mut baseline = tracked();
    let again = baseline.track(meta("a", &[1]), &words(&[1])).unwrap_err();
    assert_eq!(again, BaselineError::Tracked { name: "a".into() });
    let short = baseline.track(meta("c", &[2]), &[0; 3]).unwrap_err();
    assert_eq!(short, BaselineError::Bytes { name: "c".into(), found: 3, expected: 4 });
    assert!(matches!(baseline.track(meta("", &[2]), &[0; 4]), Err(BaselineError::Tensor(_))));
    assert_eq!(baseline.tensors().count(), 2);

    let mut refuse = |meta: &TensorMeta, bytes: &[u8]| baseline.compare(meta, bytes).map(|_| ()).unwrap_err();
    assert_eq!(refuse(&meta("c", &[2]), &[0; 4]), BaselineError::Unknown { name: "c".into() });
    let shape = refuse(&meta("a", &[4]), &[0; 8]);
    assert_eq!(shape.to_string(), "tensor \"a\" has shape [4], but [2, 2] is tracked; shapes must not change");
    let dtype = refuse(&TensorMeta::new("a", [2, 2], DType::F16), &[0; 8]);
    assert_eq!(dtype.to_string(), "tensor \"a\" has dtype F16, but BF16 is tracked; dtypes must not change");
    let bytes = refuse(&meta("a", &[2, 2]), &[0; 7]);
    assert_eq!(bytes, BaselineError::Bytes { name: "a".into(), found: 7, expected: 8 });
    assert!(baseline.candidate("a").is_none());
}

#[test]
fn empty_tensors_and_scalars_can_be_tracked() {
    let mut baseline = Baseline::default();
    baseline.track(meta("none", &[0, 5]), &[]).unwrap();
    baseline.track(meta("scalar", &[]), &[1, 2]).unwrap();
    let none = baseline.compare(&meta("none", &[0, 5]), &[]).unwrap();
    assert!(none.is_unchanged());
    assert!(none.items(|_| Encoding::Xor).is_empty());
    none.dense_item().unwrap().validate().unwrap();
    let scalar = baseline.compare(&meta("scalar", &[]), &[1, 3]).unwrap();
    assert_eq!(items(scalar)[0].values, [0, 1]);
    baseline.commit();
    assert_eq!(baseline.bits("scalar"), Some([1, 3].as_slice()));
}

#[test]
fn a_shard_is_projected_and_a_residual_tensor_overwritten() {
    let mut baseline = Baseline::default();
    // Part 1 of 2 of gate and up, one row each: shard elements 0, 1 are gate's 2, 3, and 2, 3 are up's.
    let map = Projection::gated(meta("gate", &[2, 2]), "up", 1, 2).unwrap();
    baseline.track_as(meta("fc1", &[2, 2]), Role::Shard, Some(map), &words(&[1, 2, 3, 4])).unwrap();
    baseline.track_as(meta("q", &[2]), Role::Residual, None, &words(&[5, 6])).unwrap();
    let names: Vec<_> = baseline.canonical().map(|meta| (meta.name.as_str(), meta.shape.clone())).collect();
    assert_eq!(names, [("gate", vec![2, 2]), ("up", vec![2, 2]), ("q", vec![2])]);

    let shard = baseline.compare(&meta("fc1", &[2, 2]), &words(&[1, 3, 2, 4])).unwrap();
    assert!(shard.dense_item().is_none(), "no shard is a dense tensor");
    let encoding = |tensor: &TensorMeta| if tensor.name == "up" { Encoding::Overwrite } else { Encoding::Xor };
    let items = shard.items(encoding);
    let told = |item: &Item| (item.meta.name.clone(), item.encoding, item.positions.clone(), item.values.clone());
    let at = |start| Positions::Run { start, count: 1 };
    assert_eq!(
        items.iter().map(told).collect::<Vec<_>>(),
        [
            ("gate".into(), Encoding::Xor, at(3), words(&[2 ^ 3])),
            ("up".into(), Encoding::Overwrite, at(2), words(&[2])),
        ]
    );
    let residual = baseline.compare(&meta("q", &[2]), &words(&[5, 7])).unwrap();
    let items = residual.items(|_| Encoding::Xor);
    assert_eq!(items.iter().map(told).collect::<Vec<_>>(), [("q".into(), Encoding::Overwrite, at(1), words(&[7]))]);

    let wrong = Projection::whole(meta("w", &[3])).unwrap();
    let error = baseline.track_as(meta("s", &[2]), Role::Shard, Some(wrong), &[0; 4]).unwrap_err();
    assert!(matches!(error, BaselineError::Projection { elements: 3, .. }), "{error}");
    let wrong = Projection::whole(TensorMeta::new("w", [2], DType::F16)).unwrap();
    let error = baseline.track_as(meta("s", &[2]), Role::Shard, Some(wrong), &[0; 4]).unwrap_err();
    assert!(matches!(error, BaselineError::Projection { mapped: DType::F16, .. }), "{error}");
}

#[test]
fn stretches_compared_apart_join_to_the_whole() {
    let old = words(&(0..100).collect::<Vec<u16>>());
    let mut new = old.clone();
    for at in [0, 33, 34, 66, 99] {
        new[2 * at] ^= 0x55;
    }
    let mut baseline = Baseline::default();
    baseline.track(meta("t", &[100]), &old).unwrap();
    let whole = baseline.changes(&meta("t", &[100]), &new, 0..100).unwrap();
    assert_eq!(whole.positions, Positions::Scattered(vec![0, 33, 34, 66, 99]));
    let part = |range| baseline.changes(&meta("t", &[100]), &new, range).unwrap();
    assert_eq!(Changes::join(vec![part(0..34), part(34..34), part(34..67), part(67..100)]), whole);
    assert!(baseline.changes(&meta("t", &[100]), &new, 90..101).is_err());
    assert!(Changes::join(vec![]).is_empty());
}

#[test]
fn fingerprints_flag_any_changed_bit() {
    let mut prints = Fingerprints::new();
    prints.track(meta("s", &[3]), &words(&[0, 0x7fc0, 1])).unwrap();
    let look = |prints: &mut Fingerprints, values: &[u16]| {
        let found = prints.compute(&meta("s", &[3]), &words(values)).unwrap();
        prints.stage("s", found)
    };
    assert!(!look(&mut prints, &[0, 0x7fc0, 1]));
    assert!(look(&mut prints, &[0x8000, 0x7fc0, 1]), "a sign of zero");
    assert!(look(&mut prints, &[0, 0x7fc1, 1]), "a NaN payload");
    prints.discard();
    prints.commit();
    assert!(!look(&mut prints, &[0, 0x7fc0, 1]), "what was discarded is not committed");
    assert!(look(&mut prints, &[0, 0x7fc1, 1]));
    prints.commit();
    prints.commit();
    assert!(!look(&mut prints, &[0, 0x7fc1, 1]));
    prints.discard();
    assert_eq!(prints.unstaged().count(), 1);
    let shape = prints.compute(&meta("s", &[1, 3]), &[0; 6]).unwrap_err();
    assert!(shape.to_string().contains("[1, 3]"), "{shape}");
    assert!(matches!(prints.compute(&meta("x", &[1]), &[0; 2]), Err(BaselineError::Unknown { .. })));
    assert!(matches!(prints.track(meta("s", &[1]), &[0; 2]), Err(BaselineError::Tracked { .. })));
}

proptest! {
    #[test]
    fn every_encoding_leads_to_the_new_bits(
        dtype in prop::sample::select(DType::ALL.to_vec()),
        pairs in prop::collection::vec((any::<u64>(), any::<u64>(), 0u8..3), 0..300),
    ) {
        let width = dtype.width();
        let bytes = |pick: &dyn Fn(&(u64, u64, u8)) -> u64| -> Vec<u8> {
            pairs.iter().flat_map(|pair| pick(pair).to_le_bytes()[..width].to_vec()).collect()
        };
        let old = bytes(&|pair| pair.0);
        let new = bytes(&|pair| if pair.2 == 0 { pair.1 } else { pair.0 });
        let meta = TensorMeta::new("t", [pairs.len() as u64], dtype);
        let mut baseline = Baseline::default();
        baseline.track(meta.clone(), &old).unwrap();
        let candidate = baseline.compare(&meta, &new).unwrap();
        for encoding in [Encoding::Xor, Encoding::Overwrite, Encoding::Dense] {
            let item = match encoding {
                Encoding::Dense => candidate.dense_item(),
                _ => candidate.items(|_| encoding).pop(),
            };
            let Some(item) = item else {
                prop_assert_eq!(&old, &new);
                continue;
            };
            prop_assert_eq!(item.validate(), Ok(()));
            let mut result = old.clone();
            for (index, position) in item.positions.iter().enumerate() {
                for byte in 0..width {
                    let at = &mut result[position as usize * width + byte];
                    let value = item.values[index * width + byte];
                    *at = if encoding == Encoding::Xor { *at ^ value } else { value };
                }
            }
            prop_assert_eq!(&result, &new);
        }
        prop_assert_eq!(baseline.bits("t").unwrap(), &old);
        baseline.commit();
        prop_assert_eq!(baseline.bits("t").unwrap(), &new);
    }
}
