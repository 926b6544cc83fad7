//! Moves within registers: conversions between types and between kinds of addresses.

use crate::compute::{Compute, Function, Width};
use crate::float::Shape;
use crate::memory::Space;
use crate::number::{MODES, Rounding, directed, integer_to_odd, integral};
use crate::types::{Kind, Mnemonic, Type};

/// Rounding to an integer.
const INTEGER_MODES: [(&str, Rounding); 4] = [
    ("rni", Rounding::Nearest),
    ("rzi", Rounding::Zero),
    ("rmi", Rounding::Down),
    ("rpi", Rounding::Up),
];

/// Returns the computation of a conversion.
pub(crate) fn decode(mnemonic: &mut Mnemonic<'_>) -> Result<Option<Compute>, String> {
    match mnemonic.name {
        "cvt" => convert(mnemonic).map(Some),
        "cvta" => address(mnemonic).map(Some),
        _ => Ok(None),
    }
}

/// Decodes `cvta`: a generic address holds the kind of memory in its high bits.
fn address(mnemonic: &mut Mnemonic<'_>) -> Result<Compute, String> {
    let from_generic = mnemonic.take("to");
    let space = mnemonic.require("kind of memory", &Space::WINDOWS)?;
    mnemonic.ty()?;
    Ok(Compute::new(64, &[64], move |x| {
        if !from_generic {
            return Some(space.generic(x[0]));
        }
        let (found, address) = Space::of(x[0]);
        (found == space).then_some(address)
    }))
}

fn convert(mnemonic: &mut Mnemonic<'_>) -> Result<Compute, String> {
    let from = mnemonic.ty()?;
    let to = mnemonic.ty()?;
    let (mode, whole) = (mnemonic.choose(&MODES), mnemonic.choose(&INTEGER_MODES));
    let shape = if from.is_float() || to.is_float() { Some(Shape::take(mnemonic)) } else { None };
    let saturates = shape.is_none() && mnemonic.take("sat");
    if to.lanes == 2 {
        return pack(from, to, shape, mode);
    }
    if from.lanes == 2 {
        return Err("a pair is no operand of a conversion to one lane".into());
    }
    let mode = mode.unwrap_or(Rounding::Nearest);
    let function: Function = match (from.is_float(), to.is_float(), shape) {
        (false, false, _) => Box::new(move |x| {
            let (least, largest) = to.range();
            let value = from.integer(x[0]);
            let value = if saturates { value.clamp(least, largest) } else { value };
            // A wider register holds the value with its sign.
            Some(to.integer(value as u64 & to.mask()) as u64)
        }),
        (false, true, Some(shape)) => Box::new(move |x| {
            let integer = from.integer(x[0]);
            let value = if to.bits == 64 {
                let nearest = integer as f64;
                directed(nearest, integer.cmp(&(nearest as i128)), mode)
            } else {
                integer_to_odd(integer)
            };
            Some(shape.write(to, value, mode))
        }),
        (true, false, Some(shape)) => {
            let whole = whole.ok_or("a conversion to integers needs a rounding such as 'rzi'")?;
            Box::new(move |x| Some(to_integer(from, to, integral(shape.read(from, x[0]), whole))))
        }
        (_, _, Some(shape)) => Box::new(move |x| {
            let value = shape.read(from, x[0]);
            let value = whole.map_or(value, |whole| integral(value, whole));
            Some(shape.write(to, value, mode))
        }),
        (_, _, None) => unreachable!("conversions of floats have a shape"),
    };
    let to_width = if to.is_float() { Width::Exactly(to.bits) } else { Width::AtLeast(to.bits) };
    // Without saturation, an integer keeps the bits that fit.
    let moved = usize::from(!from.is_float() && !to.is_float() && !saturates);
    Ok(Compute { to: to_width, from: vec![Width::AtLeast(from.bits)], function, moved })
}

/// Returns an integer's bits. Values out of range become the nearest integer of the type.
fn to_integer(from: Type, to: Type, value: f64) -> u64 {
    if value.is_nan() {
        return if from.bits == 64 || to.bits == 64 { 1 << (to.bits - 1) } else { 0 };
    }
    let (least, largest) = to.range();
    (value as i128).clamp(least, largest) as u64
}

/// Decodes a conversion of two floats to a pair; the first operand is the high half.
fn pack(
    from: Type,
    to: Type,
    shape: Option<Shape>,
    mode: Option<Rounding>,
) -> Result<Compute, String> {
    let shape = shape.ok_or("a pair holds floats only")?;
    let mode = mode.ok_or("a conversion to a pair needs a rounding such as 'rn'")?;
    if from != Type::new(Kind::Float, 32, 1) {
        return Err("a conversion to a pair is supported from f32 only".into());
    }
    Ok(Compute::new(32, &[32, 32], move |x| {
        let half = |x| shape.write(to, shape.read(from, x), mode);
        Some(half(x[0]) << 16 | half(x[1]))
    }))
}
