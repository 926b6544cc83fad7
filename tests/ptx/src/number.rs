//! Floats of all formats as float64, and their rounding.
//!
//! A float64 holds every float16, bfloat16 and float32, and every product of two of them. A sum may
//! need more bits. It is rounded "to odd" instead: the last bit is set if the float64 is not exact.
//! Such a float64 rounds to the same narrower float as the exact sum, in every mode.

use std::cmp::Ordering;

use half::{bf16, f16};

use crate::types::{Kind, Type};

/// The direction of rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    NearestAway,
    Zero,
    Down,
    Up,
}

/// The rounding modes of arithmetic.
pub(crate) const MODES: [(&str, Rounding); 5] = [
    ("rn", Rounding::Nearest),
    ("rna", Rounding::NearestAway),
    ("rz", Rounding::Zero),
    ("rm", Rounding::Down),
    ("rp", Rounding::Up),
];

/// Returns the value of a float's bits.
pub(crate) fn decode(ty: Type, bits: u64) -> f64 {
    match (ty.kind, ty.bits) {
        (Kind::Brain, _) => bf16::from_bits(bits as u16).to_f64(),
        (_, 16) => f16::from_bits(bits as u16).to_f64(),
        (_, 32) => f32::from_bits(bits as u32).into(),
        _ => f64::from_bits(bits),
    }
}

/// Returns the bits of an exact value, or of a value rounded to odd, in a format.
pub(crate) fn encode(ty: Type, value: f64, mode: Rounding) -> u64 {
    let precision = precision(ty);
    if value.is_nan() {
        // NVIDIA's GPUs have one NaN of each narrow format as the result of arithmetic.
        return if ty.bits == 64 { value.to_bits() } else { ty.mask() >> 1 };
    }
    match (ty.bits, mode) {
        (64, _) => return value.to_bits(),
        (32, Rounding::Nearest) => return (value as f32).to_bits().into(),
        _ => {}
    }
    let fraction = precision - 1;
    let exponents = (1 << (ty.bits - precision)) - 1;
    let infinity = (exponents as u64) << fraction;
    let sign = u64::from(value.is_sign_negative()) << (ty.bits - 1);
    let size = value.abs();
    if size.is_infinite() {
        return sign | infinity;
    }
    let least = 1 - exponents / 2;
    let exponent = least.max((size.to_bits() >> 52) as i32 - 1023);
    // Scaling by a power of two is exact.
    let scaled = size * f64::powi(2.0, fraction as i32 - exponent);
    let whole = scaled.floor();
    let up = rounds_up(mode, value < 0.0, scaled - whole, whole % 2.0 == 1.0);
    // A carry out of the fraction enters the exponent, and so does the implicit first bit.
    let bits = (((exponent - least) as u64) << fraction) + whole as u64 + u64::from(up);
    let finite = match mode {
        Rounding::Nearest | Rounding::NearestAway => false,
        Rounding::Zero => true,
        Rounding::Down => value > 0.0,
        Rounding::Up => value < 0.0,
    };
    sign | if bits >= infinity && finite { infinity - 1 } else { bits.min(infinity) }
}

/// Returns whether the size of a value rounds up, given the part below its last bit.
fn rounds_up(mode: Rounding, negative: bool, rest: f64, odd: bool) -> bool {
    match mode {
        Rounding::Nearest => rest > 0.5 || (rest == 0.5 && odd),
        Rounding::NearestAway => rest >= 0.5,
        Rounding::Zero => false,
        Rounding::Down => rest > 0.0 && negative,
        Rounding::Up => rest > 0.0 && !negative,
    }
}

/// Returns the bits of a float's significand, with the implicit bit.
fn precision(ty: Type) -> u32 {
    match (ty.kind, ty.bits) {
        (Kind::Brain, _) => 8,
        (_, 16) => 11,
        (_, 32) => 24,
        _ => 53,
    }
}

/// Returns a value with subnormals of float32 replaced by zeros of the same sign.
pub(crate) fn flush(value: f64) -> f64 {
    if value.abs() < f32::MIN_POSITIVE.into() { 0f64.copysign(value) } else { value }
}

/// Rounds to an integer.
pub(crate) fn integral(value: f64, mode: Rounding) -> f64 {
    match mode {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::NearestAway => value.round(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// Returns a + b, rounded to odd.
pub(crate) fn sum_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    to_odd(sum, error_of_sum(a, b, sum))
}

/// Returns the exact difference of a + b and its rounded value.
pub(crate) fn error_of_sum(a: f64, b: f64, sum: f64) -> Ordering {
    let shifted = sum - a;
    let error = (a - (sum - shifted)) + (b - shifted);
    error.partial_cmp(&0.0).unwrap_or(Ordering::Equal)
}

/// Returns the float64 of an integer, rounded to odd.
pub(crate) fn integer_to_odd(integer: i128) -> f64 {
    let nearest = integer as f64;
    to_odd(nearest, integer.cmp(&(nearest as i128)))
}

/// Rounds to odd, given the nearest float64 and where the exact value lies from it.
fn to_odd(nearest: f64, exact: Ordering) -> f64 {
    match exact {
        _ if nearest.to_bits() & 1 == 1 => nearest,
        Ordering::Equal => nearest,
        Ordering::Greater => nearest.next_up(),
        Ordering::Less => nearest.next_down(),
    }
}

/// Rounds to float64, given the nearest float64 and where the exact value lies from it.
pub(crate) fn directed(nearest: f64, exact: Ordering, mode: Rounding) -> f64 {
    let mode = match mode {
        Rounding::Zero if nearest > 0.0 => Rounding::Down,
        Rounding::Zero => Rounding::Up,
        other => other,
    };
    match (mode, exact) {
        (Rounding::Down, Ordering::Less) => nearest.next_down(),
        (Rounding::Up, Ordering::Greater) => nearest.next_up(),
        _ => nearest,
    }
}
