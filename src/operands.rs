//! The features of a problem, and the list of a call's arrays, with one row for each array.
//!
//! Every layer reads this list: the decoder of XLA's calls, the executors on CPU devices and on
//! GPUs, the chunks that travel, and, as JSON, the Python package. The list itself is in `table`.

mod arrays;
mod features;
mod table;
mod types;

use crate::types::Pass;

pub use arrays::Arrays;
pub use features::SOFT_CAPS;
pub use table::{Features, Operand};
use table::{Flag, INPUT, PER_QUERY, ROWS, Role, Row};
pub use types::{DeviceKind, Dim, ElementType, Side};

impl Operand {
    /// The number of operands.
    const COUNT: usize = ROWS.len();

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Returns the name in messages and in the Python package.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the lengths after the batch.
    pub fn dims(self, kind: DeviceKind) -> &'static [Dim] {
        match (self, kind) {
            // XLA sums the parts of a head's queries.
            (Operand::SlopeGrad, DeviceKind::Cuda) => PER_QUERY,
            _ => self.row().dims,
        }
    }

    /// Returns the element type.
    pub fn element(self, kind: DeviceKind) -> ElementType {
        match (self.row().element, kind) {
            (ElementType::ActivationOrFloat32, DeviceKind::Cuda) => ElementType::Activation,
            (element, _) => element,
        }
    }

    /// Returns the field of [`Features`] that asks for the array and says no more.
    pub fn flag(self) -> Option<&'static str> {
        self.row().feature.as_ref()?.name
    }

    /// Returns the gradient with respect to the array.
    pub fn gradient(self) -> Option<Operand> {
        ROWS.iter().find(|row| row.gradient_of == Some(self)).map(|row| row.operand)
    }

    /// Returns the side that the array has rows for, or `None` if it has no rows.
    pub fn side(self) -> Option<Side> {
        match self.row().dims {
            [Dim::QLen, ..] => Some(Side::Queries),
            [Dim::KvLen, ..] => Some(Side::Keys),
            _ => None,
        }
    }

    /// Returns all operands, in order.
    pub fn all() -> impl Iterator<Item = Operand> {
        ROWS.iter().map(|row| row.operand)
    }

    fn with_role(
        role: Role,
        pass: Pass,
        features: &Features,
    ) -> impl Iterator<Item = Operand> + use<> {
        let features = *features;
        let is_present =
            move |row: &&Row| row.feature.as_ref().is_none_or(|flag| (flag.is_on)(&features));
        let rows = ROWS.iter().filter(move |row| row.roles[pass as usize] == role);
        rows.filter(is_present).map(|row| row.operand)
    }

    /// Returns the arrays that a pass takes, in order.
    pub fn inputs(pass: Pass, features: &Features) -> impl Iterator<Item = Operand> + use<> {
        Operand::with_role(Role::Input, pass, features)
    }

    /// Returns the arrays that a pass returns, in order.
    pub fn results(pass: Pass, features: &Features) -> impl Iterator<Item = Operand> + use<> {
        Operand::with_role(Role::Result, pass, features)
    }

    /// Returns the gradients of the arrays of features, in order.
    pub fn gradients_of(features: &Features) -> impl Iterator<Item = Operand> + use<> {
        let results = Operand::results(Pass::Backward, features);
        results.filter(|operand| operand.row().feature.is_some())
    }

    /// Returns the arrays that calls take for any feature, in order.
    pub fn of_features() -> impl Iterator<Item = Operand> {
        let rows = ROWS.iter().filter(|row| row.feature.is_some() && row.roles == INPUT);
        rows.map(|row| row.operand)
    }

    /// Returns the arrays that a call takes for some features, in order.
    pub fn of(features: &Features) -> impl Iterator<Item = Operand> + use<> {
        let features = *features;
        let is_on = move |flag: &Flag| (flag.is_on)(&features);
        Operand::of_features()
            .filter(move |operand| operand.row().feature.as_ref().is_some_and(is_on))
    }

    /// Returns the arrays that features add to rows that travel, in order.
    pub fn travelling(features: &Features, side: Side) -> impl Iterator<Item = Operand> + use<> {
        Operand::of(features).filter(move |operand| operand.side() == Some(side))
    }

    /// Returns the gradients whose sums travel with rows of `side`, in order.
    pub fn gradients(features: &Features, side: Side) -> impl Iterator<Item = Operand> + use<> {
        let results = Operand::results(Pass::Backward, features);
        results.filter(move |operand| operand.side() == Some(side))
    }

    /// Returns the place of a feature's array among the `count` arrays of a chunk, or `None` if the
    /// problem lacks the feature. The arrays of a chunk end with [`Operand::travelling`].
    pub fn place_among(self, count: usize, features: &Features) -> Option<usize> {
        let side = self.side()?;
        let place = Operand::travelling(features, side).position(|operand| operand == self)?;
        Some(count - Operand::travelling(features, side).count() + place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operand_has_its_row() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(row.operand as usize, index, "{}", row.name);
        }
    }
}
