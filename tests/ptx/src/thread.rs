//! Runs one thread up to its end, or to an instruction that needs other threads.

use crate::Launch;
use crate::collective::LANES;
use crate::compute::Function;
use crate::error::{Fault, Outcome};
use crate::memory::{Space, Spaces};
use crate::program::{Access, Atomic, Body, Carry, Loaded, Op, Register, Source, Special};
use crate::types::mask;

/// The state of a thread.
pub(crate) struct Thread {
    pub registers: Vec<Register>,
    pub local: Vec<u8>,
    /// The next instruction.
    pub at: usize,
    pub carry: bool,
    pub index: [u32; 3],
    /// The position in the block.
    pub number: usize,
    pub state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// The instruction at the thread's position needs other threads.
    Waiting,
    Ended,
}

/// What the threads of a block share.
pub(crate) struct Context<'a> {
    pub body: &'a Body,
    pub launch: &'a Launch<'a>,
    pub spaces: Spaces<'a>,
    pub block: [u32; 3],
    pub steps: u64,
}

impl Thread {
    pub fn new(body: &Body, number: usize, [x, y, _]: [u32; 3]) -> Self {
        let n = number as u32;
        Self {
            registers: body.blank.clone(),
            local: vec![0xff; body.local],
            at: 0,
            carry: false,
            index: [n % x, n / x % y, n / x / y],
            number,
            state: State::Ready,
        }
    }

    /// Prepares the thread for another block.
    pub fn restart(&mut self, body: &Body) {
        self.registers.copy_from_slice(&body.blank);
        self.local.fill(0xff);
        self.at = 0;
        self.state = State::Ready;
    }

    pub fn lane(&self) -> usize {
        self.number % LANES
    }

    pub fn set(&mut self, to: Option<u32>, value: u64) {
        if let Some(to) = to {
            self.registers[to as usize] = Register { value, lacking: 0 };
        }
    }
}

impl Context<'_> {
    /// Returns a value that has all its bits.
    #[inline]
    pub fn read(&self, thread: &Thread, source: Source) -> Outcome<u64> {
        self.read_bits(thread, source, u64::MAX)
    }

    /// Returns a value that has the bits of a mask.
    #[inline]
    fn read_bits(&self, thread: &Thread, source: Source, mask: u64) -> Outcome<u64> {
        let Register { value, lacking } = self.partly(thread, source);
        match source {
            Source::Register(index) if lacking & mask != 0 => {
                Err(Fault::Unwritten(self.body.registers[index as usize].clone()))
            }
            _ => Ok(value),
        }
    }

    /// Returns a value and the bits that it lacks.
    #[inline]
    pub fn partly(&self, thread: &Thread, source: Source) -> Register {
        let value = match source {
            Source::Register(index) => return thread.registers[index as usize],
            Source::Value(value) => value,
            other => self.constant(thread, other),
        };
        Register { value, lacking: 0 }
    }

    /// Returns what does not change while the thread runs.
    fn constant(&self, thread: &Thread, source: Source) -> u64 {
        match source {
            Source::Special(special) => self.special(thread, special),
            Source::Global(index) => self.launch.globals[index as usize],
            Source::DynamicShared => dynamic_start(self.body),
            Source::Register(_) | Source::Value(_) => unreachable!("`partly` has their values"),
        }
    }

    fn special(&self, thread: &Thread, special: Special) -> u64 {
        let lane = thread.lane() as u32;
        let word = match special {
            Special::Thread(axis) => thread.index[axis],
            Special::Threads(axis) => self.launch.block[axis],
            Special::Block(axis) => self.block[axis],
            Special::Blocks(axis) => self.launch.grid[axis],
            Special::Lane => lane,
            Special::Warp => (thread.number / LANES) as u32,
            Special::Warps => self.launch.block.iter().product::<u32>().div_ceil(LANES as u32),
            Special::Lanes(holds) => {
                (0..32).filter(|other| holds(other, &lane)).map(|other| 1 << other).sum()
            }
            Special::Clock => return self.steps,
        };
        word.into()
    }

    /// Runs a thread until it waits or ends.
    pub fn run(&mut self, thread: &mut Thread) -> Outcome<()> {
        let body = self.body;
        loop {
            let instruction = &body.code[thread.at];
            self.steps += 1;
            if self.steps > self.launch.step_limit {
                return Err(Fault::Limit(self.launch.step_limit));
            }
            if let Some((register, wanted)) = instruction.guard {
                let holds = self.read(thread, Source::Register(register))? == 1;
                if holds != wanted {
                    thread.at += 1;
                    continue;
                }
            }
            match &instruction.op {
                Op::Compute { function, to, from, moved } => {
                    self.compute(thread, function, *to, from, *moved)?;
                }
                Op::Move { to, from } => {
                    let value = self.partly(thread, *from);
                    if let Some(to) = *to {
                        thread.registers[to as usize] = value;
                    }
                }
                Op::Carry(carry) => self.carry(thread, carry)?,
                Op::Load { access, to } => self.load(thread, access, to)?,
                Op::Store { access, from } => self.store(thread, access, from)?,
                Op::Atomic(atomic) => self.atomic(thread, atomic)?,
                Op::Branch(target) => {
                    thread.at = *target;
                    continue;
                }
                Op::Return => {
                    thread.state = State::Ended;
                    return Ok(());
                }
                Op::Trap => return Err(Fault::Trap),
                Op::Barrier { .. } | Op::Collective(_) | Op::Matrix(_) => {
                    thread.state = State::Waiting;
                    return Ok(());
                }
            }
            thread.at += 1;
        }
    }

    #[inline]
    fn compute(
        &self,
        thread: &mut Thread,
        function: &Function,
        to: Option<u32>,
        from: &[Source],
        moved: usize,
    ) -> Outcome<()> {
        let (mut values, mut lacking, mut spoils) = ([0; 4], [0; 4], false);
        for (place, &source) in from.iter().enumerate() {
            let found = self.partly(thread, source);
            spoils |= found.lacking != 0 && place >= moved;
            (values[place], lacking[place]) = (found.value, found.lacking);
        }
        if spoils {
            if let Some(to) = to {
                thread.registers[to as usize] = Register { value: 0, lacking: u64::MAX };
            }
            return Ok(());
        }
        let result = function(&values);
        thread.set(to, result.ok_or_else(|| Fault::Undefined(values.to_vec()))?);
        if let (Some(to), true) = (to, lacking != [0; 4]) {
            // Lacking bits move like all others.
            lacking[moved..].copy_from_slice(&values[moved..]);
            thread.registers[to as usize].lacking = function(&lacking).unwrap_or(u64::MAX);
        }
        Ok(())
    }

    fn carry(&self, thread: &mut Thread, carry: &Carry) -> Outcome<()> {
        let [a, b, c] = carry.from.map(|source| self.read(thread, source));
        let (a, b, c) = (u128::from(a?), u128::from(b?), u128::from(c?));
        let (first, second) = match carry.product {
            None => (a, b),
            Some(high) => {
                (((a * b) >> if high { carry.bits } else { 0 }) & mask(carry.bits) as u128, c)
            }
        };
        let second = second + u128::from(carry.reads && thread.carry);
        let result = if carry.subtracts { first.wrapping_sub(second) } else { first + second };
        if carry.writes {
            thread.carry = result >> carry.bits & 1 == 1;
        }
        thread.set(carry.to, result as u64 & mask(carry.bits));
        Ok(())
    }

    /// Returns the address of an access to some bytes, whose alignment is their number.
    pub fn place(&self, thread: &Thread, access: &Access) -> Outcome<(Space, u64)> {
        let base = self.read(thread, access.base)?;
        Ok((access.space, base.wrapping_add(access.offset)))
    }

    fn load(&mut self, thread: &mut Thread, access: &Access, to: &[Loaded]) -> Outcome<()> {
        let place = self.place(thread, access)?;
        let mut bytes = [0; 64];
        let bytes = &mut bytes[..access.bytes * to.len()];
        self.spaces.load(&mut thread.local, place, bytes)?;
        for (element, loaded) in bytes.chunks(access.bytes).zip(to) {
            let value = (word(element) << loaded.unused) as i64 >> loaded.unused;
            thread.set(loaded.to, value as u64 & loaded.mask);
        }
        Ok(())
    }

    fn store(&mut self, thread: &mut Thread, access: &Access, from: &[Source]) -> Outcome<()> {
        let place = self.place(thread, access)?;
        let mut bytes = [0; 64];
        let bytes = &mut bytes[..access.bytes * from.len()];
        let bits = mask(8 * access.bytes as u32);
        for (element, &source) in bytes.chunks_mut(access.bytes).zip(from) {
            let value = self.read_bits(thread, source, bits)?.to_le_bytes();
            element.copy_from_slice(&value[..element.len()]);
        }
        self.spaces.store(&mut thread.local, place, bytes)
    }

    fn atomic(&mut self, thread: &mut Thread, atomic: &Atomic) -> Outcome<()> {
        let place = self.place(thread, &atomic.access)?;
        let size = atomic.access.bytes;
        let mut bytes = [0; 64];
        let bytes = &mut bytes[..size * atomic.from.len()];
        self.spaces.load(&mut thread.local, place, bytes)?;
        let mut old = Vec::with_capacity(atomic.from.len());
        for (element, from) in bytes.chunks_mut(size).zip(&atomic.from) {
            let [first, second] = from.map(|source| self.read(thread, source));
            let values = [word(element), first?, second?, 0];
            let new = (atomic.function)(&values);
            let new = new.ok_or_else(|| Fault::Undefined(values.to_vec()))?;
            old.push(values[0]);
            element.copy_from_slice(&new.to_le_bytes()[..size]);
        }
        self.spaces.store(&mut thread.local, place, bytes)?;
        for (&to, old) in atomic.to.iter().zip(old) {
            thread.set(to, old);
        }
        Ok(())
    }
}

fn word(bytes: &[u8]) -> u64 {
    // Lengths that the compiler knows need no call to copy.
    match *bytes {
        [a] => a.into(),
        [a, b] => u16::from_le_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).into(),
        _ => bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

/// Returns the address of the shared memory whose size the launch chooses.
pub(crate) fn dynamic_start(body: &Body) -> u64 {
    body.shared.next_multiple_of(128) as u64
}
