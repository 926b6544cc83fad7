//! Reads the operands of instructions: registers, literals, symbols, addresses and vectors.

use crate::body::Builder;
use crate::compute::Width;
use crate::memory::Space;
use crate::program::{Access, Source, Special};
use crate::types::mask;

/// What a name of a body means.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Symbol {
    Register {
        index: u32,
        bits: u32,
    },
    /// A variable's address in its kind of memory.
    Variable(Space, Source),
}

const AXES: [(&str, usize); 3] = [("x", 0), ("y", 1), ("z", 2)];

/// The special registers without axes, and their bits.
const SPECIAL: [(&str, Special, u32); 11] = [
    ("%laneid", Special::Lane, 32),
    ("%warpid", Special::Warp, 32),
    ("%nwarpid", Special::Warps, 32),
    ("%lanemask_eq", Special::Lanes(u32::eq), 32),
    ("%lanemask_lt", Special::Lanes(u32::lt), 32),
    ("%lanemask_le", Special::Lanes(u32::le), 32),
    ("%lanemask_gt", Special::Lanes(u32::gt), 32),
    ("%lanemask_ge", Special::Lanes(u32::ge), 32),
    ("%clock", Special::Clock, 32),
    ("%clock64", Special::Clock, 64),
    ("%globaltimer", Special::Clock, 64),
];

fn special(name: &str) -> Option<(Special, u32)> {
    if let Some(&(_, found, bits)) = SPECIAL.iter().find(|row| row.0 == name) {
        return Some((found, bits));
    }
    let (name, axis) = name.split_once('.')?;
    let axis = AXES.iter().find(|row| row.0 == axis)?.1;
    let found = match name {
        "%tid" => Special::Thread(axis),
        "%ntid" => Special::Threads(axis),
        "%ctaid" => Special::Block(axis),
        "%nctaid" => Special::Blocks(axis),
        _ => return None,
    };
    Some((found, 32))
}

fn fits(bits: u32, width: Width) -> Result<(), String> {
    match width {
        Width::Exactly(wanted) if bits != wanted => {
            Err(format!("an operand has {bits} bits, the instruction takes {wanted}"))
        }
        Width::AtLeast(wanted) if bits < wanted => {
            Err(format!("an operand has {bits} bits, the instruction takes at least {wanted}"))
        }
        _ => Ok(()),
    }
}

impl Builder<'_, '_> {
    /// Takes a register that the instruction writes, and returns its bits too. `_` is no register.
    pub fn written(&mut self, width: Width) -> Result<(Option<u32>, u32), String> {
        let name = self.cursor.next();
        if name == "_" {
            return Ok((None, 64));
        }
        match self.lookup(name) {
            Some(Symbol::Register { index, bits }) => {
                fits(bits, width)?;
                Ok((Some(index), bits))
            }
            _ => Err(format!("'{name}' is no register")),
        }
    }

    /// Takes a register that the instruction writes.
    pub fn destination(&mut self, bits: u32) -> Result<Option<u32>, String> {
        Ok(self.written(Width::Exactly(bits))?.0)
    }

    /// Takes an operand that the instruction reads.
    pub fn source(&mut self, width: Width) -> Result<Source, String> {
        let (Width::Exactly(bits) | Width::AtLeast(bits)) = width;
        if let Some(value) = self.cursor.literal(bits)? {
            return Ok(Source::Value(value));
        }
        let name = self.cursor.next();
        if let Some((found, has)) = special(name) {
            fits(has, width)?;
            return Ok(Source::Special(found));
        }
        match self.lookup(name) {
            Some(Symbol::Register { index, bits }) => {
                fits(bits, width)?;
                Ok(Source::Register(index))
            }
            Some(Symbol::Variable(_, Source::Value(address))) if self.cursor.take("+") => {
                let offset = self.cursor.integer()? as u64;
                Ok(Source::Value(address.wrapping_add(offset) & mask(bits)))
            }
            Some(Symbol::Variable(_, address)) => Ok(address),
            None => Err(format!("'{name}' is not declared, and no special register")),
        }
    }

    /// Takes a comma and then an operand.
    pub fn next_source(&mut self, width: Width) -> Result<Source, String> {
        self.cursor.expect(",")?;
        self.source(width)
    }

    /// Takes an address in brackets.
    pub fn address(&mut self, space: Space, bytes: usize) -> Result<Access, String> {
        self.cursor.expect("[")?;
        if let Some(Symbol::Variable(found, _)) = self.lookup(self.cursor.peek())
            && found != space
        {
            let name = self.cursor.peek();
            return Err(format!("'{name}' is {} memory, not {}", found.name(), space.name()));
        }
        let base = match self.cursor.literal(64)? {
            Some(address) => Source::Value(address),
            // Shared memory takes addresses of 32 bits too.
            None => self.source(Width::AtLeast(32))?,
        };
        let signed = self.cursor.take("+") || self.cursor.peek() == "-";
        let offset = if signed { self.cursor.integer()? as u64 } else { 0 };
        self.cursor.expect("]")?;
        Ok(Access { space, base, offset, bytes })
    }

    /// Takes one operand, or a list in braces.
    pub fn vector<T>(
        &mut self,
        mut one: impl FnMut(&mut Self) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        if !self.cursor.take("{") {
            return Ok(vec![one(self)?]);
        }
        let mut found = vec![one(self)?];
        while self.cursor.take(",") {
            found.push(one(self)?);
        }
        self.cursor.expect("}")?;
        Ok(found)
    }

    /// Takes a predicate that may be negated; the second value tells whether it is.
    pub fn predicate(&mut self) -> Result<(Source, bool), String> {
        let negated = self.cursor.take("!");
        Ok((self.source(Width::Exactly(1))?, negated))
    }
}
