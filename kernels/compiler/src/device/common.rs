//! Shared functions: views of arrays, the order of blocks, loads, products and stores.

#[cutile::module]
pub mod common {
    use cutile::core::*;

    /// Returns a view of `[batch, rows, heads, dim]` at `base`, with rows of all heads contiguous.
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

    /// Returns a view of `[batch, heads, rows]` at `base`, with rows contiguous.
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

    /// Returns a view of `[batch, rows, heads]` at `base`, such as `lse`: a value per row and head.
    pub unsafe fn per_row_view(
        base: *mut f32,
        batch: i32,
        rows: i32,
        heads: i32,
        batch_stride: i32,
    ) -> Tensor<f32, { [-1, -1, -1] }> {
        unsafe { statistics_view(base, batch, rows, heads, batch_stride, heads) }
    }

    /// Returns what a block computes: (tile, batch entry, head).
    ///
    /// Heads come in sections whose streamed arrays fit the L2 cache together. Within a section all
    /// heads of a tile come before the next tile. With `reverse` the last tile comes first, so that
    /// the longest rows start first.
    pub fn block_of(tiles: i32, heads: i32, section: i32, reverse: i32) -> (i32, i32, i32) {
        let pid = get_tile_block_id();
        let in_section: i32 = section * tiles;
        let index: i32 = pid.0 / in_section;
        let rest: i32 = pid.0 - index * in_section;
        let tile: i32 = rest / section;
        let head: i32 = index * section + (rest - tile * section);
        let tile: i32 = if reverse == 1i32 { tiles - 1i32 - tile } else { tile };
        let entry: i32 = head / heads;
        (tile, entry, head - entry * heads)
    }

    /// Returns the streamed tiles of `BS` rows that any of rows `first..=last` sees, and the tiles
    /// that the band's two limits cut, `low ≤ s − r ≤ high`: (begin, low_end, high_begin, end).
    /// `low` cuts tiles before `low_end`; `high` or `len` cuts tiles from `high_begin` on.
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
        let low_end: i32 = max(begin, min(end, ceil_div(all_begin, BS)));
        let high_begin: i32 = max(begin, min(end, max(0i32, all_end) / BS));
        (begin, low_end, high_begin, end)
    }

    /// Returns the `t`-th cut tile: first come the tiles before `inside`, then the tiles from
    /// `outside` on.
    pub fn edge(t: i32, begin: i32, inside: i32, outside: i32) -> i32 {
        let before: i32 = inside - begin;
        if t < before { begin + t } else { outside + (t - before) }
    }

    /// Returns tile `tile` of head `head` of batch entry `batch`. The load runs ahead of its use.
    pub fn stream<E: ElementType, const R: i32, const W: i32>(
        part: &Partition<E, { [1, R, 1, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
    ) -> Tile<E, { [R, W] }> {
        stream_columns(part, batch, tile, head, 0i32)
    }

    /// Returns tile `tile` of the rows and `column` of the columns. The load runs ahead of its use.
    pub fn stream_columns<E: ElementType, const R: i32, const W: i32>(
        part: &Partition<E, { [1, R, 1, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
        column: i32,
    ) -> Tile<E, { [R, W] }> {
        let loaded: Tile<E, { [1, R, 1, W] }> = load_view_tko(
            part,
            [batch, tile, head, column],
            ordering::Weak,
            scope::TileBlock,
            Some(2),
            tma::Enabled,
        );
        loaded.reshape(const_shape![R, W])
    }

    /// Returns a bᵀ, accumulated in float32.
    pub fn product<E: ElementType, const R: i32, const C: i32, const W: i32>(
        a: Tile<E, { [R, W] }>,
        b: Tile<E, { [C, W] }>,
    ) -> Tile<f32, { [R, C] }> {
        let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
        let b: Tile<E, { [W, C] }> = permute(b, transpose);
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        mma(a, b, zero)
    }

    /// Returns a tile of rows. Elements beyond the view's end are 0.
    pub fn read<E: ElementType, const R: i32, const W: i32>(
        view: &Tensor<E, { [-1, -1, -1, -1] }>,
        shape: Shape<{ [R, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
    ) -> Tile<E, { [R, W] }> {
        read_columns(view, shape, batch, tile, head, 0i32)
    }

    /// Returns tile `tile` of the rows and `column` of the columns. Elements beyond the view's end
    /// are 0.
    pub fn read_columns<E: ElementType, const R: i32, const W: i32>(
        view: &Tensor<E, { [-1, -1, -1, -1] }>,
        shape: Shape<{ [R, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
        column: i32,
    ) -> Tile<E, { [R, W] }> {
        let rows: Tile<E, { [1, R, 1, W] }> =
            view.partition(const_shape![1, R, 1, W]).load([batch, tile, head, column]);
        rows.reshape(shape)
    }

    /// Returns statistics of a tile of rows.
    pub fn read_statistics<const R: i32>(
        view: &Tensor<f32, { [-1, -1, -1] }>,
        batch: i32,
        tile: i32,
        head: i32,
    ) -> Tile<f32, { [R, 1] }> {
        let rows: Tile<f32, { [1, 1, R] }> =
            view.partition(const_shape![1, 1, R]).load([batch, head, tile]);
        rows.reshape(const_shape![R, 1])
    }

    /// Stores a tile of rows. Elements beyond the view's end are dropped.
    pub unsafe fn write<E: ElementType, const R: i32, const W: i32>(
        view: &Tensor<E, { [-1, -1, -1, -1] }>,
        value: Tile<E, { [R, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
    ) {
        unsafe { write_columns(view, value, batch, tile, head, 0i32) };
    }

    /// Stores tile `tile` of the rows and `column` of the columns.
    pub unsafe fn write_columns<E: ElementType, const R: i32, const W: i32>(
        view: &Tensor<E, { [-1, -1, -1, -1] }>,
        value: Tile<E, { [R, W] }>,
        batch: i32,
        tile: i32,
        head: i32,
        column: i32,
    ) {
        let mut part: PartitionMut<E, { [1, R, 1, W] }> =
            unsafe { view.partition_full_mut(const_shape![1, R, 1, W]) };
        let value: Tile<E, { [1, R, 1, W] }> = value.reshape(const_shape![1, R, 1, W]);
        unsafe { part.store_unchecked(value, [batch, tile, head, column]) };
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

    /// Adds the sum of a tile of rows to its accumulator, or with `first` to nothing. Stores the
    /// total in the accumulator, or with `last` as the result.
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
}
