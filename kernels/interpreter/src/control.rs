//! `if`, `for` and `loop`.

use super::error::{Outcome, malformed, undefined};
use super::machine::{Flow, Machine, Value};
use super::program::Step;
use super::tile::{Data, Tile, unsigned, wrap};

impl<'a> Machine<'a> {
    pub fn branch(&mut self, step: &Step<'a>) -> Outcome<Flow> {
        let [condition] = self.tiles::<1>(step)?;
        let taken = if condition.int()? != 0 { 0 } else { 1 };
        self.note(step, 1 - taken as u64);
        match (step.regions.get(taken), step.regions.len()) {
            (Some(body), 1 | 2) => self.run(body, vec![]),
            (None, 1) => Ok(Flow::End),
            (_, count) => malformed(format!("1 or 2 regions expected, got {count}")),
        }
    }

    /// Runs a `for` loop. It ends in `Continue` with the last carried values, or in `Return`.
    pub fn count_loop(&mut self, step: &Step<'a>) -> Outcome<Flow> {
        let ([body], true) = (&step.regions[..], step.op.operands.len() >= 3) else {
            return malformed("one region and at least three operands expected");
        };
        let tile = |index: usize| self.tile_of(step.op.operands[index]);
        let [lower, upper, stride] = [tile(0)?, tile(1)?, tile(2)?];
        let (element, bits) = (lower.element, lower.bits()?);
        if element != upper.element || element != stride.element {
            return malformed("bounds and step of different types");
        }
        let unsigned_bounds = step.flag("unsigned_cmp")?;
        let number = |tile: &Tile| {
            let value = tile.int()?;
            Ok(if unsigned_bounds { unsigned(value, bits).into() } else { i128::from(value) })
        };
        let (mut index, end, stride) = (number(&lower)?, number(&upper)?, number(&stride)?);
        if stride <= 0 {
            return undefined(format!("for with step {stride}"));
        }
        let mut carried = self.operands(step)?.split_off(3);
        let mut turns = 0;
        while index < end {
            let data = Data::Int(vec![wrap(index, bits)]);
            let induction = Tile::new(element, [], data);
            let mut arguments = vec![Value::Tile(induction)];
            arguments.append(&mut carried);
            carried = match self.run(body, arguments)? {
                Flow::Continue(values) => values,
                Flow::End => vec![],
                Flow::Return => return Ok(Flow::Return),
                Flow::Break(_) | Flow::Yield(_) => return malformed("a for ends in continue"),
            };
            index += stride;
            turns += 1;
        }
        self.note(step, turns);
        Ok(Flow::Continue(carried))
    }

    /// Runs a `loop`. It ends in `Break` with the results, or in `Return`.
    pub fn endless_loop(&mut self, step: &Step<'a>) -> Outcome<Flow> {
        let [body] = &step.regions[..] else {
            return malformed(format!("one region expected, got {}", step.regions.len()));
        };
        let mut carried = self.operands(step)?;
        let mut turns = 0;
        loop {
            match self.run(body, carried)? {
                Flow::Continue(values) => carried = values,
                Flow::End => carried = vec![],
                flow @ (Flow::Break(_) | Flow::Return) => {
                    self.note(step, turns);
                    return Ok(flow);
                }
                Flow::Yield(_) => return malformed("a loop's body ends in continue or break"),
            }
            turns += 1;
        }
    }
}
