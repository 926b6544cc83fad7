//! Decodes instructions.

use crate::body::Builder;
use crate::compare::compare;
use crate::compute::{Compute, Function, Width, compute, function};
use crate::memory::Space;
use crate::program::{Access, Atomic, Carry, Loaded, Op, Source};
use crate::types::{Mnemonic, Type, mask};

impl Builder<'_, '_> {
    /// Decodes an instruction and takes its operands.
    pub fn decode(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let warp = mnemonic.name == "bar" && mnemonic.take("warp");
        match mnemonic.name {
            "bra" => {
                mnemonic.take("uni");
                self.branch();
            }
            "ret" => {
                mnemonic.take("uni");
                self.ret();
            }
            "exit" => self.push(Op::Return),
            "trap" => self.push(Op::Trap),
            "mov" => self.mov(mnemonic)?,
            "ld" | "ldu" => self.load(mnemonic)?,
            "st" => self.store(mnemonic)?,
            "atom" | "red" => self.atomic(mnemonic)?,
            "bar" | "barrier" if !warp => self.barrier(mnemonic)?,
            "bar" | "shfl" | "vote" | "redux" => self.collective(mnemonic)?,
            "ldmatrix" | "stmatrix" => self.matrix(mnemonic)?,
            "membar" | "fence" | "griddepcontrol" | "prefetch" | "nanosleep" => {
                // Threads see each other's accesses in order, and a launch starts after the last.
                mnemonic.ignore(|_| true);
                while self.cursor.peek() != ";" {
                    self.cursor.next();
                }
            }
            "setp" => self.set_predicate(mnemonic)?,
            "add" | "sub" | "mad" | "addc" | "subc" | "madc" if carries(mnemonic) => {
                self.carry(mnemonic)?;
            }
            name => match compute(mnemonic)? {
                Some(found) => self.compute(found)?,
                None => return Err(format!("instruction '{name}' is not supported")),
            },
        }
        Ok(())
    }

    fn compute(&mut self, compute: Compute) -> Result<(), String> {
        let (to, bits) = self.written(compute.to)?;
        let from = self.sources(&compute.from)?;
        self.push_compute(compute, to, bits, &from);
        Ok(())
    }

    fn sources(&mut self, widths: &[Width]) -> Result<Vec<Source>, String> {
        widths.iter().map(|&width| self.next_source(width)).collect()
    }

    fn push_compute(&mut self, compute: Compute, to: Option<u32>, bits: u32, from: &[Source]) {
        let (width, exact, moved) = (mask(bits), compute.function, compute.moved);
        let function = match compute.to {
            Width::Exactly(_) => exact,
            Width::AtLeast(_) => Box::new(move |x: &[u64; 4]| exact(x).map(|y| y & width)),
        };
        self.push(Op::Compute { function, to, from: from.to_vec(), moved });
    }

    /// Decodes `setp`, which may combine its result with a predicate that may be negated.
    fn set_predicate(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let to = self.destination(1)?;
        let compute = compare(mnemonic)?;
        let mut from = self.sources(&compute.from[..2])?;
        if compute.from.len() > 2 {
            self.cursor.expect(",")?;
            let (predicate, negated) = self.predicate()?;
            from.extend([predicate, Source::Value(negated.into())]);
        }
        self.push_compute(compute, to, 1, &from);
        Ok(())
    }

    /// Decodes `mov`, which also splits a register into parts and joins parts.
    fn mov(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let bits = mnemonic.ty()?.width();
        if self.cursor.peek() == "{" {
            let to = self.vector(|builder| builder.written(Width::AtLeast(1)))?;
            let part = bits / to.len() as u32;
            let wrong = to.iter().any(|&(index, has)| index.is_some() && has != part);
            if wrong || part * to.len() as u32 != bits {
                return Err(format!("the parts have not {bits} bits together"));
            }
            let from = self.next_source(Width::Exactly(bits))?;
            for (place, (to, _)) in to.into_iter().enumerate() {
                let shift = part * place as u32;
                let split = Compute::new(part, &[bits], move |x| Some(x[0] >> shift & mask(part)));
                self.push_compute(split.moving(1), to, part, &[from]);
            }
            return Ok(());
        }
        let to = self.destination(bits)?;
        self.cursor.expect(",")?;
        if self.cursor.peek() != "{" {
            let from = self.source(Width::Exactly(bits))?;
            self.push(Op::Move { to, from });
            return Ok(());
        }
        // The number of parts tells their width.
        let parts = self.cursor.commas("}") as u32 + 1;
        let part = bits / parts;
        let from = self.vector(|builder| builder.source(Width::Exactly(part)))?;
        if from.len() > 4 {
            return Err("at most four parts are supported".into());
        }
        let join = Compute::new(bits, &[], move |x| {
            Some(x.iter().rev().fold(0, |all, &x| all.checked_shl(part).unwrap_or(0) | x))
        });
        self.push_compute(join.moving(from.len()), to, bits, &from);
        Ok(())
    }

    /// Takes the modifiers of an access that have a meaning: its kind of memory and its type.
    fn access(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(Space, Type, usize), String> {
        let space = mnemonic.choose(&Space::WINDOWS).unwrap_or(Space::Generic);
        mnemonic.ignore(|modifier| HINTS.contains(&modifier) || modifier.starts_with("L1::"));
        let count = mnemonic.choose(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1);
        Ok((space, mnemonic.ty()?, count))
    }

    fn load(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let (space, ty, count) = self.access(mnemonic)?;
        let signed = ty.range().0 < 0;
        let to = self.vector(|builder| {
            let (to, has) = builder.written(Width::AtLeast(ty.width()))?;
            Ok(Loaded { to, mask: mask(has), unused: if signed { 64 - ty.bits } else { 0 } })
        })?;
        self.cursor.expect(",")?;
        let access = self.address(space, ty.bytes())?;
        counted(count, to.len())?;
        self.push(Op::Load { access: Box::new(access), to });
        Ok(())
    }

    fn store(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let (space, ty, count) = self.access(mnemonic)?;
        let access = self.address(space, ty.bytes())?;
        self.cursor.expect(",")?;
        let from = self.vector(|builder| builder.source(Width::AtLeast(ty.width())))?;
        counted(count, from.len())?;
        self.push(Op::Store { access: Box::new(access), from });
        Ok(())
    }

    fn atomic(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let mut copy = mnemonic.clone();
        let (space, ty, count) = self.access(&mut copy)?;
        let operation = *["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]
            .iter()
            .find(|name| copy.take(name))
            .ok_or("an atomic operation that is supported is lacking")?;
        let exact_subnormals = copy.take("noftz") || ty.bits != 32 || space == Space::Shared;
        copy.finish()?;
        mnemonic.ignore(|_| true);
        let mut to = vec![None; count];
        if mnemonic.name == "atom" {
            to = self.vector(|builder| builder.destination(ty.width()))?;
            self.cursor.expect(",")?;
        }
        let Access { base, offset, bytes, .. } = self.address(space, ty.bytes())?;
        self.cursor.expect(",")?;
        let operand = Width::Exactly(ty.width());
        let first = self.vector(|builder| builder.source(operand))?;
        let second = match operation {
            "cas" => self.next_source(operand)?,
            _ => Source::Value(0),
        };
        counted(count, to.len())?;
        counted(count, first.len())?;
        let access = Access { space, base, offset, bytes };
        let function = atomic_function(operation, ty, exact_subnormals)?;
        let from = first.into_iter().map(|first| [first, second]).collect();
        self.push(Op::Atomic(Box::new(Atomic { access, to, from, function })));
        Ok(())
    }

    fn barrier(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        mnemonic.take("cta");
        let aligned = mnemonic.take("aligned") || mnemonic.name == "bar";
        mnemonic.require("mode", &[("sync", ())])?;
        let id = self.source(Width::Exactly(32))?;
        let threads = match self.cursor.peek() {
            "," => Some(self.next_source(Width::Exactly(32))?),
            _ => None,
        };
        self.push(Op::Barrier { id, threads, aligned });
        Ok(())
    }

    fn carry(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let name = mnemonic.name;
        let (bits, writes) = (mnemonic.ty()?.bits, mnemonic.take("cc"));
        let product = if name.starts_with("mad") {
            Some(mnemonic.require("part of the product", &[("lo", false), ("hi", true)])?)
        } else {
            None
        };
        let to = self.destination(bits)?;
        let count = if product.is_some() { 3 } else { 2 };
        let mut from = self.sources(&[Width::Exactly(bits); 3][..count])?;
        from.resize(3, Source::Value(0));
        self.push(Op::Carry(Box::new(Carry {
            subtracts: name.starts_with("sub"),
            product,
            reads: name.ends_with('c'),
            writes,
            bits,
            to,
            from: [from[0], from[1], from[2]],
        })));
        Ok(())
    }
}

/// Modifiers of accesses that change nothing here: order, scope and caching.
const HINTS: [&str; 16] = [
    "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "cta", "cluster", "gpu", "sys",
    "nc", "ca", "cg", "cs", "lu", "wt",
];

fn carries(mnemonic: &Mnemonic<'_>) -> bool {
    mnemonic.name.ends_with('c') || mnemonic.clone().take("cc")
}

fn counted(expected: usize, got: usize) -> Result<(), String> {
    if expected == got {
        return Ok(());
    }
    Err(format!("expected {expected} elements, got {got}"))
}

/// Returns the function of the old value, the second and the third operand.
fn atomic_function(operation: &str, ty: Type, exact_subnormals: bool) -> Result<Function, String> {
    Ok(match operation {
        "exch" => Box::new(|x| Some(x[1])),
        "cas" => Box::new(|x| Some(if x[0] == x[1] { x[2] } else { x[0] })),
        "inc" => Box::new(|x| Some(if x[0] >= x[1] { 0 } else { x[0] + 1 })),
        "dec" => Box::new(|x| Some(if x[0] == 0 || x[0] > x[1] { x[1] } else { x[0] - 1 })),
        _ => {
            let flush = if ty.is_float() && !exact_subnormals { "ftz." } else { "" };
            function(&format!("{operation}.{flush}{}", ty.name()))?
        }
    })
}
