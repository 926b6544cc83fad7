//! Dropout: a random number for each pair of counted positions decides whether the pair's weight
//! stays. Every kernel draws the same number for a pair.

#[cutile::module]
pub mod dropout {
    use super::super::segments::segments::segments_view;
    use cutile::core::*;

    /// The dropout of a launch. `numbers` holds for each batch entry the two words of the random
    /// key, the entry and the first head, `[batch, 4]`.
    #[derive(Clone, Copy)]
    pub struct Dropout {
        pub mode: i32,
        pub switch: i32,
        pub numbers: *mut i32,
        pub batch_stride: i32,
        pub threshold: i32,
        pub keep_scale: f32,
    }

    /// Returns counted positions by row of a tile whose first row is at `start`.
    pub fn counted_down<const R: i32, const C: i32>(
        start: i32,
        stride: i32,
    ) -> Tile<u32, { [R, C] }> {
        let rows: Tile<i32, { [R] }> = iota(const_shape![R]);
        let stride: Tile<i32, { [R] }> = stride.broadcast(const_shape![R]);
        let start: Tile<i32, { [R] }> = start.broadcast(const_shape![R]);
        let counted: Tile<u32, { [R] }> = bitcast(rows * stride + start);
        let counted: Tile<u32, { [R, 1] }> = counted.reshape(const_shape![R, 1]);
        counted.broadcast(const_shape![R, C])
    }

    /// Returns counted positions by column of a tile whose first column is at `start`.
    pub fn counted_across<const R: i32, const C: i32>(
        start: i32,
        stride: i32,
    ) -> Tile<u32, { [R, C] }> {
        let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
        let down: Tile<u32, { [C, R] }> = counted_down::<C, R>(start, stride);
        permute(down, transpose)
    }

    /// Returns a tile that is scaled where its pairs stay, and 0 where they are dropped.
    pub fn dropped<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        keep: Tile<bool, { [R, C] }>,
        scale: f32,
    ) -> Tile<f32, { [R, C] }> {
        let scale: Tile<f32, { [R, C] }> = scale.broadcast(const_shape![R, C]);
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        select(keep, x * scale, zero)
    }

    /// Returns word `n` of a batch entry's numbers.
    pub unsafe fn number(dropout: Dropout, batch: i32, b: i32, n: i32) -> Tile<u32, { [1, 1] }> {
        let view = unsafe { segments_view(dropout.numbers, batch, 4i32, dropout.batch_stride) };
        let word: Tile<i32, { [1, 1] }> = view.partition(const_shape![1, 1]).load([b, n]);
        bitcast(word)
    }

    /// Returns the counters (c0, c1, c2, c3) after a round of Philox4x32, and the next round's key:
    ///
    /// ```text
    /// (c0, c1, c2, c3) ← (hi(M1 c2) ⊕ c1 ⊕ k0, lo(M1 c2), hi(M0 c0) ⊕ c3 ⊕ k1, lo(M0 c0))
    /// ```
    pub fn round<const R: i32, const C: i32>(
        c0: Tile<u32, { [R, C] }>,
        c1: Tile<u32, { [R, C] }>,
        c2: Tile<u32, { [R, C] }>,
        c3: Tile<u32, { [R, C] }>,
        k0: Tile<u32, { [1, 1] }>,
        k1: Tile<u32, { [1, 1] }>,
    ) -> (
        Tile<u32, { [R, C] }>,
        Tile<u32, { [R, C] }>,
        Tile<u32, { [R, C] }>,
        Tile<u32, { [R, C] }>,
        Tile<u32, { [1, 1] }>,
        Tile<u32, { [1, 1] }>,
    ) {
        // Signed constants: the compiler makes 0 of unsigned constants with bit 31.
        let m0: Tile<i32, { [R, C] }> = constant(-766435501i32, const_shape![R, C]);
        let m0: Tile<u32, { [R, C] }> = bitcast(m0);
        let m1: Tile<i32, { [R, C] }> = constant(-845247145i32, const_shape![R, C]);
        let m1: Tile<u32, { [R, C] }> = bitcast(m1);
        let high0: Tile<u32, { [R, C] }> = mulhii(m0, c0);
        let low0: Tile<u32, { [R, C] }> = m0 * c0;
        let high1: Tile<u32, { [R, C] }> = mulhii(m1, c2);
        let low1: Tile<u32, { [R, C] }> = m1 * c2;
        let key0: Tile<u32, { [R, C] }> = k0.broadcast(const_shape![R, C]);
        let key1: Tile<u32, { [R, C] }> = k1.broadcast(const_shape![R, C]);
        let mixed0: Tile<u32, { [R, C] }> = xori(high1, c1);
        let mixed0: Tile<u32, { [R, C] }> = xori(mixed0, key0);
        let mixed2: Tile<u32, { [R, C] }> = xori(high0, c3);
        let mixed2: Tile<u32, { [R, C] }> = xori(mixed2, key1);
        let w0: Tile<i32, { [1, 1] }> = constant(-1640531527i32, const_shape![1, 1]);
        let w0: Tile<u32, { [1, 1] }> = bitcast(w0);
        let w1: Tile<i32, { [1, 1] }> = constant(-1150833019i32, const_shape![1, 1]);
        let w1: Tile<u32, { [1, 1] }> = bitcast(w1);
        let next0: Tile<u32, { [1, 1] }> = k0 + w0;
        let next1: Tile<u32, { [1, 1] }> = k1 + w1;
        (mixed0, low1, mixed2, low0, next0, next1)
    }

    /// Returns whether the weight of each pair stays, from the counted positions of query and key.
    /// A pair's number is word `key mod 4` of Philox4x32-10 for the counter (key / 4, query, head,
    /// entry). The weight stays where the number reaches the threshold.
    pub unsafe fn kept<const R: i32, const C: i32>(
        queries: Tile<u32, { [R, C] }>,
        keys: Tile<u32, { [R, C] }>,
        dropout: Dropout,
        batch: i32,
        b: i32,
        h: i32,
    ) -> Tile<bool, { [R, C] }> {
        let k0: Tile<u32, { [1, 1] }> = unsafe { number(dropout, batch, b, 0i32) };
        let k1: Tile<u32, { [1, 1] }> = unsafe { number(dropout, batch, b, 1i32) };
        let entry: Tile<u32, { [1, 1] }> = unsafe { number(dropout, batch, b, 2i32) };
        let head: Tile<u32, { [1, 1] }> = unsafe { number(dropout, batch, b, 3i32) };
        let h: Tile<i32, { [1, 1] }> = h.broadcast(const_shape![1, 1]);
        let h: Tile<u32, { [1, 1] }> = bitcast(h);
        let head: Tile<u32, { [1, 1] }> = head + h;
        let two: Tile<u32, { [R, C] }> = constant(2u32, const_shape![R, C]);
        let c0: Tile<u32, { [R, C] }> = shri(keys, two);
        let c2: Tile<u32, { [R, C] }> = head.broadcast(const_shape![R, C]);
        let c3: Tile<u32, { [R, C] }> = entry.broadcast(const_shape![R, C]);
        let c = round(c0, queries, c2, c3, k0, k1);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let c = round(c.0, c.1, c.2, c.3, c.4, c.5);
        let one: Tile<u32, { [R, C] }> = constant(1u32, const_shape![R, C]);
        let zero: Tile<u32, { [R, C] }> = constant(0u32, const_shape![R, C]);
        let odd: Tile<bool, { [R, C] }> = gt_tile(andi(keys, one), zero);
        let upper: Tile<bool, { [R, C] }> = gt_tile(andi(keys, two), zero);
        let low: Tile<u32, { [R, C] }> = select(odd, c.1, c.0);
        let high: Tile<u32, { [R, C] }> = select(odd, c.3, c.2);
        let word: Tile<u32, { [R, C] }> = select(upper, high, low);
        let threshold: i32 = dropout.threshold;
        let threshold: Tile<i32, { [R, C] }> = threshold.broadcast(const_shape![R, C]);
        let threshold: Tile<u32, { [R, C] }> = bitcast(threshold);
        ge_tile(word, threshold)
    }
}
