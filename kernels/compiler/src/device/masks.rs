//! Masks as data: intervals of keys, positions of rows, and segments.
//!
//! `mask_rows` packs six numbers of each row of a side, `[batch, 6, rows]`: its segment, its place
//! (the position that slopes and dropout count by), and the bounds of two intervals. The first
//! interval of a query begins at its position. A query sees a key of its segment if its position
//! lies in either interval of the key. `mask_runs` finds the runs of rows that a block visits.

#[cutile::module]
pub mod masks {
    use super::super::segments::segments::{least, most, numbers_view};
    use super::super::segments::segments::{segments_view, store_limit};
    use super::super::visible::visible::{packed, runs_view};
    use cutile::core::*;

    /// Stores packed number `n` of `CHUNK` rows.
    pub unsafe fn store_packed<const CHUNK: i32>(
        view: &Tensor<i32, { [-1, -1] }>,
        numbers: Tile<i32, { [CHUNK] }>,
        b: i32,
        chunk: i32,
        n: i32,
    ) {
        let mut part: PartitionMut<i32, { [1, CHUNK] }> =
            unsafe { view.partition_full_mut(const_shape![1, CHUNK]) };
        let numbers: Tile<i32, { [1, CHUNK] }> = numbers.reshape(const_shape![1, CHUNK]);
        unsafe { part.store_unchecked(numbers, [6i32 * b + n, chunk]) };
    }

    /// Packs the numbers of `CHUNK` rows. A row without a segment is in segment 0. Without
    /// positions and intervals a row has the interval [0, 1), so that it sees and is seen. A key of
    /// a negative segment has empty intervals.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn mask_rows<const COUNT: i32, const CHUNK: i32>(
        segments: *mut i32,
        visible: *mut i32,
        also_visible: *mut i32,
        positions: *mut i32,
        places: *mut i32,
        packed: *mut i32,
        batch: i32,
        q_len: i32,
        segments_batch_stride: i32,
        visible_batch_stride: i32,
        also_visible_batch_stride: i32,
        positions_batch_stride: i32,
        places_batch_stride: i32,
        has_segment_ids: i32,
        has_visible: i32,
        has_also_visible: i32,
        has_positions: i32,
        has_places: i32,
        first_place: i32,
        place_stride: i32,
    ) {
        let pid = get_tile_block_id();
        let chunks: i32 = ceil_div(q_len, CHUNK);
        let b: i32 = pid.0 / chunks;
        let chunk: i32 = pid.0 - b * chunks;
        let zero: Tile<i32, { [CHUNK] }> = constant(0i32, const_shape![CHUNK]);
        let one: Tile<i32, { [CHUNK] }> = constant(1i32, const_shape![CHUNK]);
        let mut segment: Tile<i32, { [CHUNK] }> = zero;
        if has_segment_ids == 1i32 {
            let view = unsafe { segments_view(segments, batch, q_len, segments_batch_stride) };
            let t: Tile<i32, { [1, CHUNK] }> =
                view.partition(const_shape![1, CHUNK]).load([b, chunk]);
            segment = t.reshape(const_shape![CHUNK]);
        }
        let index: Tile<i32, { [CHUNK] }> = iota(const_shape![CHUNK]);
        let stride: Tile<i32, { [CHUNK] }> = place_stride.broadcast(const_shape![CHUNK]);
        let first: i32 = first_place + chunk * CHUNK * place_stride;
        let first: Tile<i32, { [CHUNK] }> = first.broadcast(const_shape![CHUNK]);
        let mut place: Tile<i32, { [CHUNK] }> = index * stride + first;
        if has_places == 1i32 {
            let view = unsafe { segments_view(places, batch, q_len, places_batch_stride) };
            let t: Tile<i32, { [1, CHUNK] }> =
                view.partition(const_shape![1, CHUNK]).load([b, chunk]);
            place = t.reshape(const_shape![CHUNK]);
        }
        let mut start: Tile<i32, { [CHUNK] }> = zero;
        let mut stop: Tile<i32, { [CHUNK] }> = one;
        if has_visible == 1i32 {
            let view = unsafe { numbers_view::<2>(visible, batch, q_len, visible_batch_stride) };
            let part = view.partition(const_shape![1, CHUNK, 1]);
            let t: Tile<i32, { [1, CHUNK, 1] }> = part.load([b, chunk, 0i32]);
            start = t.reshape(const_shape![CHUNK]);
            let t: Tile<i32, { [1, CHUNK, 1] }> = part.load([b, chunk, 1i32]);
            stop = t.reshape(const_shape![CHUNK]);
        }
        let mut also_start: Tile<i32, { [CHUNK] }> = zero;
        let mut also_stop: Tile<i32, { [CHUNK] }> = zero;
        if has_also_visible == 1i32 {
            let view =
                unsafe { numbers_view::<2>(also_visible, batch, q_len, also_visible_batch_stride) };
            let part = view.partition(const_shape![1, CHUNK, 1]);
            let t: Tile<i32, { [1, CHUNK, 1] }> = part.load([b, chunk, 0i32]);
            also_start = t.reshape(const_shape![CHUNK]);
            let t: Tile<i32, { [1, CHUNK, 1] }> = part.load([b, chunk, 1i32]);
            also_stop = t.reshape(const_shape![CHUNK]);
        }
        let hidden: Tile<bool, { [CHUNK] }> = lt_tile(segment, zero);
        let mut stop: Tile<i32, { [CHUNK] }> = select(hidden, start, stop);
        let also_stop: Tile<i32, { [CHUNK] }> = select(hidden, also_start, also_stop);
        if has_positions == 1i32 {
            let view = unsafe { segments_view(positions, batch, q_len, positions_batch_stride) };
            let t: Tile<i32, { [1, CHUNK] }> =
                view.partition(const_shape![1, CHUNK]).load([b, chunk]);
            start = t.reshape(const_shape![CHUNK]);
            stop = start + one;
        }
        let view = unsafe { segments_view(packed, 6i32 * batch, q_len, q_len) };
        unsafe { store_packed(&view, segment, b, chunk, 0i32) };
        unsafe { store_packed(&view, place, b, chunk, 1i32) };
        unsafe { store_packed(&view, start, b, chunk, 2i32) };
        unsafe { store_packed(&view, stop, b, chunk, 3i32) };
        unsafe { store_packed(&view, also_start, b, chunk, 4i32) };
        unsafe { store_packed(&view, also_stop, b, chunk, 5i32) };
    }

    /// Returns the least of the numbers that are wanted; the largest integer if none is.
    pub fn low<const N: i32>(numbers: Tile<i32, { [N] }>, wanted: Tile<bool, { [N] }>) -> i32 {
        let top: i32 = 2147483647i32;
        let top: Tile<i32, { [N] }> = top.broadcast(const_shape![N]);
        let numbers: Tile<i32, { [N] }> = select(wanted, numbers, top);
        least(numbers)
    }

    /// Returns the greatest of the numbers that are wanted; the smallest integer if none is.
    pub fn high<const N: i32>(numbers: Tile<i32, { [N] }>, wanted: Tile<bool, { [N] }>) -> i32 {
        let bottom: i32 = 0i32 - 2147483647i32 - 1i32;
        let bottom: Tile<i32, { [N] }> = bottom.broadcast(const_shape![N]);
        let numbers: Tile<i32, { [N] }> = select(wanted, numbers, bottom);
        most(numbers)
    }

    /// Finds the runs of 64 `others` that some of 128 rows may see, as ten row numbers: begin and
    /// end of four runs, the last of which may hold rows that none sees, then same and differs: all
    /// pairs with rows `same..differs` see each other. A step compares `CHUNK` rows, which is
    /// `COUNT` times 64. With `keys_stay` the rows are keys and the others queries.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn mask_runs<const COUNT: i32, const CHUNK: i32>(
        own_rows: *mut i32,
        other_rows: *mut i32,
        runs: *mut i32,
        batch: i32,
        q_len: i32,
        kv_len: i32,
        keys_stay: i32,
    ) {
        let pid = get_tile_block_id();
        let blocks: i32 = ceil_div(q_len, 128i32);
        let b: i32 = pid.0 / blocks;
        let block: i32 = pid.0 - b * blocks;
        let own_view = unsafe { segments_view(own_rows, 6i32 * batch, q_len, q_len) };
        let own_part = own_view.partition(const_shape![1, 128]);
        let others_view = unsafe { segments_view(other_rows, 6i32 * batch, kv_len, kv_len) };
        let others_part = others_view.partition(const_shape![1, CHUNK]);

        // What the rows have in common: their segments, the least start and the greatest stop of
        // intervals that are not empty, the greatest start and the least stop of all.
        let index: Tile<i32, { [128] }> = iota(const_shape![128]);
        let left: i32 = q_len - block * 128i32;
        let left: Tile<i32, { [128] }> = left.broadcast(const_shape![128]);
        let exist: Tile<bool, { [128] }> = lt_tile(index, left);
        let t: Tile<i32, { [1, 128] }> = packed(&own_part, b, block, 0i32);
        let segment: Tile<i32, { [128] }> = t.reshape(const_shape![128]);
        let t: Tile<i32, { [1, 128] }> = packed(&own_part, b, block, 2i32);
        let start: Tile<i32, { [128] }> = t.reshape(const_shape![128]);
        let t: Tile<i32, { [1, 128] }> = packed(&own_part, b, block, 3i32);
        let stop: Tile<i32, { [128] }> = t.reshape(const_shape![128]);
        let t: Tile<i32, { [1, 128] }> = packed(&own_part, b, block, 4i32);
        let also_start: Tile<i32, { [128] }> = t.reshape(const_shape![128]);
        let t: Tile<i32, { [1, 128] }> = packed(&own_part, b, block, 5i32);
        let also_stop: Tile<i32, { [128] }> = t.reshape(const_shape![128]);
        let some: Tile<bool, { [128] }> = exist & lt_tile(start, stop);
        let also_some: Tile<bool, { [128] }> = exist & lt_tile(also_start, also_stop);
        let own_low: i32 = low(segment, exist);
        let own_high: i32 = high(segment, exist);
        let own_first: i32 = low(start, some);
        let own_past: i32 = high(stop, some);
        let own_start: i32 = high(start, exist);
        let own_stop: i32 = low(stop, exist);
        let own_also_first: i32 = low(also_start, also_some);
        let own_also_past: i32 = high(also_stop, also_some);
        let own_also_start: i32 = high(also_start, exist);
        let own_also_stop: i32 = low(also_stop, exist);

        // More blocks than any array has. The rows of these blocks still fit 32 bits.
        let far: i32 = 16777216i32;
        let none: Tile<i32, { [COUNT] }> = far.broadcast(const_shape![COUNT]);
        let zero: Tile<i32, { [COUNT] }> = constant(0i32, const_shape![COUNT]);
        let one: Tile<i32, { [COUNT] }> = constant(1i32, const_shape![COUNT]);
        let count: i32 = ceil_div(kv_len, 64i32);
        let top: i32 = 2147483647i32;
        let bottom: i32 = 0i32 - top - 1i32;
        let tops: Tile<i32, { [COUNT, 64] }> = top.broadcast(const_shape![COUNT, 64]);
        let bottoms: Tile<i32, { [COUNT, 64] }> = bottom.broadcast(const_shape![COUNT, 64]);
        let counts: Tile<i32, { [COUNT] }> = count.broadcast(const_shape![COUNT]);
        let mut begin0: i32 = far;
        let mut end0: i32 = far;
        let mut begin1: i32 = far;
        let mut end1: i32 = far;
        let mut begin2: i32 = far;
        let mut end2: i32 = far;
        let mut begin3: i32 = far;
        let mut end3: i32 = 0i32;
        let mut same: i32 = far;
        let mut differs: i32 = far;
        for chunk in 0i32..ceil_div(kv_len, CHUNK) {
            let index: Tile<i32, { [CHUNK] }> = iota(const_shape![CHUNK]);
            let left: i32 = kv_len - chunk * CHUNK;
            let left: Tile<i32, { [CHUNK] }> = left.broadcast(const_shape![CHUNK]);
            let exist: Tile<bool, { [CHUNK] }> = lt_tile(index, left);
            let exist: Tile<bool, { [COUNT, 64] }> = exist.reshape(const_shape![COUNT, 64]);
            let t: Tile<i32, { [1, CHUNK] }> = packed(&others_part, b, chunk, 0i32);
            let segment: Tile<i32, { [COUNT, 64] }> = t.reshape(const_shape![COUNT, 64]);
            let t: Tile<i32, { [1, CHUNK] }> = packed(&others_part, b, chunk, 2i32);
            let start: Tile<i32, { [COUNT, 64] }> = t.reshape(const_shape![COUNT, 64]);
            let t: Tile<i32, { [1, CHUNK] }> = packed(&others_part, b, chunk, 3i32);
            let stop: Tile<i32, { [COUNT, 64] }> = t.reshape(const_shape![COUNT, 64]);
            let some: Tile<bool, { [COUNT, 64] }> = exist & lt_tile(start, stop);
            let t: Tile<i32, { [COUNT, 64] }> = select(exist, segment, tops);
            let t: Tile<i32, { [COUNT] }> = reduce_min(t, 1i32);
            let lowest: Tile<i32, { [COUNT] }> = t.reshape(const_shape![COUNT]);
            let t: Tile<i32, { [COUNT, 64] }> = select(exist, segment, bottoms);
            let t: Tile<i32, { [COUNT] }> = reduce_max(t, 1i32);
            let highest: Tile<i32, { [COUNT] }> = t.reshape(const_shape![COUNT]);
            let t: Tile<i32, { [COUNT, 64] }> = select(some, start, tops);
            let t: Tile<i32, { [COUNT] }> = reduce_min(t, 1i32);
            let first: Tile<i32, { [COUNT] }> = t.reshape(const_shape![COUNT]);
            let t: Tile<i32, { [COUNT, 64] }> = select(some, stop, bottoms);
            let t: Tile<i32, { [COUNT] }> = reduce_max(t, 1i32);
            let past: Tile<i32, { [COUNT] }> = t.reshape(const_shape![COUNT]);
            let t: Tile<i32, { [COUNT, 64] }> = select(exist, start, bottoms);
            let t: Tile<i32, { [COUNT] }> = reduce_max(t, 1i32);
            let last_start: Tile<i32, { [COUNT] }> = t.reshape(const_shape![COUNT]);
            let own_lows: Tile<i32, { [COUNT] }> = own_low.broadcast(const_shape![COUNT]);
            let own_highs: Tile<i32, { [COUNT] }> = own_high.broadcast(const_shape![COUNT]);
            let mut q_first: Tile<i32, { [COUNT] }> = own_first.broadcast(const_shape![COUNT]);
            let mut q_past: Tile<i32, { [COUNT] }> = own_past.broadcast(const_shape![COUNT]);
            let mut q_start: Tile<i32, { [COUNT] }> = own_start.broadcast(const_shape![COUNT]);
            let mut k_first: Tile<i32, { [COUNT] }> = first;
            let mut k_past: Tile<i32, { [COUNT] }> = past;
            let mut k_start: Tile<i32, { [COUNT] }> = last_start;
            let mut k_stop: Tile<i32, { [COUNT] }> = own_stop.broadcast(const_shape![COUNT]);
            let mut also_first: Tile<i32, { [COUNT] }> =
                own_also_first.broadcast(const_shape![COUNT]);
            let mut also_past: Tile<i32, { [COUNT] }> =
                own_also_past.broadcast(const_shape![COUNT]);
            let mut also_last: Tile<i32, { [COUNT] }> =
                own_also_start.broadcast(const_shape![COUNT]);
            let mut also_end: Tile<i32, { [COUNT] }> = own_also_stop.broadcast(const_shape![COUNT]);
            if keys_stay == 1i32 {
                k_first = q_first;
                k_past = q_past;
                k_start = q_start;
                q_first = first;
                q_past = past;
                q_start = last_start;
            } else {
                let t: Tile<i32, { [1, CHUNK] }> = packed(&others_part, b, chunk, 4i32);
                let also_start: Tile<i32, { [COUNT, 64] }> = t.reshape(const_shape![COUNT, 64]);
                let t: Tile<i32, { [1, CHUNK] }> = packed(&others_part, b, chunk, 5i32);
                let also_stop: Tile<i32, { [COUNT, 64] }> = t.reshape(const_shape![COUNT, 64]);
                let some: Tile<bool, { [COUNT, 64] }> = exist & lt_tile(also_start, also_stop);
                let t: Tile<i32, { [COUNT, 64] }> = select(exist, stop, tops);
                let t: Tile<i32, { [COUNT] }> = reduce_min(t, 1i32);
                k_stop = t.reshape(const_shape![COUNT]);
                let t: Tile<i32, { [COUNT, 64] }> = select(some, also_start, tops);
                let t: Tile<i32, { [COUNT] }> = reduce_min(t, 1i32);
                also_first = t.reshape(const_shape![COUNT]);
                let t: Tile<i32, { [COUNT, 64] }> = select(some, also_stop, bottoms);
                let t: Tile<i32, { [COUNT] }> = reduce_max(t, 1i32);
                also_past = t.reshape(const_shape![COUNT]);
                let t: Tile<i32, { [COUNT, 64] }> = select(exist, also_start, bottoms);
                let t: Tile<i32, { [COUNT] }> = reduce_max(t, 1i32);
                also_last = t.reshape(const_shape![COUNT]);
                let t: Tile<i32, { [COUNT, 64] }> = select(exist, also_stop, tops);
                let t: Tile<i32, { [COUNT] }> = reduce_min(t, 1i32);
                also_end = t.reshape(const_shape![COUNT]);
            }
            let start: i32 = chunk * COUNT;
            let start: Tile<i32, { [COUNT] }> = start.broadcast(const_shape![COUNT]);
            let index: Tile<i32, { [COUNT] }> = iota(const_shape![COUNT]);
            let index: Tile<i32, { [COUNT] }> = index + start;
            let exist: Tile<bool, { [COUNT] }> = lt_tile(index, counts);
            // Some see the block if segments and intervals overlap.
            let common: Tile<bool, { [COUNT] }> =
                ge_tile(highest, own_lows) & le_tile(lowest, own_highs);
            let one_meets: Tile<bool, { [COUNT] }> =
                lt_tile(k_first, q_past) & lt_tile(q_first, k_past);
            let two_meets: Tile<bool, { [COUNT] }> =
                lt_tile(also_first, q_past) & lt_tile(q_first, also_past);
            let either: Tile<bool, { [COUNT] }> = one_meets | two_meets;
            let meets: Tile<bool, { [COUNT] }> = exist & common & either;
            // All see it if all are of one segment, and one interval of each key holds all positions.
            let own: Tile<bool, { [COUNT] }> =
                eq_tile(lowest, own_lows) & eq_tile(own_lows, own_highs);
            let single: Tile<bool, { [COUNT] }> = eq_tile(lowest, highest) & own;
            let one_holds: Tile<bool, { [COUNT] }> =
                le_tile(k_start, q_first) & lt_tile(q_start, k_stop);
            let two_holds: Tile<bool, { [COUNT] }> =
                le_tile(also_last, q_first) & lt_tile(q_start, also_end);
            let either: Tile<bool, { [COUNT] }> = one_holds | two_holds;
            let uniform: Tile<bool, { [COUNT] }> = meets & single & either;
            let seen: Tile<i32, { [COUNT] }> = select(meets, index, none);
            let unseen: Tile<i32, { [COUNT] }> = select(meets, none, index);
            begin0 = min(begin0, least(seen));
            end0 = min(end0, after(unseen, index, begin0));
            begin1 = min(begin1, after(seen, index, end0));
            end1 = min(end1, after(unseen, index, begin1));
            begin2 = min(begin2, after(seen, index, end1));
            end2 = min(end2, after(unseen, index, begin2));
            begin3 = min(begin3, after(seen, index, end2));
            let next: Tile<i32, { [COUNT] }> = select(meets, index + one, zero);
            end3 = max(end3, most(next));
            let alike: Tile<i32, { [COUNT] }> = select(uniform, index, none);
            let other: Tile<i32, { [COUNT] }> = select(uniform, none, index);
            same = min(same, least(alike));
            differs = min(differs, after(other, index, same));
        }
        let view = unsafe { runs_view(runs, batch, q_len) };
        unsafe { store_limit(&view, min(begin0, end3), b, block, 0i32) };
        unsafe { store_limit(&view, min(end0, end3), b, block, 1i32) };
        unsafe { store_limit(&view, min(begin1, end3), b, block, 2i32) };
        unsafe { store_limit(&view, min(end1, end3), b, block, 3i32) };
        unsafe { store_limit(&view, min(begin2, end3), b, block, 4i32) };
        unsafe { store_limit(&view, min(end2, end3), b, block, 5i32) };
        unsafe { store_limit(&view, min(begin3, end3), b, block, 6i32) };
        unsafe { store_limit(&view, end3, b, block, 7i32) };
        unsafe { store_limit(&view, min(same, end3), b, block, 8i32) };
        unsafe { store_limit(&view, min(differs, end3), b, block, 9i32) };
    }

    /// Returns the least of `numbers` whose index is beyond `place`.
    pub fn after<const COUNT: i32>(
        numbers: Tile<i32, { [COUNT] }>,
        index: Tile<i32, { [COUNT] }>,
        place: i32,
    ) -> i32 {
        let far: i32 = 16777216i32;
        let none: Tile<i32, { [COUNT] }> = far.broadcast(const_shape![COUNT]);
        let place: Tile<i32, { [COUNT] }> = place.broadcast(const_shape![COUNT]);
        let behind: Tile<bool, { [COUNT] }> = gt_tile(index, place);
        least(select(behind, numbers, none))
    }
}
