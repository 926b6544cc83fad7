//! Which weights dropout keeps, one by one.

/// Of a batch entry: a random key, the index of the entry, and that of the first head.
pub fn numbers(b: usize) -> [u32; 4] {
    [0xffff_0123, 0x89ab_cdef, 5 + 3 * b as u32, 40]
}

/// Word `key mod 4` of Philox4x32-10 for (key / 4, query, head, entry), against the rate.
pub fn kept(numbers: [u32; 4], h: usize, (query, key): (u32, u32), rate: f32) -> f32 {
    let [k0, k1, entry, first] = numbers;
    let words = philox([key / 4, query, first + h as u32, entry], [k0, k1]);
    let threshold = (f64::from(rate) * 2f64.powi(32)).round() as u32;
    if words[key as usize % 4] >= threshold { 1.0 / (1.0 - rate) } else { 0.0 }
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

#[test]
fn known_answers() {
    // From the vectors that the authors' Random123 library is tested with.
    let zeros = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
    assert_eq!(philox([0; 4], [0; 2]), zeros);
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    let answer = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
    assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), answer);
}
