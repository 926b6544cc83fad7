//! Joins two running softmax states of the same query rows.

use std::ops::Range;

use rayon::prelude::*;

use super::array::HostArray;
use super::forward::Partial;
use super::isa::Isa;
use super::pack;
use super::simd::{Simd, Task};

/// Where results go: o in its own type, and lse.
pub type Outputs<'a> = (&'a HostArray, &'a HostArray);

/// Adds the state that came home to the one that stayed:
///
/// ```text
/// m = max(m₁, m₂);  l = l₁·e^(m₁−m) + l₂·e^(m₂−m);  acc = acc₁·e^(m₁−m) + acc₂·e^(m₂−m)
/// with outputs: o = acc / l;  lse = m + ln l;  without any key o = 0 and lse = −∞
/// ```
pub fn merge_partial(
    (isa, pool): (Isa, &rayon::ThreadPool),
    home: Partial<'_>,
    arrived: Partial<'_>,
    rows: &Range<usize>,
    out: Option<Outputs<'_>>,
) {
    let (batch, heads) = (home.m.batch, home.m.heads);
    pool.install(|| {
        (0..batch * heads).into_par_iter().for_each(|task| {
            let (batch, head) = (task / heads, task % heads);
            for row in rows.clone() {
                isa.run(Row { home, arrived, out, at: (batch, row, head) });
            }
        });
    });
}

/// One query row of one head.
struct Row<'a> {
    home: Partial<'a>,
    arrived: Partial<'a>,
    out: Option<Outputs<'a>>,
    at: (usize, usize, usize),
}

impl Task for Row<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (batch, row, head) = self.at;
        let row = |array: &HostArray| array.row(batch, row, head).cast::<f32>();
        let Row { home, arrived, .. } = self;
        let dim = home.acc.dim;
        // SAFETY: both states have this row, and this task alone touches it.
        unsafe {
            let (m1, m2) = (*row(home.m), *row(arrived.m));
            // Keeps a NaN of either side.
            let m = if m1.is_nan() || m1 > m2 { m1 } else { m2 };
            let weight = |m1: f32| if m1 == f32::NEG_INFINITY { 0.0 } else { (m1 - m).exp() };
            let (w1, w2) = (weight(m1), weight(m2));
            let l = *row(home.l) * w1 + *row(arrived.l) * w2;
            let (sum, term) = (row(home.acc), row(arrived.acc));
            for d in 0..dim {
                *sum.add(d) = *sum.add(d) * w1 + *term.add(d) * w2;
            }
            *row(home.m) = m;
            *row(home.l) = l;
            if let Some((o, lse)) = self.out {
                let inverse = if l == 0.0 { 0.0 } else { 1.0 / l };
                let to = o.row(batch, self.at.1, head);
                pack::store_row(simd, sum, inverse, to, o.dtype, dim);
                *row(lse) = if l == 0.0 {
                    f32::NEG_INFINITY
                } else {
                    (f64::from(m) + f64::from(l).ln()) as f32
                };
            }
        }
    }
}
