//! Pieces of decode: which slices of the line a slot has.

#[cutile::module]
pub mod pieces {
    use super::super::segments::segments::most;
    use cutile::core::*;

    /// Returns the integer at `base + at`.
    pub unsafe fn word(base: *mut i32, at: i32) -> i32 {
        let pointer: PointerTile<*mut i32, { [] }> = pointer_to_tile(base);
        let pointer: PointerTile<*mut i32, { [] }> = pointer.offset(at);
        let loaded: (Tile<i32, { [] }>, Token) = unsafe {
            load_ptr_tko(
                pointer,
                ordering::Weak,
                None::<scope::TileBlock>,
                None,
                None,
                None,
                Latency::<0>,
            )
        };
        tile_to_scalar(loaded.0)
    }

    /// Returns the elements at `base + at`, and `other` where they are not wanted.
    pub unsafe fn elements<E: ElementType, const N: i32>(
        base: *mut E,
        at: Tile<i32, { [N] }>,
        wanted: Tile<bool, { [N] }>,
        other: E,
    ) -> Tile<E, { [N] }> {
        let pointer: PointerTile<*mut E, { [] }> = pointer_to_tile(base);
        let pointer: PointerTile<*mut E, { [1] }> = pointer.reshape(const_shape![1]);
        let pointers: PointerTile<*mut E, { [N] }> = pointer.broadcast(const_shape![N]);
        let pointers: PointerTile<*mut E, { [N] }> = pointers.offset_tile(at);
        let loaded: (Tile<E, { [N] }>, Token) = unsafe {
            load_ptr_tko(
                pointers,
                ordering::Weak,
                None::<scope::TileBlock>,
                Some(wanted),
                Some(other),
                None,
                Latency::<0>,
            )
        };
        let found: Tile<E, { [N] }> = loaded.0;
        found
    }

    /// Returns the slices of one pair of all units before `unit`, and of `unit` alone.
    pub unsafe fn slices_of(units: *mut i32, unit: i32) -> (i32, i32) {
        let end: i32 = unsafe { word(units, 4i32 * unit) };
        let mut before: i32 = 0i32;
        if unit > 0i32 {
            before = unsafe { word(units, 4i32 * unit - 4i32) };
        }
        (before, end - before)
    }

    /// Returns the first slice of a run. The first runs have one slice more than the last.
    pub fn run_start(run: i32, slices: i32, run_count: i32) -> i32 {
        let each: i32 = slices / run_count;
        run * each + min(run, slices - each * run_count)
    }

    /// Returns the run of a slice.
    pub fn run_of(slice: i32, slices: i32, run_count: i32) -> i32 {
        let each: i32 = slices / run_count;
        let longer: i32 = slices - each * run_count;
        let of_longer: i32 = slice / (each + 1i32);
        let rest: i32 = slice - longer * (each + 1i32);
        let of_others: i32 = longer + rest / max(each, 1i32);
        if of_longer < longer { of_longer } else { of_others }
    }

    /// Returns the run that, with pair `slot − run`, has some slices in common; −1 if none has. Along
    /// the line the sum of run and pair grows from piece to piece, so no two pieces share a slot.
    pub unsafe fn run_at(
        units: *mut i32,
        slot: i32,
        slices: i32,
        run_count: i32,
        pairs: i32,
        unit_pairs: i32,
    ) -> i32 {
        let each: i32 = slices / run_count;
        let longer: i32 = slices - each * run_count;
        let each: Tile<i32, { [256] }> = each.broadcast(const_shape![256]);
        let longer: Tile<i32, { [256] }> = longer.broadcast(const_shape![256]);
        let slots: Tile<i32, { [256] }> = slot.broadcast(const_shape![256]);
        let counts: Tile<i32, { [256] }> = run_count.broadcast(const_shape![256]);
        let pairs: Tile<i32, { [256] }> = pairs.broadcast(const_shape![256]);
        let unit_pairs: Tile<i32, { [256] }> = unit_pairs.broadcast(const_shape![256]);
        let zero: Tile<i32, { [256] }> = constant(0i32, const_shape![256]);
        let one: Tile<i32, { [256] }> = constant(1i32, const_shape![256]);
        let four: Tile<i32, { [256] }> = constant(4i32, const_shape![256]);
        let nothing: Tile<i32, { [256] }> = constant(-1i32, const_shape![256]);
        let mut found: i32 = 0i32 - 1i32;
        let mut start: i32 = 0i32;
        while start < run_count {
            let index: Tile<i32, { [256] }> = iota(const_shape![256]);
            let run: Tile<i32, { [256] }> = index + start.broadcast(const_shape![256]);
            let pair: Tile<i32, { [256] }> = slots - run;
            let exist: Tile<bool, { [256] }> = ge_tile(pair, zero) & lt_tile(pair, pairs);
            let exist: Tile<bool, { [256] }> = exist & lt_tile(run, counts);
            let unit: Tile<i32, { [256] }> = pair / unit_pairs;
            let rest: Tile<i32, { [256] }> = pair - unit * unit_pairs;
            let at: Tile<i32, { [256] }> = unit * four;
            let end: Tile<i32, { [256] }> = unsafe { elements(units, at, exist, 0i32) };
            let end: Tile<i32, { [256] }> = end.reshape(const_shape![256]);
            let later: Tile<bool, { [256] }> = exist & gt_tile(unit, zero);
            let before: Tile<i32, { [256] }> = unsafe { elements(units, at - four, later, 0i32) };
            let before: Tile<i32, { [256] }> = before.reshape(const_shape![256]);
            let count: Tile<i32, { [256] }> = end - before;
            let pair_start: Tile<i32, { [256] }> = before * unit_pairs + rest * count;
            let pair_end: Tile<i32, { [256] }> = pair_start + count;
            let run_start: Tile<i32, { [256] }> = run * each + min_tile(run, longer);
            let next: Tile<i32, { [256] }> = run + one;
            let run_end: Tile<i32, { [256] }> = next * each + min_tile(next, longer);
            let first: Tile<i32, { [256] }> = max_tile(pair_start, run_start);
            let past: Tile<i32, { [256] }> = min_tile(pair_end, run_end);
            let meets: Tile<bool, { [256] }> = exist & lt_tile(first, past);
            found = max(found, most(select(meets, run, nothing)));
            start = start + 256i32;
        }
        found
    }

    /// Returns the piece in a slot: its pair, its first slice within the pair, and its slices, which
    /// are 0 in an empty slot. With `most_slices`, the most slices of a pair, each slice is a piece
    /// and pairs follow each other; otherwise a piece is the part of a run in a pair.
    pub unsafe fn piece_in(
        units: *mut i32,
        slot: i32,
        unit_count: i32,
        unit_pairs: i32,
        run_count: i32,
        most_slices: i32,
    ) -> (i32, i32, i32) {
        let all = unsafe { slices_of(units, unit_count - 1i32) };
        let slices: i32 = (all.0 + all.1) * unit_pairs;
        let mut pair: i32 = 0i32;
        let mut within: i32 = 0i32;
        let mut length: i32 = 0i32;
        if most_slices > 0i32 {
            pair = slot / most_slices;
            within = slot - pair * most_slices;
            let own = unsafe { slices_of(units, pair / unit_pairs) };
            length = max(0i32, min(1i32, own.1 - within));
        } else {
            let pairs: i32 = unit_count * unit_pairs;
            let run: i32 = unsafe { run_at(units, slot, slices, run_count, pairs, unit_pairs) };
            if run >= 0i32 {
                pair = slot - run;
                let unit: i32 = pair / unit_pairs;
                let own = unsafe { slices_of(units, unit) };
                let start: i32 = own.0 * unit_pairs + (pair - unit * unit_pairs) * own.1;
                let first: i32 = max(start, run_start(run, slices, run_count));
                let stop: i32 = min(start + own.1, run_start(run + 1i32, slices, run_count));
                within = first - start;
                length = stop - first;
            }
        }
        (pair, within, length)
    }
}
