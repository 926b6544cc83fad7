//! How often the branches and loops of kernels ran.

use std::collections::{BTreeMap, HashMap};

use super::decided::decided_by_data;
use super::program::{Program, Step};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Location, OpId};

/// A line of the kernels' source, and the column in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Line {
    /// Name of the file.
    pub file: String,
    /// From 1.
    pub line: u32,
    /// From 0.
    pub column: u32,
}

/// A branch or a loop of a kernel, the same in all variants of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Its line, and then the lines of the calls that it is inlined through, from the inside out.
    pub lines: Vec<Line>,
    /// How many branches or loops of the same lines come before it: `if a && b` has two.
    pub index: usize,
    /// Whether it is a loop.
    pub is_loop: bool,
}

/// How often a body ran at a time: the body of a loop, or the first body of a branch, which runs
/// once or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Turns {
    /// Whether it ever did not run.
    pub none: bool,
    /// Whether it ever ran once.
    pub once: bool,
    /// Whether it ever ran several times.
    pub several: bool,
}

impl Turns {
    pub(super) fn add(&mut self, count: u64) {
        match count {
            0 => self.none = true,
            1 => self.once = true,
            _ => self.several = true,
        }
    }

    /// Adds the turns of other runs.
    pub fn join(&mut self, other: Turns) {
        self.none |= other.none;
        self.once |= other.once;
        self.several |= other.several;
    }
}

/// The turns of each branch and loop that data decide, also of those that no run came to. Where a
/// constant of the instance decides, none is listed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reach {
    /// The turns of each place.
    pub turns: BTreeMap<Place, Turns>,
}

impl Reach {
    /// Adds the turns of a run.
    pub(super) fn add(&mut self, program: &Program, turns: &HashMap<OpId, Turns>) {
        let mut counts = HashMap::new();
        for step in decided_by_data(program) {
            let place = place_of(step, &mut counts);
            let ran = turns.get(&step.id).copied().unwrap_or_default();
            self.turns.entry(place).or_default().join(ran);
        }
    }
}

/// Returns the place of a branch or loop. `counts` has how many of the same lines came before it.
fn place_of(step: &Step, counts: &mut HashMap<(bool, Vec<Line>), usize>) -> Place {
    let mut lines = vec![];
    gather(&step.op.location, &mut lines);
    let is_loop = step.op.opcode != Opcode::If;
    let count = counts.entry((is_loop, lines.clone())).or_default();
    let index = *count;
    *count += 1;
    Place { lines, index, is_loop }
}

fn gather(location: &Location, lines: &mut Vec<Line>) {
    let (file, line, column) = match location {
        Location::Unknown => return,
        Location::FileLineCol { filename, line, column } => (filename, *line, *column),
        Location::DebugInfo(info) => (&info.filename, info.line, info.column),
        Location::CallSite { callee, caller } => {
            gather(callee, lines);
            return gather(caller, lines);
        }
    };
    let file = file.rsplit('/').next().unwrap_or_default().to_owned();
    lines.push(Line { file, line, column });
}
