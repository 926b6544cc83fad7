//! Runs compiled kernels on the CPU: an interpreter of Tile IR.
//!
//! Tests use it where there is no GPU, so it is strict. Each of these is an error that names the
//! operation, its source line and the block: an outcome that Tile IR leaves undefined, a promise of
//! `assume` that does not hold, an access outside of allocations, a load of bytes never written,
//! and an operation, type or attribute that the interpreter has no meaning for.
//!
//! It differs from hardware in these ways:
//! - `mmaf`, `reduce` and `scan` accumulate in ascending order, from the accumulator or identity
//!   on. `mmaf` rounds each product and each sum to float32 (float64 for float64), and a float16
//!   accumulator once at the end. Hardware sums in another order, with wider intermediates.
//! - Transcendental functions are computed in float64 and rounded once, so they are more exact than
//!   hardware. It does not model `approx` and `full`, except for `divf`'s result 0 beyond 2^126.
//! - float16 and bfloat16 arithmetic is float32 arithmetic, rounded after each operation.
//! - Blocks run one after the other, in a shuffled order, and operations in program order. So
//!   memory ordering, scopes and tokens hold trivially, and races within one block do not show. One
//!   kind of race between blocks is an error: one block adds to an element through a view
//!   (`atomic_red_view_tko`), and another block of the launch loads or stores the element.
//! - It lacks types below 8 bits, 8-bit floats, tfloat32, directed rounding, globals, `alloca`,
//!   gather/scatter views and block-scaled products. Using one of them is an error.
//! - NaNs are quiet; their payloads need not survive conversions.
//!
//! With [`GridRun::reach`] a run records how often the branches and loops ran that data decide.
//!
//! [`execute`] runs the launches of `burst-attention-kernels`; `burst-attention-compiler` compiles
//! the kernels to Tile IR.

mod additions;
mod attributes;
mod control;
mod conversion;
mod decided;
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
mod reach;
mod shape;
mod tile;
mod view;

pub use error::{Error, Fault};
pub use launch::{Argument, GridRun};
pub use memory::{Address, Memory};
pub use reach::{Line, Place, Reach, Turns};
