//! The table of main loops.

use crate::cubin::{Column, Rule};

use super::Modelled;

/// The columns of a main loop. The name of the last column has the model's version.
pub const LOOPS: [Column<Modelled>; 8] = [
    ("stages", Rule::AtLeast, |l| l.stages.iter().min().map_or(0, |&s| s.min(99) as u32)),
    ("mma", Rule::Either, |l| l.products.0 as u32),
    ("groups", Rule::AtMost(0), |l| l.products.1 as u32),
    ("bar", Rule::AtMost(0), |l| l.barriers as u32),
    ("exposed", Rule::AtMost(0), |l| l.exposed as u32),
    ("conv", Rule::AtMost(0), |l| l.conversions as u32),
    ("mask", Rule::AtMost(0), |l| l.masking as u32),
    ("cycles_model_2", Rule::AtMost(0), |l| l.cycles.round() as u32),
];

#[cfg(test)]
mod tests {
    #[test]
    fn the_last_column_names_the_model() {
        assert_eq!(super::LOOPS[7].0, format!("cycles_model_{}", crate::model::VERSION));
    }
}
