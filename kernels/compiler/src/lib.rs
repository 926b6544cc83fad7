//! CUDA kernels of BurstAttention: their source, and what turns it into images.
//!
//! [`device`] is the source, in cuTile's dialect of Rust. [`compile`] compiles it to Tile IR, which
//! the interpreter runs and [`assembler`] turns into cubins; [`images`] keeps those. [`quality`]
//! says what the compiler made of each kernel. The program `kernel-images` writes the files that
//! the library loads, `kernel-quality` the table.

pub mod assembler;
pub mod compile;
pub mod device;
pub mod images;
pub mod model;
mod parallel;
pub mod quality;

/// The compiler of the kernels copies and drops syntax trees, and the interpreter tiles, more than
/// they do anything else.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
