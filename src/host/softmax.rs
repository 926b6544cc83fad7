//! What happens between the matrix products: logits to probabilities, and their gradients.
//!
//! A panel holds logits, times log2(e), of a register tile's width: `N` vectors per row.

use std::ops::Range;

use super::simd::Simd;

/// The running state of the rows whose logits are in the lanes of a panel.
pub(super) struct Online {
    /// Largest logit so far, times log2(e); −∞ before the first.
    pub m: *mut f32,
    /// Sum of 2^(logit − m).
    pub l: *mut f32,
    /// 2^(old m − new m): what sums with the old m have to be multiplied by.
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

/// One step of the online softmax for queries in lanes, keys in rows. The logits s become
/// p = 2^(s − m'):
///
/// ```text
/// m' = max(m, max s);  alpha = 2^(m − m');  l' = l·alpha + Σ p
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
            // No key so far: anything finite will do instead of −∞, as 2^(−∞ − 0) is 0.
            *max = simd.max(*max, simd.splat(f32::MIN));
            simd.store(state.alpha.add(n * S::LANES), simd.exp2(simd.sub(old, *max)));
        }
        for row in rows {
            for (n, sum) in sums.iter_mut().enumerate() {
                let at = panel.add(row * across + n * S::LANES);
                let p = simd.exp2(simd.sub(simd.load(at), maxima[n]));
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

/// The backward pass between its products, for keys in lanes and queries in rows:
///
/// ```text
/// p = 2^(s − lse_log2);  ds = p ∘ (dp − delta)
/// ```
///
/// p takes the place of s and ds that of dp; both are 0 outside `seen(row)`, if that is given.
///
/// # Safety
/// The `rows` of both panels, `across` floats each, are this thread's; `lse_log2` and `delta` hold
/// a float for each.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
pub(super) unsafe fn gradients<S: Simd>(
    simd: S,
    logits: *mut f32,
    dp: *mut f32,
    across: usize,
    rows: Range<usize>,
    lse_log2: *const f32,
    delta: *const f32,
    seen: Option<impl Fn(usize) -> Range<usize>>,
) {
    for row in rows {
        let seen = seen.as_ref().map(|seen| seen(row));
        // SAFETY: the caller vouches for the memory.
        unsafe {
            let lse_log2 = simd.splat(*lse_log2.add(row));
            let delta = simd.splat(*delta.add(row));
            for first in (0..across).step_by(S::LANES) {
                let s_at = logits.add(row * across + first);
                let dp_at = dp.add(row * across + first);
                let mut p = simd.exp2(simd.sub(simd.load(s_at), lse_log2));
                let mut ds = simd.mul(p, simd.sub(simd.load(dp_at), delta));
                if let Some(seen) = &seen {
                    let (start, end) = (seen.start.max(first) - first, seen.end.max(first) - first);
                    p = simd.inside(start, end, p, simd.zero());
                    ds = simd.inside(start, end, ds, simd.zero());
                }
                simd.store(s_at, p);
                simd.store(dp_at, ds);
            }
        }
    }
}
