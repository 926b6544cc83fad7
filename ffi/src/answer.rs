//! What the answers to all questions have in common: their result type, and the fields that several
//! questions share.

use std::error::Error;

use burst_attention::Travels;
use serde::{Deserialize, Deserializer, de};

use crate::call::travels_of;

/// An answer, or the reason why there is none.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Deserializes the side that travels in the backward pass from its name in the public interface.
pub(crate) fn travels<'de, D: Deserializer<'de>>(
    from: D,
) -> std::result::Result<Option<Travels>, D::Error> {
    travels_of(&String::deserialize(from)?).map_err(de::Error::custom)
}
