//! The interpreter against numbers computed independently, operation by operation.

mod additions;
mod attention;
mod build;
mod control;
mod conversions;
mod floats;
mod integers;
mod launches;
mod matrices;
mod pointers;
mod promises;
mod reach;
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "in the dialect every use of a raw pointer is unsafe; none of it is run as Rust"
)]
mod sample;
mod shapes;
mod views;
