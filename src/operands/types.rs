//! What the table says of an array: lengths, element type, side, and the kind of device.

use std::fmt;

use crate::types::Dtype;

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
