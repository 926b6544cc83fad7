//! Segments: views of them, and the rows that a block may see.

#[cutile::module]
pub mod segments {
    use super::super::modes::modes::{PACKED, is_on};
    use cutile::core::*;

    /// What masks say of the rows of a side: their segments, `[batch, rows]`, or where masks are
    /// data six packed numbers of each row, `[batch, 6, rows]`.
    #[derive(Clone, Copy)]
    pub struct MaskRows {
        pub base: *mut i32,
        pub batch: i32,
        pub rows: i32,
        pub batch_stride: i32,
    }

    /// The masks of a launch besides its band. `ranges` holds results of [`segment_ranges`] for the
    /// resident rows, or where masks are data of `mask_runs`.
    #[derive(Clone, Copy)]
    pub struct Segments {
        pub mode: i32,
        pub switch: i32,
        pub queries: MaskRows,
        pub keys: MaskRows,
        pub ranges: *mut i32,
        pub ranges_batch_stride: i32,
    }

    /// Returns a view of the segments of rows, `[batch, rows]` at `base`.
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

    /// Returns a view of what masks say of rows, for the mode of segments.
    pub unsafe fn segment_rows(mode: i32, side: MaskRows) -> Tensor<i32, { [-1, -1] }> {
        let lines: i32 = if mode == PACKED { 6i32 * side.batch } else { side.batch };
        let stride: i32 = if mode == PACKED { side.rows } else { side.batch_stride };
        unsafe { segments_view(side.base, lines, side.rows, stride) }
    }

    /// Returns the segments of resident rows, where −2 stands for each negative one.
    ///
    /// A negative segment sees nothing. [`segment_tile`] gives such streamed rows −1, so one
    /// comparison of a pair says whether both rows are of one segment. With another comparison, of
    /// the resident row with 0, the compiler gave rows of some images the outcome of other rows.
    pub fn segment_column<const R: i32>(
        part: &Partition<i32, { [1, R] }>,
        b: i32,
        tile: i32,
    ) -> Tile<i32, { [R, 1] }> {
        let t: Tile<i32, { [1, R] }> = part.load([b, tile]);
        let rows: Tile<i32, { [R, 1] }> = t.reshape(const_shape![R, 1]);
        let zero: Tile<i32, { [R, 1] }> = constant(0i32, const_shape![R, 1]);
        let none: Tile<i32, { [R, 1] }> = constant(-2i32, const_shape![R, 1]);
        select(lt_tile(rows, zero), none, rows)
    }

    /// Returns the segments of a tile of streamed rows, where −1 stands for each negative one; zeros
    /// where segments are off.
    pub fn segment_tile<const C: i32>(
        masks: Segments,
        part: &Partition<i32, { [1, C] }>,
        b: i32,
        tile: i32,
    ) -> Tile<i32, { [1, C] }> {
        let mut all: Tile<i32, { [1, C] }> = constant(0i32, const_shape![1, C]);
        if is_on(masks.mode, masks.switch) {
            let none: Tile<i32, { [1, C] }> = constant(-1i32, const_shape![1, C]);
            let t: Tile<i32, { [1, C] }> = part.load([b, tile]);
            all = max_tile(t, none);
        }
        all
    }

    /// Returns a view of `[batch, count, N]` at `base`: intervals of rows, or limits of blocks.
    pub unsafe fn numbers_view<const N: i32>(
        base: *mut i32,
        batch: i32,
        count: i32,
        batch_stride: i32,
    ) -> Tensor<i32, { [-1, -1, N] }> {
        let shape: Shape<{ [-1, -1, N] }> = Shape::<{ [-1, -1, N] }> { dims: &[batch, count] };
        let strides: Array<{ [-1, N, 1] }> = Array::<{ [-1, N, 1] }> { dims: &[batch_stride] };
        let base: PointerTile<*mut i32, { [] }> = pointer_to_tile(base);
        unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) }
    }

    /// Returns a view of the results of [`segment_ranges`], `[batch, ⌈rows / 64⌉, 4]` at `base`.
    pub unsafe fn ranges_view(
        base: *mut i32,
        batch: i32,
        rows: i32,
        batch_stride: i32,
    ) -> Tensor<i32, { [-1, -1, 4] }> {
        unsafe { numbers_view::<4>(base, batch, ceil_div(rows, 64i32), batch_stride) }
    }

    /// Returns number `n` of a block in `[batch, blocks, N]`.
    pub fn limit_of<const N: i32>(
        view: &Tensor<i32, { [-1, -1, N] }>,
        b: i32,
        block: i32,
        n: i32,
    ) -> i32 {
        let limit: Tile<i32, { [1, 1, 1] }> =
            view.partition(const_shape![1, 1, 1]).load([b, block, n]);
        let limit: Tile<i32, { [] }> = limit.reshape(const_shape![]);
        tile_to_scalar(limit)
    }

    /// Stores number `n` of a block in `[batch, blocks, N]`: the first row of a block of 64 others.
    pub unsafe fn store_limit<const N: i32>(
        view: &Tensor<i32, { [-1, -1, N] }>,
        other: i32,
        b: i32,
        block: i32,
        n: i32,
    ) {
        let mut part: PartitionMut<i32, { [1, 1, 1] }> =
            unsafe { view.partition_full_mut(const_shape![1, 1, 1]) };
        let limit: i32 = other * 64i32;
        unsafe { part.store_unchecked(limit.broadcast(const_shape![1, 1, 1]), [b, block, n]) };
    }

    /// Narrows the streamed tiles (begin, inside, outside, end) of `BS` rows to the segments of
    /// rows `first..=last`: they see begin..end, and nothing cuts inside..outside.
    pub unsafe fn narrowed<const BS: i32>(
        masks: Segments,
        resident: MaskRows,
        b: i32,
        first: i32,
        last: i32,
        begin: i32,
        inside: i32,
        outside: i32,
        end: i32,
    ) -> (i32, i32, i32, i32) {
        let view = unsafe {
            ranges_view(masks.ranges, resident.batch, resident.rows, masks.ranges_batch_stride)
        };
        let one: i32 = first / 64i32;
        let other: i32 = last / 64i32;
        let seen: i32 = min(limit_of(&view, b, one, 0i32), limit_of(&view, b, other, 0i32));
        let same: i32 = max(limit_of(&view, b, one, 1i32), limit_of(&view, b, other, 1i32));
        let differs: i32 = min(limit_of(&view, b, one, 2i32), limit_of(&view, b, other, 2i32));
        let unseen: i32 = max(limit_of(&view, b, one, 3i32), limit_of(&view, b, other, 3i32));
        let begin: i32 = max(begin, seen / BS);
        let end: i32 = max(begin, min(end, ceil_div(unseen, BS)));
        let inside: i32 = min(end, max(max(begin, inside), ceil_div(same, BS)));
        let outside: i32 = min(end, max(inside, min(outside, differs / BS)));
        (begin, inside, outside, end)
    }

    /// Returns the smallest number of a tile.
    pub fn least<const N: i32>(numbers: Tile<i32, { [N] }>) -> i32 {
        let least: Tile<i32, { [] }> = reduce_min(numbers, 0i32);
        tile_to_scalar(least)
    }

    /// Returns the largest number of a tile.
    pub fn most<const N: i32>(numbers: Tile<i32, { [N] }>) -> i32 {
        let most: Tile<i32, { [] }> = reduce_max(numbers, 0i32);
        tile_to_scalar(most)
    }

    /// Finds which of `others` 64 rows may see, as (begin, same, differs, end): none before `begin`
    /// nor from `end` on, and all pairs with rows `same..differs` are of one segment. All four are
    /// multiples of 64. A step compares `CHUNK` rows, which is `COUNT` times 64.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn segment_ranges<const COUNT: i32, const CHUNK: i32>(
        segments: *mut i32,
        others: *mut i32,
        ranges: *mut i32,
        batch: i32,
        q_len: i32,
        kv_len: i32,
        segments_batch_stride: i32,
        others_batch_stride: i32,
        ranges_batch_stride: i32,
    ) {
        let pid = get_tile_block_id();
        let blocks: i32 = ceil_div(q_len, 64i32);
        let b: i32 = pid.0 / blocks;
        let block: i32 = pid.0 - b * blocks;
        let view = unsafe { segments_view(segments, batch, q_len, segments_batch_stride) };
        let own: Tile<i32, { [1, 64] }> = view.partition(const_shape![1, 64]).load([b, block]);
        let own: Tile<i32, { [64] }> = own.reshape(const_shape![64]);
        let low: i32 = least(own);
        let high: i32 = most(own);
        let others_view = unsafe { segments_view(others, batch, kv_len, others_batch_stride) };
        let others_part = others_view.partition(const_shape![1, CHUNK]);
        let count: i32 = ceil_div(kv_len, 64i32);

        // More blocks than any array has. The rows of these blocks still fit 32 bits.
        let far: i32 = 16777216i32;
        let none: Tile<i32, { [COUNT] }> = far.broadcast(const_shape![COUNT]);
        let zero: Tile<i32, { [COUNT] }> = constant(0i32, const_shape![COUNT]);
        let one: Tile<i32, { [COUNT] }> = constant(1i32, const_shape![COUNT]);
        // Rows of negative segments see nothing.
        let low_or_zero: i32 = max(low, 0i32);
        let lows: Tile<i32, { [COUNT] }> = low_or_zero.broadcast(const_shape![COUNT]);
        let highs: Tile<i32, { [COUNT] }> = high.broadcast(const_shape![COUNT]);
        let only: i32 = if low == high { low } else { -1i32 };
        let onlys: Tile<i32, { [COUNT] }> = only.broadcast(const_shape![COUNT]);
        let counts: Tile<i32, { [COUNT] }> = count.broadcast(const_shape![COUNT]);
        let mut begin: i32 = far;
        let mut same: i32 = far;
        let mut differs: i32 = far;
        let mut end: i32 = 0i32;
        for chunk in 0i32..ceil_div(kv_len, CHUNK) {
            let t: Tile<i32, { [1, CHUNK] }> = others_part.load([b, chunk]);
            let t: Tile<i32, { [COUNT, 64] }> = t.reshape(const_shape![COUNT, 64]);
            let lowest: Tile<i32, { [COUNT] }> = reduce_min(t, 1i32);
            let lowest: Tile<i32, { [COUNT] }> = lowest.reshape(const_shape![COUNT]);
            let highest: Tile<i32, { [COUNT] }> = reduce_max(t, 1i32);
            let highest: Tile<i32, { [COUNT] }> = highest.reshape(const_shape![COUNT]);
            let start: i32 = chunk * COUNT;
            let start: Tile<i32, { [COUNT] }> = start.broadcast(const_shape![COUNT]);
            let index: Tile<i32, { [COUNT] }> = iota(const_shape![COUNT]);
            let index: Tile<i32, { [COUNT] }> = index + start;
            let exist: Tile<bool, { [COUNT] }> = lt_tile(index, counts);
            let above: Tile<bool, { [COUNT] }> = ge_tile(highest, lows);
            let below: Tile<bool, { [COUNT] }> = le_tile(lowest, highs);
            let meets: Tile<bool, { [COUNT] }> = exist & above & below;
            begin = min(begin, least(select(meets, index, none)));
            end = max(end, most(select(meets, index + one, zero)));
            let even: Tile<bool, { [COUNT] }> = eq_tile(lowest, highest);
            let equal: Tile<bool, { [COUNT] }> = eq_tile(lowest, onlys);
            let some: Tile<bool, { [COUNT] }> = ge_tile(lowest, zero);
            let uniform: Tile<bool, { [COUNT] }> = exist & even & equal & some;
            same = min(same, least(select(uniform, index, none)));
            let first: Tile<i32, { [COUNT] }> = same.broadcast(const_shape![COUNT]);
            let behind: Tile<bool, { [COUNT] }> = gt_tile(index, first);
            let other: Tile<i32, { [COUNT] }> = select(uniform, none, index);
            differs = min(differs, least(select(behind, other, none)));
        }
        let ranges_view = unsafe { ranges_view(ranges, batch, q_len, ranges_batch_stride) };
        unsafe { store_limit(&ranges_view, begin, b, block, 0i32) };
        unsafe { store_limit(&ranges_view, same, b, block, 1i32) };
        unsafe { store_limit(&ranges_view, differs, b, block, 2i32) };
        unsafe { store_limit(&ranges_view, end, b, block, 3i32) };
    }
}
