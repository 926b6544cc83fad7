//! What the kernels share: views of arrays, the order of blocks, masks.

#[cutile::module]
pub mod common {
    use cutile::core::*;

    /// `[batch, rows, heads, dim]` at `base`, rows of all heads contiguous.
    pub unsafe fn rows_view<E: ElementType>(
        base: *mut E,
        batch: i32,
        rows: i32,
        heads: i32,
        dim: i32,
        batch_stride: i32,
    ) -> Tensor<E, { [-1, -1, -1, -1] }> {
        let row_stride: i32 = heads * dim;
        let shape: Shape<{ [-1, -1, -1, -1] }> =
            Shape::<{ [-1, -1, -1, -1] }> { dims: &[batch, rows, heads, dim] };
        let strides: Array<{ [-1, -1, -1, 1] }> =
            Array::<{ [-1, -1, -1, 1] }> { dims: &[batch_stride, row_stride, dim] };
        let base: PointerTile<*mut E, { [] }> = pointer_to_tile(base);
        unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) }
    }

    /// `[batch, heads, rows]` at `base`, rows contiguous.
    pub unsafe fn statistics_view(
        base: *mut f32,
        batch: i32,
        heads: i32,
        rows: i32,
        batch_stride: i32,
        head_stride: i32,
    ) -> Tensor<f32, { [-1, -1, -1] }> {
        let shape: Shape<{ [-1, -1, -1] }> =
            Shape::<{ [-1, -1, -1] }> { dims: &[batch, heads, rows] };
        let strides: Array<{ [-1, -1, 1] }> =
            Array::<{ [-1, -1, 1] }> { dims: &[batch_stride, head_stride] };
        let base: PointerTile<*mut f32, { [] }> = pointer_to_tile(base);
        unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) }
    }

    /// `[batch, rows, heads]` at `base`: one value per row and head, as JAX has `lse`.
    pub unsafe fn per_row_view(
        base: *mut f32,
        batch: i32,
        rows: i32,
        heads: i32,
        batch_stride: i32,
    ) -> Tensor<f32, { [-1, -1, -1] }> {
        let shape: Shape<{ [-1, -1, -1] }> =
            Shape::<{ [-1, -1, -1] }> { dims: &[batch, rows, heads] };
        let strides: Array<{ [-1, -1, 1] }> =
            Array::<{ [-1, -1, 1] }> { dims: &[batch_stride, heads] };
        let base: PointerTile<*mut f32, { [] }> = pointer_to_tile(base);
        unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) }
    }

    /// Which tile of which head a block computes: (tile, batch · heads + head).
    ///
    /// Heads are taken in sections whose streamed arrays fit the L2 cache together; within one,
    /// all heads of a tile before the next tile, and with `reverse` the last tile first, so that
    /// the longest rows start first.
    pub fn block_of(pid: i32, tiles: i32, section: i32, reverse: i32) -> (i32, i32) {
        let in_section: i32 = section * tiles;
        let index: i32 = pid / in_section;
        let rest: i32 = pid - index * in_section;
        let tile: i32 = rest / section;
        let head: i32 = index * section + (rest - tile * section);
        let tile: i32 = if reverse == 1i32 { tiles - 1i32 - tile } else { tile };
        (tile, head)
    }

    /// The streamed tiles of `BS` rows that some row of rows `first..=last` sees, and those that
    /// all of them see entirely: (begin, inside_begin, inside_end, end). `low ≤ s − r ≤ high`.
    pub fn streamed<const BS: i32>(
        first: i32,
        last: i32,
        low: i32,
        high: i32,
        len: i32,
    ) -> (i32, i32, i32, i32) {
        let some_begin: i32 = max(0i32, first + low);
        let some_end: i32 = min(len, last + high + 1i32);
        let all_begin: i32 = max(0i32, last + low);
        let all_end: i32 = min(len, first + high + 1i32);
        let begin: i32 = some_begin / BS;
        let end: i32 = max(begin, ceil_div(max(0i32, some_end), BS));
        let inside_begin: i32 = min(end, ceil_div(all_begin, BS));
        let inside_end: i32 = max(inside_begin, max(0i32, all_end) / BS);
        (begin, inside_begin, inside_end, end)
    }

    /// The `t`-th of the tiles that need a mask: those before the inside, then those after it.
    pub fn edge(t: i32, begin: i32, inside_begin: i32, inside_end: i32) -> i32 {
        let before: i32 = inside_begin - begin;
        if t < before { begin + t } else { inside_end + (t - before) }
    }

    /// Pairs of a tile that the band allows; rows are queries, columns keys. `corner` is the first
    /// key row minus the first query row.
    pub fn band<const R: i32, const C: i32>(
        lower: i32,
        upper: i32,
        corner: i32,
    ) -> Tile<bool, { [R, C] }> {
        let rows: Tile<i32, { [R] }> = iota(const_shape![R]);
        let rows: Tile<i32, { [R, 1] }> = rows.reshape(const_shape![R, 1]);
        let rows: Tile<i32, { [R, C] }> = rows.broadcast(const_shape![R, C]);
        let columns: Tile<i32, { [C] }> = iota(const_shape![C]);
        let columns: Tile<i32, { [1, C] }> = columns.reshape(const_shape![1, C]);
        let columns: Tile<i32, { [R, C] }> = columns.broadcast(const_shape![R, C]);
        let diagonal: Tile<i32, { [R, C] }> = columns - rows;
        let low: i32 = lower - corner;
        let low: Tile<i32, { [R, C] }> = low.broadcast(const_shape![R, C]);
        let high: i32 = upper - corner;
        let high: Tile<i32, { [R, C] }> = high.broadcast(const_shape![R, C]);
        ge_tile(diagonal, low) & le_tile(diagonal, high)
    }

    /// Columns of a tile that exist: those before `count`.
    pub fn existing<const R: i32, const C: i32>(count: i32) -> Tile<bool, { [R, C] }> {
        let columns: Tile<i32, { [C] }> = iota(const_shape![C]);
        let columns: Tile<i32, { [1, C] }> = columns.reshape(const_shape![1, C]);
        let columns: Tile<i32, { [R, C] }> = columns.broadcast(const_shape![R, C]);
        let count: Tile<i32, { [R, C] }> = count.broadcast(const_shape![R, C]);
        lt_tile(columns, count)
    }

    /// Tile `tile` of head `head` of batch entry `batch`, loaded ahead while others are computed.
    pub fn stream<E: ElementType, const R: i32, const W: i32>(
        part: &Partition<E, { [1, R, 1, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
    ) -> Tile<E, { [R, W] }> {
        let loaded: Tile<E, { [1, R, 1, W] }> = load_view_tko(
            part,
            [batch, tile, head, 0i32],
            ordering::Weak,
            scope::TileBlock,
            Some(2),
            tma::Enabled,
        );
        loaded.reshape(const_shape![R, W])
    }

    /// a bᵀ, accumulated in float32.
    pub fn product<E: ElementType, const R: i32, const C: i32, const W: i32>(
        a: Tile<E, { [R, W] }>,
        b: Tile<E, { [C, W] }>,
    ) -> Tile<f32, { [R, C] }> {
        let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
        let b: Tile<E, { [W, C] }> = permute(b, transpose);
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        mma(a, b, zero)
    }

    /// Stores a tile of rows; what lies beyond the view's end is dropped.
    pub unsafe fn write<E: ElementType, const R: i32, const W: i32>(
        view: &Tensor<E, { [-1, -1, -1, -1] }>,
        value: Tile<E, { [R, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
    ) {
        let mut part: PartitionMut<E, { [1, R, 1, W] }> =
            unsafe { view.partition_full_mut(const_shape![1, R, 1, W]) };
        let value: Tile<E, { [1, R, 1, W] }> = value.reshape(const_shape![1, R, 1, W]);
        unsafe { part.store_unchecked(value, [batch, tile, head, 0i32]) };
    }

    /// Stores statistics of a tile of rows.
    pub unsafe fn write_statistics<const R: i32>(
        view: &Tensor<f32, { [-1, -1, -1] }>,
        value: Tile<f32, { [R, 1] }>,
        batch: i32,
        tile: i32,
        head: i32,
    ) {
        let mut part: PartitionMut<f32, { [1, 1, R] }> =
            unsafe { view.partition_full_mut(const_shape![1, 1, R]) };
        let value: Tile<f32, { [1, 1, R] }> = value.reshape(const_shape![1, 1, R]);
        unsafe { part.store_unchecked(value, [batch, head, tile]) };
    }

    /// `[batch, rows]` at `base`: the segment of each row.
    pub unsafe fn segments_view(
        base: *mut i32,
        batch: i32,
        rows: i32,
        batch_stride: i32,
    ) -> Tensor<i32, { [-1, -1] }> {
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[batch, rows] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[batch_stride] };
        let base: PointerTile<*mut i32, { [] }> = pointer_to_tile(base);
        unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) }
    }

    /// Pairs of one segment; a negative one sees nothing.
    pub fn same_segment<const R: i32, const C: i32>(
        rows: Tile<i32, { [R, 1] }>,
        columns: Tile<i32, { [1, C] }>,
    ) -> Tile<bool, { [R, C] }> {
        let rows: Tile<i32, { [R, C] }> = rows.broadcast(const_shape![R, C]);
        let columns: Tile<i32, { [R, C] }> = columns.broadcast(const_shape![R, C]);
        let zero: Tile<i32, { [R, C] }> = constant(0i32, const_shape![R, C]);
        eq_tile(rows, columns) & ge_tile(rows, zero)
    }

    /// tanh(scale · s / cap), of which cap times is the capped score; 0 without a cap.
    ///
    /// tanh x = 1 − 2 / (1 + 2^(2 x log2 e)): exact to 1e-7, which is what counts of a score.
    pub fn cap_ratio<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        twice_by_cap: f32,
    ) -> Tile<f32, { [R, C] }> {
        let mut ratio: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        if twice_by_cap > 0.0f32 {
            let scale: Tile<f32, { [R, C] }> = twice_by_cap.broadcast(const_shape![R, C]);
            let doubled: Tile<f32, { [R, C] }> = exp2(s * scale, ftz::Enabled);
            let one: Tile<f32, { [R, C] }> = constant(1.0f32, const_shape![R, C]);
            let two: Tile<f32, { [R, C] }> = constant(2.0f32, const_shape![R, C]);
            let below: Tile<f32, { [R, C] }> =
                divf(two, doubled + one, rounding::Approx, ftz::Enabled);
            ratio = one - below;
        }
        ratio
    }

    /// Scores in base 2, scaled: scale · s, or with a soft cap cap · ratio.
    pub fn capped<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        ratio: Tile<f32, { [R, C] }>,
        scale_log2: f32,
        cap_log2: f32,
    ) -> Tile<f32, { [R, C] }> {
        let scale: Tile<f32, { [R, C] }> = scale_log2.broadcast(const_shape![R, C]);
        let mut scores: Tile<f32, { [R, C] }> = s * scale;
        if cap_log2 > 0.0f32 {
            let cap: Tile<f32, { [R, C] }> = cap_log2.broadcast(const_shape![R, C]);
            scores = ratio * cap;
        }
        scores
    }

    /// p times the derivative of the soft cap, 1 − tanh²; without a cap, p.
    pub fn uncapped<const R: i32, const C: i32>(
        p: Tile<f32, { [R, C] }>,
        ratio: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let minus: Tile<f32, { [R, C] }> = negf(ratio);
        let one: Tile<f32, { [R, C] }> = constant(1.0f32, const_shape![R, C]);
        let slope: Tile<f32, { [R, C] }> =
            fma(minus, ratio, one, rounding::NearestEven, ftz::Disabled);
        p * slope
    }

    /// Adds what has been accumulated of a tile of rows to its accumulator, or with `first` to
    /// nothing, and stores it there, or with `last` as the result.
    pub unsafe fn deliver<E: ElementType, const R: i32, const W: i32>(
        sum: Tile<f32, { [R, W] }>,
        accumulator: &Tensor<f32, { [-1, -1, -1, -1] }>,
        result: &Tensor<E, { [-1, -1, -1, -1] }>,
        batch: i32,
        tile: i32,
        head: i32,
        first: i32,
        last: i32,
    ) {
        let mut total: Tile<f32, { [R, W] }> = sum;
        if first == 0i32 {
            let t: Tile<f32, { [1, R, 1, W] }> =
                accumulator.partition(const_shape![1, R, 1, W]).load([batch, tile, head, 0i32]);
            let t: Tile<f32, { [R, W] }> = t.reshape(const_shape![R, W]);
            total = total + t;
        }
        if last == 1i32 {
            let t: Tile<E, { [R, W] }> = convert_tile(total);
            unsafe { write(result, t, batch, tile, head) };
        } else {
            unsafe { write(accumulator, total, batch, tile, head) };
        }
    }

    /// The slope of a head in base 2, of `[batch, heads]` at `base`.
    pub unsafe fn slope_log2(
        base: *mut f32,
        batch: i32,
        heads: i32,
        batch_stride: i32,
        b: i32,
        h: i32,
    ) -> Tile<f32, { [1, 1] }> {
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[batch, heads] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[batch_stride] };
        let base: PointerTile<*mut f32, { [] }> = pointer_to_tile(base);
        let view: Tensor<f32, { [-1, -1] }> =
            unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) };
        let slope: Tile<f32, { [1, 1] }> = view.partition(const_shape![1, 1]).load([b, h]);
        let log2e: Tile<f32, { [1, 1] }> = constant(1.442695040888963407f32, const_shape![1, 1]);
        slope * log2e
    }

    /// Positions of a tile's rows, the first of which is at `start`: exact up to 2^24.
    pub fn positions<const R: i32>(start: i32, stride: i32) -> Tile<f32, { [R] }> {
        let rows: Tile<i32, { [R] }> = iota(const_shape![R]);
        let stride: Tile<i32, { [R] }> = stride.broadcast(const_shape![R]);
        let start: Tile<i32, { [R] }> = start.broadcast(const_shape![R]);
        convert_tile(rows * stride + start)
    }

    /// Position of a tile's column minus that of its row; `start` is that of the first column minus
    /// that of the first row, and both go in steps of `stride`.
    pub fn distances<const R: i32, const C: i32>(start: i32, stride: i32) -> Tile<f32, { [R, C] }> {
        let rows: Tile<f32, { [R] }> = positions::<R>(0i32, stride);
        let rows: Tile<f32, { [R, 1] }> = rows.reshape(const_shape![R, 1]);
        let columns: Tile<f32, { [C] }> = positions::<C>(start, stride);
        let columns: Tile<f32, { [1, C] }> = columns.reshape(const_shape![1, C]);
        columns.broadcast(const_shape![R, C]) - rows.broadcast(const_shape![R, C])
    }

    /// s + slope · distance.
    pub fn biased<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        slope: Tile<f32, { [R, C] }>,
        distance: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        fma(distance, slope, s, rounding::NearestEven, ftz::Disabled)
    }
}
