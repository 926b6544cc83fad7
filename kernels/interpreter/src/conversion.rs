//! Conversions between element types.

use super::attributes::{NEAREST_EVEN, NEAREST_INT_TO_ZERO};
use super::error::{Fault, Outcome, malformed, undefined, unsupported};
use super::machine::Machine;
use super::program::Step;
use super::tile::{Data, Element, Tile, tile_type, unsigned, wrap};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::ScalarType;
use half::{bf16, f16};

impl<'a> Machine<'a> {
    pub fn convert(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        use Opcode::*;
        let [from] = self.tiles::<1>(step)?;
        let [result] = &step.op.result_types[..] else {
            return malformed("one result expected");
        };
        let (to, shape) = tile_type(result)?;
        let data = match step.op.opcode {
            FToF => float_to_float(step, &from, to)?,
            FToI => float_to_int(step, &from, to)?,
            IToF => int_to_float(step, &from, to)?,
            ExtI => extend(step, &from, to)?,
            TruncI => truncate(step, &from, to)?,
            PtrToInt | IntToPtr | PtrToPtr => {
                let pointer = |element| matches!(element, Element::Pointer(_));
                let wide = |element: Element| pointer(element) || element.int_bits() == Some(64);
                let fits = match step.op.opcode {
                    PtrToInt => pointer(from.element) && !pointer(to),
                    IntToPtr => !pointer(from.element) && pointer(to),
                    _ => pointer(from.element) && pointer(to),
                };
                if !fits || !wide(from.element) || !wide(to) {
                    return malformed(format!("{:?} to {to:?}", from.element));
                }
                Data::clone(&from.data)
            }
            // Read the bits of the whole tile as the other type.
            Bitcast | Pack | Unpack => {
                let bytes = from.element.encode(&from.data, 0, from.data.len());
                let count = bytes.len() / to.width();
                let same_width = from.element.width() == to.width();
                let bool_only = |element| element == Element::Scalar(ScalarType::I1);
                if step.op.opcode == Bitcast && !same_width
                    || bool_only(from.element) != bool_only(to)
                {
                    return malformed(format!("bits of {:?} as {to:?}", from.element));
                }
                let mut data = to.poison(count);
                to.decode(&bytes, &mut data, 0)?;
                let [length] = [data.len()];
                let shape = if same_width { from.shape.clone() } else { [length].into() };
                return Ok(Tile::new(to, shape, data));
            }
            other => return unsupported(other.name()),
        };
        // The body of a reduction declares scalars, but it runs on many elements.
        let shape = if self.lanes.is_some() { from.shape.clone() } else { shape.into() };
        if shape != from.shape {
            return malformed(format!("{:?} converted to {shape:?}", from.shape));
        }
        Ok(Tile::new(to, shape, data))
    }
}

/// Returns float64 values, rounded once to a float type.
fn round_f64(values: impl Iterator<Item = f64>, to: Element) -> Outcome<Data> {
    Ok(match to {
        Element::Scalar(ScalarType::F64) => Data::F64(values.collect()),
        Element::Scalar(ScalarType::F32) => Data::F32(values.map(|x| x as f32).collect()),
        Element::Scalar(ScalarType::F16) => {
            Data::F32(values.map(|x| f16::from_f64(x).to_f32()).collect())
        }
        Element::Scalar(ScalarType::BF16) => {
            Data::F32(values.map(|x| bf16::from_f64(x).to_f32()).collect())
        }
        other => return malformed(format!("a float expected, got {other:?}")),
    })
}

fn float_to_float(step: &Step, from: &Tile, to: Element) -> Outcome<Data> {
    step.rounding("rounding_mode", Some(NEAREST_EVEN), &[NEAREST_EVEN])?;
    if !to.is_float() || from.element == to {
        return malformed(format!("{:?} to {to:?}", from.element));
    }
    match &*from.data {
        Data::F32(values) if to != Element::Scalar(ScalarType::F64) => {
            let mut values = values.clone();
            to.round(&mut values);
            Ok(Data::F32(values))
        }
        Data::F32(values) => round_f64(values.iter().map(|&x| x.into()), to),
        Data::F64(values) => round_f64(values.iter().copied(), to),
        Data::Int(_) => malformed(format!("a float expected, got {:?}", from.element)),
    }
}

fn float_to_int(step: &Step, from: &Tile, to: Element) -> Outcome<Data> {
    step.rounding("rounding_mode", None, &[NEAREST_INT_TO_ZERO])?;
    let signed = step.signed("signedness")?;
    let saturating = matches!(step.int_or("saturating", 0)?, 1);
    let Some(bits) = to.int_bits() else {
        return malformed(format!("an integer expected, got {to:?}"));
    };
    let (low, high) = if signed {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    };
    let one = |x: f64| {
        let whole = x.trunc() as i128;
        if x.is_nan() || !saturating && (x.is_infinite() || !(low..=high).contains(&whole)) {
            return undefined(format!("{x} as an integer of {bits} bits, signed {signed}"));
        }
        Ok(wrap(whole.clamp(low, high), bits))
    };
    let data = match &*from.data {
        Data::F32(values) => values.iter().map(|&x| one(x.into())).collect::<Outcome<_>>()?,
        Data::F64(values) => values.iter().map(|&x| one(x)).collect::<Outcome<_>>()?,
        Data::Int(_) => return malformed(format!("a float expected, got {:?}", from.element)),
    };
    Ok(Data::Int(data))
}

fn int_to_float(step: &Step, from: &Tile, to: Element) -> Outcome<Data> {
    step.rounding("rounding_mode", Some(NEAREST_EVEN), &[NEAREST_EVEN])?;
    let signed = step.signed("signedness")?;
    let bits = from.bits()?;
    let number = |&x: &i64| if signed { i128::from(x) } else { i128::from(unsigned(x, bits)) };
    let values = from.ints()?;
    if to == Element::Scalar(ScalarType::F32) {
        return Ok(Data::F32(values.iter().map(|x| number(x) as f32).collect()));
    }
    // Beyond 2^53 a conversion through float64 would round twice.
    let inexact = |x: &&i64| number(x).unsigned_abs() > 1 << f64::MANTISSA_DIGITS;
    if let (Some(x), true) = (values.iter().find(inexact), to.width() == 2) {
        return unsupported(format!("{} to {to:?}", number(x)));
    }
    round_f64(values.iter().map(|x| number(x) as f64), to)
}

fn extend(step: &Step, from: &Tile, to: Element) -> Outcome<Data> {
    let signed = step.signed("signedness")?;
    let bits = from.bits()?;
    if to.int_bits().is_none_or(|wider| wider <= bits) {
        return malformed(format!("{:?} extended to {to:?}", from.element));
    }
    let one = |&x: &i64| if signed { x } else { unsigned(x, bits) as i64 };
    Ok(Data::Int(from.ints()?.iter().map(one).collect()))
}

fn truncate(step: &Step, from: &Tile, to: Element) -> Outcome<Data> {
    let flags = step.int_or("overflow", 0)?;
    let bits = from.bits()?;
    let narrower = to.int_bits().filter(|&narrower| narrower < bits);
    let (Some(to_bits), 0..=3) = (narrower, flags) else {
        return malformed(format!("{:?} to {to:?}, overflow {flags}", from.element));
    };
    let one = |&x: &i64| {
        let result = wrap(x.into(), to_bits);
        let lost_sign = flags & 1 != 0 && result != x;
        let lost_bits = flags & 2 != 0 && unsigned(x, bits) != unsigned(result, to_bits);
        if lost_sign || lost_bits {
            return Err(Fault::Promise(format!("{x} truncated to {to_bits} bits")));
        }
        Ok(result)
    };
    Ok(Data::Int(from.ints()?.iter().map(one).collect::<Outcome<_>>()?))
}
