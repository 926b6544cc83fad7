//! Tiles of pointers: arithmetic, loads, stores, atomics.

use super::error::{Outcome, malformed, undefined, unsupported};
use super::machine::{Machine, Value};
use super::memory::Address;
use super::program::Step;
use super::tile::{Data, Element, Tile, unsigned, wrap};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::ScalarType;

/// Returns the type that a tile of pointers points to.
fn pointee(tile: &Tile) -> Outcome<Element> {
    match tile.element {
        Element::Pointer(scalar) => Element::scalar(scalar),
        other => malformed(format!("pointers expected, got {other:?}")),
    }
}

impl<'a> Machine<'a> {
    pub fn offset(&mut self, step: &Step<'a>) -> Outcome<Tile> {
        let [base, count] = self.tiles::<2>(step)?;
        let width = i128::from(pointee(&base)?.width() as u64);
        count.bits()?;
        if base.shape != count.shape {
            return malformed(format!("{:?} pointers, {:?} offsets", base.shape, count.shape));
        }
        let advance = |(&at, &by): (&i64, &i64)| {
            let bytes = i64::try_from(i128::from(by) * width).ok();
            match bytes.and_then(|bytes| (at as u64).checked_add_signed(bytes)) {
                Some(to) => Ok(to as i64),
                None => undefined(format!("{:#x} offset by {by} elements wraps around", at)),
            }
        };
        let mut data = Vec::with_capacity(base.data.len());
        for pair in base.ints()?.iter().zip(count.ints()?) {
            data.push(advance(pair)?);
        }
        Ok(Tile::new(base.element, base.shape.clone(), Data::Int(data)))
    }

    /// Returns the tile of an optional operand group.
    fn optional(&self, group: &[cutile_ir::ir::Value]) -> Outcome<Option<Tile>> {
        match group {
            [] => Ok(None),
            [value] => self.tile_of(*value).map(Some),
            _ => malformed("at most one operand expected in a group"),
        }
    }

    /// Returns the places where a mask is true.
    fn active(&self, pointers: &Tile, mask: &[cutile_ir::ir::Value]) -> Outcome<Vec<usize>> {
        let Some(mask) = self.optional(mask)? else {
            return Ok((0..pointers.data.len()).collect());
        };
        if mask.shape != pointers.shape || mask.element != Element::Scalar(ScalarType::I1) {
            return malformed(format!("{:?} pointers masked by {:?}", pointers.shape, mask.shape));
        }
        let bits = mask.ints()?.iter().enumerate();
        Ok(bits.filter(|(_, bit)| **bit != 0).map(|(place, _)| place).collect())
    }

    fn one(&self, group: &[cutile_ir::ir::Value]) -> Outcome<Tile> {
        self.optional(group)?.map_or_else(|| malformed("an operand is missing"), Ok)
    }

    pub fn load_pointers(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let groups = step.segments(4)?;
        if !matches!(step.int("memory_ordering_semantics")?, 0..=2) {
            return malformed("a load that is neither weak, relaxed nor acquire");
        }
        let pointers = self.one(groups[0])?;
        let element = pointee(&pointers)?;
        let mut data = match self.optional(groups[2])? {
            Some(padding) if padding.element == element && padding.shape == pointers.shape => {
                Data::clone(&padding.data)
            }
            Some(other) => {
                return malformed(format!("padding {:?} of {:?}", other.shape, other.element));
            }
            None => element.poison(pointers.data.len()),
        };
        let addresses = pointers.ints()?;
        let width = element.width();
        let active = self.active(&pointers, groups[1])?;
        let mut bytes = vec![];
        for (first, count) in runs(addresses, &active, width)? {
            bytes.resize(count * width, 0);
            self.memory.load(Address(addresses[first] as u64), &mut bytes)?;
            element.decode(&bytes, &mut data, first)?;
        }
        let tile = Tile::new(element, pointers.shape.clone(), data);
        Ok(vec![Value::Tile(tile), Value::Token])
    }

    pub fn store_pointers(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let groups = step.segments(4)?;
        if !matches!(step.int("memory_ordering_semantics")?, 0 | 1 | 3) {
            return malformed("a store that is neither weak, relaxed nor release");
        }
        let (pointers, value) = (self.one(groups[0])?, self.one(groups[1])?);
        let element = pointee(&pointers)?;
        if value.element != element || value.shape != pointers.shape {
            return malformed(format!("{:?} of {:?} stored", value.shape, value.element));
        }
        let addresses = pointers.ints()?;
        let active = self.active(&pointers, groups[2])?;
        for (first, count) in runs(addresses, &active, element.width())? {
            let bytes = element.encode(&value.data, first, count);
            self.memory.store(Address(addresses[first] as u64), &bytes)?;
        }
        Ok(vec![Value::Token])
    }

    pub fn atomic(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        let compare = step.op.opcode == Opcode::AtomicCAS;
        let groups = step.segments(if compare { 5 } else { 4 })?;
        step.int("memory_ordering_semantics")?;
        let (pointers, first) = (self.one(groups[0])?, self.one(groups[1])?);
        let element = pointee(&pointers)?;
        let second = if compare { self.one(groups[2])? } else { first.clone() };
        let fits = |tile: &Tile| tile.element == element && tile.shape == pointers.shape;
        if !fits(&first) || !fits(&second) {
            return malformed(format!("{:?} of {:?}", first.shape, first.element));
        }
        let mode = if compare { None } else { Some(Mode::of(step, element)?) };
        // An implementation chooses the results of masked elements; here `cmp` for
        // compare-and-swap.
        let mut old =
            if compare { Data::clone(&first.data) } else { element.poison(first.data.len()) };
        let mask = groups[if compare { 3 } else { 2 }];
        for place in self.active(&pointers, mask)? {
            let at = pointers.ints()?[place];
            aligned(at, element.width())?;
            self.memory.combine(Address(at as u64), element.width(), |bytes| {
                element.decode(bytes, &mut old, place)?;
                match &mode {
                    Some(mode) => mode.apply(element, bytes, &first, place).map(Some),
                    None if bytes == element.encode(&first.data, place, 1) => {
                        Ok(Some(element.encode(&second.data, place, 1)))
                    }
                    None => Ok(None),
                }
            })?;
        }
        let tile = Tile::new(element, pointers.shape.clone(), old);
        Ok(vec![Value::Tile(tile), Value::Token])
    }
}

/// Cuts the active places into runs of consecutive addresses. Returns first place and length of
/// each.
fn runs(addresses: &[i64], active: &[usize], width: usize) -> Outcome<Vec<(usize, usize)>> {
    let mut runs: Vec<(usize, usize)> = vec![];
    for &place in active {
        aligned(addresses[place], width)?;
        match runs.last_mut() {
            Some((first, count))
                if *first + *count == place
                    && addresses[*first].wrapping_add((*count * width) as i64)
                        == addresses[place] =>
            {
                *count += 1;
            }
            _ => runs.push((place, 1)),
        }
    }
    Ok(runs)
}

fn aligned(address: i64, width: usize) -> Outcome<()> {
    if (address as u64).is_multiple_of(width as u64) {
        return Ok(());
    }
    undefined(format!("{address:#x} is not aligned to {width} bytes"))
}

/// The way in which an atomic operation combines memory with an operand.
pub(super) enum Mode {
    Int(fn(i64, i64) -> i64),
    Unsigned(fn(u64, u64) -> u64),
    AddFloat,
    Exchange,
}

impl Mode {
    pub fn of(step: &Step, element: Element) -> Outcome<Self> {
        let mode = match step.int("mode")? {
            0 => Self::Int(|x, y| x & y),
            1 => Self::Int(|x, y| x | y),
            2 => Self::Int(|x, y| x ^ y),
            3 => Self::Int(i64::wrapping_add),
            4 => Self::AddFloat,
            5 => Self::Int(i64::max),
            6 => Self::Int(i64::min),
            7 => Self::Unsigned(u64::max),
            8 => Self::Unsigned(u64::min),
            9 => Self::Exchange,
            other => return unsupported(format!("mode {other}")),
        };
        let allowed = match mode {
            Self::AddFloat => element.is_float(),
            Self::Exchange => matches!(element.width(), 4 | 8),
            _ => matches!(element.int_bits(), Some(32 | 64)),
        };
        if allowed {
            Ok(mode)
        } else {
            unsupported(format!("mode {} of {element:?}", step.int("mode")?))
        }
    }

    /// Returns the new bytes of an element, given its old bytes and the operand at `place`.
    pub fn apply(
        &self,
        element: Element,
        old: &[u8],
        operand: &Tile,
        place: usize,
    ) -> Outcome<Vec<u8>> {
        let mut data = element.poison(1);
        element.decode(old, &mut data, 0)?;
        match (&mut data, &*operand.data) {
            _ if matches!(self, Self::Exchange) => {
                return Ok(element.encode(&operand.data, place, 1));
            }
            (Data::Int(x), Data::Int(y)) => {
                let bits = element.int_bits().unwrap_or(64);
                x[0] = match self {
                    Self::Unsigned(f) => {
                        wrap(f(unsigned(x[0], bits), unsigned(y[place], bits)).into(), bits)
                    }
                    Self::Int(f) => f(x[0], y[place]),
                    _ => return malformed("a mode of floats on integers"),
                };
            }
            (Data::F32(x), Data::F32(y)) => {
                x[0] += y[place];
                element.round(x);
            }
            (Data::F64(x), Data::F64(y)) => x[0] += y[place],
            _ => return malformed("operands of different types"),
        }
        Ok(element.encode(&data, 0, 1))
    }
}
