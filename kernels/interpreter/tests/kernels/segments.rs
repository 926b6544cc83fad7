//! The segments, slopes and numbers for dropout of a case in memory, which every kernel's general variant reads.

use burst_attention_kernels::launch::{Dropout, General, Positions};
use std::ops::Range;

use super::case::Case;
use super::dropout::numbers;
use super::problem::Problem;
use super::world::{Array, Scalar, Stores, World};

/// Those of queries and of keys, slopes, and numbers, one row per entry; none where the plain
/// variants run.
pub struct Segments(Option<[Array; 4]>);

impl Segments {
    /// Writes those of the rows that may be read.
    pub fn new(
        world: &mut World,
        problem: &Problem,
        queries: Range<usize>,
        keys: Range<usize>,
    ) -> Segments {
        let case = &problem.case;
        if !case.is_general() {
            return Segments(None);
        }
        let Case { batch, q_len, kv_len, heads, margin, .. } = *case;
        // Margins that are no multiples of 4 leave the arrays at any address and with any stride.
        let mut array =
            |name, rows, margin| world.rows(name, Scalar::I32, [batch, rows, 1, 1], margin);
        let of_queries = array("q_segments", q_len, margin + margin / 4);
        let of_keys = array("kv_segments", kv_len, 2 * margin + 3 * margin / 4);
        let all = |rows: usize, of: &dyn Fn(usize, usize) -> i32| -> Vec<f32> {
            (0..batch * rows).map(|at| of(at / rows, at % rows) as f32).collect()
        };
        let slopes = world.rows("slopes", Scalar::F32, [batch, 1, heads, 1], margin / 4);
        let dropout = world.rows("dropout", Scalar::I32, [batch, 1, 1, 4], margin / 4);
        let memory = &mut world.memory;
        if case.slopes {
            slopes.fill(memory, 0..1, &problem.inputs.slopes);
        }
        for b in (0..batch).filter(|_| case.dropout.is_some()) {
            dropout.put_words(memory, b, &numbers(b));
        }
        of_queries.fill(memory, queries, &all(q_len, &|b, i| case.q_segment(b, i)));
        of_keys.fill(memory, keys, &all(kv_len, &|b, j| case.kv_segment(b, j)));
        Segments(Some([of_queries, of_keys, slopes, dropout]))
    }

    /// As descriptions take them, from these rows on.
    pub fn general(&self, case: &Case, query: usize, key: usize) -> Option<General> {
        let [of_queries, of_keys, slopes, dropout] = self.0.as_ref()?;
        let (query_place, key_place) = case.places(query, key);
        let numbers = dropout.rows(0);
        Some(General {
            q_segments: of_queries.rows(query),
            kv_segments: of_keys.rows(key),
            soft_cap: case.soft_cap,
            slopes: case.slopes.then(|| slopes.rows(0)),
            dropout: case.dropout.map(|rate| Dropout { numbers, rate }),
            positions: Positions { query: query_place, key: key_place, stride: case.positions.2 },
        })
    }

    pub fn audit(&self, world: &World) -> Result<(), String> {
        let mut arrays = self.0.iter().flatten();
        arrays.try_for_each(|array| world.audit(&[(array, Stores::Never)]))
    }
}
