//! The declared order of application (appendix B.1): by sequence first, then by owner.
//!
//! Every receiver applies payloads in this one order, whatever order they arrive in. Going by sequence first
//! lets all owners' streams drain at the same pace, so no owner's window can be blocked by another's.

use crate::PayloadKey;

/// Walks through the payloads of an attempt in declared order.
#[derive(Clone, Debug)]
pub struct DeclaredOrder {
    next: PayloadKey,
    ends: Vec<Option<u32>>,
}

impl DeclaredOrder {
    /// An order over the streams of this many owners, none of which has ended.
    pub fn new(owners: u32) -> Self {
        Self { next: PayloadKey { sequence: 0, owner: 0 }, ends: vec![None; owners as usize] }
    }

    /// An owner's stream has this many payloads. False when the owner is unknown or said something else before.
    pub fn end(&mut self, owner: u32, payloads: u32) -> bool {
        match self.ends.get_mut(owner as usize) {
            Some(slot @ None) => {
                *slot = Some(payloads);
                true
            }
            Some(Some(said)) => *said == payloads,
            None => false,
        }
    }

    /// Whether a payload can still come: its owner exists and its stream does not end before it.
    pub fn expects(&self, key: PayloadKey) -> bool {
        self.ends.get(key.owner as usize).is_some_and(|end| end.is_none_or(|end| key.sequence < end))
    }

    /// The payload to apply next; `None` when every stream has ended and been passed.
    pub fn due(&mut self) -> Option<PayloadKey> {
        if self.complete() {
            return None;
        }
        while self.ends.get(self.next.owner as usize).copied().flatten().is_some_and(|end| self.next.sequence >= end) {
            self.step();
        }
        Some(self.next)
    }

    /// The payload that `due` returned has been applied.
    pub fn advance(&mut self) {
        self.step();
    }

    /// Every owner's stream has ended and all its payloads have been passed.
    pub fn complete(&self) -> bool {
        let passed = |(owner, end): (usize, &Option<u32>)| {
            // Streams before the cursor's owner have passed the cursor's sequence as well.
            let done = self.next.sequence + u32::from((owner as u32) < self.next.owner);
            end.is_some_and(|end| end <= done)
        };
        self.ends.iter().enumerate().all(passed)
    }

    fn step(&mut self) {
        self.next.owner += 1;
        if self.next.owner as usize >= self.ends.len() {
            self.next = PayloadKey { sequence: self.next.sequence + 1, owner: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(sequence: u32, owner: u32) -> PayloadKey {
        PayloadKey { sequence, owner }
    }

    #[test]
    fn passes_ended_streams() {
        let mut order = DeclaredOrder::new(3);
        assert!(order.end(1, 0) && order.end(0, 1));
        assert_eq!(order.due(), Some(key(0, 0)));
        order.advance();
        assert_eq!(order.due(), Some(key(0, 2)));
        order.advance();
        assert_eq!(order.due(), Some(key(1, 2)), "owner 2 has not ended");
        assert!(!order.complete());
        assert!(order.end(2, 1));
        assert!(order.complete());
        assert_eq!(order.due(), None);
    }

    #[test]
    fn refuses_contradictions() {
        let mut order = DeclaredOrder::new(1);
        assert!(order.end(0, 2) && order.end(0, 2));
        assert!(!order.end(0, 3) && !order.end(1, 0));
        assert!(order.expects(key(1, 0)) && !order.expects(key(2, 0)) && !order.expects(key(0, 1)));
    }

    proptest! {
        /// Whenever the ends become known, the walk is the sorted list of all keys.
        #[test]
        fn is_the_sorted_order(ends in prop::collection::vec(0u32..5, 1..6), late in 0usize..20) {
            let mut expected: Vec<_> =
                ends.iter().enumerate().flat_map(|(o, &n)| (0..n).map(move |s| key(s, o as u32))).collect();
            expected.sort();
            let mut order = DeclaredOrder::new(ends.len() as u32);
            let mut walked = Vec::new();
            let mut told = false;
            while walked.len() < expected.len() || !told {
                if walked.len() >= late.min(expected.len()) && !told {
                    told = true;
                    for (owner, &end) in ends.iter().enumerate() {
                        prop_assert!(order.end(owner as u32, end));
                    }
                }
                let Some(next) = order.due() else { break };
                if ends[next.owner as usize] <= next.sequence {
                    // Without the end known, the walk waits here.
                    prop_assert!(!told);
                    told = true;
                    for (owner, &end) in ends.iter().enumerate() {
                        prop_assert!(order.end(owner as u32, end));
                    }
                    continue;
                }
                walked.push(next);
                order.advance();
            }
            prop_assert_eq!(walked, expected);
            prop_assert!(order.complete());
        }
    }
}
