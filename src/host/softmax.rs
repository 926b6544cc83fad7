//! The arithmetic between the matrix products: probabilities from logits, and their gradients.
//!
//! A panel holds logits of a register tile's width: `N` vectors per row.
//!
//! Both passes compute each logit by the same operations in the same order, so it has the same bits
//! in both. Then no weight e^(logit − lse) exceeds 1, however large the logits are, and a key that
//! takes all of a row's weight gets exactly 1.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::matmul::Matrix;
use super::simd::Simd;

/// The online softmax of queries in lanes, but for their sums of values.
pub(super) struct Online {
    /// Largest logit so far; −∞ before the first.
    pub m: *mut f32,
    /// Sum of e^(logit − m).
    pub l: *mut f32,
    /// e^(old m − new m), the factor for sums that were made with the old m.
    pub alpha: *mut f32,
}

/// Writes −∞ where a query may not see a key: in row `r` of the panel outside of `seen(r)`.
///
/// # Safety
/// The caller guarantees that the panel's `rows` are this thread's.
#[inline(always)]
pub(super) unsafe fn mask<S: Simd>(
    simd: S,
    panel: Matrix,
    rows: Range<usize>,
    seen: impl Fn(usize) -> Range<usize>,
) {
    for row in rows {
        let seen = seen(row);
        for first in (0..panel.row).step_by(S::LANES) {
            // SAFETY: the caller guarantees that the panel's rows are this thread's.
            unsafe {
                let at = panel.at.add(row * panel.row + first);
                let (start, end) = (seen.start.max(first) - first, seen.end.max(first) - first);
                let value = simd.inside(start, end, simd.load(at), simd.splat(f32::NEG_INFINITY));
                simd.store(at, value);
            }
        }
    }
}

/// The place of a vector in a panel.
#[derive(Clone, Copy)]
pub(super) struct VectorPlace {
    pub row: usize,
    /// First lane.
    pub first: usize,
}

/// Logits after features changed them, and their derivative by the logits before; `None` for 1.
pub(super) type Logits<V> = (V, Option<V>);

/// How features change the logits of a panel before the softmax, and the weights after it.
pub(super) trait ScoreFeatures: Copy {
    /// Returns the changed logits and their derivative.
    fn logits<S: Simd>(self, simd: S, s: S::Vector, at: VectorPlace) -> Logits<S::Vector>;

    /// Returns `x` where query and key may see each other, and `other` elsewhere.
    #[inline(always)]
    fn visible<S: Simd>(self, _simd: S, x: S::Vector, _other: f32, _at: VectorPlace) -> S::Vector {
        x
    }

    /// Returns the factors of the weights; `None` for 1.
    #[inline(always)]
    fn kept<S: Simd>(self, _simd: S, _at: VectorPlace) -> Option<S::Vector> {
        None
    }

    /// Returns the derivative of the logits by a slope, but for its sign.
    #[inline(always)]
    fn distance<S: Simd>(self, simd: S, _at: VectorPlace) -> S::Vector {
        simd.zero()
    }
}

/// No feature: logits and weights stay as they are.
#[derive(Clone, Copy)]
pub(super) struct NoFeatures;

impl ScoreFeatures for NoFeatures {
    #[inline(always)]
    fn logits<S: Simd>(self, _simd: S, s: S::Vector, _at: VectorPlace) -> Logits<S::Vector> {
        (s, None)
    }
}

/// A soft cap alone: logits become `cap · tanh(logit / cap)`.
#[derive(Clone, Copy)]
pub(super) struct SoftCap {
    cap: f32,
    /// 2 · log2(e) / cap.
    twice_by_cap_log2: f32,
}

impl SoftCap {
    pub(super) fn new(cap: f32) -> SoftCap {
        SoftCap { cap, twice_by_cap_log2: 2.0 * LOG2_E / cap }
    }
}

impl ScoreFeatures for SoftCap {
    #[inline(always)]
    fn logits<S: Simd>(self, simd: S, s: S::Vector, _at: VectorPlace) -> Logits<S::Vector> {
        // e^(2s/cap) = 2^(s · 2·log2(e)/cap)
        let (tanh, slope) = simd.tanh(simd.mul(s, simd.splat(self.twice_by_cap_log2)));
        (simd.mul(tanh, simd.splat(self.cap)), Some(slope))
    }
}

/// Changes the logits of a panel's `rows` as features ask.
///
/// # Safety
/// The caller guarantees that the panel's `rows` are this thread's.
#[inline(always)]
pub(super) unsafe fn adjust<S: Simd>(
    simd: S,
    panel: Matrix,
    rows: Range<usize>,
    features: impl ScoreFeatures,
) {
    for row in rows {
        for first in (0..panel.row).step_by(S::LANES) {
            // SAFETY: the caller guarantees that the panel's rows are this thread's.
            unsafe {
                let at = panel.at.add(row * panel.row + first);
                let (s, _) = features.logits(simd, simd.load(at), VectorPlace { row, first });
                simd.store(at, s);
            }
        }
    }
}

/// Multiplies the weights of a panel's `rows` by their factors.
///
/// # Safety
/// The caller guarantees that the panel's `rows` are this thread's.
#[inline(always)]
pub(super) unsafe fn drop_out<S: Simd>(
    simd: S,
    panel: Matrix,
    rows: Range<usize>,
    features: impl ScoreFeatures,
) {
    for row in rows {
        for first in (0..panel.row).step_by(S::LANES) {
            let Some(kept) = features.kept(simd, VectorPlace { row, first }) else { return };
            // SAFETY: the caller guarantees that the panel's rows are this thread's.
            unsafe {
                let at = panel.at.add(row * panel.row + first);
                simd.store(at, simd.mul(simd.load(at), kept));
            }
        }
    }
}

/// Takes one step of the online softmax, for queries in lanes and keys in rows. The logits s become
/// p = e^(s − m'):
///
/// ```text
/// m' = max(m, max s);  alpha = e^(m − m');  l' = l·alpha + Σ p
/// ```
///
/// # Safety
/// The caller guarantees that the panel's `rows` and the state's lanes are this thread's.
#[inline(always)]
pub(super) unsafe fn online<S: Simd>(simd: S, panel: Matrix, rows: Range<usize>, state: &Online) {
    // SAFETY: the caller guarantees that the panel and the state are this thread's.
    unsafe {
        match panel.row / S::LANES {
            1 => online_lanes::<S, 1>(simd, panel.at, rows, state),
            2 => online_lanes::<S, 2>(simd, panel.at, rows, state),
            3 => online_lanes::<S, 3>(simd, panel.at, rows, state),
            _ => online_lanes::<S, 4>(simd, panel.at, rows, state),
        }
    }
}

/// Takes the step of [`online`] for panels of `N` vectors per row.
///
/// # Safety
/// The caller guarantees that the panel's `rows` and the state's lanes are this thread's.
#[inline(always)]
unsafe fn online_lanes<S: Simd, const N: usize>(
    simd: S,
    panel: *mut f32,
    rows: Range<usize>,
    state: &Online,
) {
    if N > S::TILE_VECTORS {
        return;
    }
    let across = N * S::LANES;
    let mut maxima = [simd.zero(); N];
    let mut sums = [simd.zero(); N];
    // SAFETY: the caller guarantees that the panel and the state are this thread's.
    unsafe {
        for (n, max) in maxima.iter_mut().enumerate() {
            *max = simd.load(state.m.add(n * S::LANES));
        }
        for row in rows.clone() {
            for (n, max) in maxima.iter_mut().enumerate() {
                // The maximum leaves NaN out, but the sums below do not.
                *max = simd.max(simd.load(panel.add(row * across + n * S::LANES)), *max);
            }
        }
        for (n, max) in maxima.iter_mut().enumerate() {
            let old = simd.load(state.m.add(n * S::LANES));
            simd.store(state.m.add(n * S::LANES), *max);
            // Without a key so far, any finite number can replace −∞, since e^(−∞ − 0) is 0.
            *max = simd.max(*max, simd.splat(f32::MIN));
            simd.store(state.alpha.add(n * S::LANES), simd.exp(simd.sub(old, *max)));
        }
        for row in rows {
            for (n, sum) in sums.iter_mut().enumerate() {
                let at = panel.add(row * across + n * S::LANES);
                let p = simd.exp(simd.sub(simd.load(at), maxima[n]));
                simd.store(at, p);
                *sum = simd.add(*sum, p);
            }
        }
        for (n, sum) in sums.iter().enumerate() {
            let l = state.l.add(n * S::LANES);
            let alpha = simd.load(state.alpha.add(n * S::LANES));
            simd.store(l, simd.mul_add(simd.load(l), alpha, *sum));
        }
    }
}

/// Computes p and ds in the backward pass from panels of s and dp of the same shape, for keys in
/// lanes and queries in rows:
///
/// ```text
/// p = e^min(s − lse, 0), s as `features` change it;  ds = p ∘ (dp − delta) ∘ derivative of s
/// ```
///
/// The minimum is s − lse itself if `lse` comes from these logits. It bounds p if a rounding came
/// between, as with the instructions of another machine in the ring. p takes the place of s, and
/// ds takes the place of dp. Both are 0 outside of `seen(row)`, if `seen` is given. With dropout, p
/// and dp get the factors of the weights. If `with_distance`, the function returns Σ ds ∘ distance,
/// without the derivative of s.
///
/// # Safety
/// The caller guarantees that the `rows` of both panels are this thread's, and that `lse` and
/// `delta` hold a float for each row.
#[inline(always)]
pub(super) unsafe fn gradients<S: Simd>(
    simd: S,
    [logits, dp]: [Matrix; 2],
    rows: Range<usize>,
    (lse, delta): (*const f32, *const f32),
    seen: Option<impl Fn(usize) -> Range<usize>>,
    (features, with_distance): (impl ScoreFeatures, bool),
) -> f64 {
    let mut total = 0.0;
    for row in rows {
        let seen = seen.as_ref().map(|seen| seen(row));
        let mut sums = simd.zero();
        // SAFETY: the caller guarantees that the panels' rows are this thread's, and that `lse` and
        // `delta` have these rows.
        unsafe {
            let lse = simd.splat(*lse.add(row));
            let delta = simd.splat(*delta.add(row));
            for first in (0..logits.row).step_by(S::LANES) {
                let at = VectorPlace { row, first };
                let skip = row * logits.row + first;
                let (s_at, dp_at) = (logits.at.add(skip), dp.at.add(skip));
                let inside = |x: S::Vector| match &seen {
                    Some(seen) => {
                        let (start, end) =
                            (seen.start.max(first) - first, seen.end.max(first) - first);
                        simd.inside(start, end, x, simd.zero())
                    }
                    None => x,
                };
                let (s, derivative) = features.logits(simd, simd.load(s_at), at);
                // This order of operands keeps NaN.
                let mut p = simd.exp(simd.min(simd.zero(), simd.sub(s, lse)));
                let mut dp = simd.load(dp_at);
                let kept = features.kept(simd, at);
                if let Some(kept) = kept {
                    dp = simd.mul(dp, kept);
                }
                let mut ds = simd.mul(p, simd.sub(dp, delta));
                ds = inside(features.visible(simd, ds, 0.0, at));
                if with_distance {
                    sums = simd.mul_add(ds, features.distance(simd, at), sums);
                }
                if let Some(derivative) = derivative {
                    ds = inside(features.visible(simd, simd.mul(ds, derivative), 0.0, at));
                }
                if let Some(kept) = kept {
                    p = simd.mul(p, kept);
                }
                simd.store(s_at, inside(features.visible(simd, p, 0.0, at)));
                simd.store(dp_at, ds);
            }
        }
        if with_distance {
            total += f64::from(super::pack::sum(simd, sums));
        }
    }
    total
}
