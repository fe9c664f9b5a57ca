//! Identifiers: attempts (τ), candidate baselines (g), commit records K = (version, g) and peers.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// An identifier was not 32 hexadecimal digits.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("`{0}` is not an identifier of 32 hexadecimal digits")]
pub struct ParseIdError(String);

macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let wrong = || ParseIdError(text.to_owned());
                if text.len() != 32 || !text.is_ascii() {
                    return Err(wrong());
                }
                let mut bytes = [0; 16];
                for (index, byte) in bytes.iter_mut().enumerate() {
                    let pair = &text[2 * index..2 * index + 2];
                    // `from_str_radix` alone would accept a sign.
                    if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                        return Err(wrong());
                    }
                    *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
                }
                Ok(Self(bytes))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    };
}

identifier! {
    /// An attempt identifier, τ: fresh for every attempt.
    AttemptId
}
identifier! {
    /// A baseline identifier, g: names the source baseline that an attempt would commit.
    BaselineId
}

/// The policy that a receiver's storage or an owner's baseline holds: a version and its baseline identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Policy version, v.
    pub version: u64,
    /// Identifier of the source baseline bound to it.
    pub baseline: BaselineId,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {} (baseline {})", self.version, self.baseline)
    }
}

/// The authoritative commit record K = (v, g), changed only by compare-and-set (appendix A.1).
///
/// `nonce` is fresh on every write: stores that compare by a digest of the bytes (an ETag) would otherwise not
/// see a change back to equal content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitRecord {
    /// The committed policy version and its baseline.
    #[serde(flatten)]
    pub held: Held,
    /// Fresh for every write.
    pub nonce: BaselineId,
}

/// What a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A training rank that compares and sends its share.
    Owner,
    /// A rollout rank that applies.
    Receiver,
    /// The one that drives attempts.
    Coordinator,
    /// The relay itself.
    Relay,
}

/// A peer's name: its role, then what tells it apart: `owner/3`, `receiver/host-12/rank0`, `coordinator`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PeerName(String);

impl PeerName {
    /// Longest accepted name in bytes; ZeroMQ identities end at 255 and a session suffix is appended.
    pub const MAX_LEN: usize = 200;

    /// Checks and wraps a name. `None` when it is empty, too long, has control characters or no known role.
    pub fn new(name: impl Into<String>) -> Option<Self> {
        let name = Self(name.into());
        let shape = !name.0.is_empty() && name.0.len() <= Self::MAX_LEN && !name.0.chars().any(char::is_control);
        (shape && name.role().is_some()).then_some(name)
    }

    /// The coordinator's name.
    pub fn coordinator() -> Self {
        Self("coordinator".to_owned())
    }

    /// The relay's name.
    pub fn relay() -> Self {
        Self("relay".to_owned())
    }

    /// The name of the owner with this index.
    pub fn owner(index: u32) -> Self {
        Self(format!("owner/{index}"))
    }

    /// The role that the name starts with.
    pub fn role(&self) -> Option<Role> {
        let (role, rest) = self.0.split_once('/').unwrap_or((&self.0, ""));
        match (role, rest.is_empty()) {
            ("owner", false) => Some(Role::Owner),
            ("receiver", false) => Some(Role::Receiver),
            ("coordinator", true) => Some(Role::Coordinator),
            ("relay", true) => Some(Role::Relay),
            _ => None,
        }
    }

    /// The index in an owner's name.
    pub fn owner_index(&self) -> Option<u32> {
        self.0.strip_prefix("owner/")?.parse().ok()
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_round_trip_as_hex_and_refuse_anything_else() {
        let id = AttemptId([0xab; 16]);
        assert_eq!(id.to_string(), "ab".repeat(16));
        assert_eq!("ab".repeat(16).parse(), Ok(id));
        for wrong in ["", "ab", &"g".repeat(32), &"+1".repeat(16), "äääääääääääääääää"] {
            assert!(wrong.parse::<AttemptId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn peer_names_carry_their_role() {
        assert_eq!(PeerName::owner(3).owner_index(), Some(3));
        assert_eq!(PeerName::new("receiver/a/rank0").and_then(|name| name.role()), Some(Role::Receiver));
        for wrong in ["", "owner", "owner/", "visitor/1", "receiver/\n", "coordinator/x"] {
            assert_eq!(PeerName::new(wrong), None, "{wrong:?}");
        }
    }
}
