//! The gradient of keys in the delta rule, as far as the states that keys add to give it.
//!
//! With D_t, the gradient of the state behind token t, token t's part is
//!
//! ```text
//! dk_t = D_t u_t;   D_t = q_t do_tᵀ + Σ_(r>t) 2^(b_r−b_t) (q_r do_rᵀ − k_r dv_rᵀ) + what comes from behind the tile
//! ```
//!
//! A block goes back through the tiles of a part, as `linear_attend` in reverse, with the turned
//! state Dᵀ. Queries with dout are the tokens that it adds, keys with dv those that it takes away.
//! Where channels have decays, tokens meet in levels of blocks (`channels.rs`).

#[cutile::module]
pub mod delta_keys {
    use super::super::channels::channels::{
        Place, Terms, begun_in_channels, last_of, level_heads, plus_product, spread,
    };
    use super::super::common::common::{product, read_statistics, rows_view, statistics_view};
    use super::super::common::common::{stream, stream_columns, write_columns, write_statistics};
    use super::super::decays::decays::{
        advance, attended, between, bound_of, crossed, dots_of, fading,
    };
    use super::super::decays::decays::{
        gathered, narrow, share_of, tiles_of, total_of, visible_pairs, weighed, widened,
    };
    use super::super::modes::modes::OF_HEADS;
    use cutile::core::*;

    /// Returns the larger of the sizes of two tiles' elements.
    pub fn sizes_of<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        y: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let x: Tile<f32, { [R, C] }> = max_tile(x, negf(x));
        let y: Tile<f32, { [R, C] }> = max_tile(y, negf(y));
        max_tile(x, y)
    }

    /// Computes dk and its products by row with k, for each tile of k's columns. Where channels have
    /// decays, these are products of all elements, without what a token's own query gives it.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn delta_rule_keys<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const DECAYS: i32,
    >(
        u: *mut E,
        dout: *mut E,
        q: *mut E,
        dv: *mut E,
        k: *mut E,
        met: *mut E,
        keys_met: *mut E,
        fades: *mut E,
        sums: *mut f32,
        turned: *mut f32,
        dk: *mut E,
        key_dots: *mut f32,
        batch: i32,
        rows: i32,
        padded_rows: i32,
        heads: i32,
        dot_heads: i32,
        head_dim: i32,
        value_dim: i32,
        u_batch_stride: i32,
        q_batch_stride: i32,
        met_batch_stride: i32,
        key_dots_batch_stride: i32,
        sums_batch_stride: i32,
        sums_head_stride: i32,
        state_stride: i32,
        parts: i32,
        part_tiles: i32,
        bounded: i32,
    ) {
        let pid = get_tile_block_id();
        let columns: i32 = ceil_div(head_dim, BN);
        let share = share_of(pid.0, parts, columns);
        let c: i32 = share.2;
        let b: i32 = share.0 / heads;
        let h: i32 = share.0 - b * heads;

        let u_view = unsafe { rows_view(u, batch, rows, heads, value_dim, u_batch_stride) };
        let dout_view = unsafe { rows_view(dout, batch, rows, heads, value_dim, u_batch_stride) };
        let dv_view = unsafe { rows_view(dv, batch, rows, heads, value_dim, u_batch_stride) };
        let q_view = unsafe { rows_view(q, batch, rows, heads, head_dim, q_batch_stride) };
        let k_view = unsafe { rows_view(k, batch, rows, heads, head_dim, q_batch_stride) };
        let dk_view = unsafe { rows_view(dk, batch, rows, heads, head_dim, q_batch_stride) };
        let states: i32 = batch * parts * heads;
        let turned_view =
            unsafe { rows_view(turned, states, value_dim, 1i32, head_dim, state_stride) };
        let u_part = u_view.partition(const_shape![1, BM, 1, DT]);
        let dout_part = dout_view.partition(const_shape![1, BM, 1, DT]);
        let dv_part = dv_view.partition(const_shape![1, BM, 1, DT]);
        let q_part = q_view.partition(const_shape![1, BM, 1, BN]);
        let k_part = k_view.partition(const_shape![1, BM, 1, BN]);

        let n: i32 = (b * parts + share.1) * heads + h;
        let s: Tile<f32, { [1, DT, 1, BN] }> =
            turned_view.partition(const_shape![1, DT, 1, BN]).load([n, 0i32, 0i32, c]);
        let mut s: Tile<f32, { [DT, BN] }> = s.reshape(const_shape![DT, BN]);
        let tiles = tiles_of::<BM>(share.1, part_tiles, rows);
        for back in 0i32..tiles.1 {
            let i: i32 = tiles.0 + tiles.1 - 1i32 - back;
            let tu: Tile<E, { [BM, DT] }> = stream(&u_part, b, i, h);
            let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
            let tdv: Tile<E, { [BM, DT] }> = stream(&dv_part, b, i, h);
            let tq: Tile<E, { [BM, BN] }> = stream_columns(&q_part, b, i, h, c);
            let tk: Tile<E, { [BM, BN] }> = stream_columns(&k_part, b, i, h, c);
            if DECAYS == OF_HEADS {
                let (entry, head) = (sums_batch_stride, sums_head_stride);
                let sums_view =
                    unsafe { statistics_view(sums, batch, heads, padded_rows, entry, head) };
                let total: Tile<f32, { [1, 1] }> = total_of::<BM>(&sums_view, b, h, i);
                let tb: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sums_view, b, i, h);

                let pairs: Tile<f32, { [BM, BM] }> = product(tu, tdv);
                let left: Tile<f32, { [BM, BM] }> = between::<BM>(tb, 1i32, 1i32);
                let taken: Tile<f32, { [BM, BM] }> = weighed(negf(pairs), left);
                let unit: Tile<f32, { [1, 1] }> = bound_of(taken, bounded);
                let taken: Tile<E, { [BM, BM] }> = narrow(taken, unit, bounded);
                let kept: Tile<f32, { [BM, BN] }> =
                    attended::<E, BM, DT, BN>(tu, tdo, tq, tb, total, 1i32, 0i32, bounded, s);
                let mut share: Tile<f32, { [1, 1] }> = unit;
                if bounded == 1i32 {
                    let one: Tile<f32, { [1, 1] }> = constant(1.0f32, const_shape![1, 1]);
                    share = true_div(one, unit);
                }
                let kept: Tile<f32, { [BM, BN] }> = widened::<BM, BN>(share, bounded, kept);
                let out: Tile<f32, { [BM, BN] }> = mma(taken, tk, kept);
                let out: Tile<f32, { [BM, BN] }> = widened::<BM, BN>(unit, bounded, out);

                let written: Tile<E, { [BM, BN] }> = convert_tile(out);
                unsafe { write_columns(&dk_view, written, b, i, h, c) };
                let dot: Tile<f32, { [BM, 1] }> = dots_of(tk, out);
                let dots_view = unsafe {
                    let (entry, head) = (key_dots_batch_stride, sums_head_stride);
                    statistics_view(key_dots, batch, dot_heads, padded_rows, entry, head)
                };
                unsafe { write_statistics(&dots_view, dot, b, i, h * columns + c) };
                let fade: Tile<f32, { [BM, 1] }> = fading::<BM, 1>(tb, total, 1i32);
                let tq: Tile<f32, { [BM, BN] }> = convert_tile(tq);
                let tk: Tile<f32, { [BM, BN] }> = convert_tile(tk);
                s = advance::<E, BM, DT, BN, 1, 1, 1>(s, tdo, tq, fade, total);
                s = gathered::<E, BM, DT, BN, 1>(s, tdv, tk, negf(fade));
            } else {
                let entry: i32 = sums_batch_stride;
                let sums_view =
                    unsafe { rows_view(sums, batch, padded_rows, heads, head_dim, entry) };
                let sums_part = sums_view.partition(const_shape![1, BM, 1, BN]);
                let own: Tile<f32, { [BM, BN] }> = stream_columns(&sums_part, b, i, h, c);
                let total: Tile<f32, { [1, BN] }> = last_of::<BM, BN>(&sums_view, b, i, h, c);
                let of_levels: i32 = level_heads(heads);
                let entry: i32 = met_batch_stride;
                let met_view = unsafe { rows_view(met, batch, rows, of_levels, head_dim, entry) };
                let keys_view =
                    unsafe { rows_view(keys_met, batch, rows, of_levels, head_dim, entry) };
                let fades_view =
                    unsafe { rows_view(fades, batch, rows, of_levels, head_dim, entry) };
                let met_part = met_view.partition(const_shape![1, BM, 1, BN]);
                let keys_part = keys_view.partition(const_shape![1, BM, 1, BN]);
                let fades_part = fades_view.partition(const_shape![1, BM, 1, BN]);

                let place: Place = Place { entry: b, tile: i, heads, head: h, column: c };
                let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
                // All that needs the rows of a tile comes before tokens meet in levels, and both
                // kinds of pairs share a bound. With the state's step last and two bounds, sm_80
                // spilled 4 instructions at 128 columns; with the state's step first and two bounds,
                // 2. With queries' pairs before those of keys it spilled more than 300.
                let lost: Tile<f32, { [BM, BM] }> = product(tu, tdv);
                let lost: Tile<f32, { [BM, BM] }> = visible_pairs::<BM>(negf(lost), 1i32);
                let seen: Tile<f32, { [BM, BM] }> = product(tu, tdo);
                let seen: Tile<f32, { [BM, BM] }> = visible_pairs::<BM>(seen, 1i32);
                let sizes: Tile<f32, { [BM, BM] }> = sizes_of(seen, lost);
                let unit: Tile<f32, { [1, 1] }> = bound_of(sizes, bounded);
                let lost: Tile<E, { [BM, BM] }> = narrow(lost, unit, bounded);
                let seen: Tile<E, { [BM, BM] }> = narrow(seen, unit, bounded);
                let received: Tile<f32, { [BM, BN] }> = fading::<BM, BN>(own, total, 0i32);
                let crossing: Tile<f32, { [BM, BN] }> =
                    crossed::<E, BM, DT, BN, BN>(tu, received, unit, bounded, s);
                let tk: Tile<f32, { [BM, BN] }> = convert_tile(tk);
                let kept: Terms<BM, BN> = begun_in_channels(seen, 0i32, crossing, tk, tq, zero);
                let fade: Tile<f32, { [BM, BN] }> = fading::<BM, BN>(own, total, 1i32);
                let tq: Tile<f32, { [BM, BN] }> = convert_tile(tq);
                s = advance::<E, BM, DT, BN, BN, 1, BN>(s, tdo, tq, fade, total);
                s = gathered::<E, BM, DT, BN, BN>(s, tdv, tk, negf(fade));
                let taken: Terms<BM, BN> = Terms::<BM, BN> { dots: zero, out: zero };
                let taken: Terms<BM, BN> =
                    spread(&keys_part, &fades_part, place, 1i32, unit, bounded, taken, lost, zero);
                let kept: Terms<BM, BN> =
                    spread(&met_part, &fades_part, place, 1i32, unit, bounded, kept, seen, zero);
                let one: Tile<f32, { [BM, BN] }> = constant(1.0f32, const_shape![BM, BN]);
                let out: Tile<f32, { [BM, BN] }> = plus_product(kept.out, taken.out, one);
                let dot: Tile<f32, { [BM, BN] }> = plus_product(kept.dots, taken.dots, one);
                let written: Tile<E, { [BM, BN] }> = convert_tile(out);
                unsafe { write_columns(&dk_view, written, b, i, h, c) };
                let entry: i32 = key_dots_batch_stride;
                let dots_view =
                    unsafe { rows_view(key_dots, batch, padded_rows, heads, head_dim, entry) };
                unsafe { write_columns(&dots_view, dot, b, i, h, c) };
            }
        }
    }
}
