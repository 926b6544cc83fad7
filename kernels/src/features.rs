//! The features of images, and those of a launch, with their arrays and numbers.

use serde::Deserialize;

use crate::error::LaunchError;
use crate::place::Rows;
use crate::record::{Meaning, Operand, Value};

/// A set of features of attention. Every kernel can limit the keys after a query, as causal masks
/// do, so this limit is no feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct FeatureSet(u16);

impl FeatureSet {
    /// The empty set.
    pub const NONE: FeatureSet = FeatureSet(0);
    /// Segments: rows see rows of their own segment only.
    pub const SEGMENTS: FeatureSet = FeatureSet(1);
    /// A soft cap of scores.
    pub const SOFT_CAP: FeatureSet = FeatureSet(2);
    /// ALiBi.
    pub const SLOPES: FeatureSet = FeatureSet(4);
    /// Dropout of weights.
    pub const DROPOUT: FeatureSet = FeatureSet(8);
    /// Masks as data: intervals of keys and positions of rows.
    pub const VISIBLE: FeatureSet = FeatureSet(16);

    /// The features that a kernel has a generic for, in the order of the generics.
    pub(crate) const SWITCHES: [FeatureSet; 4] =
        [FeatureSet::SEGMENTS, FeatureSet::SOFT_CAP, FeatureSet::SLOPES, FeatureSet::DROPOUT];

    /// All features that launches can switch off; see [`GENERAL`](crate::variant::Variant::GENERAL).
    pub const ALL: FeatureSet = {
        let (mut all, mut index) = (FeatureSet::NONE, 0);
        while index < FeatureSet::SWITCHES.len() {
            all = all.and(FeatureSet::SWITCHES[index]);
            index += 1;
        }
        all
    };

    /// Returns the union of both sets.
    pub const fn and(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 | other.0)
    }

    /// Whether this set contains all of `other`.
    pub const fn has(self, other: FeatureSet) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns `self` if `on`, otherwise the empty set.
    pub const fn when(self, on: bool) -> FeatureSet {
        if on { self } else { FeatureSet::NONE }
    }
}

/// The features of a launch. It takes the image that has them and the fewest other features.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Features {
    /// Rows see rows of their own segment only.
    pub segments: Option<Segments>,
    /// Scores become `cap · tanh(score / cap)`, with a cap from 0.001 to 1000; 0 leaves them.
    pub soft_cap: f32,
    /// ALiBi: slope of each query head, float32 `[batch, heads]`. slope · (position of the key −
    /// position of the query) is added to scaled scores, after the soft cap.
    pub slopes: Option<Rows>,
    /// Dropout of weights.
    pub dropout: Option<Dropout>,
    /// Positions of the rows in the sequence; only slopes and dropout depend on them.
    pub positions: EvenPositions,
    /// Masks as data.
    pub visible: Option<Visible>,
}

/// Masks as data. A query sees a key if the query's position lies in an interval of the key, and
/// band and segments allow it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Visible {
    /// Interval of each key, int32 `[batch, kv_len, 2]`: first position, and the position behind
    /// the last. Without it every query sees every key.
    pub intervals: Option<Rows>,
    /// Second interval of each key, laid out like the first.
    pub also: Option<Rows>,
    /// Position of each query, int32 `[batch, q_len]`; needed with intervals.
    pub positions: Option<Rows>,
    /// Positions of queries and of keys, int32 `[batch, rows]`, that slopes and dropout count by
    /// instead of [`Features::positions`].
    pub counted_positions: Option<[Rows; 2]>,
    /// Address of the workspace of the launches, of [`Visible::workspace_bytes`]. Its contents are
    /// undefined before and after.
    pub workspace: u64,
}

/// The segments of a rectangle's rows.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segments {
    /// Segment of each query row, `[batch, q_len]` int32. Rows see keys of their own segment only,
    /// and a row of a negative segment sees nothing.
    pub queries: Rows,
    /// Segment of each key row, `[batch, kv_len]` int32.
    pub keys: Rows,
    /// Workspace of the launches, int32 `[batch, ⌈resident rows / 64⌉, 4]`. Its contents are
    /// undefined before and after.
    pub ranges: Rows,
}

/// Dropout of weights after the softmax; the weights that stay are divided by 1 − `rate`.
/// `numbers`, the head and the positions of query and key alone decide whether a weight stays.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropout {
    /// For each batch entry the two words of a random key, the index of the entry and the index of
    /// the first query head, uint32 `[batch, 4]`.
    pub numbers: Rows,
    /// Probability that a weight is dropped, at least 0 and below 1.
    pub rate: f32,
}

/// Positions of rows in the sequence: query row i has position `query` + `stride` · i, key row j
/// `key` + `stride` · j. All positions are below 2^31 and not negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvenPositions {
    /// Position of the first query.
    pub query: i64,
    /// Position of the first key.
    pub key: i64,
    /// Positions from one row to the next.
    pub stride: i64,
}

impl Features {
    /// Returns the set that an image must have, besides a window.
    pub(crate) fn set(&self) -> FeatureSet {
        FeatureSet::SEGMENTS
            .when(self.segments.is_some())
            .and(FeatureSet::VISIBLE.when(self.visible.is_some()))
            .and(FeatureSet::SOFT_CAP.when(self.soft_cap != 0.0))
            .and(FeatureSet::SLOPES.when(self.slopes.is_some()))
            .and(FeatureSet::DROPOUT.when(self.dropout.is_some()))
    }

    /// Returns the arrays of all features; `None` where a feature is off. Masks as data, which are
    /// packed with the segments, take the place of segments.
    pub(crate) fn arrays(&self) -> [(Operand, Option<Rows>); 5] {
        let packed = |visible: Visible| Rows { address: visible.workspace, batch_stride: 0 };
        let packed = self.visible.map(packed);
        let given = |array: fn(Segments) -> Rows| packed.or(self.segments.map(array));
        [
            (Operand::QSegments, given(|segments| segments.queries)),
            (Operand::KvSegments, given(|segments| segments.keys)),
            (Operand::Ranges, given(|segments| segments.ranges)),
            (Operand::Slopes, self.slopes),
            (Operand::Dropout, self.dropout.map(|dropout| dropout.numbers)),
        ]
    }

    /// Returns the value of an argument that features decide, in a launch whose first rows are
    /// (query, key); `None` for any other argument.
    pub(crate) fn value(&self, meaning: Meaning, (query, key): (usize, usize)) -> Option<Value> {
        let Features { dropout, positions, .. } = *self;
        // The checked positions fit 32 bits.
        let position = |first, row| Value::I32((first + positions.stride * row as i64) as i32);
        Some(match meaning {
            Meaning::Has(operand) => {
                let (_, rows) = self.arrays().into_iter().find(|(array, _)| *array == operand)?;
                Value::I32(rows.is_some().into())
            }
            Meaning::Threshold => Value::I32(dropout.map_or(0, |it| it.threshold() as i32)),
            Meaning::KeepScale => Value::F32(dropout.map_or(1.0, |it| 1.0 / (1.0 - it.rate))),
            Meaning::QPosition => position(positions.query, query),
            Meaning::KPosition => position(positions.key, key),
            Meaning::PositionStride => Value::I32(positions.stride as i32),
            _ => return None,
        })
    }

    /// Checks that the kernels compute these features over `rows` rows of either side.
    pub(crate) fn check(&self, rows: usize) -> Result<(), LaunchError> {
        let Features { slopes, dropout, .. } = *self;
        if let Some(rate) = dropout.map(|dropout| dropout.rate)
            && !(0.0..1.0).contains(&rate)
        {
            return Err(LaunchError::invalid("rate of dropout", "at least 0 and below 1", rate));
        }
        if self.visible.is_some_and(|it| it.positions.is_none() && it.intervals.is_some()) {
            return Err(LaunchError::invalid("positions", "given with intervals", "none"));
        }
        if self.visible.is_some_and(|it| it.also.is_some() && it.intervals.is_none()) {
            return Err(LaunchError::invalid("intervals", "given with second intervals", "none"));
        }
        if slopes.is_none() && dropout.is_none() { Ok(()) } else { self.positions.check(rows) }
    }
}

impl Dropout {
    /// Returns 2³² times the rate, to the nearest: a weight stays where its 32 random bits are not
    /// below.
    fn threshold(&self) -> u32 {
        (f64::from(self.rate) * 4_294_967_296.0).round() as u32
    }
}

impl EvenPositions {
    /// Checks that the positions of `rows` rows fit 32 bits.
    fn check(&self, rows: usize) -> Result<(), LaunchError> {
        let EvenPositions { query, key, stride } = *self;
        let furthest = rows as i128 * i128::from(stride);
        for (name, first) in
            [("position of the first query", query), ("position of the first key", key)]
        {
            let most = i128::from(i32::MAX);
            let (begin, end) = (i128::from(first), i128::from(first) + furthest);
            if !(0..=most).contains(&begin) || !(0..=most).contains(&end) {
                let expected = format!("such that it and {rows} rows on are from 0 to {most}");
                let got = format!("{first}, {stride} apart");
                return Err(LaunchError::invalid(name, expected, got));
            }
        }
        Ok(())
    }
}
