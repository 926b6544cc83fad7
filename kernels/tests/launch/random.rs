//! Random choices.

use burst_attention_kernels::instances::Element;
use burst_attention_kernels::launch::Rectangle;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    pub fn flip(&mut self) -> bool {
        self.below(2) == 1
    }
}

/// Returns a rectangle of up to `rows` rows on each side.
pub fn rectangle(random: &mut Random, rows: usize) -> Rectangle {
    let kv_heads = 1 + random.below(3);
    let (q_len, kv_len) = (1 + random.below(rows), 1 + random.below(rows));
    let diagonal = random.below(2 * rows) as i64 - rows as i64;
    let (lower, upper) = match random.below(6) {
        0 => (i64::MIN, i64::MAX),
        1 => (i64::MIN, diagonal),
        2 => (diagonal, i64::MAX),
        3 => (diagonal - random.below(rows) as i64, diagonal),
        4 => (diagonal, diagonal - 1 - random.below(3) as i64),
        _ => (i64::MIN, 0),
    };
    Rectangle {
        batch: 1 + random.below(4),
        q_len,
        kv_len,
        heads: kv_heads * (1 + random.below(3)),
        kv_heads,
        head_dim: random.of(&[8, 16, 64, 72, 128, 256]),
        value_dim: random.of(&[8, 24, 64, 128, 192]),
        element: random.of(&Element::ALL),
        lower,
        upper,
        softmax_scale: 0.125,
    }
}
