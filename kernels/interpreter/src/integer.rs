//! Integer arithmetic, element by element, in two's complement of the tile's width.

use super::attributes::{NEGATIVE_INF, POSITIVE_INF, ZERO};
use super::error::{Fault, Outcome, malformed, undefined, unsupported};
use super::machine::Machine;
use super::program::Step;
use super::tile::{Data, Element, Tile, unsigned, wrap};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::ScalarType;

const NO_SIGNED_WRAP: i64 = 1;
const NO_UNSIGNED_WRAP: i64 = 2;

/// An operation's promises about overflow.
#[derive(Clone, Copy)]
struct Overflow {
    bits: u32,
    signed: bool,
    unsigned: bool,
}

impl Overflow {
    fn of(step: &Step, bits: u32) -> Outcome<Self> {
        let flags = step.int_or("overflow", 0)?;
        if !(0..=(NO_SIGNED_WRAP | NO_UNSIGNED_WRAP)).contains(&flags) {
            return unsupported(format!("overflow {flags}"));
        }
        let signed = flags & NO_SIGNED_WRAP != 0;
        Ok(Self { bits, signed, unsigned: flags & NO_UNSIGNED_WRAP != 0 })
    }

    /// Returns the low bits of the exact results, signed and unsigned, if the results keep the
    /// promises.
    fn check(self, signed: i128, unsigned: i128) -> Outcome<i64> {
        let result = wrap(signed, self.bits);
        if self.signed && i128::from(result) != signed {
            return Err(Fault::Promise(format!("signed overflow to {signed}")));
        }
        if self.unsigned && !(0..1i128 << self.bits).contains(&unsigned) {
            return Err(Fault::Promise(format!("unsigned overflow to {unsigned}")));
        }
        Ok(result)
    }
}

/// Checks that two operands have the same shape and type.
pub(super) fn alike(a: &Tile, b: &Tile) -> Outcome<()> {
    if a.shape == b.shape && a.element == b.element {
        return Ok(());
    }
    let (a, b) = ((&a.shape, a.element), (&b.shape, b.element));
    malformed(format!("operands differ: {a:?} and {b:?}"))
}

fn zip(a: &Tile, b: &Tile, mut f: impl FnMut(i64, i64) -> Outcome<i64>) -> Outcome<Tile> {
    alike(a, b)?;
    // To collect results would let the vector grow, step by step.
    let mut data = Vec::with_capacity(a.data.len());
    for (&x, &y) in a.ints()?.iter().zip(b.ints()?) {
        data.push(f(x, y)?);
    }
    Ok(Tile::new(a.element, a.shape.clone(), Data::Int(data)))
}

impl<'a> Machine<'a> {
    pub fn int_binary(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        use Opcode::*;
        let [a, b] = self.tiles::<2>(step)?;
        let bits = a.bits()?;
        let overflow = Overflow::of(step, bits)?;
        let wide = |x: i64| i128::from(x);
        let plain = |x: i64| i128::from(unsigned(x, bits));
        match step.op.opcode {
            AddI => zip(&a, &b, |x, y| overflow.check(wide(x) + wide(y), plain(x) + plain(y))),
            SubI => zip(&a, &b, |x, y| overflow.check(wide(x) - wide(y), plain(x) - plain(y))),
            MulI => zip(&a, &b, |x, y| {
                // The unsigned product of 64-bit values may exceed i128; then it overflows anyway.
                let product = plain(x).checked_mul(plain(y)).unwrap_or(-1);
                overflow.check(wide(x) * wide(y), product)
            }),
            MulhiI => zip(&a, &b, |x, y| {
                let product = plain(x) as u128 * plain(y) as u128;
                Ok(wrap((product >> bits) as i128, bits))
            }),
            AndI => zip(&a, &b, |x, y| Ok(x & y)),
            OrI => zip(&a, &b, |x, y| Ok(x | y)),
            XOrI => zip(&a, &b, |x, y| Ok(x ^ y)),
            ShLI => zip(&a, &b, |x, y| {
                let count = shift(y, bits)?;
                overflow.check(wide(x) << count, plain(x) << count)
            }),
            ShRI if step.signed("signedness")? => zip(&a, &b, |x, y| Ok(x >> shift(y, bits)?)),
            ShRI => zip(&a, &b, |x, y| Ok(wrap(plain(x) >> shift(y, bits)?, bits))),
            DivI | RemI => divide(step, &a, &b, bits),
            MaxI if step.signed("signedness")? => zip(&a, &b, |x, y| Ok(x.max(y))),
            MinI if step.signed("signedness")? => zip(&a, &b, |x, y| Ok(x.min(y))),
            MaxI => zip(&a, &b, |x, y| Ok(if plain(x) >= plain(y) { x } else { y })),
            MinI => zip(&a, &b, |x, y| Ok(if plain(x) <= plain(y) { x } else { y })),
            other => unsupported(other.name()),
        }
    }

    pub fn int_unary(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        let [a] = self.tiles::<1>(step)?;
        let overflow = Overflow::of(step, a.bits()?)?;
        let lowest = wrap(1 << (overflow.bits - 1), overflow.bits);
        let one = |&x: &i64| match step.op.opcode {
            Opcode::AbsI if x == lowest => undefined(format!("absolute value of {x}")),
            Opcode::AbsI => Ok(x.abs()),
            _ if overflow.unsigned => unsupported("negi that promises no unsigned wrap"),
            _ => overflow.check(-i128::from(x), 0),
        };
        let data = a.ints()?.iter().map(one).collect::<Outcome<_>>()?;
        Ok(Tile::new(a.element, a.shape.clone(), Data::Int(data)))
    }

    pub fn int_compare(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        let [a, b] = self.tiles::<2>(step)?;
        alike(&a, &b)?;
        let bits = a.bits()?;
        let holds = predicate(step)?;
        let mask = if step.signed("signedness")? { 0 } else { i64::MIN };
        // Flipping the sign bit of zero-extended values makes a signed comparison unsigned.
        let key = |x: i64| if mask == 0 { x } else { unsigned(x, bits) as i64 ^ mask };
        let pairs = a.ints()?.iter().zip(b.ints()?);
        let data = pairs.map(|(&x, &y)| -i64::from(holds(key(x).cmp(&key(y))))).collect();
        Ok(Tile::new(Element::Scalar(ScalarType::I1), a.shape.clone(), Data::Int(data)))
    }
}

/// Returns the comparison's predicate over an ordering of its operands.
pub(super) fn predicate(step: &Step) -> Outcome<fn(std::cmp::Ordering) -> bool> {
    Ok(match step.int("comparison_predicate")? {
        0 => std::cmp::Ordering::is_eq,
        1 => std::cmp::Ordering::is_ne,
        2 => std::cmp::Ordering::is_lt,
        3 => std::cmp::Ordering::is_le,
        4 => std::cmp::Ordering::is_gt,
        5 => std::cmp::Ordering::is_ge,
        other => return unsupported(format!("comparison_predicate {other}")),
    })
}

/// Returns a shift's count, which is unsigned and less than the width.
fn shift(count: i64, bits: u32) -> Outcome<u32> {
    match unsigned(count, bits) {
        count if count < bits.into() => Ok(count as u32),
        count => undefined(format!("{bits} bits shifted by {count}")),
    }
}

fn divide(step: &Step, a: &Tile, b: &Tile, bits: u32) -> Outcome<Tile> {
    let signed = step.signed("signedness")?;
    let remainder = step.op.opcode == Opcode::RemI;
    let modes =
        if signed { &[ZERO, NEGATIVE_INF, POSITIVE_INF][..] } else { &[ZERO, POSITIVE_INF] };
    let mode = step.rounding("rounding", Some(ZERO), modes)?;
    zip(a, b, |x, y| {
        let number = |x| if signed { i128::from(x) } else { i128::from(unsigned(x, bits)) };
        let (x, y) = (number(x), number(y));
        if y == 0 {
            return undefined(format!("{x} divided by 0"));
        }
        if signed && y == -1 && x == -1 << (bits - 1) {
            return undefined(format!("{x} divided by -1"));
        }
        let (quotient, rest) = (x / y, x % y);
        let positive = (rest < 0) == (y < 0);
        let result = match mode {
            _ if remainder => rest,
            NEGATIVE_INF if rest != 0 && !positive => quotient - 1,
            POSITIVE_INF if rest != 0 && positive => quotient + 1,
            _ => quotient,
        };
        Ok(wrap(result, bits))
    })
}
