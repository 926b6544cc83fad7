//! Linear attention with decay: states that parts of a sequence leave, and outputs of tokens.
//!
//! A block goes through the tiles of one part of a head's tokens, with `reverse` from the last to
//! the first. It keeps the state S of a tile of value columns. With b_i, the sum of a tile's log
//! decays up to and including token i, in base 2, and n, the tile's last token:
//!
//! ```text
//! forward   o_i = Σ_(j≤i) 2^(b_i−b_j) (q_i·k_j) v_j + 2^(b_i) Sᵀ q_i;   S = 2^(b_n) S + Σ_j 2^(b_n−b_j) k_j v_jᵀ
//! reverse   o_i = Σ_(j≥i) 2^(b_j−b_i) (q_i·k_j) v_j + 2^(b_n−b_i) Sᵀ q_i;   S = 2^(b_n) S + Σ_j 2^(b_j) k_j v_jᵀ
//! ```
//!
//! Forward, queries, keys and values give the output; (dout, v, k) and the transposed state give
//! dq. In reverse, with D for S, (k, q, dout) give dv, and (v, dout, q) give dk.
//!
//! A power of 0 stops even infinite values and NaN: a state that is not finite ends at the end of
//! its document. A token that is not finite reaches all of its tile, and the state behind the tile.

#[cutile::module]
pub mod linear {
    use super::super::common::common::{product, read_statistics, rows_view, statistics_view};
    use super::super::common::common::{stream, stream_columns, write_columns, write_statistics};
    use cutile::core::*;

    /// Returns the share of a block: (head over all entries, part, tile of value columns).
    pub fn share_of(pid: i32, parts: i32, columns: i32) -> (i32, i32, i32) {
        let index: i32 = pid / columns;
        let head: i32 = index / parts;
        (head, index - head * parts, pid - index * columns)
    }

    /// Returns b of a tile's last token; `sums` has all rows of every tile.
    pub fn total_of<const R: i32>(
        view: &Tensor<f32, { [-1, -1, -1] }>,
        batch: i32,
        head: i32,
        tile: i32,
    ) -> Tile<f32, { [1, 1] }> {
        let total: Tile<f32, { [1, 1, 1] }> =
            view.partition(const_shape![1, 1, 1]).load([batch, head, tile * R + R - 1i32]);
        total.reshape(const_shape![1, 1])
    }

    /// Returns an integer as a factor of tiles, such as a sign.
    // With `if` between tiles instead of such products, tileiras 13.5.37 read past the end of an
    // array while it assembled the two images of 64 columns for sm_120, and crashed in 3 of 10
    // runs.
    pub fn factor(integer: i32) -> Tile<f32, { [1, 1] }> {
        let integer: Tile<i32, { [1, 1] }> = integer.broadcast(const_shape![1, 1]);
        convert_tile(integer)
    }

    /// Returns 2^(total − b), the weight of a token behind its tile; in reverse 2^(b), its weight
    /// before the tile.
    pub fn fading<const R: i32>(
        sums: Tile<f32, { [R, 1] }>,
        total: Tile<f32, { [1, 1] }>,
        reverse: i32,
    ) -> Tile<f32, { [R, 1] }> {
        let end: Tile<f32, { [1, 1] }> = total * factor(1i32 - reverse);
        let end: Tile<f32, { [R, 1] }> = end.broadcast(const_shape![R, 1]);
        let sign: Tile<f32, { [1, 1] }> = factor(1i32 - 2i32 * reverse);
        let between: Tile<f32, { [R, 1] }> = end - sums * sign.broadcast(const_shape![R, 1]);
        exp2(between, ftz::Enabled)
    }

    /// Returns the weights between tokens of a tile: 2^(b_i − b_j) for j ≤ i, or in reverse
    /// 2^(b_j − b_i) for j ≥ i; otherwise 0.
    pub fn between<const R: i32>(
        sums: Tile<f32, { [R, 1] }>,
        reverse: i32,
    ) -> Tile<f32, { [R, R] }> {
        let rows: Tile<f32, { [R, R] }> = sums.broadcast(const_shape![R, R]);
        let columns: Tile<f32, { [1, R] }> = sums.reshape(const_shape![1, R]);
        let columns: Tile<f32, { [R, R] }> = columns.broadcast(const_shape![R, R]);
        let direction: i32 = 1i32 - 2i32 * reverse;
        let sign: Tile<f32, { [1, 1] }> = factor(direction);
        let left: Tile<f32, { [R, R] }> = (rows - columns) * sign.broadcast(const_shape![R, R]);
        let positions: Tile<i32, { [R] }> = iota(const_shape![R]);
        let row: Tile<i32, { [R, 1] }> = positions.reshape(const_shape![R, 1]);
        let row: Tile<i32, { [R, R] }> = row.broadcast(const_shape![R, R]);
        let column: Tile<i32, { [1, R] }> = positions.reshape(const_shape![1, R]);
        let column: Tile<i32, { [R, R] }> = column.broadcast(const_shape![R, R]);
        let direction: Tile<i32, { [R, R] }> = direction.broadcast(const_shape![R, R]);
        let ahead: Tile<i32, { [R, R] }> = (column - row) * direction;
        let zero: Tile<i32, { [R, R] }> = constant(0i32, const_shape![R, R]);
        let seen: Tile<bool, { [R, R] }> = le_tile(ahead, zero);
        let hidden: Tile<f32, { [R, R] }> = constant(f32::NEG_INFINITY, const_shape![R, R]);
        let left: Tile<f32, { [R, R] }> = select(seen, left, hidden);
        exp2(left, ftz::Enabled)
    }

    /// Returns weight ∘ x, and 0 where the weight is 0, whatever x is there.
    pub fn weighed<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        weight: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        // A weight that is NaN does not equal 0.
        let nothing: Tile<bool, { [R, C] }> = eq_tile(weight, zero);
        select(nothing, zero, x * weight)
    }

    /// Returns with `bounded` a divisor of x that keeps every element within 2^15; otherwise 1.
    pub fn bound_of<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        bounded: i32,
    ) -> Tile<f32, { [1, 1] }> {
        let mut factor: Tile<f32, { [1, 1] }> = constant(1.0f32, const_shape![1, 1]);
        if bounded == 1i32 {
            let size: Tile<f32, { [R, C] }> = max_tile(x, negf(x));
            let largest: Tile<f32, { [R] }> = reduce_max(size, 1i32);
            let largest: Tile<f32, { [1, R] }> = largest.reshape(const_shape![1, R]);
            let largest: Tile<f32, { [1] }> = reduce_max(largest, 1i32);
            let largest: Tile<f32, { [1, 1] }> = largest.reshape(const_shape![1, 1]);
            let unit: Tile<f32, { [1, 1] }> = constant(0.000030517578125f32, const_shape![1, 1]);
            factor = max_tile(factor, largest * unit);
        }
        factor
    }

    /// Returns x / bound in 16 bits.
    pub fn narrow<E: ElementType, const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        bound: Tile<f32, { [1, 1] }>,
        bounded: i32,
    ) -> Tile<E, { [R, C] }> {
        let mut scaled: Tile<f32, { [R, C] }> = x;
        if bounded == 1i32 {
            let one: Tile<f32, { [1, 1] }> = constant(1.0f32, const_shape![1, 1]);
            let inverse: Tile<f32, { [1, 1] }> = true_div(one, bound);
            scaled = x * inverse.broadcast(const_shape![R, C]);
        }
        convert_tile(scaled)
    }

    /// Returns S = 2^(total) S + kᵀ (fade ∘ v).
    pub fn advance<E: ElementType, const R: i32, const DT: i32, const C: i32>(
        state: Tile<f32, { [DT, C] }>,
        k: Tile<E, { [R, DT] }>,
        v: Tile<E, { [R, C] }>,
        fade: Tile<f32, { [R, 1] }>,
        total: Tile<f32, { [1, 1] }>,
    ) -> Tile<f32, { [DT, C] }> {
        let carry: Tile<f32, { [1, 1] }> = exp2(total, ftz::Enabled);
        let carried: Tile<f32, { [DT, C] }> = weighed(state, carry.broadcast(const_shape![DT, C]));
        let v: Tile<f32, { [R, C] }> = convert_tile(v);
        let faded: Tile<f32, { [R, C] }> = v * fade.broadcast(const_shape![R, C]);
        let faded: Tile<E, { [R, C] }> = convert_tile(faded);
        let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
        let k: Tile<E, { [DT, R] }> = permute(k, transpose);
        mma(k, faded, carried)
    }

    /// Returns the first tile of a part and its number of tiles.
    pub fn tiles_of<const R: i32>(part: i32, part_tiles: i32, rows: i32) -> (i32, i32) {
        let first: i32 = part * part_tiles;
        (first, min(part_tiles, ceil_div(rows, R) - first))
    }

    /// Computes the state that the tokens of each part leave, starting from zero.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn linear_state<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        k: *mut E,
        v: *mut E,
        sums: *mut f32,
        state: *mut f32,
        batch: i32,
        rows: i32,
        padded_rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        value_dim: i32,
        k_batch_stride: i32,
        v_batch_stride: i32,
        sums_batch_stride: i32,
        sums_head_stride: i32,
        state_stride: i32,
        parts: i32,
        part_tiles: i32,
        reverse: i32,
    ) {
        let pid = get_tile_block_id();
        let share = share_of(pid.0, parts, ceil_div(value_dim, BN));
        let c: i32 = share.2;
        let b: i32 = share.0 / heads;
        let h: i32 = share.0 - b * heads;
        let hk: i32 = h / (heads / kv_heads);

        let k_view = unsafe { rows_view(k, batch, rows, kv_heads, head_dim, k_batch_stride) };
        let v_view = unsafe { rows_view(v, batch, rows, kv_heads, value_dim, v_batch_stride) };
        let sums_view = unsafe {
            statistics_view(sums, batch, heads, padded_rows, sums_batch_stride, sums_head_stride)
        };
        let states: i32 = batch * parts * heads;
        let state_view =
            unsafe { rows_view(state, states, head_dim, 1i32, value_dim, state_stride) };
        let k_part = k_view.partition(const_shape![1, BM, 1, DT]);
        let v_part = v_view.partition(const_shape![1, BM, 1, BN]);

        let tiles = tiles_of::<BM>(share.1, part_tiles, rows);
        let mut s: Tile<f32, { [DT, BN] }> = constant(0.0f32, const_shape![DT, BN]);
        for t in 0i32..tiles.1 {
            let i: i32 = if reverse == 1i32 { tiles.0 + tiles.1 - 1i32 - t } else { tiles.0 + t };
            let tk: Tile<E, { [BM, DT] }> = stream(&k_part, b, i, hk);
            let tv: Tile<E, { [BM, BN] }> = stream_columns(&v_part, b, i, hk, c);
            let total: Tile<f32, { [1, 1] }> = total_of::<BM>(&sums_view, b, h, i);
            let tb: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sums_view, b, i, h);
            let fade: Tile<f32, { [BM, 1] }> = fading::<BM>(tb, total, reverse);
            s = advance::<E, BM, DT, BN>(s, tk, tv, fade, total);
        }
        let n: i32 = (b * parts + share.1) * heads + h;
        unsafe { write_columns(&state_view, s, n, 0i32, 0i32, c) };
    }

    /// Computes outputs of tokens from the state before each part, in reverse behind it. `has_dots`
    /// adds the products by row of the outputs with `other`, for each tile of value columns.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn linear_attend<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        q: *mut E,
        k: *mut E,
        v: *mut E,
        sums: *mut f32,
        state: *mut f32,
        other: *mut E,
        o: *mut E,
        dots: *mut f32,
        batch: i32,
        rows: i32,
        padded_rows: i32,
        heads: i32,
        q_heads: i32,
        kv_heads: i32,
        dot_heads: i32,
        head_dim: i32,
        value_dim: i32,
        q_batch_stride: i32,
        k_batch_stride: i32,
        v_batch_stride: i32,
        other_batch_stride: i32,
        o_batch_stride: i32,
        dots_batch_stride: i32,
        sums_batch_stride: i32,
        sums_head_stride: i32,
        state_stride: i32,
        parts: i32,
        part_tiles: i32,
        reverse: i32,
        bounded: i32,
        has_other: i32,
        has_dots: i32,
    ) {
        let pid = get_tile_block_id();
        let columns: i32 = ceil_div(value_dim, BN);
        let share = share_of(pid.0, parts, columns);
        let c: i32 = share.2;
        let b: i32 = share.0 / heads;
        let h: i32 = share.0 - b * heads;
        let hq: i32 = h / (heads / q_heads);
        let hk: i32 = h / (heads / kv_heads);

        let q_view = unsafe { rows_view(q, batch, rows, q_heads, head_dim, q_batch_stride) };
        let k_view = unsafe { rows_view(k, batch, rows, kv_heads, head_dim, k_batch_stride) };
        let v_view = unsafe { rows_view(v, batch, rows, kv_heads, value_dim, v_batch_stride) };
        let sums_view = unsafe {
            statistics_view(sums, batch, heads, padded_rows, sums_batch_stride, sums_head_stride)
        };
        let states: i32 = batch * parts * heads;
        let state_view =
            unsafe { rows_view(state, states, head_dim, 1i32, value_dim, state_stride) };
        let o_view = unsafe { rows_view(o, batch, rows, heads, value_dim, o_batch_stride) };
        let q_part = q_view.partition(const_shape![1, BM, 1, DT]);
        let k_part = k_view.partition(const_shape![1, BM, 1, DT]);
        let v_part = v_view.partition(const_shape![1, BM, 1, BN]);

        let n: i32 = (b * parts + share.1) * heads + h;
        let s: Tile<f32, { [1, DT, 1, BN] }> =
            state_view.partition(const_shape![1, DT, 1, BN]).load([n, 0i32, 0i32, c]);
        let mut s: Tile<f32, { [DT, BN] }> = s.reshape(const_shape![DT, BN]);
        let tiles = tiles_of::<BM>(share.1, part_tiles, rows);
        for t in 0i32..tiles.1 {
            let i: i32 = if reverse == 1i32 { tiles.0 + tiles.1 - 1i32 - t } else { tiles.0 + t };
            let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, hq);
            let tk: Tile<E, { [BM, DT] }> = stream(&k_part, b, i, hk);
            let tv: Tile<E, { [BM, BN] }> = stream_columns(&v_part, b, i, hk, c);
            let total: Tile<f32, { [1, 1] }> = total_of::<BM>(&sums_view, b, h, i);
            let tb: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sums_view, b, i, h);
            let fade: Tile<f32, { [BM, 1] }> = fading::<BM>(tb, total, reverse);

            let pairs: Tile<f32, { [BM, BM] }> = product(tq, tk);
            let left: Tile<f32, { [BM, BM] }> = between::<BM>(tb, reverse);
            let faded: Tile<f32, { [BM, BM] }> = weighed(pairs, left);
            let weight_bound: Tile<f32, { [1, 1] }> = bound_of(faded, bounded);
            let weights: Tile<E, { [BM, BM] }> = narrow(faded, weight_bound, bounded);
            let state_bound: Tile<f32, { [1, 1] }> = bound_of(s, bounded);
            let before: Tile<E, { [DT, BN] }> = narrow(s, state_bound, bounded);
            let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
            let mut crossing: Tile<f32, { [BM, BN] }> = mma(tq, before, zero);
            if bounded == 1i32 {
                let relative: Tile<f32, { [1, 1] }> = true_div(state_bound, weight_bound);
                let relative: Tile<f32, { [BM, BN] }> = relative.broadcast(const_shape![BM, BN]);
                crossing = crossing * relative;
            }
            let received: Tile<f32, { [BM, 1] }> = fading::<BM>(tb, total, 1i32 - reverse);
            let received: Tile<f32, { [BM, BN] }> = received.broadcast(const_shape![BM, BN]);
            let nothing: Tile<bool, { [BM, BN] }> = eq_tile(received, zero);
            let crossing: Tile<f32, { [BM, BN] }> = select(nothing, zero, crossing * received);
            let mut out: Tile<f32, { [BM, BN] }> = mma(weights, tv, crossing);
            if bounded == 1i32 {
                let factor: Tile<f32, { [BM, BN] }> = weight_bound.broadcast(const_shape![BM, BN]);
                out = out * factor;
            }

            let written: Tile<E, { [BM, BN] }> = convert_tile(out);
            unsafe { write_columns(&o_view, written, b, i, h, c) };
            if has_other * has_dots == 1i32 {
                let other_view = unsafe {
                    rows_view(other, batch, rows, q_heads, value_dim, other_batch_stride)
                };
                let x: Tile<E, { [1, BM, 1, BN] }> =
                    other_view.partition(const_shape![1, BM, 1, BN]).load([b, i, hq, c]);
                let x: Tile<E, { [BM, BN] }> = x.reshape(const_shape![BM, BN]);
                let x: Tile<f32, { [BM, BN] }> = convert_tile(x);
                let dot: Tile<f32, { [BM] }> = reduce_sum(x * out, 1i32);
                let dots_view = unsafe {
                    let (entry, head) = (dots_batch_stride, sums_head_stride);
                    statistics_view(dots, batch, dot_heads, padded_rows, entry, head)
                };
                let dot: Tile<f32, { [BM, 1] }> = dot.reshape(const_shape![BM, 1]);
                unsafe { write_statistics(&dots_view, dot, b, i, h * columns + c) };
            }
            s = advance::<E, BM, DT, BN>(s, tk, tv, fade, total);
        }
    }
}
