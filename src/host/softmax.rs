//! What happens between the matrix products: logits to probabilities, and their gradients.
//!
//! A panel holds logits of a register tile's width: `N` vectors per row.
//!
//! Both passes make each logit by the same operations in the same order, so it has the same bits in
//! both. No weight e^(logit − lse) exceeds 1 then, however large the logits are, and a key that
//! takes all of a row's weight gets exactly 1.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::simd::Simd;

/// The running state of the rows whose logits are in the lanes of a panel.
pub(super) struct Online {
    /// Largest logit so far; −∞ before the first.
    pub m: *mut f32,
    /// Sum of e^(logit − m).
    pub l: *mut f32,
    /// e^(old m − new m): what sums with the old m have to be multiplied by.
    pub alpha: *mut f32,
}

/// Puts −∞ where a query may not see a key: in row `r` of the panel outside of `seen(r)`.
///
/// # Safety
/// The panel's `rows` are this thread's, `across` floats each.
#[inline(always)]
pub(super) unsafe fn mask<S: Simd>(
    simd: S,
    panel: *mut f32,
    across: usize,
    rows: Range<usize>,
    seen: impl Fn(usize) -> Range<usize>,
) {
    for row in rows {
        let seen = seen(row);
        for first in (0..across).step_by(S::LANES) {
            // SAFETY: the caller vouches for the panel.
            unsafe {
                let at = panel.add(row * across + first);
                let (start, end) = (seen.start.max(first) - first, seen.end.max(first) - first);
                let value = simd.inside(start, end, simd.load(at), simd.splat(f32::NEG_INFINITY));
                simd.store(at, value);
            }
        }
    }
}

/// Where a vector lies in a panel.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub row: usize,
    /// First lane.
    pub first: usize,
}

/// What becomes of logits before their softmax, and of weights after it.
pub(super) trait Between: Copy {
    /// The new logits, and their derivative by the old ones; `None` for 1.
    fn logits<S: Simd>(self, simd: S, s: S::Vector, at: At) -> (S::Vector, Option<S::Vector>);

    /// `x` where the pair may see each other, `other` elsewhere.
    #[inline(always)]
    fn visible<S: Simd>(self, _simd: S, x: S::Vector, _other: f32, _at: At) -> S::Vector {
        x
    }

    /// Factors of the weights; `None` for 1.
    #[inline(always)]
    fn kept<S: Simd>(self, _simd: S, _at: At) -> Option<S::Vector> {
        None
    }

    /// The derivative of the logits by a slope, but for its sign.
    #[inline(always)]
    fn distance<S: Simd>(self, simd: S, _at: At) -> S::Vector {
        simd.zero()
    }
}

/// They stay.
#[derive(Clone, Copy)]
pub(super) struct Nothing;

impl Between for Nothing {
    #[inline(always)]
    fn logits<S: Simd>(self, _simd: S, s: S::Vector, _at: At) -> (S::Vector, Option<S::Vector>) {
        (s, None)
    }
}

/// They become `cap · tanh(logit / cap)`.
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

impl Between for SoftCap {
    #[inline(always)]
    fn logits<S: Simd>(self, simd: S, s: S::Vector, _at: At) -> (S::Vector, Option<S::Vector>) {
        // e^(2s/cap) = 2^(s · 2·log2(e)/cap)
        let (tanh, slope) = simd.tanh(simd.mul(s, simd.splat(self.twice_by_cap_log2)));
        (simd.mul(tanh, simd.splat(self.cap)), Some(slope))
    }
}

/// Replaces the logits of a panel's `rows`.
///
/// # Safety
/// The panel's `rows` are this thread's, `across` floats each.
#[inline(always)]
pub(super) unsafe fn adjust<S: Simd>(
    simd: S,
    panel: *mut f32,
    across: usize,
    rows: Range<usize>,
    between: impl Between,
) {
    for row in rows {
        for first in (0..across).step_by(S::LANES) {
            // SAFETY: the caller vouches for the panel.
            unsafe {
                let place = panel.add(row * across + first);
                let (s, _) = between.logits(simd, simd.load(place), At { row, first });
                simd.store(place, s);
            }
        }
    }
}

/// Multiplies the weights of a panel's `rows` with their factors.
///
/// # Safety
/// As [`adjust`].
#[inline(always)]
pub(super) unsafe fn drop_out<S: Simd>(
    simd: S,
    panel: *mut f32,
    across: usize,
    rows: Range<usize>,
    between: impl Between,
) {
    for row in rows {
        for first in (0..across).step_by(S::LANES) {
            let Some(kept) = between.kept(simd, At { row, first }) else { return };
            // SAFETY: the caller vouches for the panel.
            unsafe {
                let place = panel.add(row * across + first);
                simd.store(place, simd.mul(simd.load(place), kept));
            }
        }
    }
}

/// One step of the online softmax for queries in lanes, keys in rows. The logits s become
/// p = e^(s − m'):
///
/// ```text
/// m' = max(m, max s);  alpha = e^(m − m');  l' = l·alpha + Σ p
/// ```
///
/// # Safety
/// The panel's `rows` and the state's lanes are this thread's.
#[inline(always)]
pub(super) unsafe fn online<S: Simd>(
    simd: S,
    panel: *mut f32,
    across: usize,
    rows: Range<usize>,
    state: &Online,
) {
    // SAFETY: the caller vouches for the memory.
    unsafe {
        match across / S::LANES {
            1 => online_lanes::<S, 1>(simd, panel, rows, state),
            2 => online_lanes::<S, 2>(simd, panel, rows, state),
            3 => online_lanes::<S, 3>(simd, panel, rows, state),
            _ => online_lanes::<S, 4>(simd, panel, rows, state),
        }
    }
}

/// # Safety
/// As [`online`].
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
    // SAFETY: the caller vouches for the memory.
    unsafe {
        for (n, max) in maxima.iter_mut().enumerate() {
            *max = simd.load(state.m.add(n * S::LANES));
        }
        for row in rows.clone() {
            for (n, max) in maxima.iter_mut().enumerate() {
                // A NaN is left out here, but not of the sums below.
                *max = simd.max(simd.load(panel.add(row * across + n * S::LANES)), *max);
            }
        }
        for (n, max) in maxima.iter_mut().enumerate() {
            let old = simd.load(state.m.add(n * S::LANES));
            simd.store(state.m.add(n * S::LANES), *max);
            // No key so far: anything finite will do instead of −∞, as e^(−∞ − 0) is 0.
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

/// The panels of the backward pass, `across` floats in each row.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub logits: *mut f32,
    pub dp: *mut f32,
    pub across: usize,
}

/// The backward pass between its products, for keys in lanes and queries in rows:
///
/// ```text
/// p = e^min(s − lse, 0), s as `between` makes it;  ds = p ∘ (dp − delta) ∘ its derivative
/// ```
///
/// The minimum is that difference itself where `lse` comes from these logits; it bounds p where a
/// rounding came between, such as that of the ring's instructions on another machine.
/// p takes the place of s and ds that of dp; both are 0 outside `seen(row)`, if that is given.
/// Where weights are dropped, p and dp get their factors. Returns Σ ds ∘ distance before the
/// derivative, where `with_distance`.
///
/// # Safety
/// The `rows` of both panels are this thread's; `lse` and `delta` hold a float for each.
#[inline(always)]
pub(super) unsafe fn gradients<S: Simd>(
    simd: S,
    Panels { logits, dp, across }: Panels,
    rows: Range<usize>,
    (lse, delta): (*const f32, *const f32),
    seen: Option<impl Fn(usize) -> Range<usize>>,
    (between, with_distance): (impl Between, bool),
) -> f64 {
    let mut total = 0.0;
    for row in rows {
        let seen = seen.as_ref().map(|seen| seen(row));
        let mut sums = simd.zero();
        // SAFETY: the caller vouches for the memory.
        unsafe {
            let lse = simd.splat(*lse.add(row));
            let delta = simd.splat(*delta.add(row));
            for first in (0..across).step_by(S::LANES) {
                let at = At { row, first };
                let (s_at, dp_at) =
                    (logits.add(row * across + first), dp.add(row * across + first));
                let inside = |x: S::Vector| match &seen {
                    Some(seen) => {
                        let (start, end) =
                            (seen.start.max(first) - first, seen.end.max(first) - first);
                        simd.inside(start, end, x, simd.zero())
                    }
                    None => x,
                };
                let (s, derivative) = between.logits(simd, simd.load(s_at), at);
                // The operand order keeps NaN.
                let mut p = simd.exp(simd.min(simd.zero(), simd.sub(s, lse)));
                let mut dp = simd.load(dp_at);
                let kept = between.kept(simd, at);
                if let Some(kept) = kept {
                    dp = simd.mul(dp, kept);
                }
                let mut ds = simd.mul(p, simd.sub(dp, delta));
                ds = inside(between.visible(simd, ds, 0.0, at));
                if with_distance {
                    sums = simd.mul_add(ds, between.distance(simd, at), sums);
                }
                if let Some(derivative) = derivative {
                    ds = inside(between.visible(simd, simd.mul(ds, derivative), 0.0, at));
                }
                if let Some(kept) = kept {
                    p = simd.mul(p, kept);
                }
                simd.store(s_at, inside(between.visible(simd, p, 0.0, at)));
                simd.store(dp_at, ds);
            }
        }
        if with_distance {
            total += f64::from(super::pack::sum(simd, sums));
        }
    }
    total
}
