//! The second part of decode: adds the states of each row's pieces.

#[cutile::module]
pub mod decode_merge {
    use super::super::common::common::write_statistics;
    use super::super::common::common::{rows_view, statistics_view, write};
    use super::super::pieces::pieces::{run_of, slices_of, word};
    use super::super::softmax::softmax::{lse_of, result_of};
    use cutile::core::*;

    /// Returns the statistics of `BM` pieces of one row, which lie `stride` elements apart.
    pub unsafe fn piece_statistics<const BM: i32>(
        base: *mut f32,
        at: i32,
        stride: i32,
        count: i32,
        chunk: i32,
    ) -> Tile<f32, { [BM, 1] }> {
        let base: PointerTile<*mut f32, { [] }> = pointer_to_tile(base);
        let base: PointerTile<*mut f32, { [] }> = base.offset(at);
        let shape: Shape<{ [-1, 1] }> = Shape::<{ [-1, 1] }> { dims: &[count] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[stride] };
        let view = unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) };
        view.partition(const_shape![BM, 1]).load([chunk, 0i32])
    }

    /// Returns Σ p·v of `BM` pieces of one row.
    pub unsafe fn piece_sums<const BM: i32, const DT: i32>(
        base: *mut f32,
        at: i32,
        stride: i32,
        count: i32,
        columns: i32,
        chunk: i32,
    ) -> Tile<f32, { [BM, DT] }> {
        let base: PointerTile<*mut f32, { [] }> = pointer_to_tile(base);
        let base: PointerTile<*mut f32, { [] }> = base.offset(at);
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[count, columns] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[stride] };
        let view = unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) };
        let part = view.partition(const_shape![BM, DT]);
        // Without TMA, whose descriptor would be made in each block.
        load_view_tko(&part, [chunk, 0i32], ordering::Weak, scope::TileBlock, None, tma::Disabled)
    }

    /// Writes o = Σ p·v / Σ p and lse = ln 2 · (m + log2 Σ p) of one row of a unit and a key head,
    /// over all pieces in their order; 0 and −inf for a row that saw nothing.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn decode_merge<const BM: i32, const DT: i32>(
        units: *mut i32,
        intervals: *mut i32,
        piece_acc: *mut f32,
        piece_max: *mut f32,
        piece_sum: *mut f32,
        o: *mut f32,
        lse: *mut f32,
        unit_count: i32,
        rows: i32,
        kv_heads: i32,
        value_dim: i32,
        slots: i32,
        tile_rows: i32,
        run_count: i32,
        most_slices: i32,
    ) {
        let pid = get_tile_block_id();
        let head: i32 = pid.0 / rows;
        let r: i32 = pid.0 - head * rows;
        let u: i32 = head / kv_heads;
        let h: i32 = head - u * kv_heads;
        let parts: i32 = ceil_div(rows, tile_rows);
        let part: i32 = r / tile_rows;
        let unit_pairs: i32 = kv_heads * parts;
        let pair: i32 = h * parts + part;

        // The slots of the row's pieces: `first..first + count`.
        let own = unsafe { slices_of(units, u) };
        let mut first: i32 = (u * unit_pairs + pair) * most_slices;
        let mut count: i32 = own.1;
        if most_slices == 0i32 && own.1 > 0i32 {
            let all = unsafe { slices_of(units, unit_count - 1i32) };
            let slices: i32 = (all.0 + all.1) * unit_pairs;
            let start: i32 = own.0 * unit_pairs + pair * own.1;
            let run: i32 = run_of(start, slices, run_count);
            first = u * unit_pairs + pair + run;
            count = run_of(start + own.1 - 1i32, slices, run_count) - run + 1i32;
        }
        let begin: i32 = unsafe { word(intervals, 2i32 * u * rows + r) };
        let end: i32 = unsafe { word(intervals, (2i32 * u + 1i32) * rows + r) };
        count = min(count, slots - first);
        if begin >= end {
            count = 0i32;
        }

        let mut m: Tile<f32, { [1, 1] }> = constant(-1.0e38f32, const_shape![1, 1]);
        let mut l: Tile<f32, { [1, 1] }> = constant(0.0f32, const_shape![1, 1]);
        let mut a: Tile<f32, { [1, DT] }> = constant(0.0f32, const_shape![1, DT]);
        let at: i32 = first * tile_rows + (r - part * tile_rows);
        for chunk in 0i32..ceil_div(count, BM) {
            let index: Tile<i32, { [BM] }> = iota(const_shape![BM]);
            let index: Tile<i32, { [BM, 1] }> = index.reshape(const_shape![BM, 1]);
            let left: i32 = count - chunk * BM;
            let exist: Tile<bool, { [BM, 1] }> =
                lt_tile(index, left.broadcast(const_shape![BM, 1]));
            let t: Tile<f32, { [BM, 1] }> =
                unsafe { piece_statistics::<BM>(piece_max, at, tile_rows, count, chunk) };
            let nothing: Tile<f32, { [BM, 1] }> = constant(f32::NEG_INFINITY, const_shape![BM, 1]);
            let highest: Tile<f32, { [BM, 1] }> = select(exist, t, nothing);
            let sums: Tile<f32, { [BM, 1] }> =
                unsafe { piece_statistics::<BM>(piece_sum, at, tile_rows, count, chunk) };
            let sums: Tile<f32, { [BM, 1] }> = sums.reshape(const_shape![BM, 1]);
            let t: Tile<f32, { [BM, DT] }> = unsafe {
                let stride: i32 = tile_rows * value_dim;
                piece_sums::<BM, DT>(piece_acc, at * value_dim, stride, count, value_dim, chunk)
            };
            let values: Tile<f32, { [BM, DT] }> = t.reshape(const_shape![BM, DT]);

            let most: Tile<f32, { [1] }> = reduce_max(highest, 0i32);
            let new_m: Tile<f32, { [1, 1] }> = max_tile(m, most.reshape(const_shape![1, 1]));
            let level: Tile<f32, { [BM, 1] }> = new_m.broadcast(const_shape![BM, 1]);
            let weight: Tile<f32, { [BM, 1] }> = exp2(highest - level, ftz::Enabled);
            let alpha: Tile<f32, { [1, 1] }> = exp2(m - new_m, ftz::Enabled);
            let sum: Tile<f32, { [1] }> = reduce_sum(sums * weight, 0i32);
            l = l * alpha + sum.reshape(const_shape![1, 1]);
            let weighed: Tile<f32, { [BM, DT] }> = values * weight.broadcast(const_shape![BM, DT]);
            let sum: Tile<f32, { [DT] }> = reduce_sum(weighed, 0i32);
            a = a * alpha.broadcast(const_shape![1, DT]) + sum.reshape(const_shape![1, DT]);
            m = new_m;
        }

        let heads: i32 = unit_count * kv_heads;
        let o_view = unsafe { rows_view(o, heads, rows, 1i32, value_dim, rows * value_dim) };
        let lse_view = unsafe { statistics_view(lse, 1i32, heads, rows, heads * rows, rows) };
        let out: Tile<f32, { [1, DT] }> = result_of(l, a);
        let value: Tile<f32, { [1, 1] }> = lse_of(m, l);
        unsafe { write(&o_view, out, head, r, 0i32) };
        unsafe { write_statistics(&lse_view, value, 0i32, r, head) };
    }
}
