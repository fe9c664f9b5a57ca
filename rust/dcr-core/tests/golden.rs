//! Golden payloads: written by an independent script (`tests/golden/make.py`), read here; and one written here.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::PathBuf;

use dcr_core::dtype::DType;
use dcr_core::payload::{Encoding, Item, PayloadId, Positions, decode, encode};
use dcr_core::tensor::TensorMeta;
use serde_json::Value;

fn golden(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(file)
}

fn item(name: &str, shape: &[u64], dtype: DType, encoding: Encoding, positions: Positions, values: &[u8]) -> Item {
    let meta = TensorMeta::new(name, shape, dtype);
    Item { meta, encoding, positions, values: values.to_vec() }
}

/// The paper's figure D.3: A's changes are one run, B's are scattered.
fn figure() -> Vec<Item> {
    let a = Positions::Run { start: 3, count: 2 };
    let b = Positions::Scattered(vec![2, 5, 8]);
    vec![
        item("model.a.weight", &[2, 4], DType::Bf16, Encoding::Xor, a, &[3, 0, 0, 0x80]),
        item("model.b.weight", &[3, 3], DType::Bf16, Encoding::Xor, b, &[1, 0, 0xff, 0x7f, 0xc0, 0x7f]),
    ]
}

const ID: PayloadId =
    PayloadId { attempt: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], owner: 3, sequence: 7 };

#[test]
fn the_papers_figure_decodes() {
    let payload = decode(&fs::read(golden("figure.bin")).unwrap()).unwrap();
    assert_eq!(payload.id, ID);
    assert_eq!(payload.items, figure());
}

#[test]
fn every_file_decodes_to_its_description() {
    let mut seen = 0;
    for entry in fs::read_dir(golden(".")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let payload = decode(&fs::read(path.with_extension("bin")).unwrap()).unwrap();
        assert_eq!(hex::encode(payload.id.attempt), text["attempt"], "{path:?}");
        assert_eq!(payload.id.owner, text["owner"], "{path:?}");
        assert_eq!(payload.id.sequence, text["sequence"], "{path:?}");
        let described: Vec<Item> = text["items"].as_array().unwrap().iter().map(described).collect();
        assert_eq!(payload.items, described, "{path:?}");
        seen += 1;
    }
    assert_eq!(seen, 5);
}

fn described(text: &Value) -> Item {
    let positions = match &text["positions"] {
        Value::Array(list) => Positions::from_sorted(list.iter().map(|at| at.as_u64().unwrap()).collect()),
        run => Positions::Run { start: run["start"].as_u64().unwrap(), count: run["count"].as_u64().unwrap() },
    };
    let shape: Vec<u64> = text["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).collect();
    item(
        text["name"].as_str().unwrap(),
        &shape,
        DType::from_name(text["dtype"].as_str().unwrap()).unwrap(),
        serde_json::from_value(text["encoding"].clone()).unwrap(),
        positions,
        &hex::decode(text["values"].as_str().unwrap()).unwrap(),
    )
}

#[test]
fn every_attack_is_refused_for_its_reason() {
    let reasons: Value = serde_json::from_str(&fs::read_to_string(golden("refused/reasons.json")).unwrap()).unwrap();
    let reasons = reasons.as_object().unwrap();
    assert!(reasons.len() > 40);
    let mut wrong = Vec::new();
    for (name, reason) in reasons {
        let bytes = fs::read(golden(&format!("refused/{name}.bin"))).unwrap();
        let error = decode(&bytes).map(|_| ()).expect_err(name).to_string();
        if !error.contains(reason.as_str().unwrap()) || error.contains('\n') {
            wrong.push(format!("{name}: {error}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Scattered positions with a pattern in them, so that zstd has something to do.
fn larger() -> Vec<Item> {
    let positions: Vec<u64> = (0..5000).map(|index| index * 97 + index % 13).collect();
    let values: Vec<u8> = (0..5000u32).flat_map(|index| ((index * index) as u16 & 0x807f).to_le_bytes()).collect();
    let dense: Vec<u8> = (0..3000u32).map(|index| (index / 7) as u8).collect();
    let run = Positions::Run { start: 0, count: 3000 };
    let mut items = figure();
    items.push(item("c", &[512, 1024], DType::Bf16, Encoding::Xor, Positions::Scattered(positions), &values));
    items.push(item("d", &[3, 1000], DType::U8, Encoding::Dense, run, &dense));
    items
}

/// The file was written by this encoder with zstd 1.5.7. Another zstd release may compress differently; then check
/// that the old file still decodes, and write the new one.
#[test]
fn the_encoder_writes_the_same_bytes() {
    let bytes = encode(&ID, &larger()).unwrap();
    let path = golden("encoder.bin");
    if std::env::var_os("DCR_WRITE_GOLDEN").is_some() {
        fs::write(&path, &bytes).unwrap();
    }
    let stored = fs::read(&path).unwrap();
    assert_eq!(decode(&stored).unwrap().items, larger());
    assert_eq!(bytes, stored);
}

/// Where zstd leaves data as it is, whole payloads agree with the independent writer.
#[test]
fn bodies_agree_with_the_independent_writer() {
    let stored = fs::read(golden("figure.bin")).unwrap();
    let ours = encode(&ID, &figure()).unwrap();
    // Everything up to the lengths and the digest.
    assert_eq!(ours[..48], stored[..48]);
    let body = zstd::bulk::decompress(&ours[72..], 1 << 20).unwrap();
    // The hand-made frame has 9 bytes of frame header and 3 of block header.
    assert_eq!(body, stored[72 + 12..]);
}
