//! The numbers that the reference computes with.

use std::ops::{Add, AddAssign, Div, Mul, Sub};

/// A floating-point type: `f64` for the exact results, `f32` for the error of plain arithmetic.
pub trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + From<f32>
    + Into<f64>
{
    /// Returns e to the power of the number.
    fn exp(self) -> Self;
    /// Returns the natural logarithm.
    fn ln(self) -> Self;
    /// Returns the hyperbolic tangent.
    fn tanh(self) -> Self;
}

macro_rules! real {
    ($($type:ident),*) => {$(
        impl Real for $type {
            fn exp(self) -> Self {
                $type::exp(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
        }
    )*};
}

real!(f32, f64);
