//! The payload format: round trips, damage of every kind, and limits.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::HashSet;

use dcr_core::dtype::DType;
use dcr_core::payload::{
    Encoding, HEADER_LEN, Item, ItemError, PayloadError, PayloadId, Positions, decode, decode_with_limit, encode, peek,
};
use dcr_core::tensor::TensorMeta;
use proptest::prelude::*;

const ID: PayloadId = PayloadId { attempt: [9; 16], owner: 5, sequence: 11 };

fn item(name: &str, shape: &[u64], dtype: DType, encoding: Encoding, positions: Positions) -> Item {
    let meta = TensorMeta::new(name, shape, dtype);
    let len = positions.count() as usize * dtype.width();
    Item { meta, encoding, positions, values: (0..len).map(|byte| byte as u8).collect() }
}

fn small() -> Vec<Item> {
    let scattered = Positions::Scattered(vec![0, 2, 300, 5000]);
    vec![
        item("a", &[2, 3], DType::Bf16, Encoding::Xor, Positions::Run { start: 2, count: 3 }),
        item("b", &[5001], DType::F32, Encoding::Overwrite, scattered),
        item("c", &[4], DType::U8, Encoding::Dense, Positions::Run { start: 0, count: 4 }),
    ]
}

#[test]
fn header_is_readable_without_the_body() {
    let bytes = encode(&ID, &small()).unwrap();
    let header = peek(&bytes[..HEADER_LEN]).unwrap();
    assert_eq!(header.id, ID);
    assert_eq!(header.items, 3);
    assert_eq!(header.compressed_len as usize, bytes.len() - HEADER_LEN);
    assert_eq!(header.digest, dcr_core::payload::digest(&bytes[HEADER_LEN..]));
    assert_eq!(header.to_bytes(), bytes[..HEADER_LEN]);
    assert_eq!(peek(&bytes[..HEADER_LEN - 1]), Err(PayloadError::Short { len: HEADER_LEN - 1 }));
    assert_eq!(ID.to_string(), "09090909090909090909090909090909/5/11");
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = encode(&ID, &small()).unwrap();
    for len in 0..bytes.len() {
        assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(matches!(decode(&longer), Err(PayloadError::BodyLength { .. })));
}

#[test]
fn every_flipped_bit_is_an_error_or_another_identifier() {
    let items = small();
    let bytes = encode(&ID, &items).unwrap();
    for bit in 0..8 * bytes.len() {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        match decode(&damaged) {
            Err(_) => {}
            // Attempt, owner and sequence: authenticated with the header, not by the digest.
            Ok(payload) => {
                assert!((8..32).contains(&(bit / 8)), "bit {bit}");
                assert_ne!(payload.id, ID);
                assert_eq!(payload.items, items);
            }
        }
    }
}

/// The same damage behind a digest that matches it, as an attacker would make it: zstd and the body's parser are
/// reached. Any answer is fine except a panic or more memory than allowed.
#[test]
fn damage_behind_a_valid_digest_never_panics() {
    let bytes = encode(&ID, &small()).unwrap();
    for (at, value) in (HEADER_LEN..bytes.len()).flat_map(|at| (0..=255).map(move |value| (at, value))) {
        let mut damaged = bytes.clone();
        damaged[at] = value;
        reseal(&mut damaged);
        let _ = decode_with_limit(&damaged, 1 << 20);
    }
}

/// And in the uncompressed body.
#[test]
fn damage_in_the_body_never_panics() {
    let bytes = encode(&ID, &small()).unwrap();
    let body = zstd::bulk::decompress(&bytes[HEADER_LEN..], 1 << 20).unwrap();
    let mut accepted = 0;
    for at in 0..body.len() {
        for value in [0, 1, 2, 3, 4, 8, 0x7f, 0x80, 0xfe, 0xff, body[at] ^ 1, body[at].wrapping_add(1)] {
            let mut damaged = body.clone();
            damaged[at] = value;
            accepted += usize::from(decode(&wrap(&bytes, &damaged)).is_ok());
        }
    }
    // Names, values and some sizes may hold anything; most of the rest may not.
    assert!(accepted < 12 * body.len() / 2, "{accepted} of {}", 12 * body.len());
    for len in 0..body.len() {
        assert!(decode(&wrap(&bytes, &body[..len])).is_err());
    }
}

fn wrap(header: &[u8], body: &[u8]) -> Vec<u8> {
    let packed = zstd::bulk::compress(body, 1).unwrap();
    let mut bytes = header[..HEADER_LEN].to_vec();
    bytes[40..48].copy_from_slice(&(body.len() as u64).to_le_bytes());
    bytes[48..56].copy_from_slice(&(packed.len() as u64).to_le_bytes());
    bytes.extend(packed);
    reseal(&mut bytes);
    bytes
}

fn reseal(bytes: &mut [u8]) {
    let digest = dcr_core::payload::digest(&bytes[HEADER_LEN..]);
    bytes[56..72].copy_from_slice(&digest);
}

#[test]
fn limits_bound_the_body() {
    let zeros = item("z", &[1 << 24], DType::U8, Encoding::Dense, Positions::Run { start: 0, count: 1 << 24 });
    let zeros = Item { values: vec![0; 1 << 24], ..zeros };
    let bytes = encode(&ID, &[zeros]).unwrap();
    assert!(bytes.len() < 4096);
    let declared = peek(&bytes).unwrap().uncompressed_len;
    assert!(decode_with_limit(&bytes, declared).is_ok());
    let refused = decode_with_limit(&bytes, declared - 1);
    assert_eq!(refused, Err(PayloadError::TooLarge { declared, limit: declared - 1 }));
    // Declares little and holds much.
    let mut bomb = bytes.clone();
    bomb[40..48].copy_from_slice(&100u64.to_le_bytes());
    assert!(matches!(decode_with_limit(&bomb, 1 << 20), Err(PayloadError::Decompress { .. })));
    // Declares more than any memory.
    bomb[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(decode_with_limit(&bomb, u64::MAX), Err(PayloadError::Memory { .. })));
}

#[test]
fn what_cannot_be_encoded_is_an_error() {
    let good = small();
    let refuse = |change: &dyn Fn(&mut Item)| {
        let mut items = good.clone();
        change(&mut items[1]);
        encode(&ID, &items).unwrap_err()
    };
    let error = refuse(&|item| item.values.truncate(15));
    assert!(matches!(error, PayloadError::Item(ItemError::ValueBytes { len: 15, expected: 16, .. })));
    let error = refuse(&|item| item.positions = Positions::Scattered(vec![0, 2, 2, 5]));
    assert!(matches!(error, PayloadError::Item(ItemError::NotIncreasing { previous: 2, position: 2, .. })));
    let error = refuse(&|item| item.positions = Positions::Scattered(vec![0, 2, 3, 5001]));
    assert!(matches!(error, PayloadError::Item(ItemError::Outside { position: 5001, .. })));
    let error = refuse(&|item| item.positions = Positions::Run { start: 4998, count: 4 });
    assert!(matches!(error, PayloadError::Item(ItemError::RunOutside { .. })));
    let error = refuse(&|item| item.positions = Positions::Run { start: u64::MAX, count: 4 });
    assert!(matches!(error, PayloadError::Item(ItemError::RunOutside { .. })));
    let error = refuse(&|item| item.encoding = Encoding::Dense);
    assert!(matches!(error, PayloadError::Item(ItemError::DenseIncomplete { count: 4, numel: 5001, .. })));
    let error = refuse(&|item| item.meta.name.clear());
    assert!(matches!(error, PayloadError::Item(ItemError::Tensor(_))));
    let error = refuse(&|item| item.meta.name = "a".into());
    assert_eq!(error, PayloadError::Duplicate { name: "a".into() });
}

#[test]
fn contiguous_positions_become_a_run() {
    let scattered = item("a", &[9], DType::U8, Encoding::Xor, Positions::Scattered(vec![3, 4, 5]));
    let run = item("a", &[9], DType::U8, Encoding::Xor, Positions::Run { start: 3, count: 3 });
    let bytes = encode(&ID, std::slice::from_ref(&scattered)).unwrap();
    assert_eq!(bytes, encode(&ID, std::slice::from_ref(&run)).unwrap());
    assert_eq!(decode(&bytes).unwrap().items, [run]);
    let empty = item("a", &[9], DType::U8, Encoding::Xor, Positions::Scattered(vec![]));
    let decoded = decode(&encode(&ID, &[empty]).unwrap()).unwrap().items;
    assert_eq!(decoded[0].positions, Positions::Run { start: 0, count: 0 });
}

#[test]
fn gaps_use_the_narrowest_type() {
    let len = |gap: u64| {
        let positions = Positions::Scattered(vec![0, gap + 1, gap + 3]);
        let bytes = encode(&ID, &[item("a", &[1 << 40], DType::U8, Encoding::Xor, positions)]).unwrap();
        let body = zstd::bulk::decompress(&bytes[HEADER_LEN..], 1 << 20).unwrap();
        u64::from_le_bytes(body[8..16].try_into().unwrap())
    };
    let expected = [(255, 3), (256, 6), (65535, 6), (65536, 12), ((1 << 32) - 1, 12), (1 << 32, 24)];
    for (gap, bytes) in expected {
        assert_eq!(len(gap), bytes, "gap {gap}");
    }
}

fn any_item() -> impl Strategy<Value = Item> {
    let shape = prop::collection::vec(0u64..7, 0..5);
    let name = prop_oneof!["[a-z.]{1,12}", "\\PC{1,40}"];
    let dtype = prop::sample::select(DType::ALL.to_vec());
    let encoding = prop::sample::select(vec![Encoding::Xor, Encoding::Overwrite, Encoding::Dense]);
    (name, shape, dtype, encoding, 0u64..=4, any::<u64>(), prop::bool::ANY).prop_map(
        |(name, shape, dtype, encoding, density, seed, huge)| {
            let mut state = seed | 1;
            let mut random = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            };
            // A tensor too large for memory still has positions all over it.
            let sparse = huge && encoding != Encoding::Dense;
            let shape = if sparse { vec![1 << 20, 1 << 20] } else { shape };
            let meta = TensorMeta::new(name, shape, dtype);
            let numel = meta.numel().unwrap();
            let positions = if encoding == Encoding::Dense {
                Positions::Run { start: 0, count: numel }
            } else if sparse {
                let mut positions: Vec<u64> = (0..30).map(|_| random() % numel).collect();
                positions.sort_unstable();
                positions.dedup();
                Positions::from_sorted(positions)
            } else {
                Positions::from_sorted((0..numel).filter(|_| random() % 4 < density).collect())
            };
            let len = positions.count() as usize * dtype.width();
            let values = (0..len).map(|_| random() as u8).collect();
            Item { meta, encoding, positions, values }
        },
    )
}

proptest! {
    #[test]
    fn decoding_undoes_encoding(
        attempt: [u8; 16],
        owner: u32,
        sequence: u32,
        items in prop::collection::vec(any_item(), 0..8),
    ) {
        let mut names = HashSet::new();
        let items: Vec<Item> =
            items.into_iter().filter(|item| names.insert(item.meta.name.clone())).collect();
        let id = PayloadId { attempt, owner, sequence };
        let bytes = encode(&id, &items).unwrap();
        let payload = decode(&bytes).unwrap();
        prop_assert_eq!(payload.id, id);
        prop_assert_eq!(&payload.items, &items);
        prop_assert_eq!(encode(&id, &payload.items).unwrap(), bytes);
    }

    #[test]
    fn noise_is_refused(bytes: Vec<u8>, seed: [u8; 16]) {
        prop_assert!(decode(&bytes).is_err());
        // Behind a good header, too.
        let header = encode(&PayloadId { attempt: seed, owner: 0, sequence: 0 }, &[]).unwrap();
        prop_assert!(decode(&wrap(&header, &bytes)).is_err());
    }
}
