//! The inverses of the delta rule: (I + A)⁻¹ of each tile of tokens, with A of `delta_rule.rs`.

#[cutile::module]
pub mod delta_inverse {
    use super::super::common::common::{product, read_statistics, rows_view, statistics_view};
    use super::super::common::common::{stream, write};
    use super::super::decays::decays::{between, remainder, share_of, tiles_of, weighed};
    use super::super::modes::modes::{OF_HEADS, OF_KEYS};
    use cutile::core::*;

    /// Returns `x` in the lower left quarter of each diagonal block of 2m rows, and otherwise 0.
    pub fn quarters<E: ElementType, const R: i32>(
        m: i32,
        x: Tile<E, { [R, R] }>,
    ) -> Tile<E, { [R, R] }> {
        let positions: Tile<i32, { [R] }> = iota(const_shape![R]);
        let size: Tile<i32, { [R] }> = m.broadcast(const_shape![R]);
        let index: Tile<i32, { [R] }> = positions / size;
        let one: Tile<i32, { [R] }> = constant(1i32, const_shape![R]);
        // Block n of m rows is below the diagonal if it is odd, and above block n − 1.
        let odd: Tile<i32, { [R] }> = andi(index, one);
        let none: Tile<i32, { [R] }> = constant(-1i32, const_shape![R]);
        let is_odd: Tile<bool, { [R] }> = eq_tile(odd, one);
        let above: Tile<i32, { [R] }> = select(is_odd, index - one, none);
        let row: Tile<i32, { [R, 1] }> = above.reshape(const_shape![R, 1]);
        let row: Tile<i32, { [R, R] }> = row.broadcast(const_shape![R, R]);
        let column: Tile<i32, { [1, R] }> = index.reshape(const_shape![1, R]);
        let column: Tile<i32, { [R, R] }> = column.broadcast(const_shape![R, R]);
        let inside: Tile<bool, { [R, R] }> = eq_tile(row, column);
        let zero: Tile<f32, { [R, R] }> = constant(0.0f32, const_shape![R, R]);
        let zero: Tile<E, { [R, R] }> = convert_tile(zero);
        select(inside, x, zero)
    }

    /// Returns `x` with `value` on the diagonal.
    pub fn with_diagonal<const R: i32>(
        value: f32,
        x: Tile<f32, { [R, R] }>,
    ) -> Tile<f32, { [R, R] }> {
        let positions: Tile<i32, { [R] }> = iota(const_shape![R]);
        let row: Tile<i32, { [R, 1] }> = positions.reshape(const_shape![R, 1]);
        let row: Tile<i32, { [R, R] }> = row.broadcast(const_shape![R, R]);
        let column: Tile<i32, { [1, R] }> = positions.reshape(const_shape![1, R]);
        let column: Tile<i32, { [R, R] }> = column.broadcast(const_shape![R, R]);
        let diagonal: Tile<bool, { [R, R] }> = eq_tile(row, column);
        let values: Tile<f32, { [R, R] }> = value.broadcast(const_shape![R, R]);
        select(diagonal, values, x)
    }

    /// Returns T + T N T, with N the lower left quarters of the diagonal blocks of 2m rows of −A: the
    /// inverse of these blocks, from T, that of the blocks of m rows. The new elements are where T
    /// is 0.
    pub fn joined<E: ElementType, const R: i32>(
        negative: Tile<E, { [R, R] }>,
        m: i32,
        t: Tile<E, { [R, R] }>,
    ) -> Tile<E, { [R, R] }> {
        let lower: Tile<E, { [R, R] }> = quarters::<E, R>(m, negative);
        let zero: Tile<f32, { [R, R] }> = constant(0.0f32, const_shape![R, R]);
        let moved: Tile<f32, { [R, R] }> = mma(lower, t, zero);
        let moved: Tile<E, { [R, R] }> = convert_tile(moved);
        let whole: Tile<f32, { [R, R] }> = convert_tile(t);
        let whole: Tile<f32, { [R, R] }> = mma(t, moved, whole);
        convert_tile(whole)
    }

    /// Returns one step of Newton's method for the inverse T of I + A, where `high` + `low` is −A.
    /// The diagonal of T is 1.
    pub fn refined<E: ElementType, const R: i32>(
        high: Tile<E, { [R, R] }>,
        low: Tile<E, { [R, R] }>,
        t: Tile<E, { [R, R] }>,
    ) -> Tile<E, { [R, R] }> {
        let whole: Tile<f32, { [R, R] }> = convert_tile(t);
        let error: Tile<f32, { [R, R] }> = with_diagonal::<R>(0.0f32, negf(whole));
        let error: Tile<f32, { [R, R] }> = mma(high, t, error);
        let error: Tile<f32, { [R, R] }> = mma(low, t, error);
        let error: Tile<E, { [R, R] }> = convert_tile(error);
        let better: Tile<f32, { [R, R] }> = mma(t, error, whole);
        convert_tile(better)
    }

    /// Computes the inverse of I + A for each tile of tokens. Where channels have decays, `pairs` has
    /// the products of keys under them.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn delta_rule_inverse<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const DECAYS: i32,
    >(
        k: *mut E,
        pairs: *mut f32,
        sums: *mut f32,
        beta: *mut f32,
        inverse: *mut E,
        batch: i32,
        rows: i32,
        padded_rows: i32,
        heads: i32,
        head_dim: i32,
        k_batch_stride: i32,
        pairs_batch_stride: i32,
        inverse_batch_stride: i32,
        sums_batch_stride: i32,
        sums_head_stride: i32,
        beta_batch_stride: i32,
        parts: i32,
        part_tiles: i32,
    ) {
        let pid = get_tile_block_id();
        let share = share_of(pid.0, parts, 1i32);
        let b: i32 = share.0 / heads;
        let h: i32 = share.0 - b * heads;

        let inverse_view =
            unsafe { rows_view(inverse, batch, rows, heads, BM, inverse_batch_stride) };
        let beta_view = unsafe {
            statistics_view(beta, batch, heads, padded_rows, beta_batch_stride, sums_head_stride)
        };
        let tiles = tiles_of::<BM>(share.1, part_tiles, rows);
        for i in tiles.0..tiles.0 + tiles.1 {
            let rate: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&beta_view, b, i, h);
            let mut met: Tile<f32, { [BM, BM] }> = constant(0.0f32, const_shape![BM, BM]);
            if DECAYS == OF_HEADS {
                let k_view = unsafe { rows_view(k, batch, rows, heads, head_dim, k_batch_stride) };
                let (entry, head) = (sums_batch_stride, sums_head_stride);
                let sums_view =
                    unsafe { statistics_view(sums, batch, heads, padded_rows, entry, head) };
                let k_part = k_view.partition(const_shape![1, BM, 1, DT]);
                let tk: Tile<E, { [BM, DT] }> = stream(&k_part, b, i, h);
                let tb: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sums_view, b, i, h);
                let all: Tile<f32, { [BM, BM] }> = product(tk, tk);
                let left: Tile<f32, { [BM, BM] }> = between::<BM>(tb, 0i32, 1i32);
                met = weighed(all, left);
            }
            if DECAYS == OF_KEYS {
                let entry: i32 = pairs_batch_stride;
                let pairs_view = unsafe { rows_view(pairs, batch, padded_rows, heads, BM, entry) };
                let pairs_part = pairs_view.partition(const_shape![1, BM, 1, BM]);
                let all: Tile<f32, { [BM, BM] }> = stream(&pairs_part, b, i, h);
                met = with_diagonal::<BM>(0.0f32, all);
            }
            let rate: Tile<f32, { [BM, BM] }> = negf(rate).broadcast(const_shape![BM, BM]);
            let negative: Tile<f32, { [BM, BM] }> = weighed(met, rate);
            let high: Tile<E, { [BM, BM] }> = convert_tile(negative);
            let low: Tile<E, { [BM, BM] }> = remainder::<E, BM, BM>(high, negative);

            // Substitution by blocks, from blocks of one row to one block. Rounding errors of the
            // blocks add up, and one step of Newton's method takes them away.
            let t: Tile<E, { [BM, BM] }> = quarters::<E, BM>(1i32, high);
            let t: Tile<f32, { [BM, BM] }> = convert_tile(t);
            let t: Tile<f32, { [BM, BM] }> = with_diagonal::<BM>(1.0f32, t);
            let t: Tile<E, { [BM, BM] }> = convert_tile(t);
            let mut t: Tile<E, { [BM, BM] }> = t;
            let mut m: i32 = 2i32;
            // The compiler does not know that this is 5. Otherwise it would unroll the loop, and spill.
            let levels: i32 = 5i32 + min(i, 0i32);
            for _level in 0i32..levels {
                t = joined::<E, BM>(high, m, t);
                m = 2i32 * m;
            }
            let written: Tile<E, { [BM, BM] }> = refined::<E, BM>(high, low, t);
            unsafe { write(&inverse_view, written, b, i, h) };
        }
    }
}
