//! Decays of channels: the pairs of a tile, each with decays of its own in every channel.
//!
//! Pairs of tokens j ≤ i want 2^(b_i − b_j) in each channel, which is no product of two factors that
//! are safe in 16 bits. So tokens meet in levels of blocks of m = 1, 2, 4 … 32 tokens: each odd block
//! meets the even block before it, and both have their decays between a token and the end r of the
//! even block. The caller gives rows with these decays:
//!
//! ```text
//! 2^(b_i − b_j) = 2^(b_i − r) · 2^(r − b_j)
//! ```
//!
//! Every pair of different tokens meets in one level. Products with `other` are sums over the same
//! rounded rows for both tokens of a pair, so they cancel in the gradient of a decay.

#[cutile::module]
pub mod channels {
    use super::super::common::common::{product, rows_view, stream, stream_columns, write};
    use super::super::decays::decays::{bound_of, crossed, narrow, share_of, tiles_of};
    use super::super::decays::decays::{visible_pairs, widened};
    use cutile::core::*;

    /// Returns the heads of all levels of blocks in which the tokens of a tile meet.
    pub fn level_heads(heads: i32) -> i32 {
        6i32 * heads
    }

    /// Returns the number of levels. The compiler does not know that this is 6. Otherwise it would
    /// unroll loops, and spill.
    pub fn levels(tile: i32) -> i32 {
        6i32 + min(tile, 0i32)
    }

    /// A tile of tokens, and of columns.
    #[derive(Clone, Copy)]
    pub struct Place {
        pub entry: i32,
        pub tile: i32,
        pub heads: i32,
        pub head: i32,
        pub column: i32,
    }

    /// Returns the last token of each token's pair of blocks of m tokens, m a power of 2.
    pub fn pair_ends<const R: i32>(m: i32) -> Tile<i32, { [R] }> {
        let positions: Tile<i32, { [R] }> = iota(const_shape![R]);
        let rest: i32 = 2i32 * m - 1i32;
        ori(positions, rest.broadcast(const_shape![R]))
    }

    /// Returns which tokens are in the second block of their pair of blocks of m tokens, in reverse
    /// in the first.
    pub fn is_later<const R: i32>(m: i32, reverse: i32) -> Tile<bool, { [R] }> {
        let positions: Tile<i32, { [R] }> = iota(const_shape![R]);
        let wanted: i32 = m - m * reverse;
        let bit: Tile<i32, { [R] }> = andi(positions, m.broadcast(const_shape![R]));
        eq_tile(bit, wanted.broadcast(const_shape![R]))
    }

    /// Returns `x` in the lower left quarter of each pair of blocks of m rows, in reverse in the upper
    /// right quarter, and otherwise 0.
    pub fn quarters<E: ElementType, const R: i32>(
        m: i32,
        reverse: i32,
        x: Tile<E, { [R, R] }>,
    ) -> Tile<E, { [R, R] }> {
        let ends: Tile<i32, { [R] }> = pair_ends::<R>(m);
        let later: Tile<bool, { [R] }> = is_later::<R>(m, reverse);
        let none: Tile<i32, { [R] }> = constant(-1i32, const_shape![R]);
        let other: Tile<i32, { [R] }> = constant(-2i32, const_shape![R]);
        let row: Tile<i32, { [R] }> = select(later, ends, none);
        let row: Tile<i32, { [R, 1] }> = row.reshape(const_shape![R, 1]);
        let row: Tile<i32, { [R, R] }> = row.broadcast(const_shape![R, R]);
        let column: Tile<i32, { [R] }> = select(later, other, ends);
        let column: Tile<i32, { [1, R] }> = column.reshape(const_shape![1, R]);
        let column: Tile<i32, { [R, R] }> = column.broadcast(const_shape![R, R]);
        let inside: Tile<bool, { [R, R] }> = eq_tile(row, column);
        let zero: Tile<f32, { [R, R] }> = constant(0.0f32, const_shape![R, R]);
        let zero: Tile<E, { [R, R] }> = convert_tile(zero);
        select(inside, x, zero)
    }

    /// Returns `x` on the diagonal, with `strict` nowhere, and otherwise 0.
    pub fn diagonal<E: ElementType, const R: i32>(
        strict: i32,
        x: Tile<E, { [R, R] }>,
    ) -> Tile<E, { [R, R] }> {
        let positions: Tile<i32, { [R] }> = iota(const_shape![R]);
        let far: i32 = strict * R;
        let far: Tile<i32, { [R] }> = far.broadcast(const_shape![R]);
        let row: Tile<i32, { [R] }> = positions + far;
        let row: Tile<i32, { [R, 1] }> = row.reshape(const_shape![R, 1]);
        let row: Tile<i32, { [R, R] }> = row.broadcast(const_shape![R, R]);
        let column: Tile<i32, { [1, R] }> = positions.reshape(const_shape![1, R]);
        let column: Tile<i32, { [R, R] }> = column.broadcast(const_shape![R, R]);
        let met: Tile<bool, { [R, R] }> = eq_tile(row, column);
        let zero: Tile<f32, { [R, R] }> = constant(0.0f32, const_shape![R, R]);
        let zero: Tile<E, { [R, R] }> = convert_tile(zero);
        select(met, x, zero)
    }

    /// Returns the sums of a tile's last token, for a tile of columns; an array of sums has all rows
    /// of every tile.
    pub fn last_of<const R: i32, const W: i32>(
        view: &Tensor<f32, { [-1, -1, -1, -1] }>,
        batch: i32,
        tile: i32,
        head: i32,
        column: i32,
    ) -> Tile<f32, { [1, W] }> {
        let row: i32 = tile * R + R - 1i32;
        let sums: Tile<f32, { [1, 1, 1, W] }> =
            view.partition(const_shape![1, 1, 1, W]).load([batch, row, head, column]);
        sums.reshape(const_shape![1, W])
    }

    /// Returns x + y ∘ z. The compiler compares the types of operands by their names, which results of
    /// functions lose.
    pub fn plus_product<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        y: Tile<f32, { [R, C] }>,
        z: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let term: Tile<f32, { [R, C] }> = y * z;
        x + term
    }

    /// Computes the pairs of each tile of tokens.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn channel_pairs<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        q: *mut E,
        k: *mut E,
        met: *mut E,
        pairs: *mut f32,
        batch: i32,
        rows: i32,
        padded_rows: i32,
        heads: i32,
        head_dim: i32,
        q_batch_stride: i32,
        met_batch_stride: i32,
        pairs_batch_stride: i32,
        parts: i32,
        part_tiles: i32,
    ) {
        let pid = get_tile_block_id();
        let share = share_of(pid.0, parts, 1i32);
        let b: i32 = share.0 / heads;
        let h: i32 = share.0 - b * heads;

        let q_view = unsafe { rows_view(q, batch, rows, heads, head_dim, q_batch_stride) };
        let k_view = unsafe { rows_view(k, batch, rows, heads, head_dim, q_batch_stride) };
        let of_levels: i32 = level_heads(heads);
        let met_view =
            unsafe { rows_view(met, batch, rows, of_levels, head_dim, met_batch_stride) };
        let entry: i32 = pairs_batch_stride;
        let pairs_view = unsafe { rows_view(pairs, batch, padded_rows, heads, BM, entry) };
        let q_part = q_view.partition(const_shape![1, BM, 1, DT]);
        let k_part = k_view.partition(const_shape![1, BM, 1, DT]);
        let met_part = met_view.partition(const_shape![1, BM, 1, DT]);
        let tiles = tiles_of::<BM>(share.1, part_tiles, rows);
        let one: Tile<f32, { [BM, BM] }> = constant(1.0f32, const_shape![BM, BM]);
        for i in tiles.0..tiles.0 + tiles.1 {
            let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
            let tk: Tile<E, { [BM, DT] }> = stream(&k_part, b, i, h);
            let own: Tile<f32, { [BM, BM] }> = product(tq, tk);
            let mut found: Tile<f32, { [BM, BM] }> = diagonal(0i32, own);
            let mut level: i32 = 0i32;
            while level < levels(i) {
                let tm: Tile<E, { [BM, DT] }> = stream(&met_part, b, i, level * heads + h);
                let all: Tile<f32, { [BM, BM] }> = product(tm, tm);
                let seen: Tile<f32, { [BM, BM] }> = quarters(1i32 << level, 0i32, all);
                found = plus_product::<BM, BM>(found, seen, one);
                level = level + 1i32;
            }
            unsafe { write(&pairs_view, found, b, i, h) };
        }
    }

    /// Outputs of a tile's tokens, and their products with another array.
    #[derive(Clone, Copy)]
    pub struct Terms<const BM: i32, const BN: i32> {
        pub dots: Tile<f32, { [BM, BN] }>,
        pub out: Tile<f32, { [BM, BN] }>,
    }

    /// Returns terms with what pairs of different tokens add to them: w_ij 2^(b_i − b_j) ∘ v_j, and
    /// the products of this with `other`. Then it multiplies with `unit`, which divides the weights
    /// and the terms given.
    pub fn spread<E: ElementType, const BM: i32, const BN: i32>(
        met: &Partition<E, { [1, BM, 1, BN] }>,
        fades: &Partition<E, { [1, BM, 1, BN] }>,
        place: Place,
        reverse: i32,
        unit: Tile<f32, { [1, 1] }>,
        bounded: i32,
        terms: Terms<BM, BN>,
        weights: Tile<E, { [BM, BM] }>,
        zero: Tile<f32, { [BM, BN] }>,
    ) -> Terms<BM, BN> {
        let mut out: Tile<f32, { [BM, BN] }> = terms.out;
        let mut dots: Tile<f32, { [BM, BN] }> = terms.dots;
        let mut level: i32 = 0i32;
        while level < levels(place.tile) {
            let head: i32 = level * place.heads + place.head;
            let (b, i, c) = (place.entry, place.tile, place.column);
            let tm: Tile<E, { [BM, BN] }> = stream_columns(met, b, i, head, c);
            let fade: Tile<E, { [BM, BN] }> = stream_columns(fades, b, i, head, c);
            let seen: Tile<E, { [BM, BM] }> = quarters::<E, BM>(1i32 << level, reverse, weights);
            let part: Tile<f32, { [BM, BN] }> = mma(seen, tm, zero);
            let fade: Tile<f32, { [BM, BN] }> = convert_tile(fade);
            let tm: Tile<f32, { [BM, BN] }> = convert_tile(tm);
            out = plus_product(out, part, fade);
            dots = plus_product(dots, part, tm);
            level = level + 1i32;
        }
        let out: Tile<f32, { [BM, BN] }> = widened::<BM, BN>(unit, bounded, out);
        let dots: Tile<f32, { [BM, BN] }> = widened::<BM, BN>(unit, bounded, dots);
        Terms::<BM, BN> { dots, out }
    }

    /// Returns terms of what the state before a tile, in reverse behind it, gives its tokens, and of
    /// what a token's own key and value give it. These are in the outputs alone.
    pub fn begun_in_channels<E: ElementType, const BM: i32, const BN: i32>(
        weights: Tile<E, { [BM, BM] }>,
        strict: i32,
        crossing: Tile<f32, { [BM, BN] }>,
        other: Tile<f32, { [BM, BN] }>,
        v: Tile<E, { [BM, BN] }>,
        zero: Tile<f32, { [BM, BN] }>,
    ) -> Terms<BM, BN> {
        let dots: Tile<f32, { [BM, BN] }> = plus_product(zero, crossing, other);
        let own: Tile<E, { [BM, BM] }> = diagonal::<E, BM>(strict, weights);
        let out: Tile<f32, { [BM, BN] }> = mma(own, v, crossing);
        Terms::<BM, BN> { dots, out }
    }

    /// Returns the outputs of a tile's tokens, where each column of values has decays: of the tile's
    /// keys and values, and of the state before the tile, in reverse behind it. And the products of
    /// the outputs with `other`, without what a token's own key and value give it.
    pub fn attended_in_channels<E: ElementType, const BM: i32, const DT: i32, const BN: i32>(
        q: Tile<E, { [BM, DT] }>,
        k: Tile<E, { [BM, DT] }>,
        met: &Partition<E, { [1, BM, 1, BN] }>,
        fades: &Partition<E, { [1, BM, 1, BN] }>,
        place: Place,
        reverse: i32,
        strict: i32,
        bounded: i32,
        state: Tile<f32, { [DT, BN] }>,
        received: Tile<f32, { [BM, BN] }>,
        other: Tile<E, { [BM, BN] }>,
        v: Tile<E, { [BM, BN] }>,
    ) -> Terms<BM, BN> {
        let pairs: Tile<f32, { [BM, BM] }> = product(q, k);
        let pairs: Tile<f32, { [BM, BM] }> = visible_pairs::<BM>(pairs, reverse);
        let unit: Tile<f32, { [1, 1] }> = bound_of(pairs, bounded);
        let weights: Tile<E, { [BM, BM] }> = narrow(pairs, unit, bounded);
        let crossing: Tile<f32, { [BM, BN] }> =
            crossed::<E, BM, DT, BN, BN>(q, received, unit, bounded, state);
        let other: Tile<f32, { [BM, BN] }> = convert_tile(other);
        let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
        let terms: Terms<BM, BN> = begun_in_channels(weights, strict, crossing, other, v, zero);
        spread(met, fades, place, reverse, unit, bounded, terms, weights, zero)
    }
}
