//! Types that problems, schedules and executors share.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Element type of the activations. Accumulators are float32 for every element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Dtype {
    /// Returns the bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        })
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        let found = all.into_iter().find(|dtype| dtype.to_string() == name);
        found.ok_or_else(|| invalid("dtype", "float32, bfloat16 or float16", name))
    }
}

/// The pass that a schedule or an executor serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Computes `o` and `lse`.
    Forward,
    /// Computes `dq`, `dk` and `dv` from the final `o` and `lse`.
    Backward,
}

/// The side of the attention that travels round the ring. The other side stays at home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Travels {
    /// Keys and values travel; in the backward pass dk and dv follow them.
    Keys,
    /// Queries travel; in the backward pass `dout`, `lse` and `delta` travel with them, and `dq`
    /// follows.
    Queries,
}

/// The order in which kernels on GPUs add to a gradient in the backward pass. On CPU devices the
/// order is always fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// A fixed order: every run gives the same bits.
    Fixed,
    /// Any order where that is predicted faster, or where nothing is predicted: runs may differ in
    /// the last bits.
    Any,
    /// Any order where that is predicted faster, otherwise a fixed one.
    Auto,
}

impl FromStr for Order {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "fixed" => Ok(Order::Fixed),
            "any" => Ok(Order::Any),
            "auto" => Ok(Order::Auto),
            other => Err(invalid("backward_order", "fixed, any or auto", other)),
        }
    }
}

/// Deserializes types from their names, with the errors of their [`FromStr`].
macro_rules! deserialize_by_name {
    ($($type:ty),*) => {$(
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(
                from: D,
            ) -> std::result::Result<Self, D::Error> {
                let name = <String as serde::Deserialize>::deserialize(from)?;
                name.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}
pub(crate) use deserialize_by_name;

deserialize_by_name!(Dtype, Order);

/// Returns the error of a field that has a wrong value.
pub(crate) fn invalid(
    name: &'static str,
    expected: impl Into<String>,
    got: impl fmt::Display,
) -> Error {
    Error::InvalidProblem { name, expected: expected.into(), got: got.to_string() }
}
