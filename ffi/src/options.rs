//! The mask, the features and the schedule of a call.

use burst_attention::Problem;
use burst_attention::mask::Window;
use burst_attention::problem::Features;
use burst_attention::schedule::Family;
use serde::Deserialize;

use crate::attributes::Attributes;
use crate::error::{Error, Result};

/// Static options of a call.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "Stated")]
pub struct Options {
    /// The pairs of positions that see each other.
    pub window: Window,
    /// The features of the problem.
    pub features: Features,
    /// The family of schedules, which may not fit the number of ranks.
    pub family: Family,
}

/// Options as Python states them: in numbers and names, under the names of the call's attributes.
#[derive(Deserialize)]
struct Stated {
    /// Positions that a query sees before its own; the smallest int64 for no limit.
    window_left: i64,
    /// Positions that a query sees after its own; the smallest int64 for no limit.
    window_right: i64,
    /// The soft cap; 0 for none.
    logits_soft_cap: f32,
    /// The probability that a weight is dropped; 0 for none.
    dropout_rate: f32,
    /// Names of the operands that features take, with commas between them.
    feature_operands: String,
    /// Name of the family of schedules.
    schedule: String,
    /// Ranks of an inner ring; 0 for schedules without inner rings.
    inner_size: i64,
}

impl Options {
    /// Returns a problem with this mask and these features.
    ///
    /// # Errors
    /// If the core does not take it, or the schedule does not fit its ranks.
    pub(crate) fn of(&self, problem: &Problem) -> crate::answer::Result<Problem> {
        let Options { window, features, family } = *self;
        let problem = Problem { window, features, ..problem.clone() };
        problem.validate()?;
        family.validate(problem.world_size)?;
        Ok(problem)
    }

    /// Reads the attributes.
    ///
    /// # Errors
    /// If one is missing, of another type or out of range.
    pub fn decode(attributes: &Attributes<'_>) -> Result<Options> {
        Options::try_from(Stated {
            window_left: attributes.get("window_left")?,
            window_right: attributes.get("window_right")?,
            logits_soft_cap: attributes.get("logits_soft_cap")?,
            dropout_rate: attributes.get("dropout_rate")?,
            feature_operands: attributes.get::<&str>("feature_operands")?.into(),
            schedule: attributes.get::<&str>("schedule")?.into(),
            inner_size: attributes.get("inner_size")?,
        })
    }
}

impl TryFrom<Stated> for Options {
    type Error = Error;

    fn try_from(stated: Stated) -> Result<Options> {
        let [left, right] = [stated.window_left, stated.window_right]
            .map(|limit| (limit != i64::MIN).then_some(limit));
        let window = Window { left, right };
        let inner = usize::try_from(stated.inner_size).unwrap_or(0);
        let names = stated.feature_operands.split(',').filter(|name| !name.is_empty());
        let names: Vec<_> = names.collect();
        Ok(Options {
            window,
            features: Features::of_operands(stated.logits_soft_cap, stated.dropout_rate, &names)?,
            family: Family::named(&stated.schedule, inner)?,
        })
    }
}
