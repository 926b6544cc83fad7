//! The table: the arrays of calls and the features that ask for them. A feature that takes an array
//! needs a field of [`Features`] and a row of `ROWS`, both here.

use serde::Deserialize;

use super::types::{Dim, ElementType};

/// The features of a problem, which change scores and weights beyond q·k, its scale and the window.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Features {
    /// The cap of scores, which become `cap · tanh(score / cap)` before slopes and masks.
    pub soft_cap: Option<f32>,
    /// Whether every query and key has a segment, int32. A query and a key see each other if their
    /// segments are equal and not negative.
    pub segments: bool,
    /// Whether every query head has a slope, float32, which adds `slope · (key position − query
    /// position)` to its scores.
    pub slopes: bool,
    /// The probability that a weight is dropped. All other weights are divided by 1 − probability.
    pub dropout: Option<f32>,
    /// Whether every key has an interval of query positions, int32 (start, stop): a query at
    /// position p sees the key only if start ≤ p < stop.
    pub visible: bool,
    /// Whether every key has a second interval: a query sees the key if either interval allows it.
    pub also_visible: bool,
    /// Whether the positions of keys are data too, int32. Slopes and dropout then count by them.
    pub positions: bool,
}

impl Features {
    /// No features.
    pub const NONE: Features = Features {
        soft_cap: None,
        segments: false,
        slopes: false,
        dropout: None,
        visible: false,
        also_visible: false,
        positions: false,
    };
}

/// An array of a call, in the order in which calls take and return arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operand {
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// Result of the forward pass. The backward pass takes it in the problem's type or in float32.
    Out,
    /// Natural logarithm of Σ e^score, for each query.
    Lse,
    /// Cotangent of the result.
    OutGrad,
    /// Cotangent of lse.
    LseGrad,
    /// Segment of each query.
    QuerySegments,
    /// Segment of each key.
    KeySegments,
    /// ALiBi slope of each query head.
    Slopes,
    /// First interval of query positions that see each key: (start, stop).
    Visible,
    /// Second interval of query positions that see each key: (start, stop).
    AlsoVisible,
    /// Position of each query in the sequence.
    QueryPositions,
    /// Position of each key in the sequence.
    KeyPositions,
    /// For each batch entry the two words of a random key, the index of the entry, and the index of
    /// the first query head. Both indices count in the whole model.
    Dropout,
    /// Gradient of the queries.
    QueryGrad,
    /// Gradient of the keys.
    KeyGrad,
    /// Gradient of the values.
    ValueGrad,
    /// This rank's part of the gradient of the slopes. On GPUs the array holds the part of each
    /// query, and starts as zeros.
    SlopeGrad,
}

/// The role of an array in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Absent,
    Input,
    Result,
}

/// The row of an array.
#[derive(Debug)]
pub(super) struct Row {
    pub operand: Operand,
    pub name: &'static str,
    /// Lengths after the batch.
    pub dims: &'static [Dim],
    pub element: ElementType,
    /// Roles in the forward pass and in the backward pass.
    pub roles: [Role; 2],
    /// The input that the array is the gradient of. Where that input has rows, sums of its gradient
    /// travel with them.
    pub gradient_of: Option<Operand>,
    /// The feature that asks for the array; `None` for an array of every problem.
    pub feature: Option<Flag>,
}

/// A feature of a problem.
#[derive(Debug)]
pub(super) struct Flag {
    /// The name of its field of [`Features`] if the field says no more than whether it is on.
    pub name: Option<&'static str>,
    pub is_on: fn(&Features) -> bool,
    /// Turns the feature on. Does nothing if a number of the caller or another array turns it on.
    pub turn_on: fn(&mut Features),
}

const QUERY: &[Dim] = &[Dim::QLen, Dim::Heads, Dim::HeadDim];
const KEY: &[Dim] = &[Dim::KvLen, Dim::KvHeads, Dim::HeadDim];
const VALUE: &[Dim] = &[Dim::KvLen, Dim::KvHeads, Dim::ValueDim];
const OUT: &[Dim] = &[Dim::QLen, Dim::Heads, Dim::ValueDim];
pub(super) const PER_QUERY: &[Dim] = &[Dim::QLen, Dim::Heads];

pub(super) const INPUT: [Role; 2] = [Role::Input, Role::Input];
const KEPT: [Role; 2] = [Role::Result, Role::Input];
const COTANGENT: [Role; 2] = [Role::Absent, Role::Input];
const GRADIENT: [Role; 2] = [Role::Absent, Role::Result];

macro_rules! rows {
    (@input) => { None };
    (@input $input:ident) => { Some(Operand::$input) };
    (@feature) => { None };
    (@feature dropout) => {
        Some(Flag { name: None, is_on: |features| features.dropout.is_some(), turn_on: |_| () })
    };
    (@feature has_query_positions) => {
        Some(Flag { name: None, is_on: Features::has_query_positions, turn_on: |_| () })
    };
    (@feature $flag:ident) => {
        Some(Flag {
            name: Some(stringify!($flag)),
            is_on: |features| features.$flag,
            turn_on: |features| features.$flag = true,
        })
    };
    ($(
        $operand:ident: $name:literal, $dims:expr, $element:ident,
        $roles:ident $(of $input:ident)? $(, $flag:ident)?;
    )*) => {
        &[$(Row {
            operand: Operand::$operand,
            name: $name,
            dims: $dims,
            element: ElementType::$element,
            roles: $roles,
            gradient_of: rows!(@input $($input)?),
            feature: rows!(@feature $($flag)?),
        }),*]
    };
}

/// All arrays, in the order of [`Operand`].
pub(super) const ROWS: &[Row] = rows! {
    Query: "query", QUERY, Activation, INPUT;
    Key: "key", KEY, Activation, INPUT;
    Value: "value", VALUE, Activation, INPUT;
    Out: "out", OUT, ActivationOrFloat32, KEPT;
    Lse: "lse", PER_QUERY, Float32, KEPT;
    OutGrad: "dout", OUT, Activation, COTANGENT;
    LseGrad: "dlse", PER_QUERY, Float32, COTANGENT;
    QuerySegments: "query_segment_ids", &[Dim::QLen], Int32, INPUT, segments;
    KeySegments: "key_segment_ids", &[Dim::KvLen], Int32, INPUT, segments;
    Slopes: "alibi_slopes", &[Dim::Heads], Float32, INPUT, slopes;
    Visible: "visible", &[Dim::KvLen, Dim::Number(2)], Int32, INPUT, visible;
    AlsoVisible: "also_visible", &[Dim::KvLen, Dim::Number(2)], Int32, INPUT, also_visible;
    QueryPositions: "query_positions", &[Dim::QLen], Int32, INPUT, has_query_positions;
    KeyPositions: "key_positions", &[Dim::KvLen], Int32, INPUT, positions;
    Dropout: "dropout", &[Dim::Number(4)], Uint32, INPUT, dropout;
    QueryGrad: "dq", QUERY, Activation, GRADIENT of Query;
    KeyGrad: "dk", KEY, Activation, GRADIENT of Key;
    ValueGrad: "dv", VALUE, Activation, GRADIENT of Value;
    SlopeGrad: "dslopes", &[Dim::Heads], Float32, GRADIENT of Slopes, slopes;
};
