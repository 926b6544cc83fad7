//! The definitions that tests compare results with: dense softmax attention and the recurrences of
//! linear attention and of the delta rule, each with all gradients.
//!
//! The crate depends on no other one, so no error of the product can hide in it. Arrays are slices
//! in row-major order, and rows stand in the order of the sequence.

mod attention;
mod dropout;
pub mod linear;
mod real;

pub use attention::{Attention, Dense, Features, Inputs, Visible, dense};
pub use dropout::{Dropout, numbers};
pub use real::Real;
