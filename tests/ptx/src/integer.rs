//! Integer arithmetic and operations on bits.

use crate::compute::Compute;
use crate::types::{Mnemonic, Type, mask};

/// An operation on integers of up to 64 bits. The result is exact, or has the right 128 low bits.
type Exact = fn(i128, i128, i128) -> Option<i128>;

const ARITHMETIC: [(&str, usize, Exact); 10] = [
    ("add", 2, |a, b, _| Some(a + b)),
    ("sub", 2, |a, b, _| Some(a - b)),
    ("mul", 2, |a, b, _| Some(a.wrapping_mul(b))),
    ("mad", 3, |a, b, _| Some(a.wrapping_mul(b))),
    ("div", 2, |a, b, _| a.checked_div(b)),
    ("rem", 2, |a, b, _| a.checked_rem(b)),
    ("min", 2, |a, b, _| Some(a.min(b))),
    ("max", 2, |a, b, _| Some(a.max(b))),
    ("neg", 1, |a, _, _| Some(-a)),
    ("abs", 1, |a, _, _| Some(a.abs())),
];

/// The part of a product that `mul` and `mad` return.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Low,
    High,
    Wide,
}

/// Returns the computation of an instruction on integers.
pub(crate) fn decode(mnemonic: &mut Mnemonic<'_>) -> Result<Option<Compute>, String> {
    let name = mnemonic.name;
    let Some(&(_, operands, exact)) = ARITHMETIC.iter().find(|row| row.0 == name) else {
        return Ok(None);
    };
    let mut copy = mnemonic.clone();
    let ty = copy.ty()?;
    if ty.is_float() {
        return Ok(None);
    }
    *mnemonic = copy;
    if matches!(name, "mul" | "mad") {
        let parts = [("lo", Part::Low), ("hi", Part::High), ("wide", Part::Wide)];
        let part = mnemonic.require("part of the product", &parts)?;
        return Ok(Some(product(ty, operands, exact, part)));
    }
    let saturate = mnemonic.take("sat");
    let rectify = mnemonic.take("relu");
    let (least, largest) = ty.range();
    Ok(Some(Compute::uniform(ty, operands, move |x| {
        let result = exact(ty.integer(x[0]), ty.integer(x[1]), 0)?;
        let result = if saturate { result.clamp(least, largest) } else { result };
        let result = if rectify { result.max(0) } else { result };
        Some(result as u64 & ty.mask())
    })))
}

fn product(ty: Type, operands: usize, exact: Exact, part: Part) -> Compute {
    let wide = if part == Part::Wide { ty.bits * 2 } else { ty.bits };
    let widths = [ty.bits, ty.bits, wide];
    let result = mask(wide);
    Compute::new(wide, &widths[..operands], move |x| {
        let product = exact(ty.integer(x[0]), ty.integer(x[1]), 0)?;
        let kept = if part == Part::High { product >> ty.bits } else { product };
        Some((kept as u64).wrapping_add(x[2]) & result)
    })
}

/// Returns the computation of an instruction on bits.
pub(crate) fn bits(mnemonic: &mut Mnemonic<'_>) -> Result<Option<Compute>, String> {
    let name = mnemonic.name;
    Ok(Some(match name {
        "and" | "or" | "xor" | "not" => logic(name, mnemonic.ty()?),
        "shl" | "shr" => shift(name == "shl", mnemonic.ty()?),
        "bfe" => extract(mnemonic.ty()?),
        "popc" | "clz" | "brev" => count(name, mnemonic.ty()?),
        "shf" => funnel(mnemonic)?,
        "prmt" => {
            mnemonic.ty()?;
            Compute::new(32, &[32; 3], |x| Some(permute(x[0], x[1], x[2]))).moving(2)
        }
        "selp" => {
            let bits = mnemonic.ty()?.width();
            let choose = |x: &[u64; 4]| Some(if x[2] == 1 { x[0] } else { x[1] });
            Compute::new(bits, &[bits, bits, 1], choose).moving(2)
        }
        _ => return Ok(None),
    }))
}

fn logic(name: &str, ty: Type) -> Compute {
    let apply: fn(u64, u64) -> u64 = match name {
        "and" => |a, b| a & b,
        "or" => |a, b| a | b,
        "xor" => |a, b| a ^ b,
        _ => |a, _| !a,
    };
    let operands = if name == "not" { 1 } else { 2 };
    Compute::uniform(ty, operands, move |x| Some(apply(x[0], x[1]) & ty.mask()))
}

/// Shifts by more than the width give what shifts by the width would give.
fn shift(left: bool, ty: Type) -> Compute {
    Compute::new(ty.bits, &[ty.bits, 32], move |x| {
        let count = x[1].min(u64::from(ty.bits));
        let value = ty.integer(x[0]);
        let shifted = if left { value << count } else { value >> count };
        Some(shifted as u64 & ty.mask())
    })
    .moving(1)
}

/// `bfe` returns a field of bits from a place on. The highest bit of a signed field is its sign, and
/// a field beyond the value has only signs.
fn extract(ty: Type) -> Compute {
    Compute::new(ty.bits, &[ty.bits, 32, 32], move |x| {
        let (place, length) = ((x[1] & 0xff) as u32, (x[2] & 0xff) as u32);
        if length == 0 {
            return Some(0);
        }
        // A field's highest bit is in the value, or it is the value's highest bit.
        let end = (place + length).min(ty.bits);
        let above = 128 - end;
        let value = ty.integer(x[0]) << above >> above;
        let unsigned = value as u128 & ((1 << end) - 1);
        let field = if ty.range().0 < 0 { value } else { unsigned as i128 };
        Some((field >> place) as u64 & ty.mask())
    })
    .moving(1)
}

fn count(name: &str, ty: Type) -> Compute {
    let unused = 64 - ty.bits;
    let apply: fn(u64, u32) -> u64 = match name {
        "popc" => |x, _| x.count_ones().into(),
        "clz" => |x, unused| u64::from(x.leading_zeros() - unused),
        _ => |x, unused| x.reverse_bits() >> unused,
    };
    let to = if name == "brev" { ty.bits } else { 32 };
    Compute::new(to, &[ty.bits], move |x| Some(apply(x[0], unused)))
}

fn funnel(mnemonic: &mut Mnemonic<'_>) -> Result<Compute, String> {
    mnemonic.ty()?;
    let left = mnemonic.require("direction", &[("l", true), ("r", false)])?;
    let wrap = mnemonic.require("mode", &[("wrap", true), ("clamp", false)])?;
    Ok(Compute::new(32, &[32; 3], move |x| {
        let count = if wrap { x[2] & 31 } else { x[2].min(32) };
        let both = x[1] << 32 | x[0];
        let shifted = if left { (u128::from(both) << count >> 32) as u64 } else { both >> count };
        Some(shifted & mask(32))
    }))
}

/// Returns four bytes of the eight bytes of a and b; each hexadecimal digit chooses one.
fn permute(a: u64, b: u64, digits: u64) -> u64 {
    let bytes = (b << 32 | a).to_le_bytes();
    let chosen = |place: u32| {
        let digit = digits >> (4 * place) & 0xf;
        let byte = bytes[(digit & 7) as usize];
        // The highest bit of a digit asks for copies of the byte's sign.
        let byte = if digit & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        u64::from(byte) << (8 * place)
    };
    (0..4).map(chosen).sum()
}
