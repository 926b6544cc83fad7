//! The running softmax of a tile of queries.

#[cutile::module]
pub mod softmax {
    use super::super::common::common::{read, read_statistics, write};
    use cutile::core::*;

    /// The state of a tile of queries: largest scores, sums of weights in `LANES` parts,
    /// and sums of weighted values.
    #[derive(Clone, Copy)]
    pub struct State<const BM: i32, const LANES: i32, const DT: i32> {
        pub m: Tile<f32, { [BM, 1] }>,
        pub l: Tile<f32, { [BM, LANES] }>,
        pub acc: Tile<f32, { [BM, DT] }>,
    }

    /// Folds one tile of scores into the running state without acc, all in base 2:
    ///
    /// ```text
    /// m' = max(m, rowmax s);  p = 2^(s−m');  l' = l·2^(m−m') + rowsum p
    /// ```
    ///
    /// Returns (p, 2^(m−m'), m', l'). `s` times `scale`, which is positive, is in base 2; hidden
    /// pairs are −inf. m starts at a finite number below every score, so that a row that has seen
    /// nothing yet stays at l = 0 without a NaN.
    ///
    /// l has `LANES` parts, the sums of every `LANES`-th column. Each part belongs to one thread,
    /// so threads add their parts once for each row instead of once for each tile.
    pub fn weigh<const BM: i32, const BN: i32, const PARTS: i32, const LANES: i32>(
        s: Tile<f32, { [BM, BN] }>,
        m: Tile<f32, { [BM, 1] }>,
        l: Tile<f32, { [BM, LANES] }>,
        parts: Shape<{ [BM, PARTS, LANES] }>,
        scale: f32,
    ) -> (
        Tile<f32, { [BM, BN] }>,
        Tile<f32, { [BM, 1] }>,
        Tile<f32, { [BM, 1] }>,
        Tile<f32, { [BM, LANES] }>,
    ) {
        let scale_row: Tile<f32, { [BM, 1] }> = scale.broadcast(const_shape![BM, 1]);
        let scale_all: Tile<f32, { [BM, BN] }> = scale.broadcast(const_shape![BM, BN]);
        let highest: Tile<f32, { [BM] }> = reduce_max(s, 1i32);
        let highest: Tile<f32, { [BM, 1] }> = highest.reshape(const_shape![BM, 1]);
        let new_m: Tile<f32, { [BM, 1] }> = max_tile(m, highest * scale_row);
        let minus_m: Tile<f32, { [BM, 1] }> = negf(new_m);
        let minus_m: Tile<f32, { [BM, BN] }> = minus_m.broadcast(const_shape![BM, BN]);
        let shifted: Tile<f32, { [BM, BN] }> =
            fma(s, scale_all, minus_m, rounding::NearestEven, ftz::Enabled);
        let p: Tile<f32, { [BM, BN] }> = exp2(shifted, ftz::Enabled);
        let alpha: Tile<f32, { [BM, 1] }> = exp2(m - new_m, ftz::Enabled);
        let apart: Tile<f32, { [BM, PARTS, LANES] }> = p.reshape(parts);
        let sums: Tile<f32, { [BM, LANES] }> = reduce_sum(apart, 1i32);
        let sums: Tile<f32, { [BM, LANES] }> = sums.reshape(const_shape![BM, LANES]);
        let decay: Tile<f32, { [BM, LANES] }> = alpha.broadcast(const_shape![BM, LANES]);
        let new_l: Tile<f32, { [BM, LANES] }> = l * decay + sums;
        (p, alpha, new_m, new_l)
    }

    /// Returns acc' = acc·2^(m−m') + p v.
    pub fn gather<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        p: Tile<f32, { [BM, BN] }>,
        v: Tile<E, { [BN, DT] }>,
        acc: Tile<f32, { [BM, DT] }>,
        alpha: Tile<f32, { [BM, 1] }>,
    ) -> Tile<f32, { [BM, DT] }> {
        let rescaled: Tile<f32, { [BM, DT] }> = acc * alpha.broadcast(const_shape![BM, DT]);
        let p: Tile<E, { [BM, BN] }> = convert_tile(p);
        mma(p, v, rescaled)
    }

    /// Returns o = acc / l; 0 for a row that saw nothing. NaN does not equal 0, so a NaN score makes
    /// o and lse of its row NaN.
    pub fn result_of<const R: i32, const W: i32>(
        l: Tile<f32, { [R, 1] }>,
        acc: Tile<f32, { [R, W] }>,
    ) -> Tile<f32, { [R, W] }> {
        let zero: Tile<f32, { [R, 1] }> = constant(0.0f32, const_shape![R, 1]);
        let one: Tile<f32, { [R, 1] }> = constant(1.0f32, const_shape![R, 1]);
        let divisor: Tile<f32, { [R, 1] }> = select(eq_tile(l, zero), one, l);
        let factor: Tile<f32, { [R, 1] }> = true_div(one, divisor);
        let out: Tile<f32, { [R, W] }> = acc * factor.broadcast(const_shape![R, W]);
        out
    }

    /// Returns lse = ln 2 · (m + log2 l); −inf for a row that saw nothing.
    pub fn lse_of<const R: i32>(
        m: Tile<f32, { [R, 1] }>,
        l: Tile<f32, { [R, 1] }>,
    ) -> Tile<f32, { [R, 1] }> {
        let zero: Tile<f32, { [R, 1] }> = constant(0.0f32, const_shape![R, 1]);
        let one: Tile<f32, { [R, 1] }> = constant(1.0f32, const_shape![R, 1]);
        let ln2: Tile<f32, { [R, 1] }> = constant(0.693147180559945309f32, const_shape![R, 1]);
        let nothing: Tile<f32, { [R, 1] }> = constant(f32::NEG_INFINITY, const_shape![R, 1]);
        let empty: Tile<bool, { [R, 1] }> = eq_tile(l, zero);
        let log: Tile<f32, { [R, 1] }> = log2(select(empty, one, l));
        select(empty, nothing, (m + log) * ln2)
    }

    /// Writes [`result_of`] and [`lse_of`] a tile of queries.
    pub unsafe fn conclude<E: ElementType, const BM: i32, const DT: i32>(
        m: Tile<f32, { [BM, 1] }>,
        l: Tile<f32, { [BM, 1] }>,
        acc: Tile<f32, { [BM, DT] }>,
        o: &Tensor<E, { [-1, -1, -1, -1] }>,
        lse: &Tensor<f32, { [-1, -1, -1] }>,
        b: i32,
        i: i32,
        h: i32,
    ) {
        let out: Tile<f32, { [BM, DT] }> = result_of(l, acc);
        let out: Tile<E, { [BM, DT] }> = convert_tile(out);
        unsafe { write(o, out, b, i, h) };
        let value: Tile<f32, { [BM, 1] }> = lse_of(m, l);
        let mut part: PartitionMut<f32, { [1, BM, 1] }> =
            unsafe { lse.partition_full_mut(const_shape![1, BM, 1]) };
        unsafe { part.store_unchecked(value.reshape(const_shape![1, BM, 1]), [b, i, h]) };
    }

    /// Returns the state before the first key.
    pub fn empty_state<const BM: i32, const LANES: i32, const DT: i32>() -> State<BM, LANES, DT> {
        let m: Tile<f32, { [BM, 1] }> = constant(-1.0e38f32, const_shape![BM, 1]);
        let l: Tile<f32, { [BM, LANES] }> = constant(0.0f32, const_shape![BM, LANES]);
        let acc: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
        State::<BM, LANES, DT> { m, l, acc }
    }

    /// Returns the state that an earlier launch left. Its sums become the first of their parts.
    pub fn read_state<const BM: i32, const LANES: i32, const DT: i32>(
        row_max: &Tensor<f32, { [-1, -1, -1] }>,
        row_sum: &Tensor<f32, { [-1, -1, -1] }>,
        acc: &Tensor<f32, { [-1, -1, -1, -1] }>,
        b: i32,
        i: i32,
        h: i32,
    ) -> State<BM, LANES, DT> {
        let m: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(row_max, b, i, h);
        let sum: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(row_sum, b, i, h);
        let lane: Tile<i32, { [LANES] }> = iota(const_shape![LANES]);
        let lane: Tile<i32, { [1, LANES] }> = lane.reshape(const_shape![1, LANES]);
        let lane: Tile<i32, { [BM, LANES] }> = lane.broadcast(const_shape![BM, LANES]);
        let first: Tile<i32, { [BM, LANES] }> = constant(0i32, const_shape![BM, LANES]);
        let none: Tile<f32, { [BM, LANES] }> = constant(0.0f32, const_shape![BM, LANES]);
        let l: Tile<f32, { [BM, LANES] }> =
            select(eq_tile(lane, first), sum.broadcast(const_shape![BM, LANES]), none);
        let acc: Tile<f32, { [BM, DT] }> = read(acc, const_shape![BM, DT], b, i, h);
        State::<BM, LANES, DT> { m, l, acc }
    }
}
