//! A call as Python describes it before there is one.

use std::ffi::CStr;

use burst_attention::{Family, Order, Pass, Problem, Travels};
use serde::Deserialize;

use crate::answer;
use crate::call::travels_of;
use crate::options::Options;

/// The shapes and attributes of a call.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    pass: Name,
    batch: usize,
    q_len: usize,
    kv_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: String,
    value_dim: usize,
    softmax_scale: f32,
    options: Options,
    layout: String,
    world_size: usize,
    backward: String,
    backward_order: String,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Name {
    Forward,
    Backward,
}

/// What is to be computed.
#[derive(Debug)]
pub struct Described {
    /// The shapes of a rank, and what all ranks share.
    pub problem: Problem,
    /// How chunks travel.
    pub family: Family,
    /// Which pass.
    pub pass: Pass,
    /// Which side travels, where that was asked for.
    pub travels: Option<Travels>,
    /// The order of sums in the backward pass.
    pub backward_order: Order,
}

/// Reads a description.
///
/// # Errors
/// If it is none, or describes nothing that can be computed.
pub fn read(request: &CStr) -> Result<Described, String> {
    answer::read::<Request>(request)?.described().map_err(|error| error.to_string())
}

impl Request {
    fn described(&self) -> crate::error::Result<Described> {
        let problem = Problem {
            batch: self.batch,
            q_len: self.q_len,
            kv_len: self.kv_len,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            dtype: self.dtype.parse()?,
            value_dim: self.value_dim,
            window: self.options.window(),
            softmax_scale: self.softmax_scale,
            features: self.options.features(),
            layout: self.layout.parse()?,
            world_size: self.world_size,
        };
        problem.validate()?;
        let (pass, travels, backward_order) = match self.pass {
            Name::Forward => (Pass::Forward, None, Order::Fixed),
            Name::Backward => {
                (Pass::Backward, travels_of(&self.backward)?, self.backward_order.parse()?)
            }
        };
        let family = self.options.family();
        family.validate(problem.world_size)?;
        Ok(Described { problem, family, pass, travels, backward_order })
    }
}
