//! Floating-point arithmetic, comparison and selection.

use std::cmp::Ordering;

use crate::compute::Compute;
use crate::number::{
    MODES, Rounding, decode as value, directed, encode, error_of_sum, flush, sum_to_odd,
};
use crate::types::{Mnemonic, Type};

type Operation = fn([f64; 3]) -> f64;
/// Returns where the exact result lies from its nearest float64.
type Remainder = fn([f64; 3], f64) -> Ordering;

/// A floating-point instruction.
struct Row {
    name: &'static str,
    operands: usize,
    /// The result of floats of up to 32 bits, exact or rounded to odd, or a float64 that is close
    /// enough that its rounding is the rounding of the exact result.
    narrow: Operation,
    /// The result of float64, rounded to nearest.
    double: Operation,
    /// What directed rounding of float64 needs, where it is supported.
    remainder: Option<Remainder>,
}

const fn row(name: &'static str, operands: usize, narrow: Operation, double: Operation) -> Row {
    Row { name, operands, narrow, double, remainder: None }
}

const fn same(name: &'static str, operands: usize, operation: Operation) -> Row {
    row(name, operands, operation, operation)
}

/// All instructions. The interpreter computes approximate variants of `rcp`, `rsqrt`, `sqrt` and `div`
/// as exactly as their rounded variants.
const ROWS: [Row; 17] = [
    Row {
        remainder: Some(|[a, b, _], sum| error_of_sum(a, b, sum)),
        ..row("add", 2, |[a, b, _]| sum_to_odd(a, b), |[a, b, _]| a + b)
    },
    Row {
        remainder: Some(|[a, b, _], sum| error_of_sum(a, -b, sum)),
        ..row("sub", 2, |[a, b, _]| sum_to_odd(a, -b), |[a, b, _]| a - b)
    },
    Row {
        remainder: Some(|[a, b, _], product| {
            a.mul_add(b, -product).partial_cmp(&0.0).unwrap_or(Ordering::Equal)
        }),
        ..same("mul", 2, |[a, b, _]| a * b)
    },
    row("fma", 3, |[a, b, c]| sum_to_odd(a * b, c), |[a, b, c]| a.mul_add(b, c)),
    row("mad", 3, |[a, b, c]| sum_to_odd(a * b, c), |[a, b, c]| a.mul_add(b, c)),
    same("div", 2, |[a, b, _]| a / b),
    same("rcp", 1, |[a, ..]| 1.0 / a),
    same("sqrt", 1, |[a, ..]| a.sqrt()),
    same("rsqrt", 1, |[a, ..]| 1.0 / a.sqrt()),
    same("ex2", 1, |[a, ..]| a.exp2()),
    same("lg2", 1, |[a, ..]| a.log2()),
    same("sin", 1, |[a, ..]| a.sin()),
    same("cos", 1, |[a, ..]| a.cos()),
    same("tanh", 1, |[a, ..]| a.tanh()),
    same("neg", 1, |[a, ..]| -a),
    same("abs", 1, |[a, ..]| a.abs()),
    same("copysign", 2, |[sign, size, _]| size.copysign(sign)),
];

/// Returns the computation of an instruction on floats.
pub(crate) fn decode(mnemonic: &mut Mnemonic<'_>) -> Result<Option<Compute>, String> {
    if matches!(mnemonic.name, "min" | "max") {
        return extreme(mnemonic).map(Some);
    }
    let Some(row) = ROWS.iter().find(|row| row.name == mnemonic.name) else {
        return Ok(None);
    };
    // `add.rn.f32.bf16` takes one narrow operand and then a float32.
    let first = float(mnemonic)?;
    let mixed = matches!(row.name, "add" | "sub" | "fma") && mnemonic.clone().ty().is_ok();
    let ty = if mixed { float(mnemonic)? } else { first };
    let shape = Shape::take(mnemonic);
    let rounding = mnemonic.choose(&MODES);
    let approximate = mnemonic.take("approx");
    mnemonic.take("full");
    let mode = rounding.unwrap_or(Rounding::Nearest);
    let double = ty.bits == 64;
    if !double {
        return Ok(Some(shape.compute([first, ty], row.operands, mode, row.narrow)));
    }
    let operation = row.double;
    let remainder = row.remainder;
    if mode != Rounding::Nearest && remainder.is_none() {
        return Err(format!("'{}' of float64 rounds to nearest only", row.name));
    }
    // `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64` have 20 bits of fraction.
    let coarse = approximate && shape.flushes;
    let kept = if coarse { u64::MAX << 32 } else { u64::MAX };
    Ok(Some(Compute::uniform(ty, row.operands, move |x| {
        let read = |x| if coarse { flush_double(value(ty, x)) } else { value(ty, x) };
        let x = [read(x[0]), read(x[1]), read(x[2])];
        let nearest = operation(x);
        let result = match remainder {
            Some(remainder) if mode != Rounding::Nearest => {
                directed(nearest, remainder(x, nearest), mode)
            }
            _ => nearest,
        };
        Some(encode(ty, result, mode) & kept)
    })))
}

fn flush_double(x: f64) -> f64 {
    if x.is_subnormal() { 0f64.copysign(x) } else { x }
}

fn float(mnemonic: &mut Mnemonic<'_>) -> Result<Type, String> {
    let ty = mnemonic.ty()?;
    if ty.is_float() { Ok(ty) } else { Err(format!("'{}' needs a float type", mnemonic.name)) }
}

/// What happens to operands before, and to the result after an operation.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Whether subnormals of float32 are zeros.
    flushes: bool,
    /// Whether the result is clamped to [0, 1].
    saturates: bool,
    /// Whether negative results are zeros.
    rectifies: bool,
}

impl Shape {
    pub fn take(mnemonic: &mut Mnemonic<'_>) -> Self {
        Self {
            flushes: mnemonic.take("ftz"),
            saturates: mnemonic.take("sat"),
            rectifies: mnemonic.take("relu"),
        }
    }

    /// Returns an operand's value.
    pub fn read(self, ty: Type, bits: u64) -> f64 {
        let value = value(ty, bits);
        if self.flushes && ty.bits == 32 { flush(value) } else { value }
    }

    /// Returns a result's bits.
    pub fn write(self, ty: Type, result: f64, mode: Rounding) -> u64 {
        let result = match result {
            x if self.saturates && x.is_nan() => 0.0,
            x if self.saturates => x.clamp(0.0, 1.0) + 0.0,
            x if self.rectifies && x < 0.0 => 0.0,
            x => x,
        };
        let bits = encode(ty, result, mode);
        let subnormal = ty.bits == 32 && f32::from_bits(bits as u32).is_subnormal();
        if self.flushes && subnormal { bits & 1 << 31 } else { bits }
    }

    /// Makes the computation of a result of the last operand's type. The operands before the last
    /// have the first type.
    fn compute(
        self,
        [first, ty]: [Type; 2],
        operands: usize,
        mode: Rounding,
        operation: impl Fn([f64; 3]) -> f64 + Send + Sync + 'static,
    ) -> Compute {
        let mut types = [first; 3];
        types[operands - 1] = ty;
        let lane = move |x: &[u64; 4], shift: u32| {
            let read = |k: usize| self.read(types[k], x[k] >> shift);
            self.write(ty, operation([read(0), read(1), read(2)]), mode) << shift
        };
        let pair = ty.lanes == 2;
        let widths = types.map(Type::width);
        Compute::new(ty.width(), &widths[..operands], move |x| {
            Some(lane(x, 0) | if pair { lane(x, ty.bits) } else { 0 })
        })
    }
}

/// Decodes `min` and `max` of two or three numbers.
fn extreme(mnemonic: &mut Mnemonic<'_>) -> Result<Compute, String> {
    let (ty, shape) = (float(mnemonic)?, Shape::take(mnemonic));
    let (least, spreads) = (mnemonic.name == "min", mnemonic.take("NaN"));
    let three = mnemonic.operands == 3;
    let pair = move |a: f64, b: f64| match () {
        () if spreads && (a.is_nan() || b.is_nan()) => f64::NAN,
        () if least => -larger(-a, -b),
        () => larger(a, b),
    };
    let operands = if three { 3 } else { 2 };
    Ok(shape.compute([ty; 2], operands, Rounding::Nearest, move |[a, b, c]| {
        if three { pair(pair(a, b), c) } else { pair(a, b) }
    }))
}

/// Returns the larger number; +0 is larger than −0, and any number is larger than NaN.
fn larger(a: f64, b: f64) -> f64 {
    let first = a > b || b.is_nan() || (a == b && !a.is_sign_negative());
    if first { a } else { b }
}
