//! The source baseline and its staged candidates.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use dcr_core::baseline::{Baseline, BaselineError};
use dcr_core::dtype::DType;
use dcr_core::payload::{Encoding, Positions};
use dcr_core::tensor::TensorMeta;
use proptest::prelude::*;

fn words(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn meta(name: &str, shape: &[u64]) -> TensorMeta {
    TensorMeta::new(name, shape, DType::Bf16)
}

fn tracked() -> Baseline {
    let mut baseline = Baseline::new();
    baseline.track(meta("a", &[2, 2]), &words(&[0x3f80, 0, 0x7fc0, 5])).unwrap();
    baseline.track(meta("b", &[3]), &words(&[1, 2, 3])).unwrap();
    baseline
}

#[test]
fn a_candidate_serves_every_encoding() {
    let mut baseline = tracked();
    // The paper's example mask 0x4040 ^ 0x3f80 = 0x7fc0, a changed sign of zero, a changed NaN payload.
    let new = words(&[0x4040, 0x8000, 0x7fc1, 5]);
    let candidate = baseline.compare(&meta("a", &[2, 2]), &new).unwrap();
    assert!(!candidate.is_unchanged());
    assert_eq!(candidate.positions(), &Positions::Run { start: 0, count: 3 });
    assert_eq!(candidate.values(), words(&[0x4040, 0x8000, 0x7fc1]));
    assert_eq!(candidate.xor_values(), words(&[0x7fc0, 0x8000, 1]));
    assert_eq!(candidate.dense_values(), new);
    for encoding in [Encoding::Xor, Encoding::Overwrite, Encoding::Dense] {
        let item = candidate.item(encoding);
        item.validate().unwrap();
        assert_eq!((item.encoding, item.meta.name.as_str()), (encoding, "a"));
    }
    assert_eq!(candidate.item(Encoding::Dense).positions, Positions::Run { start: 0, count: 4 });
    assert_eq!(candidate.item(Encoding::Overwrite).values, candidate.values());
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
    assert_eq!(baseline.metas().map(|meta| meta.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn mistakes_name_the_tensor() {
    let mut baseline = tracked();
    let again = baseline.track(meta("a", &[1]), &words(&[1])).unwrap_err();
    assert_eq!(again, BaselineError::Tracked { name: "a".into() });
    let short = baseline.track(meta("c", &[2]), &[0; 3]).unwrap_err();
    assert_eq!(short, BaselineError::Bytes { name: "c".into(), found: 3, expected: 4 });
    assert!(matches!(baseline.track(meta("", &[2]), &[0; 4]), Err(BaselineError::Tensor(_))));
    assert_eq!(baseline.metas().count(), 2);

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
    let mut baseline = Baseline::new();
    baseline.track(meta("none", &[0, 5]), &[]).unwrap();
    baseline.track(meta("scalar", &[]), &[1, 2]).unwrap();
    let none = baseline.compare(&meta("none", &[0, 5]), &[]).unwrap();
    assert!(none.is_unchanged());
    none.item(Encoding::Dense).validate().unwrap();
    let scalar = baseline.compare(&meta("scalar", &[]), &[1, 3]).unwrap();
    assert_eq!(scalar.xor_values(), [0, 1]);
    baseline.commit();
    assert_eq!(baseline.bits("scalar"), Some([1, 3].as_slice()));
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
        let mut baseline = Baseline::new();
        baseline.track(meta.clone(), &old).unwrap();
        let candidate = baseline.compare(&meta, &new).unwrap();
        for encoding in [Encoding::Xor, Encoding::Overwrite, Encoding::Dense] {
            let item = candidate.item(encoding);
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
