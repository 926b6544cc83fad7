//! The random numbers of dropout. Each pair of positions has its own number, so the same weights
//! are dropped however ranks share the sequence.
//!
//! Source: Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

/// Number of counters that are computed side by side, so that the compiler can use vectors.
pub(super) const WIDTH: usize = 16;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// The random numbers of one head of one batch entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Philox {
    /// The key.
    pub key: [u32; 2],
    /// Index of the query head in the whole model.
    pub head: u32,
    /// Index of the batch entry in the whole batch.
    pub entry: u32,
}

impl Philox {
    /// Returns the four words of each counter (quad, query position, head, batch entry). Word n
    /// belongs to the query and the key at position 4·quad + n.
    #[inline(always)]
    pub fn words(&self, quads: &[u32; WIDTH], queries: &[u32; WIDTH]) -> [[u32; WIDTH]; 4] {
        let mut counter = [*quads, *queries, [self.head; WIDTH], [self.entry; WIDTH]];
        let mut key = self.key;
        for _ in 0..ROUNDS {
            let [c0, c1, c2, c3] = counter;
            for i in 0..WIDTH {
                let a = u64::from(MULTIPLIERS[0]) * u64::from(c0[i]);
                let b = u64::from(MULTIPLIERS[1]) * u64::from(c2[i]);
                counter[0][i] = (b >> 32) as u32 ^ c1[i] ^ key[0];
                counter[1][i] = b as u32;
                counter[2][i] = (a >> 32) as u32 ^ c3[i] ^ key[1];
                counter[3][i] = a as u32;
            }
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        counter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // The authors test their Random123 library with these vectors.
        let answer = |counter: [u32; 4], key| {
            let philox = Philox { key, head: counter[2], entry: counter[3] };
            philox.words(&[counter[0]; WIDTH], &[counter[1]; WIDTH]).map(|words| words[WIDTH - 1])
        };
        assert_eq!(answer([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = u32::MAX;
        assert_eq!(
            answer([ones; 4], [ones; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            answer(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
