//! Features of a tile of scores: the band, segments, a soft cap, ALiBi.

#[cutile::module]
pub mod scores {
    use super::super::modes::modes::{ABSENT, LIMIT_AND_END, PRESENT, SWITCHED};
    use cutile::core::*;

    /// How a launch makes scores of products. `cap` and `alibi` are the modes of the soft cap and of
    /// slopes.
    #[derive(Clone, Copy)]
    pub struct Scoring {
        pub cap: i32,
        pub alibi: i32,
        pub scale_log2: f32,
        pub cap_log2: f32,
        pub twice_by_cap: f32,
        pub slopes: *mut f32,
        pub slopes_batch_stride: i32,
        pub has_slopes: i32,
    }

    /// Returns the pairs of a tile that the band allows: with `cut_low` columns ≥ row + `low`, with
    /// `cut_high` columns ≤ row + `high`, with [`LIMIT_AND_END`] also columns < `count`. At least
    /// one of both is not 0. Each takes one comparison, because a row's upper limit covers `count`.
    pub fn band<const R: i32, const C: i32>(
        cut_low: i32,
        cut_high: i32,
        low: i32,
        high: i32,
        count: i32,
    ) -> Tile<bool, { [R, C] }> {
        let columns: Tile<i32, { [C] }> = iota(const_shape![C]);
        let columns: Tile<i32, { [1, C] }> = columns.reshape(const_shape![1, C]);
        let columns: Tile<i32, { [R, C] }> = columns.broadcast(const_shape![R, C]);
        let rows: Tile<i32, { [R] }> = iota(const_shape![R]);
        let rows: Tile<i32, { [R, 1] }> = rows.reshape(const_shape![R, 1]);
        let low: Tile<i32, { [R, 1] }> = low.broadcast(const_shape![R, 1]);
        let least: Tile<i32, { [R, 1] }> = rows + low;
        let least: Tile<i32, { [R, C] }> = least.broadcast(const_shape![R, C]);
        let mut seen: Tile<bool, { [R, C] }> = ge_tile(columns, least);
        if cut_high != 0i32 {
            let high: Tile<i32, { [R, 1] }> = high.broadcast(const_shape![R, 1]);
            let mut most: Tile<i32, { [R, 1] }> = rows + high;
            if cut_high == LIMIT_AND_END {
                let last: i32 = count - 1i32;
                let last: Tile<i32, { [R, 1] }> = last.broadcast(const_shape![R, 1]);
                most = min_tile(most, last);
            }
            let most: Tile<i32, { [R, C] }> = most.broadcast(const_shape![R, C]);
            let below: Tile<bool, { [R, C] }> = le_tile(columns, most);
            if cut_low == 1i32 {
                seen = seen & below;
            } else {
                seen = below;
            }
            // The same condition, in a form that does not make the compiler spill for such tiles.
            if cut_low == 1i32 && cut_high == 1i32 && R > C {
                let rows: Tile<i32, { [R, C] }> = rows.broadcast(const_shape![R, C]);
                let diagonal: Tile<i32, { [R, C] }> = columns - rows;
                let low: Tile<i32, { [R, C] }> = low.broadcast(const_shape![R, C]);
                let high: Tile<i32, { [R, C] }> = high.broadcast(const_shape![R, C]);
                seen = ge_tile(diagonal, low) & le_tile(diagonal, high);
            }
        }
        seen
    }

    /// Returns the pairs whose numbers are equal.
    pub fn alike<const R: i32, const C: i32>(
        rows: Tile<i32, { [R, 1] }>,
        columns: Tile<i32, { [1, C] }>,
    ) -> Tile<bool, { [R, C] }> {
        let rows: Tile<i32, { [R, C] }> = rows.broadcast(const_shape![R, C]);
        let columns: Tile<i32, { [R, C] }> = columns.broadcast(const_shape![R, C]);
        eq_tile(rows, columns)
    }

    /// Returns tanh(scale · s / cap), the capped score divided by cap; 0 without a soft cap.
    ///
    /// tanh x = 1 − 2 / (1 + 2^(2 x log2 e)) is exact to 1e-7, which suffices for a score.
    pub fn cap_ratio<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        scoring: Scoring,
    ) -> Tile<f32, { [R, C] }> {
        let mut ratio: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        let twice_by_cap: f32 = scoring.twice_by_cap;
        if scoring.cap == PRESENT || (scoring.cap == SWITCHED && twice_by_cap > 0.0f32) {
            let scale: Tile<f32, { [R, C] }> = twice_by_cap.broadcast(const_shape![R, C]);
            let doubled: Tile<f32, { [R, C] }> = exp2(s * scale, ftz::Enabled);
            let one: Tile<f32, { [R, C] }> = constant(1.0f32, const_shape![R, C]);
            let two: Tile<f32, { [R, C] }> = constant(2.0f32, const_shape![R, C]);
            let below: Tile<f32, { [R, C] }> =
                divf(two, doubled + one, rounding::Approx, ftz::Enabled);
            ratio = one - below;
        }
        ratio
    }

    /// Returns scores with the soft cap, whose [`cap_ratio`] is given. With a cap or slopes they are
    /// scaled, in base 2; otherwise [`unit()`] is the scale that they still lack.
    pub fn capped<const R: i32, const C: i32>(
        s: Tile<f32, { [R, C] }>,
        ratio: Tile<f32, { [R, C] }>,
        scoring: Scoring,
    ) -> Tile<f32, { [R, C] }> {
        let (scale_log2, cap_log2) = (scoring.scale_log2, scoring.cap_log2);
        let mut scores: Tile<f32, { [R, C] }> = s;
        if scoring.cap != ABSENT || scoring.alibi != ABSENT {
            scores = s * scale_log2.broadcast(const_shape![R, C]);
        }
        if scoring.cap == PRESENT || (scoring.cap == SWITCHED && cap_log2 > 0.0f32) {
            scores = ratio * cap_log2.broadcast(const_shape![R, C]);
        }
        scores
    }

    /// Returns the scale that [`capped`] has not applied.
    pub fn unit(scoring: Scoring) -> f32 {
        let mut unit: f32 = scoring.scale_log2;
        if scoring.cap != ABSENT || scoring.alibi != ABSENT {
            unit = 1.0f32;
        }
        unit
    }

    /// Returns min(scale · s − lse, 0) in base 2, the exponents of p. lse is huge where a row sees
    /// nothing, so that p = 0. Large scores are rounded differently than in the forward pass, and
    /// lse is rounded too: the minimum keeps p from exceeding 1. NaN stays NaN. Queries may be the
    /// rows of the tile or its columns.
    pub fn exponents<const R: i32, const C: i32, const QR: i32, const QC: i32>(
        s: Tile<f32, { [R, C] }>,
        lse: Tile<f32, { [QR, QC] }>,
        scale: f32,
    ) -> Tile<f32, { [R, C] }> {
        let scale: Tile<f32, { [R, C] }> = scale.broadcast(const_shape![R, C]);
        let minus_lse: Tile<f32, { [QR, QC] }> = negf(lse);
        let minus_lse: Tile<f32, { [R, C] }> = minus_lse.broadcast(const_shape![R, C]);
        let e: Tile<f32, { [R, C] }> =
            fma(s, scale, minus_lse, rounding::NearestEven, ftz::Enabled);
        let zero: Tile<f32, { [R, C] }> = constant(0.0f32, const_shape![R, C]);
        minf(e, zero, nan::Enabled, ftz::Disabled)
    }

    /// Returns x times the derivative of the soft cap, 1 − tanh²; without a cap, x.
    pub fn uncapped<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        cap: i32,
        ratio: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let mut all: Tile<f32, { [R, C] }> = x;
        if cap != ABSENT {
            let minus: Tile<f32, { [R, C] }> = negf(ratio);
            let one: Tile<f32, { [R, C] }> = constant(1.0f32, const_shape![R, C]);
            let slope: Tile<f32, { [R, C] }> =
                fma(minus, ratio, one, rounding::NearestEven, ftz::Disabled);
            all = x * slope;
        }
        all
    }

    /// Returns the slope of a head in base 2, from slopes `[batch, heads]`.
    pub unsafe fn slope_log2(
        scoring: Scoring,
        batch: i32,
        heads: i32,
        b: i32,
        h: i32,
    ) -> Tile<f32, { [1, 1] }> {
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[batch, heads] };
        let strides: Array<{ [-1, 1] }> =
            Array::<{ [-1, 1] }> { dims: &[scoring.slopes_batch_stride] };
        let base: PointerTile<*mut f32, { [] }> = pointer_to_tile(scoring.slopes);
        let view = unsafe { make_tensor_view(base, shape, strides, new_token_unordered()) };
        let slope: Tile<f32, { [1, 1] }> = view.partition(const_shape![1, 1]).load([b, h]);
        let log2e: Tile<f32, { [1, 1] }> = constant(1.442695040888963407f32, const_shape![1, 1]);
        slope * log2e
    }

    /// Returns the positions of a tile's rows, whose first row is at `start`: exact up to 2^24.
    pub fn positions<const R: i32>(start: i32, stride: i32) -> Tile<f32, { [R] }> {
        let rows: Tile<i32, { [R] }> = iota(const_shape![R]);
        let stride: Tile<i32, { [R] }> = stride.broadcast(const_shape![R]);
        let start: Tile<i32, { [R] }> = start.broadcast(const_shape![R]);
        convert_tile(rows * stride + start)
    }

    /// Returns the position of each column minus the position of each row. `start` is the
    /// difference of the first column and the first row, and both sides go in steps of `stride`.
    pub fn distances<const R: i32, const C: i32>(start: i32, stride: i32) -> Tile<f32, { [R, C] }> {
        let rows: Tile<f32, { [R] }> = positions::<R>(0i32, stride);
        let rows: Tile<f32, { [R, 1] }> = rows.reshape(const_shape![R, 1]);
        let columns: Tile<f32, { [C] }> = positions::<C>(start, stride);
        let columns: Tile<f32, { [1, C] }> = columns.reshape(const_shape![1, C]);
        columns.broadcast(const_shape![R, C]) - rows.broadcast(const_shape![R, C])
    }
}
