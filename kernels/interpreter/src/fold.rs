//! `reduce` and `scan`, whose regions say how two elements combine.

use super::error::{Outcome, malformed, unsupported};
use super::machine::{Flow, Machine, Value};
use super::program::{Body, Step};
use super::tile::{Data, Element, Tile, strides, walk, wrap};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Attribute, ScalarType};
use half::{bf16, f16};

/// Whether a body has the same meaning on many elements at once: each of its operations works
/// element by element.
fn is_elementwise(body: &Body) -> bool {
    use Opcode::*;
    body.steps.iter().all(|step| {
        matches!(
            step.op.opcode,
            AddI | SubI
                | MulI
                | DivI
                | RemI
                | MulhiI
                | MaxI
                | MinI
                | AndI
                | OrI
                | XOrI
                | ShLI
                | ShRI
                | AbsI
                | NegI
                | CmpI
                | AddF
                | SubF
                | MulF
                | DivF
                | RemF
                | MaxF
                | MinF
                | Pow
                | Atan2
                | AbsF
                | NegF
                | Ceil
                | Floor
                | Exp
                | Exp2
                | Log
                | Log2
                | Sqrt
                | Rsqrt
                | Sin
                | Cos
                | Tan
                | SinH
                | CosH
                | TanH
                | Fma
                | CmpF
                | FToF
                | FToI
                | IToF
                | ExtI
                | TruncI
                | Bitcast
                | Constant
                | Select
                | Yield
        )
    })
}

/// Operands cut along an axis: for every index on the axis, the places of all lanes.
struct Lanes {
    operands: Vec<Tile>,
    identities: Vec<Tile>,
    axis: usize,
    length: usize,
    places: Vec<usize>,
    stride: usize,
}

impl Lanes {
    fn of(machine: &Machine, step: &Step) -> Outcome<Self> {
        let tile = |&value: &_| machine.tile_of(value);
        let operands = step.op.operands.iter().map(tile).collect::<Outcome<Vec<_>>>()?;
        let Some(first) = operands.first() else {
            return malformed("an operand expected");
        };
        let axis = step.int("dim")? as usize;
        let alike = operands.iter().all(|tile| tile.shape == first.shape);
        if axis >= first.shape.len() || !alike || machine.lanes.is_some() {
            return malformed(format!("axis {axis} of {:?}", first.shape));
        }
        let Attribute::Array(identities) = step.attribute("identities")? else {
            return malformed("identities are an array");
        };
        if identities.len() != operands.len() {
            return malformed(format!("{} identities, {} tiles", identities.len(), operands.len()));
        }
        let pairs = identities.iter().zip(&operands);
        let identities =
            pairs.map(|(value, tile)| identity(value, tile)).collect::<Outcome<_>>()?;
        let mut shape = first.shape.to_vec();
        let length = std::mem::replace(&mut shape[axis], 1);
        let strides = strides(&first.shape);
        let places = walk(&shape, &strides);
        Ok(Self { operands, identities, axis, length, places, stride: strides[axis] })
    }

    /// Returns all lanes of each operand at an index along the axis.
    fn cut(&self, index: usize) -> Vec<Tile> {
        let places = || self.places.iter().map(|place| place + index * self.stride);
        let cut =
            |tile: &Tile| Tile::new(tile.element, [self.places.len()], tile.data.gather(places()));
        self.operands.iter().map(cut).collect()
    }

    fn start(&self) -> Vec<Tile> {
        self.identities.iter().map(|tile| tile.splat(self.places.len())).collect()
    }
}

fn identity(value: &Attribute, tile: &Tile) -> Outcome<Tile> {
    let (declared, data) = match (value, tile.element) {
        (Attribute::Integer(x, ty), element) if element.int_bits().is_some() => {
            (ty, Data::Int(vec![wrap((*x).into(), tile.bits()?)]))
        }
        (Attribute::Float(x, ty), Element::Scalar(ScalarType::F64)) => (ty, Data::F64(vec![*x])),
        (Attribute::Float(x, ty), Element::Scalar(scalar)) if scalar.is_float() => {
            let x = match scalar {
                ScalarType::BF16 => bf16::from_f64(*x).to_f32(),
                ScalarType::F16 => f16::from_f64(*x).to_f32(),
                _ => *x as f32,
            };
            (ty, Data::F32(vec![x]))
        }
        (other, element) => return unsupported(format!("identity {other:?} of {element:?}")),
    };
    match declared {
        cutile_ir::ir::Type::Scalar(scalar) if tile.element == Element::Scalar(*scalar) => {
            Ok(Tile::new(tile.element, [], data))
        }
        other => malformed(format!("identity of {other:?} for {:?}", tile.element)),
    }
}

impl<'a> Machine<'a> {
    /// Returns `body(current, accumulator)` for every lane: at once if the body allows it,
    /// otherwise one by one.
    fn combine(
        &mut self,
        body: &Body<'a>,
        current: &[Tile],
        accumulators: &[Tile],
    ) -> Outcome<Vec<Tile>> {
        let lanes = current[0].data.len();
        if is_elementwise(body) {
            self.lanes = Some(lanes);
            let result = self.apply(body, current, accumulators);
            self.lanes = None;
            return result;
        }
        let mut out = accumulators.to_vec();
        for lane in 0..lanes {
            let pick =
                |tile: &Tile| Tile::new(tile.element, [], tile.data.gather([lane].into_iter()));
            let current: Vec<_> = current.iter().map(pick).collect();
            let before: Vec<_> = accumulators.iter().map(pick).collect();
            let results = self.apply(body, &current, &before)?;
            for (out, result) in out.iter_mut().zip(results) {
                let one = result.splat(1);
                *out = replace(out, lane, &one)?;
            }
        }
        Ok(out)
    }

    fn apply(
        &mut self,
        body: &Body<'a>,
        current: &[Tile],
        accumulators: &[Tile],
    ) -> Outcome<Vec<Tile>> {
        let pairs = current.iter().zip(accumulators);
        let arguments = pairs.flat_map(|(x, y)| [x, y].map(|tile| Value::Tile(tile.clone())));
        let Flow::Yield(results) = self.run(body, arguments.collect())? else {
            return malformed("a reduction's body ends in yield");
        };
        if results.len() != accumulators.len() {
            return malformed(format!("{} results for {} tiles", results.len(), current.len()));
        }
        let check = |(value, like): (Value, &Tile)| match value {
            // A yielded scalar from outside of the body is the value of every lane.
            Value::Tile(tile) if tile.element == like.element => match self.lanes {
                Some(lanes) if tile.shape.is_empty() => Ok(tile.splat(lanes)),
                _ => Ok(tile),
            },
            other => malformed(format!("{:?} expected, got {other:?}", like.element)),
        };
        results.into_iter().zip(accumulators).map(check).collect()
    }

    pub fn reduce(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let lanes = Lanes::of(self, step)?;
        let [body] = &step.regions[..] else {
            return malformed(format!("one region expected, got {}", step.regions.len()));
        };
        let mut accumulators = lanes.start();
        for index in 0..lanes.length {
            accumulators = self.combine(body, &lanes.cut(index), &accumulators)?;
        }
        let mut shape = lanes.operands[0].shape.to_vec();
        shape.remove(lanes.axis);
        Ok(accumulators.iter().map(|tile| Value::Tile(tile.reshaped(shape.clone()))).collect())
    }

    pub fn scan(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let lanes = Lanes::of(self, step)?;
        let ([body], [operand]) = (&step.regions[..], &lanes.operands[..]) else {
            return unsupported("a scan other than of one tile by one region");
        };
        let reverse = step.int("reverse")? != 0;
        let mut accumulators = lanes.start();
        let mut parts = Vec::with_capacity(lanes.length);
        for index in 0..lanes.length {
            let index = if reverse { lanes.length - 1 - index } else { index };
            accumulators = self.combine(body, &lanes.cut(index), &accumulators)?;
            parts.push(accumulators[0].clone());
        }
        if reverse {
            parts.reverse();
        }
        let data = scatter(operand, &lanes, &parts)?;
        Ok(vec![Value::Tile(Tile::new(operand.element, operand.shape.clone(), data))])
    }
}

/// Returns a tile with one element replaced by the only element of another tile.
fn replace(tile: &Tile, place: usize, by: &Tile) -> Outcome<Tile> {
    let mut data = Data::clone(&tile.data);
    match (&mut data, &*by.data) {
        (Data::Int(out), Data::Int(x)) => out[place] = x[0],
        (Data::F32(out), Data::F32(x)) => out[place] = x[0],
        (Data::F64(out), Data::F64(x)) => out[place] = x[0],
        _ => return malformed("a result of another type"),
    }
    Ok(Tile::new(tile.element, tile.shape.clone(), data))
}

/// Returns data with the lanes of every index along the axis back in place.
fn scatter(like: &Tile, lanes: &Lanes, parts: &[Tile]) -> Outcome<Data> {
    fn fill<T: Copy>(out: &mut [T], lanes: &Lanes, index: usize, part: &[T]) {
        for (place, &x) in lanes.places.iter().zip(part) {
            out[place + index * lanes.stride] = x;
        }
    }
    let mut data = like.element.poison(like.data.len());
    for (index, part) in parts.iter().enumerate() {
        match (&mut data, &*part.data) {
            (Data::Int(out), Data::Int(part)) => fill(out, lanes, index, part),
            (Data::F32(out), Data::F32(part)) => fill(out, lanes, index, part),
            (Data::F64(out), Data::F64(part)) => fill(out, lanes, index, part),
            _ => return malformed("a result of another type"),
        }
    }
    Ok(data)
}
