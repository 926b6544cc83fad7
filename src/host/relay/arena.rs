//! What a rank keeps between two stretches: one block of memory for each batch entry.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

use crate::host::array::HostArray;
use crate::host::buffer::{HostBuffer, Item, items};
use crate::host::kernel::Room;
use crate::problem::{Dtype, Pass, Problem};
use crate::schedule::{Payload, Place, Schedule, Tile};

const ALIGNMENT: usize = 64;

/// A place in the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Name {
    Home(Payload),
    Delta,
    Slot(Payload, usize),
}

/// Where everything lies in a block, the same on all ranks.
#[derive(Debug, PartialEq, Eq)]
pub struct Arena {
    pub(super) pass: Pass,
    /// Bytes of a block.
    pub bytes: usize,
    offsets: BTreeMap<Name, usize>,
}

impl Arena {
    /// With room for what any rank keeps.
    pub fn new(problem: &Problem, schedules: &[Schedule]) -> Arena {
        let pass = schedules.first().map_or(Pass::Forward, |schedule| schedule.pass);
        let mut sizes: BTreeMap<Name, usize> = BTreeMap::new();
        let mut keep = |name, payload, rows: usize| {
            let bytes = bytes(&items(problem, payload, pass), rows);
            let size = sizes.entry(name).or_default();
            *size = bytes.max(*size);
        };
        let mut at_home = |payload, rows| keep(Name::Home(payload), payload, rows);
        match pass {
            Pass::Forward if carries_state(schedules) => at_home(Payload::Partial, problem.q_len),
            // Float32 gradients add up in the outputs.
            Pass::Backward if problem.dtype != Dtype::F32 => {
                at_home(Payload::QueryGrads, problem.q_len);
                at_home(Payload::KeyGrads, problem.kv_len);
            }
            _ => (),
        }
        for step in schedules.iter().flat_map(|schedule| &schedule.steps) {
            for (chunk, slot) in &step.opens {
                keep(Name::Slot(chunk.payload, *slot), chunk.payload, chunk.rows.len());
            }
            for receive in step.exchanges.iter().flat_map(|exchange| &exchange.receives) {
                if let Place::Slot(slot) = receive.place {
                    let payload = receive.chunk.payload;
                    keep(Name::Slot(payload, slot), payload, receive.chunk.rows.len());
                }
            }
        }
        if pass == Pass::Backward {
            sizes.insert(Name::Delta, bytes(&[per_row(problem)], problem.q_len));
        }
        let mut next = 0;
        let offsets = sizes.into_iter().map(|(name, bytes)| {
            next += bytes;
            (name, next - bytes)
        });
        let offsets = offsets.collect();
        Arena { pass, bytes: next, offsets }
    }
}

/// Is a softmax state kept anywhere? Not where one tile does a row's work.
fn carries_state(schedules: &[Schedule]) -> bool {
    let tiles = schedules.iter().flat_map(|schedule| &schedule.steps).flat_map(|step| &step.tiles);
    tiles.map(|tile: &Tile| tile.query_state).any(|state| !(state.first && state.last))
}

/// delta: a number for each row and head.
fn per_row(problem: &Problem) -> Item {
    Item { heads: problem.heads, dim: 1, dtype: Dtype::F32, by_head: true }
}

fn bytes(items: &[Item], rows: usize) -> usize {
    items.iter().map(|item| item.bytes(rows).next_multiple_of(ALIGNMENT)).sum()
}

/// The blocks of one rank's batch entries, one behind the other.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// What they are for.
    pub problem: &'a Problem,
    /// What lies where in a block.
    pub arena: &'a Arena,
    /// The first.
    pub first: NonNull<u8>,
}

impl Blocks<'_> {
    fn buffer(&self, name: Name, items: &[Item], rows: &Range<usize>) -> HostBuffer {
        let Blocks { problem, arena, first } = *self;
        let Some(&offset) = arena.offsets.get(&name) else {
            return HostBuffer { arrays: vec![] };
        };
        // SAFETY: the block has this offset, and the first one exists.
        let mut next = unsafe { first.add(offset) };
        let arrays = items.iter().map(|item| {
            let memory = next;
            // SAFETY: as above; what is behind the last item is at most the block's end.
            next = unsafe { next.add(item.bytes(rows.len()).next_multiple_of(ALIGNMENT)) };
            let shape = (problem.batch, rows.clone());
            item.view(memory, shape, arena.bytes)
        });
        HostBuffer { arrays: arrays.collect() }
    }

    /// The buffer of a slot.
    pub fn slot(&self, payload: Payload, slot: usize, rows: &Range<usize>) -> HostBuffer {
        let items = items(self.problem, payload, self.arena.pass);
        self.buffer(Name::Slot(payload, slot), &items, rows)
    }
}

impl Room for Blocks<'_> {
    fn home(&self, payload: Payload, rows: Range<usize>) -> HostBuffer {
        let items = items(self.problem, payload, self.arena.pass);
        self.buffer(Name::Home(payload), &items, &rows)
    }

    fn delta(&self, rows: Range<usize>) -> HostArray {
        let one = self.buffer(Name::Delta, &[per_row(self.problem)], &rows).arrays.pop();
        one.expect("a backward pass keeps delta")
    }

    fn accumulator(&self, payload: Payload, slot: usize, rows: Range<usize>) -> HostBuffer {
        self.slot(payload, slot, &rows)
    }
}
