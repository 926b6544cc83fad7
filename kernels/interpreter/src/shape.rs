//! Constants, and operations that only move elements.

use super::error::{Outcome, malformed, undefined, unsupported};
use super::integer::alike;
use super::machine::Machine;
use super::program::Step;
use super::tile::{Data, Element, Tile, strides, tile_type, unsigned, walk, wrap};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Attribute, ScalarType};

impl<'a> Machine<'a> {
    pub fn arrange(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        let [result] = &step.op.result_types[..] else {
            return malformed("one result expected");
        };
        let (element, shape) = tile_type(result)?;
        match step.op.opcode {
            Opcode::Constant => {
                let tile = constant(step, element, shape)?;
                Ok(self.lanes.map_or(tile.clone(), |lanes| tile.splat(lanes)))
            }
            Opcode::Iota => iota(element, shape),
            Opcode::Reshape => {
                let [source] = self.tiles::<1>(step)?;
                if shape.iter().product::<usize>() != source.data.len() {
                    return malformed(format!("{:?} reshaped to {shape:?}", source.shape));
                }
                Ok(source.reshaped(shape))
            }
            Opcode::Broadcast => broadcast(&self.tiles::<1>(step)?[0], shape),
            Opcode::Permute => permute(step, &self.tiles::<1>(step)?[0]),
            Opcode::Cat => concatenate(step, &self.tiles::<2>(step)?),
            Opcode::Select => {
                let [condition, yes, no] = self.tiles::<3>(step)?;
                select(&condition, &yes, &no)
            }
            Opcode::Extract => {
                let Some((&source, indices)) = step.op.operands.split_first() else {
                    return malformed("a source expected");
                };
                let source = self.tile_of(source)?;
                let places = self.slice(&source.shape, &shape, indices)?;
                Ok(Tile::new(source.element, shape, source.data.gather(places.into_iter())))
            }
            Opcode::Insert => {
                let [source, destination, indices @ ..] = &step.op.operands[..] else {
                    return malformed("a source and a destination expected");
                };
                let (source, into) = (self.tile_of(*source)?, self.tile_of(*destination)?);
                let places = self.slice(&into.shape, &source.shape, indices)?;
                insert(&source, &into, &places)
            }
            other => unsupported(other.name()),
        }
    }

    /// Returns the places in a tile of `whole` that make up the slice of shape `part` at the
    /// indices.
    fn slice(
        &self,
        whole: &[usize],
        part: &[usize],
        indices: &[cutile_ir::ir::Value],
    ) -> Outcome<Vec<usize>> {
        let rank = whole.len();
        let even = |axis: usize| part[axis] > 0 && whole[axis].is_multiple_of(part[axis]);
        if part.len() != rank || indices.len() != rank || !(0..rank).all(even) {
            return malformed(format!("{part:?} of {whole:?} at {} indices", indices.len()));
        }
        let strides = strides(whole);
        let mut first = 0;
        for (axis, &index) in indices.iter().enumerate() {
            let index = self.tile_of(index)?;
            let index = unsigned(index.int()?, index.bits()?);
            if index >= (whole[axis] / part[axis]) as u64 {
                return undefined(format!("slice {index} of {whole:?} by {part:?}, axis {axis}"));
            }
            first += index as usize * part[axis] * strides[axis];
        }
        Ok(walk(part, &strides).into_iter().map(|place| first + place).collect())
    }
}

fn constant(step: &Step, element: Element, shape: Vec<usize>) -> Outcome<Tile> {
    let Attribute::DenseElements(dense) = step.attribute("value")? else {
        return malformed("a constant's value is not dense elements");
    };
    let count: usize = shape.iter().product();
    let width = element.width();
    let mut data = element.poison(count);
    let declared = match dense.element_type.without_pointer_attribute() {
        cutile_ir::ir::Type::Scalar(scalar) => Element::scalar(*scalar)?,
        other => tile_type(other)?.0,
    };
    if declared != element {
        return malformed(format!("a constant of {declared:?} as {element:?}"));
    }
    // A single element is the value of all elements.
    let bytes = match dense.data.len() {
        one if one == width => dense.data.repeat(count),
        all if all == width * count => dense.data.clone(),
        other => return malformed(format!("{other} bytes for {count} elements of {element:?}")),
    };
    element.decode(&bytes, &mut data, 0)?;
    Ok(Tile::new(element, shape, data))
}

fn iota(element: Element, shape: Vec<usize>) -> Outcome<Tile> {
    match (element.int_bits(), &shape[..]) {
        (Some(bits), &[length]) if (length as u128) <= 1 << bits => {
            let data = (0..length).map(|index| wrap(index as i128, bits)).collect();
            Ok(Tile::new(element, shape, Data::Int(data)))
        }
        _ => malformed(format!("iota of {element:?} and shape {shape:?}")),
    }
}

fn broadcast(source: &Tile, shape: Vec<usize>) -> Outcome<Tile> {
    let mut steps = strides(&source.shape);
    if shape.len() != source.shape.len() {
        return malformed(format!("{:?} broadcast to {shape:?}", source.shape));
    }
    for (axis, (&from, &to)) in source.shape.iter().zip(&shape).enumerate() {
        match from {
            _ if from == to => {}
            1 => steps[axis] = 0,
            _ => return malformed(format!("{:?} broadcast to {shape:?}", source.shape)),
        }
    }
    let data = source.data.gather(walk(&shape, &steps).into_iter());
    Ok(Tile::new(source.element, shape, data))
}

fn permute(step: &Step, source: &Tile) -> Outcome<Tile> {
    let axes: Vec<i64> = match step.attribute("permutation")? {
        Attribute::DenseI32Array(axes) => axes.iter().map(|&axis| axis.into()).collect(),
        Attribute::Array(axes) => {
            let axis = |axis: &_| match axis {
                Attribute::Integer(axis, _) => Ok(*axis),
                other => malformed(format!("permutation with {other:?}")),
            };
            axes.iter().map(axis).collect::<Outcome<_>>()?
        }
        other => return malformed(format!("permutation {other:?}")),
    };
    let mut sorted = axes.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..source.shape.len() as i64) {
        return malformed(format!("{:?} permuted by {axes:?}", source.shape));
    }
    let old = strides(&source.shape);
    let shape: Vec<usize> = axes.iter().map(|&axis| source.shape[axis as usize]).collect();
    let steps: Vec<usize> = axes.iter().map(|&axis| old[axis as usize]).collect();
    let data = source.data.gather(walk(&shape, &steps).into_iter());
    Ok(Tile::new(source.element, shape, data))
}

fn concatenate(step: &Step, [a, b]: &[Tile; 2]) -> Outcome<Tile> {
    let axis = step.int("dim")?;
    let others = |tile: &Tile| {
        let mut shape = tile.shape.to_vec();
        shape.get_mut(axis as usize).map(|size| std::mem::replace(size, 1))?;
        Some(shape)
    };
    if others(a).is_none() || others(a) != others(b) || a.element != b.element {
        return malformed(format!("{:?} and {:?} along {axis}", a.shape, b.shape));
    }
    let axis = axis as usize;
    let run = |tile: &Tile| tile.shape[axis..].iter().product::<usize>();
    let (run_a, run_b) = (run(a), run(b));
    let mut shape = a.shape.to_vec();
    shape[axis] += b.shape[axis];
    // Places count the elements of `a` first, then the elements of `b`.
    let total: usize = shape.iter().product();
    let place = |index: usize| {
        let (row, column) = (index / (run_a + run_b), index % (run_a + run_b));
        if column < run_a {
            row * run_a + column
        } else {
            a.data.len() + row * run_b + column - run_a
        }
    };
    let both = join(&a.data, &b.data)?;
    Ok(Tile::new(a.element, shape, both.gather((0..total).map(place))))
}

fn join(a: &Data, b: &Data) -> Outcome<Data> {
    match (a, b) {
        (Data::Int(a), Data::Int(b)) => Ok(Data::Int([&a[..], b].concat())),
        (Data::F32(a), Data::F32(b)) => Ok(Data::F32([&a[..], b].concat())),
        (Data::F64(a), Data::F64(b)) => Ok(Data::F64([&a[..], b].concat())),
        _ => malformed("operands of different types"),
    }
}

fn insert(source: &Tile, into: &Tile, places: &[usize]) -> Outcome<Tile> {
    if source.element != into.element {
        return malformed(format!("{:?} inserted into {:?}", source.element, into.element));
    }
    let both = join(&into.data, &source.data)?;
    let mut order: Vec<usize> = (0..into.data.len()).collect();
    for (index, &place) in places.iter().enumerate() {
        order[place] = into.data.len() + index;
    }
    Ok(Tile::new(into.element, into.shape.clone(), both.gather(order.into_iter())))
}

fn select(condition: &Tile, yes: &Tile, no: &Tile) -> Outcome<Tile> {
    alike(yes, no)?;
    if condition.shape != yes.shape || condition.element != Element::Scalar(ScalarType::I1) {
        return malformed(format!("{:?} selects from {:?}", condition.shape, yes.shape));
    }
    fn mix<T: Copy>(condition: &[i64], yes: &[T], no: &[T]) -> Vec<T> {
        let choices = condition.iter().zip(yes).zip(no);
        choices.map(|((&c, &yes), &no)| if c != 0 { yes } else { no }).collect()
    }
    let condition = condition.ints()?;
    let data = match (&*yes.data, &*no.data) {
        (Data::Int(yes), Data::Int(no)) => Data::Int(mix(condition, yes, no)),
        (Data::F32(yes), Data::F32(no)) => Data::F32(mix(condition, yes, no)),
        (Data::F64(yes), Data::F64(no)) => Data::F64(mix(condition, yes, no)),
        _ => return malformed("operands of different types"),
    };
    Ok(Tile::new(yes.element, yes.shape.clone(), data))
}
