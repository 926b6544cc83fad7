//! Floating-point arithmetic, element by element.

use super::attributes::{APPROX, FULL, NEAREST_EVEN};
use super::error::{Outcome, malformed, unsupported};
use super::integer::{alike, predicate};
use super::machine::Machine;
use super::program::Step;
use super::tile::{Data, Element, Tile};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::ScalarType;

/// Evaluates an expression over pairs of float32 or of float64.
macro_rules! zip_floats {
    ($a:expr, $b:expr, |$x:ident, $y:ident| $body:expr) => {
        match ($a, $b) {
            (Data::F32(a), Data::F32(b)) => {
                Ok(Data::F32(a.iter().zip(b).map(|(&$x, &$y)| $body).collect()))
            }
            (Data::F64(a), Data::F64(b)) => {
                Ok(Data::F64(a.iter().zip(b).map(|(&$x, &$y)| $body).collect()))
            }
            _ => malformed("floats expected"),
        }
    };
}

/// Returns the larger operand by the given order: +0 above -0, NaNs as `propagate` says.
macro_rules! pick {
    ($x:ident, $y:ident, $propagate:ident, $first_if:ident) => {
        if $x.is_nan() || $y.is_nan() {
            let other = if $x.is_nan() { $y } else { $x };
            if $propagate || other.is_nan() { $x + $y } else { other }
        } else if $x.total_cmp(&$y).$first_if() {
            $x
        } else {
            $y
        }
    };
}

/// Turns subnormals of float32 into zeros of the same sign.
fn flush(values: &mut [f32]) {
    for x in values.iter_mut().filter(|x| x.is_subnormal()) {
        *x = 0f32.copysign(*x);
    }
}

fn flushed(tile: &Tile, on: bool) -> Outcome<Tile> {
    if on && tile.element != Element::Scalar(ScalarType::F32) {
        return unsupported(format!("flush_to_zero of {:?}", tile.element));
    }
    if !on || !tile.f32s()?.iter().any(|x| x.is_subnormal()) {
        return Ok(tile.clone());
    }
    let mut values = tile.f32s()?.to_vec();
    flush(&mut values);
    Ok(Tile::new(tile.element, tile.shape.clone(), Data::F32(values)))
}

/// Returns a result rounded to its type, and flushed if `ftz`.
fn finish(like: &Tile, mut data: Data, ftz: bool) -> Tile {
    if let Data::F32(values) = &mut data {
        like.element.round(values);
        if ftz {
            flush(values);
        }
    }
    Tile::new(like.element, like.shape.clone(), data)
}

fn only_f32(tile: &Tile, what: &str) -> Outcome<()> {
    if tile.element == Element::Scalar(ScalarType::F32) {
        return Ok(());
    }
    unsupported(format!("{what} of {:?}", tile.element))
}

/// Returns a quotient by the reciprocal, which is 0 from 2^126 on.
fn divide_approx(x: f32, y: f32) -> f32 {
    let huge = f32::MAX_EXP - 2;
    if y.is_finite() && y.abs() > 2f32.powi(huge) {
        return if x.is_infinite() || x.is_nan() { f32::NAN } else { 0.0 };
    }
    x / y
}

impl<'a> Machine<'a> {
    pub fn float_binary(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        use Opcode::*;
        let [a, b] = self.tiles::<2>(step)?;
        alike(&a, &b)?;
        let opcode = step.op.opcode;
        let mode = match opcode {
            AddF | SubF | MulF => step.rounding("rounding_mode", None, &[NEAREST_EVEN])?,
            DivF => step.rounding("rounding_mode", None, &[NEAREST_EVEN, APPROX, FULL])?,
            _ => step.rounding("rounding_mode", Some(NEAREST_EVEN), &[NEAREST_EVEN])?,
        };
        if mode != NEAREST_EVEN {
            only_f32(&a, "an approximate quotient")?;
        }
        let propagate = step.flag("propagate_nan")?;
        let ftz = step.flag("flush_to_zero")?;
        let (a, b) = (flushed(&a, ftz)?, flushed(&b, ftz)?);
        let (x, y) = (&*a.data, &*b.data);
        let data = match opcode {
            AddF => zip_floats!(x, y, |x, y| x + y),
            SubF => zip_floats!(x, y, |x, y| x - y),
            MulF => zip_floats!(x, y, |x, y| x * y),
            DivF if mode == APPROX => {
                let pairs = a.f32s()?.iter().zip(b.f32s()?);
                Ok(Data::F32(pairs.map(|(&x, &y)| divide_approx(x, y)).collect()))
            }
            DivF => zip_floats!(x, y, |x, y| x / y),
            RemF => zip_floats!(x, y, |x, y| x % y),
            MaxF => zip_floats!(x, y, |x, y| pick!(x, y, propagate, is_ge)),
            MinF => zip_floats!(x, y, |x, y| pick!(x, y, propagate, is_le)),
            Pow => zip_floats!(x, y, |x, y| through_f64(x, y, f64::powf)),
            Atan2 => zip_floats!(x, y, |x, y| through_f64(x, y, f64::atan2)),
            other => unsupported(other.name()),
        }?;
        Ok(finish(&a, data, ftz))
    }

    pub fn float_unary(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        use Opcode::*;
        let [a] = self.tiles::<1>(step)?;
        let opcode = step.op.opcode;
        let mode = match opcode {
            Sqrt => step.rounding("rounding_mode", None, &[NEAREST_EVEN, APPROX])?,
            Exp | TanH => step.rounding("rounding_mode", Some(FULL), &[FULL, APPROX])?,
            _ => FULL,
        };
        if mode == APPROX {
            only_f32(&a, "an approximation")?;
        }
        let f: fn(f64) -> f64 = match opcode {
            AbsF => f64::abs,
            NegF => |x| -x,
            Ceil => f64::ceil,
            Floor => f64::floor,
            Exp => f64::exp,
            Exp2 => f64::exp2,
            Log => f64::ln,
            Log2 => f64::log2,
            Sqrt => f64::sqrt,
            Rsqrt => |x| 1.0 / x.sqrt(),
            Sin => f64::sin,
            Cos => f64::cos,
            Tan => f64::tan,
            SinH => f64::sinh,
            CosH => f64::cosh,
            TanH => f64::tanh,
            other => return unsupported(other.name()),
        };
        let ftz = step.flag("flush_to_zero")?;
        let a = flushed(&a, ftz)?;
        let data = match &*a.data {
            Data::F32(values) => {
                Data::F32(values.iter().map(|&x| f(f64::from(x)) as f32).collect())
            }
            Data::F64(values) => Data::F64(values.iter().map(|&x| f(x)).collect()),
            Data::Int(_) => return malformed(format!("floats expected, got {:?}", a.element)),
        };
        Ok(finish(&a, data, ftz))
    }

    pub fn float_fma(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        let [a, b, c] = self.tiles::<3>(step)?;
        alike(&a, &b)?;
        alike(&a, &c)?;
        step.rounding("rounding_mode", None, &[NEAREST_EVEN])?;
        let ftz = step.flag("flush_to_zero")?;
        let (a, b, c) = (flushed(&a, ftz)?, flushed(&b, ftz)?, flushed(&c, ftz)?);
        let data = match (&*a.data, &*b.data, &*c.data) {
            (Data::F32(x), Data::F32(y), Data::F32(z)) => {
                let triples = x.iter().zip(y).zip(z);
                Data::F32(triples.map(|((x, y), &z)| x.mul_add(*y, z)).collect())
            }
            (Data::F64(x), Data::F64(y), Data::F64(z)) => {
                let triples = x.iter().zip(y).zip(z);
                Data::F64(triples.map(|((x, y), &z)| x.mul_add(*y, z)).collect())
            }
            _ => return malformed("floats expected"),
        };
        Ok(finish(&a, data, ftz))
    }

    pub fn float_compare(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        let [a, b] = self.tiles::<2>(step)?;
        alike(&a, &b)?;
        let holds = predicate(step)?;
        let unordered = match step.int("comparison_ordering")? {
            0 => true,
            1 => false,
            other => return unsupported(format!("comparison_ordering {other}")),
        };
        let bit = |ordering: Option<_>| -i64::from(ordering.map_or(unordered, holds));
        let data = match (&*a.data, &*b.data) {
            (Data::F32(x), Data::F32(y)) => {
                x.iter().zip(y).map(|(x, y)| bit(x.partial_cmp(y))).collect()
            }
            (Data::F64(x), Data::F64(y)) => {
                x.iter().zip(y).map(|(x, y)| bit(x.partial_cmp(y))).collect()
            }
            _ => return malformed(format!("floats expected, got {:?}", a.element)),
        };
        Ok(Tile::new(Element::Scalar(ScalarType::I1), a.shape.clone(), Data::Int(data)))
    }
}

/// Returns a function of two floats of either width, computed in float64 and rounded to their
/// width.
fn through_f64<T: Real>(x: T, y: T, f: fn(f64, f64) -> f64) -> T {
    T::from_f64(f(x.into(), y.into()))
}

trait Real: Into<f64> + Copy {
    fn from_f64(x: f64) -> Self;
}

impl Real for f32 {
    fn from_f64(x: f64) -> Self {
        x as f32
    }
}

impl Real for f64 {
    fn from_f64(x: f64) -> Self {
        x
    }
}
