//! Which training rank compares what (section 4.1, appendix A.1): one owner for each unique source element.

use std::cmp::Reverse;

use thiserror::Error;

use crate::payload::digest;

/// Something that one owner compares: a shard of a conversion task, or a canonical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its name; the hash of it decides between owners that have the same load.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// The ranks that hold a copy, of which one becomes the owner.
    pub candidates: Vec<u32>,
}

/// Why shares cannot be assigned.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OwnershipError {
    /// Nobody holds a share.
    #[error("no training rank holds `{name}`")]
    NoCandidate {
        /// The share.
        name: String,
    },
    /// A rank that does not exist.
    #[error("training rank {rank} is said to hold `{name}`, but there are {owners} ranks")]
    UnknownRank {
        /// The share.
        name: String,
        /// The rank.
        rank: u32,
        /// Number of ranks.
        owners: u32,
    },
}

/// The owner of every share, in their order.
///
/// Large shares are placed first, those with the fewest candidates before all others, each with the candidate that
/// has the fewest bytes so far; a hash of name and rank decides between equals. So the answer depends on nothing but the
/// set of shares: it is the same on every machine, in every attempt, and in whatever order the shares come. Where
/// candidates allow it, and no single share is larger than a tenth of the mean, loads are within 10% of the mean.
pub fn assign(shares: &[Share], owners: u32) -> Result<Vec<u32>, OwnershipError> {
    let mut order: Vec<(usize, &Share, u64)> =
        shares.iter().enumerate().map(|(index, share)| (index, share, hash(&share.name, None))).collect();
    order.sort_by_key(|(_, share, hash)| (share.candidates.len(), Reverse(share.bytes), *hash));
    let mut loads = vec![0u64; owners as usize];
    let mut assigned = vec![0; shares.len()];
    for (index, share, _) in order {
        let name = || share.name.clone();
        if let Some(rank) = share.candidates.iter().copied().find(|rank| *rank >= owners) {
            return Err(OwnershipError::UnknownRank { name: name(), rank, owners });
        }
        let load = |rank: &u32| (loads[*rank as usize], hash(&share.name, Some(*rank)), *rank);
        let Some(owner) = share.candidates.iter().copied().min_by_key(load) else {
            return Err(OwnershipError::NoCandidate { name: name() });
        };
        loads[owner as usize] = loads[owner as usize].saturating_add(share.bytes);
        assigned[index] = owner;
    }
    Ok(assigned)
}

/// The first eight bytes of BLAKE2b-128 over the name, and over a zero byte and the rank where there is one.
fn hash(name: &str, rank: Option<u32>) -> u64 {
    let mut bytes = name.as_bytes().to_vec();
    if let Some(rank) = rank {
        bytes.push(0);
        bytes.extend_from_slice(&rank.to_le_bytes());
    }
    let [a, b, c, d, e, f, g, h, ..] = digest(&bytes);
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn share(name: &str, bytes: u64, candidates: &[u32]) -> Share {
        Share { name: name.to_owned(), bytes, candidates: candidates.to_vec() }
    }

    #[test]
    fn owners_are_pinned() {
        // By hand, with hashes from Python's hashlib.blake2b(name + b"\0" + rank, digest_size=16): those that have no
        // choice go first; among equals, "a" has the lower hash, and that of "a" with rank 0 is the lower one of two.
        let shares = [share("a", 4, &[0, 1]), share("b", 4, &[0, 1]), share("c", 9, &[1]), share("d", 2, &[0])];
        assert_eq!(assign(&shares, 2), Ok(vec![0, 0, 1, 0]));
        let equals = [share("b", 4, &[0, 1]), share("a", 4, &[0, 1])];
        assert_eq!(assign(&equals, 2), Ok(vec![1, 0]));
        let python = [
            ("a", None, 9_189_440_641_721_877_287_u64),
            ("b", None, 15_072_482_883_801_913_238),
            ("a", Some(0), 4_233_493_243_373_614_611),
            ("a", Some(1), 15_646_024_999_848_614_248),
        ];
        for (name, rank, value) in python {
            assert_eq!(hash(name, rank), value, "{name} {rank:?}");
        }
    }

    #[test]
    fn impossible_shares_are_named() {
        let error = assign(&[share("w", 1, &[])], 2).unwrap_err();
        assert_eq!(error.to_string(), "no training rank holds `w`");
        let error = assign(&[share("w", 1, &[0, 2])], 2).unwrap_err();
        assert_eq!(error.to_string(), "training rank 2 is said to hold `w`, but there are 2 ranks");
        assert_eq!(assign(&[], 0), Ok(vec![]));
    }

    proptest! {
        #[test]
        fn loads_are_within_a_tenth_of_the_mean(
            owners in 1u32..9,
            each in 64usize..100,
            sizes in proptest::collection::vec(prop_oneof![Just(128u64), 1u64..4096, Just(786_432u64)], 900),
            seed in 0u32..1000,
        ) {
            let count = owners as usize * each;
            let all: Vec<u32> = (0..owners).collect();
            let shares: Vec<Share> =
                (0..count).map(|index| share(&format!("{seed}.{index}"), sizes[index % 900], &all)).collect();
            let assigned = assign(&shares, owners).unwrap();
            let mut loads = vec![0u64; owners as usize];
            for (share, owner) in shares.iter().zip(&assigned) {
                loads[*owner as usize] += share.bytes;
            }
            let mean = loads.iter().sum::<u64>() as f64 / f64::from(owners);
            let largest = shares.iter().map(|share| share.bytes).max().unwrap() as f64;
            // No rule can do better where one tensor is larger than the tolerance.
            prop_assume!(largest <= mean / 10.0);
            for load in loads {
                prop_assert!((load as f64 - mean).abs() <= mean / 10.0, "{load} of {mean}");
            }
        }

        #[test]
        fn order_does_not_matter(rotate in 0usize..40, seed in 0u32..100) {
            let shares: Vec<Share> = (0..40u64)
                .map(|index| share(&format!("{seed}.{index}"), index % 7 * 100, if index % 3 == 0 { &[1] } else { &[0, 1, 2] }))
                .collect();
            let mut rotated = shares.clone();
            rotated.rotate_left(rotate);
            let mut assigned = assign(&shares, 3).unwrap();
            assigned.rotate_left(rotate);
            prop_assert_eq!(assign(&rotated, 3).unwrap(), assigned);
        }
    }
}
