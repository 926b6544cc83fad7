//! The third executor of schedules: a clock instead of arithmetic. It predicts time, overlap and
//! memory on a [`Machine`] that need not be at hand.
//!
//! Ranks do as [`crate::engine`] does. A step begins when the messages that are due by then have
//! come. The rank then posts its exchanges and computes its tiles in order. A message moves once
//! both its ends have posted it. A rank's exchanges take turns, as on the one stream that carries
//! them on a GPU, within nodes and between nodes separately. The messages of one exchange move
//! together. Links are full duplex, and messages that use a link at the same time share it.
//!
//! A [`Method`] may also exchange rows for heads, before and after a schedule, on the same clock.
//! [`run`] times any other method, from the [`Script`] of each rank.
//!
//! Tiles take rounds of blocks on a GPU's multiprocessors, or their FLOPs at a rate: [`Speed`]. The
//! simulator leaves out delta and casts, and the part of a processor that messages take from kernels.

mod choose;
mod clock;
mod cost;
mod estimate;
mod heads;
mod kernels;
mod line;
mod machine;
mod messages;
mod method;
mod report;
mod script;
mod shrink;
mod simulation;
mod travels;
mod wires;

pub use choose::{Candidate, Choice, choose};
pub use cost::tile_flops;
pub use estimate::{Cost, cost, estimate};
pub use kernels::{Kernels, Speed};
pub use machine::{Class, Link, Machine, Named, Network, named};
pub use method::{Method, predict};
pub use report::{Activity, Bytes, Estimate, Event, RankReport, Report};
pub use script::Script;
pub use simulation::{run, simulate};
pub use travels::library_computes;
