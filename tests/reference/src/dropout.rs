//! The weights that dropout keeps, one by one.

use crate::Real;

/// Dropout of the weights of all batch entries.
#[derive(Debug, Clone, PartialEq)]
pub struct Dropout {
    /// The rate at which weights are dropped.
    pub rate: f32,
    /// For each batch entry of the arrays: two words of a random key, the entry's index in the whole
    /// batch, and the index of the arrays' first head among all heads of the model.
    pub numbers: Vec<[u32; 4]>,
}

impl Dropout {
    /// Returns the factor of one weight: 0, or 1 / (1 − rate), which makes up for dropped weights.
    ///
    /// The weight is kept if its random word, read as an integer, is at least rate · 2^32. The word
    /// is number `key mod 4` of Philox's four for the counter (key / 4, query, head, entry).
    pub fn factor<R: Real>(&self, entry: usize, head: usize, query: i64, key: i64) -> R {
        let [k0, k1, entry, first] = self.numbers[entry];
        let counter = [key as u32 / 4, query as u32, first + head as u32, entry];
        let word = philox(counter, [k0, k1])[key as usize % 4];
        match f64::from(word) >= (f64::from(self.rate) * 2f64.powi(32)).round() {
            true => R::from(1.0) / (R::from(1.0) - R::from(self.rate)),
            false => R::from(0.0),
        }
    }
}

/// Returns sample [`Dropout::numbers`] of a batch entry: large words, and heads that begin at 40.
pub fn numbers(entry: usize) -> [u32; 4] {
    [0xffff_0123, 0x89ab_cdef, 5 + 3 * entry as u32, 40]
}

/// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let split = |product: u64| ((product >> 32) as u32, product as u32);
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let (high0, low0) = split(0xd251_1f53 * u64::from(c0));
        let (high1, low1) = split(0xcd9e_8d57 * u64::from(c2));
        [c0, c1, c2, c3] = [high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0];
        [k0, k1] = [k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85)];
    }
    [c0, c1, c2, c3]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // From the vectors that the authors' Random123 library is tested with.
        let zeros = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        assert_eq!(philox([0; 4], [0; 2]), zeros);
        let ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), ones);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let answer = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), answer);
    }
}
