//! The parts of the delta rule's launches: what a block computes, the state that it begins with, and
//! the state that it leaves. `delta_rule.rs` says what the columns of the transfer are.

#[cutile::module]
pub mod delta_parts {
    use super::super::channels::channels::last_of;
    use super::super::common::common::{rows_view, write_columns};
    use super::super::decays::decays::{factor, share_of};
    use cutile::core::*;

    /// Returns the columns of a tile of the identity, or 0 without `is_transfer`.
    pub fn start<const R: i32, const C: i32>(
        shape: Shape<{ [R, C] }>,
        column: i32,
        is_transfer: i32,
    ) -> Tile<f32, { [R, C] }> {
        let row: Tile<i32, { [R] }> = iota(const_shape![R]);
        let row: Tile<i32, { [R, 1] }> = row.reshape(const_shape![R, 1]);
        let row: Tile<i32, { [R, C] }> = row.broadcast(shape);
        let columns: Tile<i32, { [C] }> = iota(const_shape![C]);
        let columns: Tile<i32, { [1, C] }> = columns.reshape(const_shape![1, C]);
        let columns: Tile<i32, { [R, C] }> = columns.broadcast(shape);
        let first: i32 = column * C;
        let first: Tile<i32, { [R, C] }> = first.broadcast(shape);
        let met: Tile<bool, { [R, C] }> = eq_tile(row, columns + first);
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        let one: Tile<f32, { [1, 1] }> = factor(is_transfer);
        select(met, one.broadcast(shape), zero)
    }

    /// Returns `x`, or 0 with `is_transfer`, whatever `x` is.
    pub fn unless_transfer<E: ElementType, const R: i32, const C: i32>(
        x: Tile<E, { [R, C] }>,
        is_transfer: i32,
    ) -> Tile<E, { [R, C] }> {
        let flag: Tile<i32, { [R, C] }> = is_transfer.broadcast(const_shape![R, C]);
        let one: Tile<i32, { [R, C] }> = constant(1i32, const_shape![R, C]);
        let dropped: Tile<bool, { [R, C] }> = eq_tile(flag, one);
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        let zero: Tile<E, { [R, C] }> = convert_tile(zero);
        select(dropped, zero, x)
    }

    /// The sizes of a launch over states.
    #[derive(Clone, Copy)]
    pub struct Cut {
        pub batch: i32,
        pub rows: i32,
        pub padded_rows: i32,
        pub heads: i32,
        pub head_dim: i32,
        pub value_dim: i32,
        pub state_stride: i32,
        pub transfer_stride: i32,
        pub parts: i32,
        pub part_tiles: i32,
        pub has_values: i32,
        pub has_transfer: i32,
    }

    /// A block's work: entry, head, part, number of the state, tile of columns, and whether these
    /// are columns of the transfer.
    #[derive(Clone, Copy)]
    pub struct Work {
        pub b: i32,
        pub h: i32,
        pub part: i32,
        pub n: i32,
        pub column: i32,
        pub is_transfer: i32,
    }

    /// Returns a block's work. The columns of the transfer come first.
    pub fn work_of<const C: i32>(cut: Cut) -> Work {
        let pid = get_tile_block_id();
        let of_transfer: i32 = ceil_div(cut.head_dim, C) * cut.has_transfer;
        let share = share_of(pid.0, cut.parts, of_transfer + ceil_div(cut.value_dim, C));
        let is_transfer: i32 = if share.2 < of_transfer { 1i32 } else { 0i32 };
        let column: i32 = share.2 - of_transfer * (1i32 - is_transfer);
        let b: i32 = share.0 / cut.heads;
        let h: i32 = share.0 - b * cut.heads;
        let n: i32 = (b * cut.parts + share.1) * cut.heads + h;
        Work { b, h, part: share.1, n, column, is_transfer }
    }

    /// Returns a view of `[batch, rows, heads, dim]` at `base`.
    pub unsafe fn token_rows<E: ElementType>(
        base: *mut E,
        cut: Cut,
        dim: i32,
        batch_stride: i32,
    ) -> Tensor<E, { [-1, -1, -1, -1] }> {
        unsafe { rows_view(base, cut.batch, cut.rows, cut.heads, dim, batch_stride) }
    }

    /// Returns a view of states of `dim` columns at `base`.
    pub unsafe fn states_of(
        base: *mut f32,
        cut: Cut,
        dim: i32,
        stride: i32,
    ) -> Tensor<f32, { [-1, -1, -1, -1] }> {
        let states: i32 = cut.batch * cut.parts * cut.heads;
        unsafe { rows_view(base, states, cut.head_dim, 1i32, dim, stride) }
    }

    /// Returns b of a tile's last token, one for each channel.
    pub unsafe fn totals_of<const R: i32, const W: i32>(
        sums: *mut f32,
        cut: Cut,
        entry: i32,
        batch: i32,
        tile: i32,
        head: i32,
    ) -> Tile<f32, { [W, 1] }> {
        let view =
            unsafe { rows_view(sums, cut.batch, cut.padded_rows, cut.heads, cut.head_dim, entry) };
        let total: Tile<f32, { [1, W] }> = last_of::<R, W>(&view, batch, tile, head, 0i32);
        total.reshape(const_shape![W, 1])
    }

    /// Returns the state that a block begins with: the state given, zeros, or the columns of the
    /// identity.
    pub unsafe fn begun<const R: i32, const C: i32>(
        shape: Shape<{ [R, C] }>,
        before: *mut f32,
        cut: Cut,
        work: Work,
    ) -> Tile<f32, { [R, C] }> {
        let mut s: Tile<f32, { [R, C] }> = start::<R, C>(shape, work.column, work.is_transfer);
        if cut.has_values == 1i32 {
            let view = unsafe { states_of(before, cut, cut.value_dim, cut.state_stride) };
            let loaded: Tile<f32, { [1, R, 1, C] }> =
                view.partition(const_shape![1, R, 1, C]).load([work.n, 0i32, 0i32, work.column]);
            s = loaded.reshape(shape);
        }
        s
    }

    /// Stores the state that a block's part leaves, or its columns of the transfer.
    pub unsafe fn left<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        state: *mut f32,
        transfer: *mut f32,
        cut: Cut,
        work: Work,
    ) {
        if cut.has_transfer * work.is_transfer == 1i32 {
            let view = unsafe { states_of(transfer, cut, cut.head_dim, cut.transfer_stride) };
            unsafe { write_columns(&view, s, work.n, 0i32, 0i32, work.column) };
        }
        if cut.has_transfer * (1i32 - work.is_transfer) == 1i32 {
            let view = unsafe { states_of(state, cut, cut.value_dim, cut.state_stride) };
            unsafe { write_columns(&view, s, work.n, 0i32, 0i32, work.column) };
        }
    }
}
