//! Runs compiled kernels on the CPU: an interpreter of Tile IR.
//!
//! It is for tests where no GPU is at hand, so it is strict: what Tile IR leaves undefined, what
//! `assume` promises and does not hold, accesses outside of allocations, loads of bytes never
//! written, and operations, types or attributes it has no meaning for are all errors that name
//! the operation, its source line and the block.
//!
//! Where it differs from hardware:
//! - `mmaf`, `reduce` and `scan` accumulate in ascending order, from the accumulator or identity
//!   on. `mmaf` rounds each product and each sum to float32 (float64 for float64), and a float16
//!   accumulator once at the end. Hardware sums in another order, with wider intermediates.
//! - Transcendental functions are computed in float64 and rounded once, so they are more exact
//!   than hardware; `approx` and `full` are not modelled, save for `divf`'s result 0 beyond 2^126.
//! - float16 and bfloat16 arithmetic is float32 arithmetic, rounded after each operation.
//! - Blocks run one after the other, in a shuffled order, and operations in program order: memory
//!   ordering, scopes and tokens hold trivially, and races within one block do not show. Of races
//!   between blocks one kind is an error: an element that one block adds to through a view
//!   (`atomic_red_view_tko`) and another block of the launch loads or stores.
//! - Not there: types below 8 bits, 8-bit floats, tfloat32, directed rounding, globals, `alloca`,
//!   gather/scatter views, block-scaled products. Using them is an error.
//! - NaNs are quiet; their payloads need not survive conversions.
//!
//! [`execute`] runs the launches of `burst-attention-kernels`; `burst-attention-compiler` compiles
//! the kernels to the IR that is run.

mod additions;
mod attributes;
mod control;
mod conversion;
mod error;
pub mod execute;
mod float;
mod fold;
mod integer;
mod launch;
mod machine;
mod matrix;
mod memory;
mod pointer;
mod program;
mod promise;
mod shape;
mod tile;
mod view;

pub use error::{Error, Fault};
pub use launch::{Argument, Launch, run};
pub use memory::{Address, Memory};
