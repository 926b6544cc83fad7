//! The mask and the features of a call, as the numbers in which Python states them.

use burst_attention::mask::Window;
use burst_attention::problem::Features;
use burst_attention::schedule::Family;
use serde::Deserialize;

use crate::attributes::Attributes;
use crate::error::{Error, Result};

/// Static options of a call, under the names of its attributes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Options {
    /// How many positions back a query sees; −1 for no limit.
    window_left: i64,
    /// How many positions ahead; −1 for no limit.
    window_right: i64,
    /// 0 for none.
    logits_soft_cap: f32,
    has_segments: bool,
    has_slopes: bool,
    /// 0 for none.
    dropout_rate: f32,
    schedule: Schedule,
    /// Ranks of an inner ring; 0 but for double rings.
    inner_size: i64,
}

/// A family of schedules by its name in the public interface.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum Schedule {
    Ring,
    DoubleRing,
    Balanced,
    AllGather,
}

impl TryFrom<String> for Schedule {
    type Error = Error;

    fn try_from(name: String) -> Result<Schedule> {
        Schedule::named(&name)
    }
}

impl Schedule {
    pub(crate) fn named(name: &str) -> Result<Schedule> {
        match name {
            "ring" => Ok(Schedule::Ring),
            "double_ring" => Ok(Schedule::DoubleRing),
            "balanced" => Ok(Schedule::Balanced),
            "all_gather" => Ok(Schedule::AllGather),
            other => {
                let expected = "ring, double_ring, balanced or all_gather";
                Err(Error::mismatch("schedule", expected, format!("{other:?}")))
            }
        }
    }

    /// The family, with so many ranks in an inner ring.
    pub(crate) fn family(self, inner: usize) -> Family {
        match self {
            Schedule::Ring => Family::Ring,
            Schedule::DoubleRing => Family::DoubleRing { inner },
            Schedule::Balanced => Family::Balanced,
            Schedule::AllGather => Family::AllGather,
        }
    }
}

impl Options {
    /// Reads the attributes.
    ///
    /// # Errors
    /// If one is missing, of another type or out of range.
    pub fn decode(attributes: &Attributes<'_>) -> Result<Options> {
        let options = Options {
            window_left: attributes.get("window_left")?,
            window_right: attributes.get("window_right")?,
            logits_soft_cap: attributes.get("logits_soft_cap")?,
            has_segments: attributes.get("has_segments")?,
            has_slopes: attributes.get("has_slopes")?,
            dropout_rate: attributes.get("dropout_rate")?,
            schedule: Schedule::named(attributes.get("schedule")?)?,
            inner_size: attributes.get("inner_size")?,
        };
        for (name, limit) in
            [("window_left", options.window_left), ("window_right", options.window_right)]
        {
            if limit < -1 {
                return Err(Error::mismatch(name, "at least 0, or -1 for no limit", limit));
            }
        }
        Ok(options)
    }

    /// Which positions see each other.
    pub fn window(&self) -> Window {
        let limit = |limit: i64| usize::try_from(limit).ok();
        Window { left: limit(self.window_left), right: limit(self.window_right) }
    }

    /// How chunks travel; whether it fits the number of ranks is seen later.
    pub fn family(&self) -> Family {
        self.schedule.family(usize::try_from(self.inner_size).unwrap_or(0))
    }

    /// What else goes into the scores.
    pub fn features(&self) -> Features {
        let given = |number: f32| Some(number).filter(|number| *number != 0.0);
        Features {
            soft_cap: given(self.logits_soft_cap),
            segments: self.has_segments,
            slopes: self.has_slopes,
            dropout: given(self.dropout_rate),
        }
    }
}
