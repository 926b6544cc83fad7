//! Which branches and loops of a program data decide: arguments of the launch, the block, and what
//! is in memory. Constants of the instance decide the others.

use super::program::{Body, Program, Step, slot};
use cutile_ir::bytecode::Opcode;

/// Returns the branches and loops that data decide, in order.
pub(super) fn decided_by_data<'p, 'm>(program: &'p Program<'m>) -> Vec<&'p Step<'m>> {
    let mut data = Data { slots: vec![false; program.slots], changed: true };
    program.body.args.iter().for_each(|&(slot, _)| data.mark(slot));
    while std::mem::take(&mut data.changed) {
        data.follow(&program.body);
    }
    let mut decided = vec![];
    data.gather(&program.body, &mut decided);
    decided
}

/// Which values depend on data.
struct Data {
    slots: Vec<bool>,
    /// Whether a value was marked since this was last reset.
    changed: bool,
}

impl Data {
    fn mark(&mut self, slot: usize) {
        self.changed |= !self.slots[slot];
        self.slots[slot] = true;
    }

    fn is_data(&self, step: &Step, operand: usize) -> bool {
        step.op.operands.get(operand).is_some_and(|&value| self.slots[slot(value)])
    }

    /// Marks the values of a body that depend on marked values.
    fn follow(&mut self, body: &Body) {
        for step in &body.steps {
            let any = (0..step.op.operands.len()).any(|operand| self.is_data(step, operand));
            match step.op.opcode {
                Opcode::If => self.follow_branch(step),
                Opcode::For => self.follow_loop(step, 3, 1),
                Opcode::Loop => self.follow_loop(step, 0, 0),
                Opcode::GetTileBlockId | Opcode::GetNumTileBlocks => self.mark_results(step),
                _ if any => {
                    self.mark_results(step);
                    let arguments = step.regions.iter().flat_map(|region| &region.args);
                    arguments.for_each(|&(slot, _)| self.mark(slot));
                }
                _ => {}
            }
            step.regions.iter().for_each(|region| self.follow(region));
        }
    }

    fn mark_results(&mut self, step: &Step) {
        step.results.iter().flatten().for_each(|&slot| self.mark(slot));
    }

    fn follow_branch(&mut self, step: &Step) {
        let yields: Vec<_> = step.regions.iter().filter_map(|region| region.steps.last()).collect();
        for (place, slot) in step.results.iter().enumerate() {
            if self.decides(step) || yields.iter().any(|last| self.is_data(last, place)) {
                slot.iter().for_each(|&slot| self.mark(slot));
            }
        }
    }

    /// Marks what a loop carries. It carries the operands from `first` on, and its body takes them
    /// from argument `own` on.
    fn follow_loop(&mut self, step: &Step, first: usize, own: usize) {
        let [body] = &step.regions[..] else { return };
        let decided = self.decides(step);
        let [next, last] =
            [Opcode::Continue, Opcode::Break].map(|opcode| terminators(body, opcode));
        for (place, &(slot, _)) in body.args.iter().enumerate() {
            let carried = place.checked_sub(own);
            let from = |step, first| carried.is_some_and(|place| self.is_data(step, first + place));
            if decided || from(step, first) || next.iter().any(|&step| from(step, 0)) {
                self.mark(slot);
            }
        }
        for (place, slot) in step.results.iter().enumerate() {
            let carried = body.args.get(place + own).is_some_and(|&(slot, _)| self.slots[slot]);
            if decided || carried || last.iter().any(|step| self.is_data(step, place)) {
                slot.iter().for_each(|&slot| self.mark(slot));
            }
        }
    }

    /// Whether data decide which way a branch goes, or how often the body of a loop runs.
    fn decides(&self, step: &Step) -> bool {
        match step.op.opcode {
            Opcode::If => self.is_data(step, 0),
            Opcode::For => (0..3).any(|operand| self.is_data(step, operand)),
            Opcode::Loop => step.regions.iter().any(|body| self.leaves(body)),
            _ => false,
        }
    }

    /// Whether a branch that data decide leaves a turn of the loop with this body.
    fn leaves(&self, body: &Body) -> bool {
        let mut branches = body.steps.iter().filter(|step| step.op.opcode == Opcode::If);
        branches.any(|branch| {
            let ends = |region: &Body| {
                [Opcode::Continue, Opcode::Break]
                    .into_iter()
                    .any(|opcode| !terminators(region, opcode).is_empty())
            };
            let leaves = self.decides(branch) && branch.regions.iter().any(ends);
            leaves || branch.regions.iter().any(|region| self.leaves(region))
        })
    }

    fn gather<'p, 'm>(&self, body: &'p Body<'m>, decided: &mut Vec<&'p Step<'m>>) {
        for step in &body.steps {
            if self.decides(step) {
                decided.push(step);
            }
            step.regions.iter().for_each(|region| self.gather(region, decided));
        }
    }
}

/// Returns the terminators of turns of the loop with this body: its own, and those in branches.
fn terminators<'p, 'm>(body: &'p Body<'m>, opcode: Opcode) -> Vec<&'p Step<'m>> {
    let of_step = |step: &'p Step<'m>| match step.op.opcode {
        Opcode::If => step.regions.iter().flat_map(|region| terminators(region, opcode)).collect(),
        other if other == opcode => vec![step],
        _ => vec![],
    };
    body.steps.iter().flat_map(of_step).collect()
}
