//! The arrays of a case's features, in memory: segments, masks, slopes, numbers for dropout.

use burst_attention_kernels::instances::Kernel;
use burst_attention_kernels::launch::{Dropout, EvenPositions, Features, Segments, Visible};
use burst_attention_reference::numbers;

use super::case::{Case, Masks};
use super::problem::Problem;
use super::world::{Array, Scalar, Stores, World};

/// The arrays of the features that are on.
pub struct FeatureArrays {
    /// Segments of queries and of keys, and the workspace of their ranges.
    segments: Option<[Array; 3]>,
    masks: Option<MaskArrays>,
    slopes: Option<Array>,
    dropout: Option<Array>,
}

/// The arrays of masks as data, and their workspace.
pub struct MaskArrays {
    /// First and second intervals of keys.
    intervals: Vec<Array>,
    positions: Array,
    /// Positions of keys.
    counted: Option<Array>,
    workspace: Array,
}

impl FeatureArrays {
    /// Places and fills the arrays for a kernel.
    pub fn new(world: &mut World, problem: &Problem, kernel: Kernel) -> FeatureArrays {
        let case = &problem.case;
        let Case { batch, heads, margin, .. } = *case;
        let segments = case.segments.map(|_| segments(world, case, kernel));
        let masks = case.masks.map(|masks| MaskArrays::new(world, case, masks));
        let slopes = case.slopes.then(|| {
            let slopes = world.rows("slopes", Scalar::F32, [batch, 1, heads, 1], margin / 4);
            slopes.fill(&mut world.memory, 0..1, &problem.inputs.slopes);
            slopes
        });
        let dropout = case.dropout.map(|_| {
            let dropout = world.rows("dropout", Scalar::I32, [batch, 1, 1, 4], margin / 4);
            (0..batch).for_each(|b| dropout.put_words(&mut world.memory, b, &numbers(b)));
            dropout
        });
        FeatureArrays { segments, masks, slopes, dropout }
    }

    /// Returns the features of a rectangle that begins at these rows.
    pub fn features(&self, case: &Case, query: usize, key: usize) -> Features {
        let (query_position, key_position) = case.even_positions(query, key);
        let segments = self.segments.as_ref().map(|[queries, keys, ranges]| Segments {
            queries: queries.rows(query),
            keys: keys.rows(key),
            ranges: ranges.rows(0),
        });
        let dropout = case.dropout.zip(self.dropout.as_ref());
        Features {
            segments,
            soft_cap: case.soft_cap,
            slopes: self.slopes.as_ref().map(|slopes| slopes.rows(0)),
            dropout: dropout.map(|(rate, array)| Dropout { numbers: array.rows(0), rate }),
            positions: EvenPositions {
                query: query_position,
                key: key_position,
                stride: case.positions.2,
            },
            visible: self.masks.as_ref().map(|masks| masks.visible(query, key)),
        }
    }

    /// Checks that kernels store the ranges, once for each launch, and nothing else in these
    /// arrays.
    pub fn audit(&self, world: &World) -> Result<(), String> {
        let all = self.segments.iter().flatten().chain(&self.slopes).chain(&self.dropout);
        let masks = self.masks.iter().flat_map(|masks| {
            masks.intervals.iter().chain([&masks.positions]).chain(&masks.counted)
        });
        let all = all.chain(masks);
        let expected = |array: &Array| match array.name {
            // Masks as data take their place.
            "ranges" if self.masks.is_none() => world.ranges(),
            _ => Stores::Never,
        };
        all.into_iter().try_for_each(|array| world.audit(&[(array, expected(array))]))
    }
}

impl MaskArrays {
    /// Places and fills the arrays.
    pub fn new(world: &mut World, case: &Case, masks: Masks) -> MaskArrays {
        let Case { batch, q_len, kv_len, margin, .. } = *case;
        let mut array =
            |name, rows, margin, dim| world.rows(name, Scalar::I32, [batch, rows, 1, dim], margin);
        let names = ["visible", "also_visible"];
        let intervals = names[..masks.count].iter().zip(1..);
        let intervals: Vec<_> =
            intervals.map(|(name, n)| array(*name, kv_len, n * margin, 2)).collect();
        let positions = array("query_positions", q_len, margin + margin / 4, 1);
        let counted = masks.counted.map(|_| array("key_positions", kv_len, margin, 1));
        let bytes = Visible::workspace_bytes(batch, q_len, kv_len) as usize;
        let workspace = world.rows("workspace", Scalar::I32, [1, bytes / 4, 1, 1], 64);
        let memory = &mut world.memory;
        for b in 0..batch {
            for i in 0..q_len {
                positions.put_word(memory, (b, i), (masks.position)(b, i));
            }
            for j in 0..kv_len {
                for (array, bounds) in intervals.iter().zip((masks.intervals)(b, j)) {
                    array.put_integers(memory, (b, j), &bounds);
                }
                if let Some((array, position)) = counted.as_ref().zip(masks.counted) {
                    array.put_word(memory, (b, j), position(b, j));
                }
            }
        }
        MaskArrays { intervals, positions, counted, workspace }
    }

    /// Returns the masks of a rectangle that begins at these rows.
    pub fn visible(&self, query: usize, key: usize) -> Visible {
        let interval = |n: usize| self.intervals.get(n).map(|array| array.rows(key));
        let positions = self.positions.rows(query);
        Visible {
            intervals: interval(0),
            also: interval(1),
            positions: (!self.intervals.is_empty()).then_some(positions),
            counted_positions: self.counted.as_ref().map(|keys| [positions, keys.rows(key)]),
            workspace: self.workspace.rows(0).address,
        }
    }
}

/// Places segments of queries and of keys, and the workspace for the ranges of the rows that a
/// kernel's blocks keep.
fn segments(world: &mut World, case: &Case, kernel: Kernel) -> [Array; 3] {
    let Case { batch, q_len, kv_len, margin, .. } = *case;
    // Margins that are no multiples of 4 give the arrays odd addresses and strides.
    let mut array =
        |name, rows, margin, dim| world.rows(name, Scalar::I32, [batch, rows, 1, dim], margin);
    let queries = array("q_segments", q_len, margin + margin / 4, 1);
    let keys = array("kv_segments", kv_len, 2 * margin + 3 * margin / 4, 1);
    let resident = if kernel == Kernel::KeyGrads { kv_len } else { q_len };
    let ranges = array("ranges", resident.div_ceil(64), margin / 4, 4);
    for b in 0..batch {
        for i in 0..q_len {
            queries.put_word(&mut world.memory, (b, i), case.q_segment(b, i));
        }
        for j in 0..kv_len {
            keys.put_word(&mut world.memory, (b, j), case.kv_segment(b, j));
        }
    }
    [queries, keys, ranges]
}
