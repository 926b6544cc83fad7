//! What the kernels of linear attention share: the parts of a sequence, the weights between tokens,
//! and the step of a state over a tile.

#[cutile::module]
pub mod decays {
    use super::super::common::common::product;
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
    /// before the tile. There is one column, or one for each channel.
    pub fn fading<const R: i32, const W: i32>(
        sums: Tile<f32, { [R, W] }>,
        total: Tile<f32, { [1, W] }>,
        reverse: i32,
    ) -> Tile<f32, { [R, W] }> {
        let ahead: Tile<f32, { [1, 1] }> = factor(1i32 - reverse);
        let end: Tile<f32, { [1, W] }> = total * ahead.broadcast(const_shape![1, W]);
        let end: Tile<f32, { [R, W] }> = end.broadcast(const_shape![R, W]);
        let sign: Tile<f32, { [1, 1] }> = factor(1i32 - 2i32 * reverse);
        let between: Tile<f32, { [R, W] }> = end - sums * sign.broadcast(const_shape![R, W]);
        exp2(between, ftz::Enabled)
    }

    /// Returns the weights between tokens of a tile: 2^(b_i − b_j) for j ≤ i, or in reverse
    /// 2^(b_j − b_i) for j ≥ i; otherwise 0. With `strict` a token does not see itself.
    pub fn between<const R: i32>(
        sums: Tile<f32, { [R, 1] }>,
        reverse: i32,
        strict: i32,
    ) -> Tile<f32, { [R, R] }> {
        let rows: Tile<f32, { [R, R] }> = sums.broadcast(const_shape![R, R]);
        let columns: Tile<f32, { [1, R] }> = sums.reshape(const_shape![1, R]);
        let columns: Tile<f32, { [R, R] }> = columns.broadcast(const_shape![R, R]);
        let direction: i32 = 1i32 - 2i32 * reverse;
        let sign: Tile<f32, { [1, 1] }> = factor(direction);
        let left: Tile<f32, { [R, R] }> = (rows - columns) * sign.broadcast(const_shape![R, R]);
        let seen: Tile<bool, { [R, R] }> = seen_of::<R>(reverse, strict);
        let hidden: Tile<f32, { [R, R] }> = constant(f32::NEG_INFINITY, const_shape![R, R]);
        let left: Tile<f32, { [R, R] }> = select(seen, left, hidden);
        exp2(left, ftz::Enabled)
    }

    /// Returns the pairs of a tile whose row sees its column: j ≤ i, or in reverse j ≥ i.
    pub fn seen_of<const R: i32>(reverse: i32, strict: i32) -> Tile<bool, { [R, R] }> {
        let direction: i32 = 1i32 - 2i32 * reverse;
        let positions: Tile<i32, { [R] }> = iota(const_shape![R]);
        let own: i32 = strict * direction;
        let own: Tile<i32, { [R] }> = own.broadcast(const_shape![R]);
        let last: Tile<i32, { [R] }> = positions - own;
        let row: Tile<i32, { [R, 1] }> = last.reshape(const_shape![R, 1]);
        let row: Tile<i32, { [R, R] }> = row.broadcast(const_shape![R, R]);
        let column: Tile<i32, { [1, R] }> = positions.reshape(const_shape![1, R]);
        let column: Tile<i32, { [R, R] }> = column.broadcast(const_shape![R, R]);
        let direction: Tile<i32, { [R, R] }> = direction.broadcast(const_shape![R, R]);
        let ahead: Tile<i32, { [R, R] }> = (column - row) * direction;
        let zero: Tile<i32, { [R, R] }> = constant(0i32, const_shape![R, R]);
        le_tile(ahead, zero)
    }

    /// Returns pairs of a tile, and 0 where the row does not see the column.
    pub fn visible_pairs<const R: i32>(
        x: Tile<f32, { [R, R] }>,
        reverse: i32,
    ) -> Tile<f32, { [R, R] }> {
        let zero: Tile<f32, { [R, R] }> = constant(0.0f32, const_shape![R, R]);
        select(seen_of::<R>(reverse, 0i32), x, zero)
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

    /// Returns what rounding to `high` has taken from `x`, rounded.
    pub fn remainder<E: ElementType, const R: i32, const C: i32>(
        high: Tile<E, { [R, C] }>,
        x: Tile<f32, { [R, C] }>,
    ) -> Tile<E, { [R, C] }> {
        let high: Tile<f32, { [R, C] }> = convert_tile(high);
        convert_tile(x - high)
    }

    /// Returns x · bound of a product whose operand was divided by `bound`.
    pub fn widened<const R: i32, const C: i32>(
        bound: Tile<f32, { [1, 1] }>,
        bounded: i32,
        x: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let mut whole: Tile<f32, { [R, C] }> = x;
        if bounded == 1i32 {
            whole = x * bound.broadcast(const_shape![R, C]);
        }
        whole
    }

    /// Returns S + kᵀ (fade ∘ v).
    pub fn gathered<E: ElementType, const R: i32, const DT: i32, const C: i32, const W: i32>(
        state: Tile<f32, { [DT, C] }>,
        k: Tile<E, { [R, DT] }>,
        v: Tile<f32, { [R, C] }>,
        fade: Tile<f32, { [R, W] }>,
    ) -> Tile<f32, { [DT, C] }> {
        let faded: Tile<f32, { [R, C] }> = v * fade.broadcast(const_shape![R, C]);
        let faded: Tile<E, { [R, C] }> = convert_tile(faded);
        let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
        let k: Tile<E, { [DT, R] }> = permute(k, transpose);
        mma(k, faded, state)
    }

    /// Returns S = 2^(total) ∘ S + kᵀ (fade ∘ v). The total is one number, or one for each row or
    /// column of S.
    pub fn advance<
        E: ElementType,
        const R: i32,
        const DT: i32,
        const C: i32,
        const W: i32,
        const A: i32,
        const B: i32,
    >(
        state: Tile<f32, { [DT, C] }>,
        k: Tile<E, { [R, DT] }>,
        v: Tile<f32, { [R, C] }>,
        fade: Tile<f32, { [R, W] }>,
        total: Tile<f32, { [A, B] }>,
    ) -> Tile<f32, { [DT, C] }> {
        let carry: Tile<f32, { [A, B] }> = exp2(total, ftz::Enabled);
        let carried: Tile<f32, { [DT, C] }> = weighed(state, carry.broadcast(const_shape![DT, C]));
        gathered::<E, R, DT, C, W>(carried, k, v, fade)
    }

    /// Returns received ∘ (q S) / unit, with S before the tile, in reverse behind it; 0 where
    /// `received` is 0, whatever the state is.
    pub fn crossed<E: ElementType, const R: i32, const DT: i32, const C: i32, const W: i32>(
        q: Tile<E, { [R, DT] }>,
        received: Tile<f32, { [R, W] }>,
        unit: Tile<f32, { [1, 1] }>,
        bounded: i32,
        state: Tile<f32, { [DT, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let bound: Tile<f32, { [1, 1] }> = bound_of(state, bounded);
        let before: Tile<E, { [DT, C] }> = narrow(state, bound, bounded);
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        let crossing: Tile<f32, { [R, C] }> = mma(q, before, zero);
        let mut relative: Tile<f32, { [1, 1] }> = bound;
        if bounded == 1i32 {
            relative = true_div(bound, unit);
        }
        let crossing: Tile<f32, { [R, C] }> = widened::<R, C>(relative, bounded, crossing);
        weighed::<R, C>(crossing, received.broadcast(const_shape![R, C]))
    }

    /// Returns the outputs of a tile's tokens: of the tile's keys and values, and of the state
    /// before the tile, in reverse behind it.
    pub fn attended<E: ElementType, const R: i32, const DT: i32, const C: i32>(
        q: Tile<E, { [R, DT] }>,
        k: Tile<E, { [R, DT] }>,
        v: Tile<E, { [R, C] }>,
        sums: Tile<f32, { [R, 1] }>,
        total: Tile<f32, { [1, 1] }>,
        reverse: i32,
        strict: i32,
        bounded: i32,
        state: Tile<f32, { [DT, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let pairs: Tile<f32, { [R, R] }> = product(q, k);
        let left: Tile<f32, { [R, R] }> = between::<R>(sums, reverse, strict);
        let faded: Tile<f32, { [R, R] }> = weighed(pairs, left);
        let received: Tile<f32, { [R, 1] }> = fading::<R, 1>(sums, total, 1i32 - reverse);
        summed::<E, R, DT, C>(faded, q, received, v, bounded, state)
    }

    /// Returns pairs v + received ∘ (q S).
    pub fn summed<E: ElementType, const R: i32, const DT: i32, const C: i32>(
        pairs: Tile<f32, { [R, R] }>,
        q: Tile<E, { [R, DT] }>,
        received: Tile<f32, { [R, 1] }>,
        v: Tile<E, { [R, C] }>,
        bounded: i32,
        state: Tile<f32, { [DT, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let unit: Tile<f32, { [1, 1] }> = bound_of(pairs, bounded);
        let weights: Tile<E, { [R, R] }> = narrow(pairs, unit, bounded);
        let crossing: Tile<f32, { [R, C] }> =
            crossed::<E, R, DT, C, 1>(q, received, unit, bounded, state);
        let out: Tile<f32, { [R, C] }> = mma(weights, v, crossing);
        widened::<R, C>(unit, bounded, out)
    }

    /// Returns the first tile of a part and its number of tiles.
    pub fn tiles_of<const R: i32>(part: i32, part_tiles: i32, rows: i32) -> (i32, i32) {
        let first: i32 = part * part_tiles;
        (first, min(part_tiles, ceil_div(rows, R) - first))
    }

    /// Returns the products by row of two tiles.
    pub fn dots_of<E: ElementType, const R: i32, const C: i32>(
        x: Tile<E, { [R, C] }>,
        out: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, 1] }> {
        let x: Tile<f32, { [R, C] }> = convert_tile(x);
        let dot: Tile<f32, { [R] }> = reduce_sum(x * out, 1i32);
        dot.reshape(const_shape![R, 1])
    }
}
