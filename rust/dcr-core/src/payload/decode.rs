//! Reading a payload.

use std::collections::HashSet;

use zstd::zstd_safe;

use super::body::{ITEM_FIXED_LEN, Location, SECTIONS_LEN};
use super::error::PayloadError;
use super::header::{HEADER_LEN, peek};
use super::item::{Encoding, Item, Payload, Positions};
use crate::dtype::DType;
use crate::tensor::{MAX_RANK, TensorError, TensorMeta};

/// What [`decode`] accepts at most: 8 GiB of uncompressed body, enough for a dense item of a large embedding.
pub const DEFAULT_BODY_LIMIT: u64 = 8 << 30;

/// Decodes a payload with [`DEFAULT_BODY_LIMIT`].
pub fn decode(bytes: &[u8]) -> Result<Payload, PayloadError> {
    decode_with_limit(bytes, DEFAULT_BODY_LIMIT)
}

/// Decodes a payload whose body is at most `limit` bytes when uncompressed. Besides the body, positions take 8 bytes
/// each, so at most eight times the location bytes.
pub fn decode_with_limit(bytes: &[u8], limit: u64) -> Result<Payload, PayloadError> {
    let header = peek(bytes)?;
    let compressed = bytes.get(HEADER_LEN..).unwrap_or_default();
    if compressed.len() as u64 != header.compressed_len {
        let found = compressed.len() as u64;
        return Err(PayloadError::BodyLength { found, declared: header.compressed_len });
    }
    if header.uncompressed_len > limit {
        return Err(PayloadError::TooLarge { declared: header.uncompressed_len, limit });
    }
    if super::digest(compressed) != header.digest {
        return Err(PayloadError::Digest);
    }
    let body = decompress(compressed, header.uncompressed_len)?;
    let items = read_body(&body, header.items)?;
    Ok(Payload { id: header.id, items })
}

fn decompress(compressed: &[u8], declared: u64) -> Result<Vec<u8>, PayloadError> {
    let failed = |reason: String| PayloadError::Decompress { reason };
    // Decompression would go on into a second frame and skip over skippable ones.
    let frame = zstd_safe::find_frame_compressed_size(compressed)
        .map_err(|code| failed(zstd_safe::get_error_name(code).into()))?;
    if frame != compressed.len() {
        let (frame, declared) = (frame as u64, compressed.len() as u64);
        return Err(PayloadError::AfterFrame { frame, declared });
    }
    let mut body = Vec::new();
    let memory = PayloadError::Memory { bytes: declared };
    let Ok(capacity) = usize::try_from(declared) else {
        return Err(memory);
    };
    if body.try_reserve_exact(capacity).is_err() {
        return Err(memory);
    }
    // Writes at most the capacity, so a frame that holds more than it declares is an error and not more memory.
    let found = zstd::bulk::Decompressor::new()
        .and_then(|mut decompressor| decompressor.decompress_to_buffer(compressed, &mut body))
        .map_err(|error| failed(error.to_string()))?;
    if found as u64 != declared {
        return Err(PayloadError::UncompressedLength { found: found as u64, declared });
    }
    Ok(body)
}

fn read_body(body: &[u8], items: u32) -> Result<Vec<Item>, PayloadError> {
    let mut reader = Section { name: "body", item: 0, bytes: body, at: 0 };
    let lengths = [reader.u64("section lengths")?, reader.u64("section lengths")?, reader.u64("section lengths")?];
    let [metadata, locations, values] = lengths;
    let total = lengths.iter().try_fold(SECTIONS_LEN as u64, |sum, len| sum.checked_add(*len));
    if total != Some(body.len() as u64) {
        return Err(PayloadError::Sections { metadata, locations, values, body: body.len() as u64 });
    }
    let mut section = |name, len: u64| -> Result<Section<'_>, PayloadError> {
        let bytes = reader.take(len, name)?;
        Ok(Section { name, item: 0, bytes, at: 0 })
    };
    let mut metadata = section("metadata", metadata)?;
    let mut locations = section("locations", locations)?;
    let mut values = section("values", values)?;

    let mut names = HashSet::new();
    let mut decoded = Vec::new();
    for index in 0..items {
        for section in [&mut metadata, &mut locations, &mut values] {
            section.item = index;
        }
        let item = read_item(&mut metadata, &mut locations, &mut values)?;
        if !names.insert(item.meta.name.clone()) {
            return Err(PayloadError::Duplicate { name: item.meta.name });
        }
        decoded.push(item);
    }
    for section in [metadata, locations, values] {
        section.finish()?;
    }
    Ok(decoded)
}

fn read_item(
    metadata: &mut Section<'_>,
    locations: &mut Section<'_>,
    values: &mut Section<'_>,
) -> Result<Item, PayloadError> {
    let mut fixed = Section {
        name: metadata.name,
        item: metadata.item,
        bytes: metadata.take(ITEM_FIXED_LEN as u64, "fixed fields")?,
        at: 0,
    };
    let name_len = fixed.u16("name length")?;
    let [dtype, encoding, location, rank] = fixed.array("codes")?;
    let reserved = fixed.u16("reserved bytes")?;
    let count = fixed.u64("count")?;
    let start = fixed.u64("start or location offset")?;
    let value_offset = fixed.u64("value offset")?;

    let name = metadata.take(u64::from(name_len), "name")?;
    let Ok(name) = std::str::from_utf8(name).map(str::to_owned) else {
        return Err(PayloadError::NameEncoding { item: metadata.item });
    };
    if reserved != 0 {
        return Err(PayloadError::Reserved { place: "of an item", value: reserved });
    }
    let Some(dtype) = DType::from_code(dtype) else {
        return Err(PayloadError::DType { name, code: dtype });
    };
    let Some(encoding) = Encoding::from_code(encoding) else {
        return Err(PayloadError::Encoding { name, code: encoding });
    };
    let Some(location) = Location::from_code(location) else {
        return Err(PayloadError::LocationType { name, code: location });
    };
    if usize::from(rank) > MAX_RANK {
        return Err(TensorError::Rank { name, rank: rank.into() }.into());
    }
    let shape = (0..rank).map(|_| metadata.u64("shape")).collect::<Result<Vec<u64>, _>>()?;
    let meta = TensorMeta { name, shape, dtype };

    let positions = match location {
        Location::Run if count == 0 && start != 0 => {
            return Err(PayloadError::EmptyRun { name: meta.name, start });
        }
        Location::Run => Positions::Run { start, count },
        Location::Gaps(width) => {
            locations.expect_offset(start, &meta.name)?;
            let gaps = locations.take_elements(count, width)?;
            read_gaps(gaps, width, &meta)?
        }
    };
    values.expect_offset(value_offset, &meta.name)?;
    let values = values.take_elements(count, dtype.width())?.to_vec();
    let item = Item { meta, encoding, positions, values };
    item.validate()?;
    Ok(item)
}

fn read_gaps(gaps: &[u8], width: usize, meta: &TensorMeta) -> Result<Positions, PayloadError> {
    let count = gaps.len() / width;
    let mut positions = Vec::new();
    if positions.try_reserve_exact(count).is_err() {
        return Err(PayloadError::Memory { bytes: 8 * count as u64 });
    }
    // `next` is one past the last position; it overflows only past every possible element.
    let mut next = Some(0u64);
    let mut push = |gap: u64| {
        let position = next.and_then(|next| next.checked_add(gap));
        next = position.and_then(|position| position.checked_add(1));
        positions.push(position.unwrap_or(u64::MAX));
    };
    match width {
        1 => gaps.iter().for_each(|gap| push(u64::from(*gap))),
        2 => gaps.as_chunks().0.iter().for_each(|gap| push(u64::from(u16::from_le_bytes(*gap)))),
        4 => gaps.as_chunks().0.iter().for_each(|gap| push(u64::from(u32::from_le_bytes(*gap)))),
        _ => gaps.as_chunks().0.iter().for_each(|gap| push(u64::from_le_bytes(*gap))),
    }
    if next.is_none() {
        return Err(PayloadError::GapOverflow { name: meta.name.clone() });
    }
    Ok(Positions::from_sorted(positions))
}

/// A part of the body that is read from front to back.
struct Section<'a> {
    name: &'static str,
    item: u32,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Section<'a> {
    fn take(&mut self, len: u64, field: &'static str) -> Result<&'a [u8], PayloadError> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        let bytes = end.and_then(|end| self.bytes.get(self.at..end));
        let Some(bytes) = bytes else {
            return Err(PayloadError::Truncated { item: self.item, section: self.name, field });
        };
        self.at += bytes.len();
        Ok(bytes)
    }

    fn take_elements(&mut self, count: u64, width: usize) -> Result<&'a [u8], PayloadError> {
        let len = count.saturating_mul(width as u64);
        self.take(len, "elements")
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], PayloadError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, PayloadError> {
        self.array(field).map(u16::from_le_bytes)
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, PayloadError> {
        self.array(field).map(u64::from_le_bytes)
    }

    fn expect_offset(&self, found: u64, name: &str) -> Result<(), PayloadError> {
        let expected = self.at as u64;
        if found == expected {
            return Ok(());
        }
        Err(PayloadError::Offset { name: name.into(), section: self.name, found, expected })
    }

    fn finish(self) -> Result<(), PayloadError> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            left => Err(PayloadError::LeftOver { section: self.name, left: left as u64 }),
        }
    }
}
