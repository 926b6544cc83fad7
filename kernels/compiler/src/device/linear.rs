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
//! With decays of channels of keys, b_i is a vector over them. Then k and q come with their decays to
//! the end and from the beginning of their tile, and `channel_pairs` gives the pairs. With decays of
//! columns of values, b_i is a vector over these, and each of them is a head with a value of one
//! column: so dq and dk are outputs too.
//!
//! A power of 0 stops even infinite values and NaN: a state that is not finite ends at the end of
//! its document. A token that is not finite reaches all of its tile, and the state behind the tile.

#[cutile::module]
pub mod linear {
    use super::super::channels::channels::{
        Place, Terms, attended_in_channels, last_of, level_heads,
    };
    use super::super::common::common::{read_statistics, rows_view, statistics_view};
    use super::super::common::common::{stream, stream_columns, write_columns, write_statistics};
    use super::super::decays::decays::{advance, attended, dots_of, fading};
    use super::super::decays::decays::{share_of, summed, tiles_of, total_of};
    use super::super::modes::modes::{OF_HEADS, OF_KEYS, OF_VALUES};
    use cutile::core::*;

    /// Computes the state that the tokens of each part leave, starting from zero.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn linear_state<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const DECAYS: i32,
    >(
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
            let tv: Tile<f32, { [BM, BN] }> = convert_tile(tv);
            if DECAYS == OF_HEADS {
                let (entry, head) = (sums_batch_stride, sums_head_stride);
                let sums_view =
                    unsafe { statistics_view(sums, batch, heads, padded_rows, entry, head) };
                let total: Tile<f32, { [1, 1] }> = total_of::<BM>(&sums_view, b, h, i);
                let tb: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sums_view, b, i, h);
                let fade: Tile<f32, { [BM, 1] }> = fading::<BM, 1>(tb, total, reverse);
                s = advance::<E, BM, DT, BN, 1, 1, 1>(s, tk, tv, fade, total);
            } else {
                let entry: i32 = sums_batch_stride;
                let sums_view =
                    unsafe { rows_view(sums, batch, padded_rows, heads, head_dim, entry) };
                let total: Tile<f32, { [1, DT] }> = last_of::<BM, DT>(&sums_view, b, i, h, 0i32);
                let total: Tile<f32, { [DT, 1] }> = total.reshape(const_shape![DT, 1]);
                let whole: Tile<f32, { [BM, 1] }> = constant(1.0f32, const_shape![BM, 1]);
                s = advance::<E, BM, DT, BN, 1, DT, 1>(s, tk, tv, whole, total);
            }
        }
        let n: i32 = (b * parts + share.1) * heads + h;
        unsafe { write_columns(&state_view, s, n, 0i32, 0i32, c) };
    }

    /// Computes outputs of tokens from the state before each part, in reverse behind it. With
    /// `strict` a token's own key and value give it nothing. `has_dots` adds the products by row of
    /// the outputs with `other`, for each tile of value columns.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn linear_attend<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const DECAYS: i32,
    >(
        q: *mut E,
        k: *mut E,
        v: *mut E,
        pairs: *mut f32,
        met: *mut E,
        fades: *mut E,
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
        pairs_batch_stride: i32,
        met_batch_stride: i32,
        other_batch_stride: i32,
        o_batch_stride: i32,
        dots_batch_stride: i32,
        sums_batch_stride: i32,
        sums_head_stride: i32,
        state_stride: i32,
        parts: i32,
        part_tiles: i32,
        reverse: i32,
        strict: i32,
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
            let as_floats: Tile<f32, { [BM, BN] }> = convert_tile(tv);
            let mut out: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
            if DECAYS == OF_HEADS {
                let (entry, head) = (sums_batch_stride, sums_head_stride);
                let sums_view =
                    unsafe { statistics_view(sums, batch, heads, padded_rows, entry, head) };
                let total: Tile<f32, { [1, 1] }> = total_of::<BM>(&sums_view, b, h, i);
                let tb: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sums_view, b, i, h);
                let fade: Tile<f32, { [BM, 1] }> = fading::<BM, 1>(tb, total, reverse);
                out = attended::<E, BM, DT, BN>(tq, tk, tv, tb, total, reverse, strict, bounded, s);
                s = advance::<E, BM, DT, BN, 1, 1, 1>(s, tk, as_floats, fade, total);
            }
            if DECAYS == OF_KEYS {
                let entry: i32 = sums_batch_stride;
                let sums_view =
                    unsafe { rows_view(sums, batch, padded_rows, heads, head_dim, entry) };
                let entry: i32 = pairs_batch_stride;
                let pairs_view = unsafe { rows_view(pairs, batch, padded_rows, heads, BM, entry) };
                let pairs_part = pairs_view.partition(const_shape![1, BM, 1, BM]);
                let seen: Tile<f32, { [BM, BM] }> = stream(&pairs_part, b, i, h);
                let total: Tile<f32, { [1, DT] }> = last_of::<BM, DT>(&sums_view, b, i, h, 0i32);
                let total: Tile<f32, { [DT, 1] }> = total.reshape(const_shape![DT, 1]);
                let whole: Tile<f32, { [BM, 1] }> = constant(1.0f32, const_shape![BM, 1]);
                out = summed::<E, BM, DT, BN>(seen, tq, whole, tv, bounded, s);
                s = advance::<E, BM, DT, BN, 1, DT, 1>(s, tk, as_floats, whole, total);
            }
            if DECAYS == OF_VALUES {
                let entry: i32 = sums_batch_stride;
                let sums_view =
                    unsafe { rows_view(sums, batch, padded_rows, heads, value_dim, entry) };
                let sums_part = sums_view.partition(const_shape![1, BM, 1, BN]);
                let own: Tile<f32, { [BM, BN] }> = stream_columns(&sums_part, b, i, h, c);
                let total: Tile<f32, { [1, BN] }> = last_of::<BM, BN>(&sums_view, b, i, h, c);
                let of_levels: i32 = level_heads(heads);
                let entry: i32 = met_batch_stride;
                let met_view = unsafe { rows_view(met, batch, rows, of_levels, value_dim, entry) };
                let fades_view =
                    unsafe { rows_view(fades, batch, rows, of_levels, value_dim, entry) };
                let met_part = met_view.partition(const_shape![1, BM, 1, BN]);
                let fades_part = fades_view.partition(const_shape![1, BM, 1, BN]);
                let other_view = unsafe {
                    rows_view(other, batch, rows, q_heads, value_dim, other_batch_stride)
                };
                let other_part = other_view.partition(const_shape![1, BM, 1, BN]);
                let x: Tile<E, { [BM, BN] }> = stream_columns(&other_part, b, i, hq, c);

                let received: Tile<f32, { [BM, BN] }> =
                    fading::<BM, BN>(own, total, 1i32 - reverse);
                let place: Place = Place { entry: b, tile: i, heads, head: h, column: c };
                let terms: Terms<BM, BN> = attended_in_channels(
                    tq,
                    tk,
                    &met_part,
                    &fades_part,
                    place,
                    reverse,
                    strict,
                    bounded,
                    s,
                    received,
                    x,
                    tv,
                );
                out = terms.out;
                let dots_view = unsafe {
                    rows_view(dots, batch, padded_rows, heads, value_dim, dots_batch_stride)
                };
                unsafe { write_columns(&dots_view, terms.dots, b, i, h, c) };
                let fade: Tile<f32, { [BM, BN] }> = fading::<BM, BN>(own, total, reverse);
                s = advance::<E, BM, DT, BN, BN, 1, BN>(s, tk, as_floats, fade, total);
            }
            let written: Tile<E, { [BM, BN] }> = convert_tile(out);
            unsafe { write_columns(&o_view, written, b, i, h, c) };
            if DECAYS != OF_VALUES && has_other * has_dots == 1i32 {
                let other_view = unsafe {
                    rows_view(other, batch, rows, q_heads, value_dim, other_batch_stride)
                };
                let x: Tile<E, { [1, BM, 1, BN] }> =
                    other_view.partition(const_shape![1, BM, 1, BN]).load([b, i, hq, c]);
                let x: Tile<E, { [BM, BN] }> = x.reshape(const_shape![BM, BN]);
                let dot: Tile<f32, { [BM, 1] }> = dots_of(x, out);
                let dots_view = unsafe {
                    let (entry, head) = (dots_batch_stride, sums_head_stride);
                    statistics_view(dots, batch, dot_heads, padded_rows, entry, head)
                };
                unsafe { write_statistics(&dots_view, dot, b, i, h * columns + c) };
            }
        }
    }
}
