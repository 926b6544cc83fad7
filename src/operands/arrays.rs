//! The arrays of a pass.

use std::ops::Index;

use super::{Features, Operand};
use crate::types::Pass;

/// One array, or a handle of one, for each operand of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrays<A> {
    /// The pass that the arrays belong to.
    pub pass: Pass,
    arrays: [Option<A>; Operand::COUNT],
}

impl<A> Arrays<A> {
    /// Returns the arrays of a pass, each made by `array`.
    pub fn new(pass: Pass, features: &Features, mut array: impl FnMut(Operand) -> A) -> Arrays<A> {
        let mut arrays = Arrays::none(pass);
        let all = Operand::inputs(pass, features).chain(Operand::results(pass, features));
        all.for_each(|operand| arrays.set(operand, array(operand)));
        arrays
    }

    /// Returns a set without arrays.
    pub fn none(pass: Pass) -> Arrays<A> {
        Arrays { pass, arrays: [const { None }; Operand::COUNT] }
    }

    /// Sets the array of an operand.
    pub fn set(&mut self, operand: Operand, array: A) {
        self.arrays[operand as usize] = Some(array);
    }

    /// Returns the array of an operand, if the set has it.
    pub fn get(&self, operand: Operand) -> Option<&A> {
        self.arrays[operand as usize].as_ref()
    }

    /// Changes each array.
    pub fn map<B>(&self, mut change: impl FnMut(Operand, &A) -> B) -> Arrays<B> {
        let mut changed = Arrays::none(self.pass);
        for (operand, array) in Operand::all().zip(&self.arrays) {
            if let Some(array) = array {
                changed.set(operand, change(operand, array));
            }
        }
        changed
    }
}

/// # Panics
/// If the set lacks the array of the operand.
impl<A> Index<Operand> for Arrays<A> {
    type Output = A;

    fn index(&self, operand: Operand) -> &A {
        let missing = || panic!("there is no {} in the {:?} pass", operand.name(), self.pass);
        self.get(operand).unwrap_or_else(missing)
    }
}
