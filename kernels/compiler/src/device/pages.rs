//! Pages of decode: where a tile of keys lies, and which rows see it.

#[cutile::module]
pub mod pages {
    use super::super::pieces::pieces::{elements, word};
    use super::super::segments::segments::{least, most};
    use cutile::core::*;

    /// Where the keys of a piece lie: the page table of a source, the pages, and the piece's tiles.
    #[derive(Clone, Copy)]
    pub struct Source {
        pub table: *mut i32,
        pub pages: i32,
        pub page_rows: i32,
        pub page_shift: i32,
        pub first: i32,
        pub end: i32,
    }

    /// Returns 1 if some page of `first..=last` of a source is out of range; otherwise 0.
    pub unsafe fn misses_pages(table: *mut i32, first: i32, last: i32, pages: i32) -> i32 {
        let mut lowest: i32 = 0i32;
        let mut highest: i32 = 0i32;
        let mut start: i32 = first;
        while start <= last {
            let index: Tile<i32, { [256] }> = iota(const_shape![256]);
            let index: Tile<i32, { [256] }> = index + start.broadcast(const_shape![256]);
            let wanted: Tile<bool, { [256] }> = le_tile(index, last.broadcast(const_shape![256]));
            let ids: Tile<i32, { [256] }> = unsafe { elements(table, index, wanted, 0i32) };
            lowest = min(lowest, least(ids));
            highest = max(highest, most(ids));
            start = start + 256i32;
        }
        if lowest < 0i32 || highest >= pages { 1i32 } else { 0i32 }
    }

    /// Returns where tile `tile` of a source lies: (page, tile within the page, first row, rows of
    /// the page from there on). With `cut` no row is left of a tile that is not the piece's, or of
    /// a page out of range; another tile stands for it.
    pub unsafe fn page_place<const SUB: i32>(
        cut: i32,
        source: Source,
        tile: i32,
    ) -> (i32, i32, i32, i32) {
        let mut near: i32 = tile;
        if cut == 1i32 {
            near = max(source.first, min(tile, source.end - 1i32));
        }
        let page: i32 = near >> source.page_shift;
        let within: i32 = near - (page << source.page_shift);
        let id: i32 = unsafe { word(source.table, page) };
        let mut known: i32 = id;
        let mut left: i32 = source.page_rows - within * SUB;
        if cut == 1i32 {
            known = max(0i32, min(id, source.pages - 1i32));
            if id != known || tile != near {
                left = 0i32;
            }
        }
        (known, within, page * source.page_rows + within * SUB, left)
    }

    /// Returns the pairs of a tile that see each other, of the tile's first `left` rows.
    pub fn pairs_of<const BM: i32, const SUB: i32>(
        begin: Tile<i32, { [BM, 1] }>,
        end: Tile<i32, { [BM, 1] }>,
        first: i32,
        left: i32,
    ) -> Tile<bool, { [BM, SUB] }> {
        let column: Tile<i32, { [SUB] }> = iota(const_shape![SUB]);
        let column: Tile<i32, { [1, SUB] }> = column.reshape(const_shape![1, SUB]);
        let column: Tile<i32, { [BM, SUB] }> = column.broadcast(const_shape![BM, SUB]);
        let first: Tile<i32, { [BM, 1] }> = first.broadcast(const_shape![BM, 1]);
        let begin: Tile<i32, { [BM, 1] }> = begin - first;
        let end: Tile<i32, { [BM, 1] }> = end - first;
        let end: Tile<i32, { [BM, 1] }> = min_tile(end, left.broadcast(const_shape![BM, 1]));
        let after: Tile<bool, { [BM, SUB] }> =
            ge_tile(column, begin.broadcast(const_shape![BM, SUB]));
        let before: Tile<bool, { [BM, SUB] }> =
            lt_tile(column, end.broadcast(const_shape![BM, SUB]));
        after & before
    }

    /// Returns scores, and −inf for pairs that do not see each other.
    pub fn hidden_out<const BM: i32, const SUB: i32>(
        scores: Tile<f32, { [BM, SUB] }>,
        seen: Tile<bool, { [BM, SUB] }>,
    ) -> Tile<f32, { [BM, SUB] }> {
        let hidden: Tile<f32, { [BM, SUB] }> = constant(f32::NEG_INFINITY, const_shape![BM, SUB]);
        select(seen, scores, hidden)
    }

    /// Returns values, and 0 for rows that no query sees, whatever is there.
    pub fn values_seen<E: ElementType, const BM: i32, const SUB: i32, const DT: i32>(
        v: Tile<E, { [SUB, DT] }>,
        seen: Tile<bool, { [BM, SUB] }>,
    ) -> Tile<E, { [SUB, DT] }> {
        let zero: Tile<f32, { [BM, SUB] }> = constant(0.0f32, const_shape![BM, SUB]);
        let one: Tile<f32, { [BM, SUB] }> = constant(1.0f32, const_shape![BM, SUB]);
        let some: Tile<f32, { [BM, SUB] }> = select(seen, one, zero);
        let some: Tile<f32, { [SUB] }> = reduce_max(some, 0i32);
        let some: Tile<f32, { [SUB, 1] }> = some.reshape(const_shape![SUB, 1]);
        let some: Tile<f32, { [SUB, DT] }> = some.broadcast(const_shape![SUB, DT]);
        let none: Tile<f32, { [SUB, DT] }> = constant(0.0f32, const_shape![SUB, DT]);
        let nothing: Tile<E, { [SUB, DT] }> = constant(E::ZERO, const_shape![SUB, DT]);
        select(gt_tile(some, none), v, nothing)
    }
}
