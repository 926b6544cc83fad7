//! The delta rule: linear attention whose values are corrected first.
//!
//! A token's corrected value is u_t = β_t (v_t − S_tᵀ k_t), where S_t is the state before the token,
//! decayed to it. With these values all else is linear attention (`linear.rs`). With b as there, and
//! A_ij = β_i 2^(b_i−b_j) (k_i·k_j) for j < i, a tile's corrected values are
//!
//! ```text
//! U = (I + A)⁻¹ diag(β) (V − 2^b ∘ K S)
//! ```
//!
//! `delta_inverse.rs` has the inverses, which depend on no state. `delta_rule_state` goes through
//! the tiles of a part with S, and `delta_rule_grad` goes back through them with D, the
//! gradient of the state behind each tile:
//!
//! ```text
//! dY = (I + A)⁻ᵀ (Pᵀ dO + 2^(b_n−b) ∘ K D);   dV = β dY;   D = 2^(b_n) D + (2^b ∘ Q)ᵀ dO − (2^b ∘ K)ᵀ dV
//! ```
//!
//! Both compute what a part does to any state, or with the state before (behind) each part the
//! values of tokens. What a part does to a state is affine: the columns of the transfer are what it
//! makes of the columns of the identity, with values of 0. `delta_keys.rs` has the gradient of keys.
//!
//! With decays of channels of keys, b_i is a vector over them. Then queries and keys come with their
//! decays from the beginning of their tile, `kh` are keys with those to its end, and `channel_pairs`
//! gives the products of keys for A, and those of queries with keys.
//!
//! A token or state that is not finite spoils its tile. Only going forward does a reset stop it, and
//! only one at the start of a later tile.

#[cutile::module]
pub mod delta_rule {
    use super::super::common::common::{read_statistics, rows_view, statistics_view};
    use super::super::common::common::{stream, stream_columns, write_columns};
    use super::super::decays::decays::{advance, attended, crossed, factor, fading, gathered};
    use super::super::decays::decays::{summed, tiles_of, total_of};
    use super::super::delta_parts::delta_parts::{Cut, Work, begun, left, token_rows, totals_of};
    use super::super::delta_parts::delta_parts::{unless_transfer, work_of};
    use super::super::modes::modes::{OF_HEADS, OF_KEYS};
    use cutile::core::*;

    /// Returns β (v − what the state knows of v).
    pub fn missing<E: ElementType, const R: i32, const C: i32>(
        v: Tile<E, { [R, C] }>,
        rate: Tile<f32, { [R, 1] }>,
        known: Tile<f32, { [R, C] }>,
    ) -> Tile<E, { [R, C] }> {
        let v: Tile<f32, { [R, C] }> = convert_tile(v);
        let y: Tile<f32, { [R, C] }> = (v - known) * rate.broadcast(const_shape![R, C]);
        convert_tile(y)
    }

    /// Goes through the tiles of each part. Without `has_transfer` it begins with the state before
    /// the part, and computes the corrected values. With `has_transfer` it computes the state that a
    /// part leaves from a state of zeros, and the transfer of any state.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn delta_rule_state<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const DECAYS: i32,
    >(
        k: *mut E,
        kh: *mut E,
        v: *mut E,
        inverse: *mut E,
        sums: *mut f32,
        beta: *mut f32,
        before: *mut f32,
        u: *mut E,
        state: *mut f32,
        transfer: *mut f32,
        batch: i32,
        rows: i32,
        padded_rows: i32,
        heads: i32,
        head_dim: i32,
        value_dim: i32,
        k_batch_stride: i32,
        v_batch_stride: i32,
        inverse_batch_stride: i32,
        u_batch_stride: i32,
        sums_batch_stride: i32,
        sums_head_stride: i32,
        beta_batch_stride: i32,
        state_stride: i32,
        transfer_stride: i32,
        parts: i32,
        part_tiles: i32,
        bounded: i32,
        has_u: i32,
        has_transfer: i32,
    ) {
        let cut: Cut = Cut {
            batch,
            rows,
            padded_rows,
            heads,
            head_dim,
            value_dim,
            state_stride,
            transfer_stride,
            parts,
            part_tiles,
            has_values: has_u,
            has_transfer,
        };
        let work: Work = work_of::<BN>(cut);
        let b: i32 = work.b;
        let h: i32 = work.h;
        let is_transfer: i32 = work.is_transfer;
        let c: i32 = work.column;
        let cv: i32 = c * (1i32 - is_transfer);

        let k_view = unsafe { token_rows(k, cut, head_dim, k_batch_stride) };
        let v_view = unsafe { token_rows(v, cut, value_dim, v_batch_stride) };
        let inverse_view = unsafe { token_rows(inverse, cut, BM, inverse_batch_stride) };
        let u_view = unsafe { token_rows(u, cut, value_dim, u_batch_stride) };
        let beta_view = unsafe {
            statistics_view(beta, batch, heads, padded_rows, beta_batch_stride, sums_head_stride)
        };
        let k_part = k_view.partition(const_shape![1, BM, 1, DT]);
        let v_part = v_view.partition(const_shape![1, BM, 1, BN]);
        let inverse_part = inverse_view.partition(const_shape![1, BM, 1, BM]);

        let mut s: Tile<f32, { [DT, BN] }> =
            unsafe { begun::<DT, BN>(const_shape![DT, BN], before, cut, work) };
        let one: Tile<f32, { [1, 1] }> = factor(1i32);
        let whole: Tile<f32, { [BM, 1] }> = constant(1.0f32, const_shape![BM, 1]);
        let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
        let tiles = tiles_of::<BM>(work.part, part_tiles, rows);
        for i in tiles.0..tiles.0 + tiles.1 {
            let tk: Tile<E, { [BM, DT] }> = stream(&k_part, b, i, h);
            let tv: Tile<E, { [BM, BN] }> = stream_columns(&v_part, b, i, h, cv);
            let tv: Tile<E, { [BM, BN] }> = unless_transfer(tv, is_transfer);
            let tt: Tile<E, { [BM, BM] }> = stream(&inverse_part, b, i, h);
            let rate: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&beta_view, b, i, h);
            let mut total: Tile<f32, { [1, 1] }> = one;
            let mut received: Tile<f32, { [BM, 1] }> = whole;
            let mut fade: Tile<f32, { [BM, 1] }> = whole;
            if DECAYS == OF_HEADS {
                let (entry, head) = (sums_batch_stride, sums_head_stride);
                let sums_view =
                    unsafe { statistics_view(sums, batch, heads, padded_rows, entry, head) };
                total = total_of::<BM>(&sums_view, b, h, i);
                let tb: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sums_view, b, i, h);
                received = fading::<BM, 1>(tb, total, 1i32);
                fade = fading::<BM, 1>(tb, total, 0i32);
            }
            let known: Tile<f32, { [BM, BN] }> =
                crossed::<E, BM, DT, BN, 1>(tk, received, one, bounded, s);
            let y: Tile<E, { [BM, BN] }> = missing::<E, BM, BN>(tv, rate, known);
            let values: Tile<f32, { [BM, BN] }> = mma(tt, y, zero);
            if has_u == 1i32 {
                let written: Tile<E, { [BM, BN] }> = convert_tile(values);
                unsafe { write_columns(&u_view, written, b, i, h, c) };
            }
            if DECAYS == OF_HEADS {
                s = advance::<E, BM, DT, BN, 1, 1, 1>(s, tk, values, fade, total);
            } else {
                let totals: Tile<f32, { [DT, 1] }> =
                    unsafe { totals_of::<BM, DT>(sums, cut, sums_batch_stride, b, i, h) };
                let kh_view = unsafe { token_rows(kh, cut, head_dim, k_batch_stride) };
                let kh_part = kh_view.partition(const_shape![1, BM, 1, DT]);
                let tkh: Tile<E, { [BM, DT] }> = stream(&kh_part, b, i, h);
                s = advance::<E, BM, DT, BN, 1, DT, 1>(s, tkh, values, fade, totals);
            }
        }
        unsafe { left::<DT, BN>(s, state, transfer, cut, work) };
    }

    /// Goes back through the tiles of each part. Without `has_transfer` it begins with the gradient
    /// of the state behind the part, and computes dY. With `has_transfer` it computes the gradient of
    /// the state before a part, from one of zeros behind it, and the transfer of any gradient.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn delta_rule_grad<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const DECAYS: i32,
    >(
        q: *mut E,
        k: *mut E,
        kh: *mut E,
        dout: *mut E,
        pairs: *mut f32,
        inverse: *mut E,
        sums: *mut f32,
        beta: *mut f32,
        before: *mut f32,
        dy: *mut E,
        state: *mut f32,
        transfer: *mut f32,
        batch: i32,
        rows: i32,
        padded_rows: i32,
        heads: i32,
        head_dim: i32,
        value_dim: i32,
        q_batch_stride: i32,
        k_batch_stride: i32,
        dout_batch_stride: i32,
        pairs_batch_stride: i32,
        inverse_batch_stride: i32,
        dy_batch_stride: i32,
        sums_batch_stride: i32,
        sums_head_stride: i32,
        beta_batch_stride: i32,
        state_stride: i32,
        transfer_stride: i32,
        parts: i32,
        part_tiles: i32,
        bounded: i32,
        has_dy: i32,
        has_transfer: i32,
    ) {
        let cut: Cut = Cut {
            batch,
            rows,
            padded_rows,
            heads,
            head_dim,
            value_dim,
            state_stride,
            transfer_stride,
            parts,
            part_tiles,
            has_values: has_dy,
            has_transfer,
        };
        let work: Work = work_of::<BN>(cut);
        let b: i32 = work.b;
        let h: i32 = work.h;
        let is_transfer: i32 = work.is_transfer;
        let c: i32 = work.column;
        let cv: i32 = c * (1i32 - is_transfer);

        let q_view = unsafe { token_rows(q, cut, head_dim, q_batch_stride) };
        let k_view = unsafe { token_rows(k, cut, head_dim, k_batch_stride) };
        let dout_view = unsafe { token_rows(dout, cut, value_dim, dout_batch_stride) };
        let inverse_view = unsafe { token_rows(inverse, cut, BM, inverse_batch_stride) };
        let dy_view = unsafe { token_rows(dy, cut, value_dim, dy_batch_stride) };
        let beta_view = unsafe {
            statistics_view(beta, batch, heads, padded_rows, beta_batch_stride, sums_head_stride)
        };
        let q_part = q_view.partition(const_shape![1, BM, 1, DT]);
        let k_part = k_view.partition(const_shape![1, BM, 1, DT]);
        let dout_part = dout_view.partition(const_shape![1, BM, 1, BN]);
        let inverse_part = inverse_view.partition(const_shape![1, BM, 1, BM]);

        let mut s: Tile<f32, { [DT, BN] }> =
            unsafe { begun::<DT, BN>(const_shape![DT, BN], before, cut, work) };
        let one: Tile<f32, { [1, 1] }> = factor(1i32);
        let whole: Tile<f32, { [BM, 1] }> = constant(1.0f32, const_shape![BM, 1]);
        let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
        let tiles = tiles_of::<BM>(work.part, part_tiles, rows);
        for back in 0i32..tiles.1 {
            let i: i32 = tiles.0 + tiles.1 - 1i32 - back;
            let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
            let tk: Tile<E, { [BM, DT] }> = stream(&k_part, b, i, h);
            let tdo: Tile<E, { [BM, BN] }> = stream_columns(&dout_part, b, i, h, cv);
            let tdo: Tile<E, { [BM, BN] }> = unless_transfer(tdo, is_transfer);
            let tt: Tile<E, { [BM, BM] }> = stream(&inverse_part, b, i, h);
            let mut total: Tile<f32, { [1, 1] }> = one;
            let mut tb: Tile<f32, { [BM, 1] }> = whole;
            let mut du: Tile<f32, { [BM, BN] }> = zero;
            if DECAYS == OF_HEADS {
                let (entry, head) = (sums_batch_stride, sums_head_stride);
                let sums_view =
                    unsafe { statistics_view(sums, batch, heads, padded_rows, entry, head) };
                total = total_of::<BM>(&sums_view, b, h, i);
                tb = read_statistics::<BM>(&sums_view, b, i, h);
                du = attended::<E, BM, DT, BN>(tk, tq, tdo, tb, total, 1i32, 0i32, bounded, s);
            }
            if DECAYS == OF_KEYS {
                let entry: i32 = pairs_batch_stride;
                let pairs_view = unsafe { rows_view(pairs, batch, padded_rows, heads, BM, entry) };
                let pairs_part = pairs_view.partition(const_shape![1, BM, 1, BM]);
                let seen: Tile<f32, { [BM, BM] }> = stream(&pairs_part, b, i, h);
                let kh_view = unsafe { token_rows(kh, cut, head_dim, k_batch_stride) };
                let kh_part = kh_view.partition(const_shape![1, BM, 1, DT]);
                let tkh: Tile<E, { [BM, DT] }> = stream(&kh_part, b, i, h);
                du = summed::<E, BM, DT, BN>(seen, tkh, whole, tdo, bounded, s);
            }
            let rate: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&beta_view, b, i, h);
            let du: Tile<E, { [BM, BN] }> = convert_tile(du);
            let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
            let tt: Tile<E, { [BM, BM] }> = permute(tt, transpose);
            let change: Tile<f32, { [BM, BN] }> = mma(tt, du, zero);
            if has_dy == 1i32 {
                let written: Tile<E, { [BM, BN] }> = convert_tile(change);
                unsafe { write_columns(&dy_view, written, b, i, h, c) };
            }
            let dv: Tile<f32, { [BM, BN] }> = change * rate.broadcast(const_shape![BM, BN]);
            let mut fade: Tile<f32, { [BM, 1] }> = whole;
            let tdo: Tile<f32, { [BM, BN] }> = convert_tile(tdo);
            if DECAYS == OF_HEADS {
                fade = fading::<BM, 1>(tb, total, 1i32);
                s = advance::<E, BM, DT, BN, 1, 1, 1>(s, tq, tdo, fade, total);
            } else {
                let totals: Tile<f32, { [DT, 1] }> =
                    unsafe { totals_of::<BM, DT>(sums, cut, sums_batch_stride, b, i, h) };
                s = advance::<E, BM, DT, BN, 1, DT, 1>(s, tq, tdo, fade, totals);
            }
            s = gathered::<E, BM, DT, BN, 1>(s, tk, dv, negf(fade));
        }
        unsafe { left::<DT, BN>(s, state, transfer, cut, work) };
    }
}
