//! `setp`: comparisons.

use std::cmp::Ordering;

use crate::compute::Compute;
use crate::number::{decode as value, flush};
use crate::types::{Mnemonic, Type};

/// Whether a comparison holds for an ordering. Floats with a NaN among them have no ordering.
type Holds = fn(Option<Ordering>) -> bool;

const EQ: Holds = |order| order == Some(Ordering::Equal);
const NE: Holds = |order| order.is_some_and(Ordering::is_ne);
const LT: Holds = |order| order.is_some_and(Ordering::is_lt);
const LE: Holds = |order| order.is_some_and(Ordering::is_le);
const GT: Holds = |order| order.is_some_and(Ordering::is_gt);
const GE: Holds = |order| order.is_some_and(Ordering::is_ge);

/// The comparisons, with whether they are for floats only. Those with `u` also hold for NaN.
const COMPARISONS: [(&str, (Holds, bool)); 18] = [
    ("eq", (EQ, false)),
    ("ne", (NE, false)),
    ("lt", (LT, false)),
    ("le", (LE, false)),
    ("gt", (GT, false)),
    ("ge", (GE, false)),
    ("lo", (LT, false)),
    ("ls", (LE, false)),
    ("hi", (GT, false)),
    ("hs", (GE, false)),
    ("equ", (|order| order.is_none() || EQ(order), true)),
    ("neu", (|order| order.is_none() || NE(order), true)),
    ("ltu", (|order| order.is_none() || LT(order), true)),
    ("leu", (|order| order.is_none() || LE(order), true)),
    ("gtu", (|order| order.is_none() || GT(order), true)),
    ("geu", (|order| order.is_none() || GE(order), true)),
    ("num", (|order| order.is_some(), true)),
    ("nan", (|order| order.is_none(), true)),
];

type Combine = fn(bool, bool) -> bool;
const COMBINE: [(&str, Combine); 3] =
    [("and", |a, b| a & b), ("or", |a, b| a | b), ("xor", |a, b| a ^ b)];

/// Decodes `setp`. The third operand of the computation is a predicate to combine the result with,
/// and the fourth one tells whether that predicate is negated.
pub(crate) fn compare(mnemonic: &mut Mnemonic<'_>) -> Result<Compute, String> {
    let (holds, floats) = mnemonic.require("comparison", &COMPARISONS)?;
    let combine = mnemonic.choose(&COMBINE);
    let (ty, flushes) = (mnemonic.ty()?, mnemonic.take("ftz"));
    if floats && !ty.is_float() {
        return Err(format!("this comparison is for floats, not for {}", ty.name()));
    }
    if ty.lanes > 1 {
        return Err("comparisons of pairs are not supported".into());
    }
    let order = order(ty, flushes);
    let widths = [ty.bits, ty.bits, 1];
    let operands = if combine.is_some() { 3 } else { 2 };
    Ok(Compute::new(1, &widths[..operands], move |x| {
        let found = holds(order(x[0], x[1]));
        let negated = x[3] == 1;
        Some(combine.map_or(found, |combine| combine(found, (x[2] == 1) != negated)).into())
    }))
}

/// Returns the function that orders two values of a type.
fn order(ty: Type, flushes: bool) -> impl Fn(u64, u64) -> Option<Ordering> + Send + Sync + Copy {
    let flushes = flushes && ty.bits == 32;
    move |a, b| {
        if !ty.is_float() {
            return Some(ty.integer(a).cmp(&ty.integer(b)));
        }
        let (a, b) = (value(ty, a), value(ty, b));
        if flushes { flush(a).partial_cmp(&flush(b)) } else { a.partial_cmp(&b) }
    }
}
