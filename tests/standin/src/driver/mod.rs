//! The functions of `libcuda.so.1`.

mod context;
pub mod copies;
mod devices;
mod entry;
mod graphs;
mod mapping;
mod memory;
mod modules;
pub mod streams;

pub use copies::{Lines, copy_lines, fill};
pub use devices::{bus_id, copy_text};
