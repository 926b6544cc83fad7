//! Masks as data in the attention kernels: which pairs of a tile see each other, the places of rows,
//! and which tiles a block visits. [`masks`](super::masks) says how rows are packed.

#[cutile::module]
pub mod visible {
    use cutile::core::*;

    /// Returns packed number `n` of a tile of rows.
    pub fn packed<const C: i32>(
        part: &Partition<i32, { [1, C] }>,
        b: i32,
        tile: i32,
        n: i32,
    ) -> Tile<i32, { [1, C] }> {
        part.load([6i32 * b + n, tile])
    }

    /// Returns the pairs that data allow, of queries by row and keys by column.
    pub fn shown_across<const R: i32, const C: i32>(
        segment: Tile<i32, { [R, 1] }>,
        position: Tile<i32, { [R, 1] }>,
        other: Tile<i32, { [1, C] }>,
        start: Tile<i32, { [1, C] }>,
        stop: Tile<i32, { [1, C] }>,
        also_start: Tile<i32, { [1, C] }>,
        also_stop: Tile<i32, { [1, C] }>,
    ) -> Tile<bool, { [R, C] }> {
        let position: Tile<i32, { [R, C] }> = position.broadcast(const_shape![R, C]);
        let start: Tile<i32, { [R, C] }> = start.broadcast(const_shape![R, C]);
        let stop: Tile<i32, { [R, C] }> = stop.broadcast(const_shape![R, C]);
        let first: Tile<bool, { [R, C] }> = ge_tile(position, start) & lt_tile(position, stop);
        let start: Tile<i32, { [R, C] }> = also_start.broadcast(const_shape![R, C]);
        let stop: Tile<i32, { [R, C] }> = also_stop.broadcast(const_shape![R, C]);
        let second: Tile<bool, { [R, C] }> = ge_tile(position, start) & lt_tile(position, stop);
        let segment: Tile<i32, { [R, C] }> = segment.broadcast(const_shape![R, C]);
        let other: Tile<i32, { [R, C] }> = other.broadcast(const_shape![R, C]);
        let same: Tile<bool, { [R, C] }> = eq_tile(segment, other);
        let either: Tile<bool, { [R, C] }> = first | second;
        either & same
    }

    /// Returns the pairs that data allow, of keys by row and queries by column.
    pub fn shown_down<const R: i32, const C: i32>(
        segment: Tile<i32, { [R, 1] }>,
        start: Tile<i32, { [R, 1] }>,
        stop: Tile<i32, { [R, 1] }>,
        also_start: Tile<i32, { [R, 1] }>,
        also_stop: Tile<i32, { [R, 1] }>,
        other: Tile<i32, { [1, C] }>,
        position: Tile<i32, { [1, C] }>,
    ) -> Tile<bool, { [R, C] }> {
        let position: Tile<i32, { [R, C] }> = position.broadcast(const_shape![R, C]);
        let start: Tile<i32, { [R, C] }> = start.broadcast(const_shape![R, C]);
        let stop: Tile<i32, { [R, C] }> = stop.broadcast(const_shape![R, C]);
        let first: Tile<bool, { [R, C] }> = ge_tile(position, start) & lt_tile(position, stop);
        let start: Tile<i32, { [R, C] }> = also_start.broadcast(const_shape![R, C]);
        let stop: Tile<i32, { [R, C] }> = also_stop.broadcast(const_shape![R, C]);
        let second: Tile<bool, { [R, C] }> = ge_tile(position, start) & lt_tile(position, stop);
        let segment: Tile<i32, { [R, C] }> = segment.broadcast(const_shape![R, C]);
        let other: Tile<i32, { [R, C] }> = other.broadcast(const_shape![R, C]);
        let same: Tile<bool, { [R, C] }> = eq_tile(segment, other);
        let either: Tile<bool, { [R, C] }> = first | second;
        either & same
    }

    /// Returns the place of each column minus the place of each row.
    pub fn apart<const R: i32, const C: i32>(
        rows: Tile<i32, { [R, 1] }>,
        columns: Tile<i32, { [1, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let rows: Tile<i32, { [R, C] }> = rows.broadcast(const_shape![R, C]);
        let columns: Tile<i32, { [R, C] }> = columns.broadcast(const_shape![R, C]);
        convert_tile(columns - rows)
    }

    /// Returns scores plus the slope times the distances.
    pub fn biased<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        slope: Tile<f32, { [1, 1] }>,
        away: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let slope: Tile<f32, { [R, C] }> = slope.broadcast(const_shape![R, C]);
        fma(away, slope, s, rounding::NearestEven, ftz::Disabled)
    }

    /// Returns places by row, as dropout counts them.
    pub fn drawn_down<const R: i32, const C: i32>(
        places: Tile<i32, { [R, 1] }>,
    ) -> Tile<u32, { [R, C] }> {
        let places: Tile<i32, { [R, C] }> = places.broadcast(const_shape![R, C]);
        bitcast(places)
    }

    /// Returns places by column, as dropout counts them.
    pub fn drawn_across<const R: i32, const C: i32>(
        places: Tile<i32, { [1, C] }>,
    ) -> Tile<u32, { [R, C] }> {
        let places: Tile<i32, { [R, C] }> = places.broadcast(const_shape![R, C]);
        bitcast(places)
    }

    /// Returns a view of the results of `mask_runs`, `[batch, ⌈rows / 128⌉, 10]` at `base`.
    pub unsafe fn runs_view(
        base: *mut i32,
        batch: i32,
        rows: i32,
    ) -> Tensor<i32, { [-1, -1, 10] }> {
        let blocks: i32 = ceil_div(rows, 128i32);
        let shape: Shape<{ [-1, -1, 10] }> = Shape::<{ [-1, -1, 10] }> { dims: &[batch, blocks] };
        let strides: Array<{ [-1, 10, 1] }> = Array::<{ [-1, 10, 1] }> { dims: &[10i32 * blocks] };
        let base: PointerTile<*mut i32, { [] }> = pointer_to_tile(base);
        unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) }
    }

    /// Returns number `n` of a block in `[batch, blocks, 10]`.
    pub fn run_limit(view: &Tensor<i32, { [-1, -1, 10] }>, b: i32, block: i32, n: i32) -> i32 {
        let limit: Tile<i32, { [1, 1, 1] }> =
            view.partition(const_shape![1, 1, 1]).load([b, block, n]);
        let limit: Tile<i32, { [] }> = limit.reshape(const_shape![]);
        tile_to_scalar(limit)
    }

    /// Returns the tiles of `BS` streamed rows that data let rows from `first` on see, and that lie
    /// in `begin..end`: (inside, outside, count, before, shift 0, from 1, shift 1, from 2, shift 2,
    /// from 3, shift 3). Nothing cuts tiles `inside..outside`; [`run_tile`] numbers `count` others.
    pub unsafe fn run_tiles<const BS: i32>(
        runs: *mut i32,
        batch: i32,
        rows: i32,
        b: i32,
        first: i32,
        begin: i32,
        inside: i32,
        outside: i32,
        end: i32,
    ) -> (i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32) {
        let view: Tensor<i32, { [-1, -1, 10] }> = unsafe { runs_view(runs, batch, rows) };
        let block: i32 = first / 128i32;
        let begin0: i32 = min(end, max(begin, run_limit(&view, b, block, 0i32) / BS));
        let end0: i32 = min(end, max(begin0, ceil_div(run_limit(&view, b, block, 1i32), BS)));
        let begin1: i32 = min(end, max(end0, run_limit(&view, b, block, 2i32) / BS));
        let end1: i32 = min(end, max(begin1, ceil_div(run_limit(&view, b, block, 3i32), BS)));
        let begin2: i32 = min(end, max(end1, run_limit(&view, b, block, 4i32) / BS));
        let end2: i32 = min(end, max(begin2, ceil_div(run_limit(&view, b, block, 5i32), BS)));
        let begin3: i32 = min(end, max(end2, run_limit(&view, b, block, 6i32) / BS));
        let end3: i32 = min(end, max(begin3, ceil_div(run_limit(&view, b, block, 7i32), BS)));
        let same: i32 = ceil_div(run_limit(&view, b, block, 8i32), BS);
        let differs: i32 = run_limit(&view, b, block, 9i32) / BS;
        let inside: i32 = min(end, max(max(begin, inside), same));
        let outside: i32 = min(end, max(inside, min(outside, differs)));
        let from1: i32 = end0 - begin0;
        let from2: i32 = from1 + (end1 - begin1);
        let from3: i32 = from2 + (end2 - begin2);
        let all: i32 = from3 + (end3 - begin3);
        // The tiles of each run before `inside`.
        let before0: i32 = max(0i32, min(end0, inside) - begin0);
        let before1: i32 = max(0i32, min(end1, inside) - begin1);
        let before2: i32 = max(0i32, min(end2, inside) - begin2);
        let before3: i32 = max(0i32, min(end3, inside) - begin3);
        let before: i32 = before0 + before1 + before2 + before3;
        let count: i32 = all - (outside - inside);
        (
            inside,
            outside,
            count,
            before,
            begin0,
            from1,
            begin1 - from1,
            from2,
            begin2 - from2,
            from3,
            begin3 - from3,
        )
    }

    /// Returns the `t`-th tile of four runs without `whole` tiles, which follow `before` others.
    pub fn run_tile(
        t: i32,
        whole: i32,
        before: i32,
        shift0: i32,
        from1: i32,
        shift1: i32,
        from2: i32,
        shift2: i32,
        from3: i32,
        shift3: i32,
    ) -> i32 {
        let n: i32 = if t < before { t } else { t + whole };
        let low: i32 = if n < from1 { n + shift0 } else { n + shift1 };
        let high: i32 = if n < from3 { n + shift2 } else { n + shift3 };
        if n < from2 { low } else { high }
    }
}
