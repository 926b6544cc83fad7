#![doc = include_str!("../README.md")]

pub mod cuda;
pub mod engine;
pub mod environment;
pub mod error;
pub mod host;
pub mod kernel;
pub mod layout;
pub mod mask;
pub mod operands;
pub mod problem;
pub mod schedule;
pub mod simulate;
pub mod transport;
pub mod types;

pub use error::{Error, Result};
pub use layout::Layout;
pub use mask::Window;
pub use problem::{Dtype, Features, Order, Pass, Problem, Travels};
pub use schedule::Family;
