//! Codes and sizes inside the body, shared by encoder and decoder.

/// Bytes in front of the metadata: lengths of metadata, locations and values.
pub(super) const SECTIONS_LEN: usize = 24;
/// Bytes of an item's metadata before its name and shape.
pub(super) const ITEM_FIXED_LEN: usize = 32;

/// How an item's positions are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Location {
    /// A start index in the metadata.
    Run,
    /// Gaps of this many bytes in the location buffer.
    Gaps(usize),
}

impl Location {
    pub(super) const fn code(self) -> u8 {
        match self {
            Location::Run => 0,
            Location::Gaps(width) => width as u8,
        }
    }

    pub(super) const fn from_code(code: u8) -> Option<Location> {
        match code {
            0 => Some(Location::Run),
            1 | 2 | 4 | 8 => Some(Location::Gaps(code as usize)),
            _ => None,
        }
    }

    /// The narrowest type for gaps up to `largest`.
    pub(super) const fn for_gap(largest: u64) -> Location {
        Location::Gaps(match largest {
            0..=0xff => 1,
            0x100..=0xffff => 2,
            0x1_0000..=0xffff_ffff => 4,
            _ => 8,
        })
    }
}
