//! Tiles of latents, whose values are the first columns of the keys.
//!
//! A tile has three parts of columns: `DT` columns of values, its own, the other `DT` of the first
//! 2 · `DT`, and the next `RT`. Columns beyond the array's end read as zero. Scores add the parts in
//! an order that is the same whichever part is a block's own, bit by bit.

#[cutile::module]
pub mod latents {
    use super::super::common::common::{product, read_columns, stream_columns};
    use super::super::pages::pages::{hidden_out, page_place, pairs_of, values_seen};
    use super::super::units::units::{Piece, Rows, scores_of};
    use cutile::core::*;

    /// Which tile of `DT` columns is the block's own and which is the other, and which of `RT`
    /// columns is the rest.
    #[derive(Clone, Copy)]
    pub struct Columns {
        pub own: i32,
        pub other: i32,
        pub rest: i32,
    }

    /// The rows of queries in the three parts of the columns.
    #[derive(Clone, Copy)]
    pub struct Queries<E: ElementType, const BM: i32, const DT: i32, const RT: i32> {
        pub own: Tile<E, { [BM, DT] }>,
        pub other: Tile<E, { [BM, DT] }>,
        pub rest: Tile<E, { [BM, RT] }>,
    }

    /// Returns the parts of the columns. Where there are no other columns, or no rest, any tile
    /// stands for them, with queries of 0.
    pub fn columns_of<const DT: i32, const RT: i32>(head_dim: i32, own: i32) -> Columns {
        let other: i32 = if head_dim > DT { 1i32 - own } else { 0i32 };
        let rest: i32 = min(2i32 * DT / RT, (head_dim - 1i32) / RT);
        Columns { own, other, rest }
    }

    /// Returns the rows of tile `part` of the queries. `none` and `rest` are zeros.
    pub fn queries_of<E: ElementType, const BM: i32, const DT: i32, const RT: i32>(
        view: &Tensor<E, { [-1, -1, -1, -1] }>,
        heads: i32,
        part: i32,
        head_dim: i32,
        columns: Columns,
        none: Tile<E, { [BM, DT] }>,
        rest: Tile<E, { [BM, RT] }>,
    ) -> Queries<E, BM, DT, RT> {
        let own: Tile<E, { [BM, DT] }> =
            read_columns(view, const_shape![BM, DT], heads, part, 0i32, columns.own);
        let t: Tile<E, { [BM, DT] }> =
            read_columns(view, const_shape![BM, DT], heads, part, 0i32, columns.other);
        let mut other: Tile<E, { [BM, DT] }> = t;
        if head_dim <= DT {
            other = none;
        }
        let t: Tile<E, { [BM, RT] }> =
            read_columns(view, const_shape![BM, RT], heads, part, 0i32, columns.rest);
        let mut last: Tile<E, { [BM, RT] }> = t;
        if head_dim <= 2i32 * DT {
            last = rest;
        }
        Queries::<E, BM, DT, RT> { own, other, rest: last }
    }

    /// Returns the scores of a tile, and its values. `cut` says that some pairs may not see each
    /// other.
    pub unsafe fn latent_tile<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const RT: i32,
    >(
        cut: i32,
        k: &Partition<E, { [1, BN, 1, DT] }>,
        k_rest: &Partition<E, { [1, BN, 1, RT] }>,
        piece: Piece,
        columns: Columns,
        rows: Rows<BM>,
        q: Queries<E, BM, DT, RT>,
        tile: i32,
    ) -> (Tile<f32, { [BM, BN] }>, Tile<E, { [BN, DT] }>) {
        let place = unsafe { page_place::<BN>(cut, piece.source, tile) };
        let (page, within, first): (i32, i32, i32) = (place.0, place.1, place.2);
        let own: Tile<E, { [BN, DT] }> = stream_columns(k, page, within, piece.head, columns.own);
        let other: Tile<E, { [BN, DT] }> =
            stream_columns(k, page, within, piece.head, columns.other);
        let rest: Tile<E, { [BN, RT] }> =
            stream_columns(k_rest, page, within, piece.head, columns.rest);
        let of_own: Tile<f32, { [BM, BN] }> = product(q.own, own);
        let of_other: Tile<f32, { [BM, BN] }> = product(q.other, other);
        let of_rest: Tile<f32, { [BM, BN] }> = product(q.rest, rest);
        let of_rest: Tile<f32, { [BM, BN] }> = of_rest.reshape(const_shape![BM, BN]);
        let s: Tile<f32, { [BM, BN] }> = of_own + of_other;
        let s: Tile<f32, { [BM, BN] }> = s + of_rest;
        let mut scores: Tile<f32, { [BM, BN] }> = scores_of::<BM, BN>(piece, rows, s, first);
        let mut values: Tile<E, { [BN, DT] }> = own;
        if cut == 1i32 {
            let seen: Tile<bool, { [BM, BN] }> =
                pairs_of::<BM, BN>(rows.begin, rows.end, first, place.3);
            scores = hidden_out::<BM, BN>(scores, seen);
            values = values_seen::<E, BM, BN, DT>(values, seen);
        }
        (scores, values)
    }
}
