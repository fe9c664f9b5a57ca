//! Which training rank owns a canonical tensor.

use crate::payload::digest;

/// The owner of a canonical tensor: a number below `owners`, equal on every machine and in every release.
///
/// It is the first eight bytes of the name's BLAKE2b-128, read little-endian, modulo `owners`. With `owners` 0 or 1
/// the answer is 0.
pub fn owner_of(name: &str, owners: u32) -> u32 {
    let [a, b, c, d, e, f, g, h, ..] = digest(name.as_bytes());
    let hash = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    (hash % u64::from(owners.max(1))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_pinned() {
        // Computed with Python's hashlib.blake2b(name, digest_size=16).
        let counts = [1, 2, 3, 8, 1000, u32::MAX];
        let expected: [(&str, [u32; 6]); 6] = [
            ("model.embed_tokens.weight", [0, 0, 0, 2, 930, 1357702890]),
            ("model.layers.0.self_attn.q_proj.weight", [0, 0, 1, 6, 694, 2130411379]),
            ("model.layers.0.self_attn.k_proj.weight", [0, 0, 0, 6, 166, 3891085251]),
            ("lm_head.weight", [0, 1, 0, 3, 99, 3244893129]),
            ("", [0, 0, 0, 2, 986, 2183648931]),
            ("é", [0, 0, 2, 4, 332, 2775307007]),
        ];
        for (name, owners) in expected {
            assert_eq!(counts.map(|count| owner_of(name, count)), owners, "{name}");
        }
        assert_eq!(owner_of("lm_head.weight", 0), 0);
    }

    #[test]
    fn owners_get_similar_shares() {
        let mut shares = [0; 4];
        for layer in 0..4000 {
            shares[owner_of(&format!("model.layers.{layer}.mlp.up_proj.weight"), 4) as usize] += 1;
        }
        assert!(shares.iter().all(|share| (850..1150).contains(share)), "{shares:?}");
    }
}
