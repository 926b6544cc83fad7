//! What the attention kernels share: the arguments of a launch by subject, and what they compute
//! alike for a pair of tiles. A block keeps the resident tile, whose rows are rows of the tile of
//! scores; the rows of streamed tiles are its columns.

#[cutile::module]
pub mod pairs {
    use super::super::common::common::{rows_view, statistics_view};
    use super::super::dropout::dropout::{Dropout, counted_across, counted_down, kept};
    use super::super::modes::modes::{ABSENT, LIMIT_AND_END, PACKED, is_on};
    use super::super::scores::scores::{Scoring, alike, band, capped, distances, slope_log2};
    use super::super::segments::segments::{MaskRows, Segments};
    use super::super::visible::visible::{Queries, counted_columns, shown_across};
    use cutile::core::*;

    /// The inputs of every pass.
    #[derive(Clone, Copy)]
    pub struct Inputs<E: ElementType> {
        pub q: *mut E,
        pub k: *mut E,
        pub v: *mut E,
        pub q_batch_stride: i32,
        pub k_batch_stride: i32,
        pub v_batch_stride: i32,
    }

    /// What the forward pass saved, with the gradient of its result.
    #[derive(Clone, Copy)]
    pub struct Saved<E: ElementType> {
        pub dout: *mut E,
        pub lse_log2: *mut f32,
        pub delta: *mut f32,
        pub dout_batch_stride: i32,
        pub stat_batch_stride: i32,
        pub stat_head_stride: i32,
    }

    /// The sizes of a rectangle of queries and keys.
    #[derive(Clone, Copy)]
    pub struct Sizes {
        pub batch: i32,
        pub q_len: i32,
        pub kv_len: i32,
        pub heads: i32,
        pub kv_heads: i32,
        pub head_dim: i32,
        pub value_dim: i32,
    }

    /// The pairs that see each other, `lower ≤ key row − query row ≤ upper`. `window` is the mode.
    #[derive(Clone, Copy)]
    pub struct Band {
        pub window: i32,
        pub lower: i32,
        pub upper: i32,
    }

    /// Counted positions, by which slopes and dropout count, unless the launch brings them as data.
    #[derive(Clone, Copy)]
    pub struct Counted {
        pub q_position: i32,
        pub k_position: i32,
        pub position_stride: i32,
    }

    /// The order of blocks, and whether the launch is the first or last for its resident rows.
    #[derive(Clone, Copy)]
    pub struct Turn {
        pub section: i32,
        pub reverse: i32,
        pub first: i32,
        pub last: i32,
    }

    /// A rectangle of queries and keys: which pairs see each other, and how they score.
    #[derive(Clone, Copy)]
    pub struct Rectangle {
        pub sizes: Sizes,
        pub band: Band,
        pub segments: Segments,
        pub scoring: Scoring,
        pub dropout: Dropout,
        pub counted: Counted,
    }

    /// A pair of tiles: entry, query head, key head, first query, first key, and number of the
    /// streamed tile.
    #[derive(Clone, Copy)]
    pub struct Pair {
        pub b: i32,
        pub h: i32,
        pub hk: i32,
        pub row: i32,
        pub key: i32,
        pub tile: i32,
    }

    /// Returns a view of `[batch, q_len, heads, dim]` at `base`.
    pub unsafe fn query_rows<E: ElementType>(
        base: *mut E,
        sizes: Sizes,
        dim: i32,
        batch_stride: i32,
    ) -> Tensor<E, { [-1, -1, -1, -1] }> {
        unsafe { rows_view(base, sizes.batch, sizes.q_len, sizes.heads, dim, batch_stride) }
    }

    /// Returns a view of `[batch, kv_len, kv_heads, dim]` at `base`.
    pub unsafe fn key_rows<E: ElementType>(
        base: *mut E,
        sizes: Sizes,
        dim: i32,
        batch_stride: i32,
    ) -> Tensor<E, { [-1, -1, -1, -1] }> {
        unsafe { rows_view(base, sizes.batch, sizes.kv_len, sizes.kv_heads, dim, batch_stride) }
    }

    /// Returns a view of `[batch, heads, q_len]` at `base`.
    pub unsafe fn query_statistics(
        base: *mut f32,
        sizes: Sizes,
        batch_stride: i32,
        head_stride: i32,
    ) -> Tensor<f32, { [-1, -1, -1] }> {
        let (batch, heads, rows) = (sizes.batch, sizes.heads, sizes.q_len);
        unsafe { statistics_view(base, batch, heads, rows, batch_stride, head_stride) }
    }

    /// Returns the counted position of the first query.
    pub fn first_query(rect: Rectangle, pair: Pair) -> i32 {
        rect.counted.q_position + pair.row * rect.counted.position_stride
    }

    /// Returns the counted position of the first key.
    pub fn first_key(rect: Rectangle, pair: Pair) -> i32 {
        rect.counted.k_position + pair.key * rect.counted.position_stride
    }

    /// Returns the slope of a head in base 2; 0 where slopes are off.
    pub unsafe fn slope_of(rect: Rectangle, b: i32, h: i32) -> Tile<f32, { [1, 1] }> {
        let mut slope: Tile<f32, { [1, 1] }> = constant(0.0f32, const_shape![1, 1]);
        let on: bool = is_on(rect.scoring.alibi, rect.scoring.has_slopes);
        if on && rect.band.lower <= rect.band.upper {
            let (batch, heads) = (rect.sizes.batch, rect.sizes.heads);
            slope = unsafe { slope_log2(rect.scoring, batch, heads, b, h) };
        }
        slope
    }

    /// Returns the counted position of each column minus that of each row. `start` is the difference
    /// of the first column and the first row, `own` holds the rows' positions where masks are data.
    pub unsafe fn between<const R: i32, const C: i32>(
        rect: Rectangle,
        pair: Pair,
        start: i32,
        own: Tile<i32, { [R, 1] }>,
        streamed: MaskRows,
    ) -> Tile<f32, { [R, C] }> {
        let mut away: Tile<f32, { [R, C] }> =
            distances::<R, C>(start, rect.counted.position_stride);
        if rect.segments.mode == PACKED {
            let others: Tile<i32, { [1, C] }> =
                unsafe { counted_columns::<C>(streamed, pair.b, pair.tile) };
            let others: Tile<i32, { [R, C] }> = others.broadcast(const_shape![R, C]);
            let own: Tile<i32, { [R, C] }> = own.broadcast(const_shape![R, C]);
            away = convert_tile(others - own);
        }
        away
    }

    /// Returns the scores of a tile of products, with the soft cap and the slope's bias. With
    /// either feature they are scaled, in base 2; otherwise [`unit`] is the scale that they lack.
    pub unsafe fn scores_of<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        ratio: Tile<f32, { [R, C] }>,
        rect: Rectangle,
        pair: Pair,
        slope: Tile<f32, { [1, 1] }>,
        start: i32,
        own: Tile<i32, { [R, 1] }>,
        streamed: MaskRows,
    ) -> Tile<f32, { [R, C] }> {
        let mut scores: Tile<f32, { [R, C] }> = capped(s, ratio, rect.scoring);
        if is_on(rect.scoring.alibi, rect.scoring.has_slopes) {
            let away: Tile<f32, { [R, C] }> =
                unsafe { between::<R, C>(rect, pair, start, own, streamed) };
            let slope: Tile<f32, { [R, C] }> = slope.broadcast(const_shape![R, C]);
            scores = fma(away, slope, scores, rounding::NearestEven, ftz::Disabled);
        }
        scores
    }

    /// Returns a tile of queries by row and keys by column, with `hidden` for pairs that do not see
    /// each other. Keys beyond the end are hidden: a key there reads as 0, but its distance would
    /// count in the gradient of the slope.
    pub unsafe fn masked_across<const BM: i32, const BN: i32>(
        rect: Rectangle,
        pair: Pair,
        own: Queries<BM>,
        other: Tile<i32, { [1, BN] }>,
        tile: Tile<f32, { [BM, BN] }>,
        hidden: Tile<f32, { [BM, BN] }>,
    ) -> Tile<f32, { [BM, BN] }> {
        let corner: i32 = pair.key - pair.row;
        let cut_low: i32 = if rect.band.window == ABSENT { 0i32 } else { 1i32 };
        let (low, high) = (rect.band.lower - corner, rect.band.upper - corner);
        let mut seen: Tile<bool, { [BM, BN] }> =
            band::<BM, BN>(cut_low, LIMIT_AND_END, low, high, rect.sizes.kv_len - pair.key);
        if is_on(rect.segments.mode, rect.segments.switch) {
            let same: Tile<bool, { [BM, BN] }> = alike(own.segment, other);
            seen = seen & same;
        }
        if rect.segments.mode == PACKED {
            seen = unsafe { shown_across(own, rect.segments.keys, pair.b, pair.tile, seen) };
        }
        select(seen, tile, hidden)
    }

    /// Returns counted positions by row, as dropout takes them. The first row is at `start`, `own`
    /// holds the positions where masks are data.
    pub fn drawn_down<const R: i32, const C: i32>(
        rect: Rectangle,
        start: i32,
        own: Tile<i32, { [R, 1] }>,
    ) -> Tile<u32, { [R, C] }> {
        let mut rows: Tile<u32, { [R, C] }> =
            counted_down::<R, C>(start, rect.counted.position_stride);
        if rect.segments.mode == PACKED {
            let own: Tile<i32, { [R, C] }> = own.broadcast(const_shape![R, C]);
            rows = bitcast(own);
        }
        rows
    }

    /// Returns counted positions by column, as dropout takes them. The first column is at `start`.
    pub unsafe fn drawn_across<const R: i32, const C: i32>(
        rect: Rectangle,
        pair: Pair,
        start: i32,
        streamed: MaskRows,
    ) -> Tile<u32, { [R, C] }> {
        let mut columns: Tile<u32, { [R, C] }> =
            counted_across::<R, C>(start, rect.counted.position_stride);
        if rect.segments.mode == PACKED {
            let others: Tile<i32, { [1, C] }> =
                unsafe { counted_columns::<C>(streamed, pair.b, pair.tile) };
            let others: Tile<i32, { [R, C] }> = others.broadcast(const_shape![R, C]);
            columns = bitcast(others);
        }
        columns
    }

    /// Returns the weights that dropout keeps, of queries by row and keys by column.
    pub unsafe fn kept_across<const BM: i32, const BN: i32>(
        rect: Rectangle,
        pair: Pair,
        own: Tile<i32, { [BM, 1] }>,
    ) -> Tile<bool, { [BM, BN] }> {
        let (row, column, others) =
            (first_query(rect, pair), first_key(rect, pair), rect.segments.keys);
        let queries: Tile<u32, { [BM, BN] }> = drawn_down::<BM, BN>(rect, row, own);
        let keys: Tile<u32, { [BM, BN] }> =
            unsafe { drawn_across::<BM, BN>(rect, pair, column, others) };
        unsafe { kept(queries, keys, rect.dropout, rect.sizes.batch, pair.b, pair.h) }
    }
}
