//! The mask and the features of a call, as the numbers in which Python states them.

use burst_attention::mask::Window;
use burst_attention::problem::Features;
use burst_attention::schedule::Family;
use serde::{Deserialize, Deserializer, de};

use crate::attributes::Attributes;
use crate::error::{Error, Result};

/// Static options of a call, under the names of its attributes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Options {
    /// How many positions back a query sees; −1 for no limit.
    window_left: i64,
    /// How many positions ahead; −1 for no limit.
    window_right: i64,
    /// 0 for none.
    logits_soft_cap: f32,
    /// 0 for none.
    dropout_rate: f32,
    /// Names of the operands that features take, with commas between them.
    feature_operands: String,
    #[serde(deserialize_with = "family")]
    schedule: Family,
    /// Ranks of an inner ring; 0 but for double rings.
    inner_size: i64,
}

/// Reads the name of a family of schedules.
fn family<'de, D: Deserializer<'de>>(name: D) -> std::result::Result<Family, D::Error> {
    Family::named(&String::deserialize(name)?, 0).map_err(de::Error::custom)
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
            dropout_rate: attributes.get("dropout_rate")?,
            feature_operands: attributes.get::<&str>("feature_operands")?.into(),
            schedule: Family::named(attributes.get("schedule")?, 0)?,
            inner_size: attributes.get("inner_size")?,
        };
        for (name, limit) in
            [("window_left", options.window_left), ("window_right", options.window_right)]
        {
            if limit < -1 {
                return Err(Error::mismatch(name, "at least 0, or -1 for no limit", limit));
            }
        }
        options.features()?;
        Ok(options)
    }

    /// Which positions see each other.
    pub fn window(&self) -> Window {
        let limit = |limit: i64| usize::try_from(limit).ok();
        Window { left: limit(self.window_left), right: limit(self.window_right) }
    }

    /// How chunks travel; whether it fits the number of ranks is seen later.
    pub fn family(&self) -> Family {
        self.schedule.with_inner(usize::try_from(self.inner_size).unwrap_or(0))
    }

    /// The features of the problem.
    ///
    /// # Errors
    /// If the names of operands are not those that the features ask for.
    pub fn features(&self) -> Result<Features> {
        let names = self.feature_operands.split(',').filter(|name| !name.is_empty());
        let names: Vec<_> = names.collect();
        Ok(Features::of_operands(self.logits_soft_cap, self.dropout_rate, &names)?)
    }
}
