//! The features of a problem, and the list of a call's arrays, with one row for each array.
//!
//! Every layer reads this list: the decoder of XLA's calls, the executors on CPU devices and on
//! GPUs, the chunks that travel, and, as JSON, the Python package. A feature that takes an array
//! needs a row here, a flag of [`Features`], and its arithmetic.

mod arrays;
mod features;

use std::fmt;

use crate::types::{Dtype, Pass};

pub use arrays::Arrays;
pub use features::{Features, SOFT_CAPS};

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

/// A length of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// Queries of a rank.
    QLen,
    /// Keys of a rank.
    KvLen,
    /// Query heads.
    Heads,
    /// Key/value heads.
    KvHeads,
    /// Columns of queries and keys.
    HeadDim,
    /// Columns of values and results.
    ValueDim,
    /// A fixed number.
    Number(usize),
}

/// Element type of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// The type of the problem.
    Activation,
    /// The type of the problem, or float32 if the result was kept unrounded.
    ActivationOrFloat32,
    /// float32.
    Float32,
    /// int32.
    Int32,
    /// uint32.
    Uint32,
}

/// The kind of device that computes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// CPU devices.
    Host,
    /// NVIDIA GPUs.
    Cuda,
}

/// The side of the attention that an array has rows for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// One row for each query.
    Queries,
    /// One row for each key.
    Keys,
}

/// The role of an array in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Absent,
    Input,
    Result,
}

/// The row of an array.
#[derive(Debug)]
struct Row {
    operand: Operand,
    name: &'static str,
    /// Lengths after the batch.
    dims: &'static [Dim],
    element: ElementType,
    /// Roles in the forward pass and in the backward pass.
    roles: [Role; 2],
    /// The input that the array is the gradient of. Where that input has rows, sums of its gradient
    /// travel with them.
    gradient_of: Option<Operand>,
    /// The feature that asks for the array; `None` for an array of every problem.
    feature: Option<Flag>,
}

/// A feature of a problem.
#[derive(Debug)]
struct Flag {
    /// The name of its field of [`Features`] if the field says no more than whether it is on.
    name: Option<&'static str>,
    is_on: fn(&Features) -> bool,
    /// Turns the feature on. Does nothing if a number of the caller or another array turns it on.
    turn_on: fn(&mut Features),
}

const QUERY: &[Dim] = &[Dim::QLen, Dim::Heads, Dim::HeadDim];
const KEY: &[Dim] = &[Dim::KvLen, Dim::KvHeads, Dim::HeadDim];
const VALUE: &[Dim] = &[Dim::KvLen, Dim::KvHeads, Dim::ValueDim];
const OUT: &[Dim] = &[Dim::QLen, Dim::Heads, Dim::ValueDim];
const PER_QUERY: &[Dim] = &[Dim::QLen, Dim::Heads];

const INPUT: [Role; 2] = [Role::Input, Role::Input];
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
const ROWS: &[Row] = rows! {
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

impl Operand {
    /// The number of operands.
    const COUNT: usize = ROWS.len();

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Returns the name in messages and in the Python package.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the lengths after the batch.
    pub fn dims(self, kind: DeviceKind) -> &'static [Dim] {
        match (self, kind) {
            // XLA sums the parts of a head's queries.
            (Operand::SlopeGrad, DeviceKind::Cuda) => PER_QUERY,
            _ => self.row().dims,
        }
    }

    /// Returns the element type.
    pub fn element(self, kind: DeviceKind) -> ElementType {
        match (self.row().element, kind) {
            (ElementType::ActivationOrFloat32, DeviceKind::Cuda) => ElementType::Activation,
            (element, _) => element,
        }
    }

    /// Returns the field of [`Features`] that asks for the array and says no more.
    pub fn flag(self) -> Option<&'static str> {
        self.row().feature.as_ref()?.name
    }

    /// Returns the gradient with respect to the array.
    pub fn gradient(self) -> Option<Operand> {
        ROWS.iter().find(|row| row.gradient_of == Some(self)).map(|row| row.operand)
    }

    /// Returns the side that the array has rows for, or `None` if it has no rows.
    pub fn side(self) -> Option<Side> {
        match self.row().dims {
            [Dim::QLen, ..] => Some(Side::Queries),
            [Dim::KvLen, ..] => Some(Side::Keys),
            _ => None,
        }
    }

    /// Returns all operands, in order.
    pub fn all() -> impl Iterator<Item = Operand> {
        ROWS.iter().map(|row| row.operand)
    }

    fn with_role(
        role: Role,
        pass: Pass,
        features: &Features,
    ) -> impl Iterator<Item = Operand> + use<> {
        let features = *features;
        let is_present =
            move |row: &&Row| row.feature.as_ref().is_none_or(|flag| (flag.is_on)(&features));
        let rows = ROWS.iter().filter(move |row| row.roles[pass as usize] == role);
        rows.filter(is_present).map(|row| row.operand)
    }

    /// Returns the arrays that a pass takes, in order.
    pub fn inputs(pass: Pass, features: &Features) -> impl Iterator<Item = Operand> + use<> {
        Operand::with_role(Role::Input, pass, features)
    }

    /// Returns the arrays that a pass returns, in order.
    pub fn results(pass: Pass, features: &Features) -> impl Iterator<Item = Operand> + use<> {
        Operand::with_role(Role::Result, pass, features)
    }

    /// Returns the gradients of the arrays of features, in order.
    pub fn gradients_of(features: &Features) -> impl Iterator<Item = Operand> + use<> {
        let results = Operand::results(Pass::Backward, features);
        results.filter(|operand| operand.row().feature.is_some())
    }

    /// Returns the arrays that calls take for any feature, in order.
    pub fn of_features() -> impl Iterator<Item = Operand> {
        let rows = ROWS.iter().filter(|row| row.feature.is_some() && row.roles == INPUT);
        rows.map(|row| row.operand)
    }

    /// Returns the arrays that a call takes for some features, in order.
    pub fn of(features: &Features) -> impl Iterator<Item = Operand> + use<> {
        let features = *features;
        let is_on = move |flag: &Flag| (flag.is_on)(&features);
        Operand::of_features()
            .filter(move |operand| operand.row().feature.as_ref().is_some_and(is_on))
    }

    /// Returns the arrays that features add to rows that travel, in order.
    pub fn travelling(features: &Features, side: Side) -> impl Iterator<Item = Operand> + use<> {
        Operand::of(features).filter(move |operand| operand.side() == Some(side))
    }

    /// Returns the gradients whose sums travel with rows of `side`, in order.
    pub fn gradients(features: &Features, side: Side) -> impl Iterator<Item = Operand> + use<> {
        let results = Operand::results(Pass::Backward, features);
        results.filter(move |operand| operand.side() == Some(side))
    }

    /// Returns the place of a feature's array among the `count` arrays of a chunk, or `None` if the
    /// problem lacks the feature. The arrays of a chunk end with [`Operand::travelling`].
    pub fn place_among(self, count: usize, features: &Features) -> Option<usize> {
        let side = self.side()?;
        let place = Operand::travelling(features, side).position(|operand| operand == self)?;
        Some(count - Operand::travelling(features, side).count() + place)
    }
}

impl Dim {
    /// Returns the name in the Python package. A number has none.
    pub fn name(self) -> &'static str {
        match self {
            Dim::QLen => "q_len",
            Dim::KvLen => "kv_len",
            Dim::Heads => "heads",
            Dim::KvHeads => "kv_heads",
            Dim::HeadDim => "head_dim",
            Dim::ValueDim => "value_dim",
            Dim::Number(_) => "",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElementType::Activation | ElementType::ActivationOrFloat32 => "the problem's",
            ElementType::Float32 => "float32",
            ElementType::Int32 => "int32",
            ElementType::Uint32 => "uint32",
        })
    }
}

impl ElementType {
    /// Returns the bytes of an element, for results that are rounded to the type of the problem.
    pub fn bytes(self, dtype: Dtype) -> usize {
        match self {
            ElementType::Activation | ElementType::ActivationOrFloat32 => dtype.bytes(),
            ElementType::Float32 | ElementType::Int32 | ElementType::Uint32 => 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operand_has_its_row() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(row.operand as usize, index, "{}", row.name);
        }
    }
}
