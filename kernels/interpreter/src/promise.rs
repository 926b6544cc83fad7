//! `assume` and `assert`. The interpreter checks both, because the compiler relies on `assume`.

use super::error::{Fault, Outcome, malformed, unsupported};
use super::machine::{Machine, Value};
use super::program::Step;
use super::tile::{Element, Tile, strides, walk};
use cutile_ir::ir::{Attribute, Bounded, DivBy};

fn broken<T>(what: String) -> Outcome<T> {
    Err(Fault::Promise(what))
}

impl<'a> Machine<'a> {
    pub fn assume(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let [operand] = step.op.operands[..] else {
            return malformed("one operand expected");
        };
        let value = self.value(operand)?.clone();
        match (step.attribute("predicate")?, &value) {
            (Attribute::DivBy(promise), Value::Tile(tile)) => divisible(promise, tile)?,
            (Attribute::DivBy(promise), Value::Tensor(view)) => {
                if promise.divisor == 0 || !view.base.0.is_multiple_of(promise.divisor) {
                    return broken(format!("base {} divisible by {}", view.base, promise.divisor));
                }
            }
            (Attribute::Bounded(promise), Value::Tile(tile)) => bounded(promise, tile)?,
            (Attribute::SameElements(promise), Value::Tile(tile)) => same(&promise.values, tile)?,
            (predicate, value) => {
                return unsupported(format!("predicate {predicate:?} of {value:?}"));
            }
        }
        Ok(vec![value])
    }

    pub fn assert(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let [condition] = self.tiles::<1>(step)?;
        let Attribute::String(message) = step.attribute("message")? else {
            return malformed("a message expected");
        };
        match condition.ints()?.iter().position(|&holds| holds == 0) {
            Some(element) => Err(Fault::Assertion { element, message: message.clone() }),
            None => Ok(vec![]),
        }
    }
}

/// Checks that the first element of every group is divisible, and that the next elements follow one
/// by one.
fn divisible(promise: &DivBy, tile: &Tile) -> Outcome<()> {
    let (group, axis) = match (promise.every, promise.along) {
        (None, None) => (1, 0),
        (Some(every), Some(along))
            if every > 0 && (0..tile.shape.len() as i64).contains(&along) =>
        {
            (every as usize, along as usize)
        }
        other => return malformed(format!("div_by every and along {other:?}")),
    };
    let pointers = matches!(tile.element, Element::Pointer(_));
    let by_one = match tile.element {
        Element::Pointer(pointee) => pointee.byte_width() as i64,
        Element::Scalar(_) => 1,
    };
    let values = tile.ints()?;
    let stride = strides(&tile.shape).get(axis).copied().unwrap_or(1);
    let length = tile.shape.get(axis).copied().unwrap_or(1);
    for (place, &value) in values.iter().enumerate() {
        let within = place / stride % length % group;
        let holds = if within > 0 {
            values[place - stride].checked_add(by_one) == Some(value)
        } else if pointers {
            promise.divisor != 0 && (value as u64).is_multiple_of(promise.divisor)
        } else {
            promise.divisor != 0 && value.unsigned_abs().is_multiple_of(promise.divisor)
        };
        if !holds {
            let value = if pointers { format!("{value:#x}") } else { value.to_string() };
            return broken(format!("element {place} is {value}, not as in {promise:?}"));
        }
    }
    Ok(())
}

fn bounded(promise: &Bounded, tile: &Tile) -> Outcome<()> {
    tile.bits()?;
    let outside =
        |&&x: &&i64| promise.lb.is_some_and(|lb| x < lb) || promise.ub.is_some_and(|ub| x > ub);
    match tile.ints()?.iter().find(outside) {
        Some(value) => broken(format!("{value} is not as in {promise:?}")),
        None => Ok(()),
    }
}

/// Checks that every group of `groups` elements per axis has one value.
fn same(groups: &[i64], tile: &Tile) -> Outcome<()> {
    if groups.len() != tile.shape.len() || groups.iter().any(|&size| size < 1) {
        return malformed(format!("same_elements {groups:?} of {:?}", tile.shape));
    }
    let values = tile.ints()?;
    let strides = strides(&tile.shape);
    for place in walk(&tile.shape, &strides) {
        let steps = strides.iter().zip(&*tile.shape).zip(groups);
        let back = |((&stride, &length), &group): ((&usize, &usize), &i64)| {
            place / stride % length % group as usize * stride
        };
        let first = place - steps.map(back).sum::<usize>();
        if values[place] != values[first] {
            let (a, b) = (values[first], values[place]);
            return broken(format!("{a} and {b} in one group of same_elements {groups:?}"));
        }
    }
    Ok(())
}
