//! Writing a payload.

use std::collections::HashSet;

use super::body::{ITEM_FIXED_LEN, Location, SECTIONS_LEN};
use super::error::PayloadError;
use super::header::{CODEC_ZSTD, HEADER_LEN, Header};
use super::item::{Item, PayloadId, Positions};

const ZSTD_LEVEL: i32 = 1;

/// Encodes `items` as one payload. The bytes depend on nothing but the arguments (and the zstd release): contiguous
/// positions become a run, others gaps in the smallest integer type that holds the largest of them.
pub fn encode(id: &PayloadId, items: &[Item]) -> Result<Vec<u8>, PayloadError> {
    let Ok(count) = u32::try_from(items.len()) else {
        return Err(PayloadError::TooManyItems { items: items.len() });
    };
    let body = body(items)?;
    let compressed = zstd::bulk::compress(&body, ZSTD_LEVEL)
        .map_err(|error| PayloadError::Compress { reason: error.to_string() })?;
    let header = Header {
        id: *id,
        codec: CODEC_ZSTD,
        items: count,
        uncompressed_len: body.len() as u64,
        compressed_len: compressed.len() as u64,
        digest: super::digest(&compressed),
    };
    let mut payload = Vec::with_capacity(HEADER_LEN + compressed.len());
    payload.extend_from_slice(&header.to_bytes());
    payload.extend_from_slice(&compressed);
    Ok(payload)
}

fn body(items: &[Item]) -> Result<Vec<u8>, PayloadError> {
    let mut names = HashSet::with_capacity(items.len());
    let mut metadata = Vec::new();
    let mut locations = Vec::new();
    let mut value_bytes = 0u64;
    for item in items {
        item.validate()?;
        if !names.insert(item.meta.name.as_str()) {
            return Err(PayloadError::Duplicate { name: item.meta.name.clone() });
        }
        let (location, start) = match item.positions.contiguous() {
            Some((start, _)) => (Location::Run, start),
            None => {
                let offset = locations.len() as u64;
                (write_gaps(&item.positions, &mut locations), offset)
            }
        };
        write_metadata(item, location, start, value_bytes, &mut metadata);
        value_bytes += item.values.len() as u64;
    }
    let len = SECTIONS_LEN + metadata.len() + locations.len() + value_bytes as usize;
    let mut body = Vec::with_capacity(len);
    for section in [metadata.len() as u64, locations.len() as u64, value_bytes] {
        body.extend_from_slice(&section.to_le_bytes());
    }
    body.extend_from_slice(&metadata);
    body.extend_from_slice(&locations);
    for item in items {
        body.extend_from_slice(&item.values);
    }
    Ok(body)
}

fn write_metadata(item: &Item, location: Location, start: u64, values: u64, out: &mut Vec<u8>) {
    out.reserve(ITEM_FIXED_LEN + item.meta.name.len() + 8 * item.meta.shape.len());
    // validate() bounds name and rank.
    out.extend_from_slice(&(item.meta.name.len() as u16).to_le_bytes());
    out.push(item.meta.dtype.code());
    out.push(item.encoding.code());
    out.push(location.code());
    out.push(item.meta.shape.len() as u8);
    out.extend_from_slice(&0u16.to_le_bytes());
    out.extend_from_slice(&item.positions.count().to_le_bytes());
    out.extend_from_slice(&start.to_le_bytes());
    out.extend_from_slice(&values.to_le_bytes());
    out.extend_from_slice(item.meta.name.as_bytes());
    for size in &item.meta.shape {
        out.extend_from_slice(&size.to_le_bytes());
    }
}

fn write_gaps(positions: &Positions, out: &mut Vec<u8>) -> Location {
    let Positions::Scattered(positions) = positions else {
        return Location::Run;
    };
    // Positions increase strictly, so "previous + 1" is at most the next position.
    let gaps = || {
        let mut next = 0;
        positions.iter().map(move |position| {
            let gap = position - next;
            next = position + 1;
            gap
        })
    };
    let location = Location::for_gap(gaps().max().unwrap_or(0));
    match location {
        Location::Run => {}
        Location::Gaps(1) => out.extend(gaps().map(|gap| gap as u8)),
        Location::Gaps(2) => out.extend(gaps().flat_map(|gap| (gap as u16).to_le_bytes())),
        Location::Gaps(4) => out.extend(gaps().flat_map(|gap| (gap as u32).to_le_bytes())),
        Location::Gaps(_) => out.extend(gaps().flat_map(u64::to_le_bytes)),
    }
    location
}
