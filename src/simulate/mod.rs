//! The third executor of schedules: a clock instead of arithmetic. It predicts time, overlap and
//! memory of a [`Machine`] that is not at hand.
//!
//! Ranks do as [`crate::engine`] does. As a step begins, what is due by then has come; then its
//! exchanges are posted, and its tiles computed in order. A message moves from when both its ends
//! have posted it. A rank's exchanges take turns, as they do on the one stream that carries them on
//! a GPU, each when those before it are through, within nodes and between nodes apart; the messages
//! of one exchange move together. Links are full duplex, and messages that use one at the same time
//! share it.
//!
//! A [`Method`] may also exchange rows for heads, before and after a schedule, on the same clock.
//!
//! What is left out: how fast memory is, delta and casts, and that kernels leave a part of the
//! processor to messages.

mod choose;
mod clock;
mod cost;
mod estimate;
mod heads;
mod machine;
mod messages;
mod method;
mod report;
mod script;
mod shrink;
mod walk;
mod wires;

pub use choose::{Candidate, Choice, choose};
pub use cost::tile_flops;
pub use estimate::{Cost, Estimate, cost, estimate};
pub use machine::{Class, Kernels, Link, Machine, Named, Network, named};
pub use method::{Method, predict};
pub use report::{Activity, Bytes, Event, RankReport, Report};
pub use walk::simulate;
