//! The CUDA kernels of BurstAttention: their source, and the tools that turn it into images.
//!
//! [`device`] is the source, in cuTile's dialect of Rust. [`compile`] compiles it to Tile IR, which
//! the interpreter runs and [`assembler`] turns into cubins. `tile_ir` keeps Tile IR in files, and
//! [`images`] keeps the cubins. [`cubin`] reads the cubins, [`model`] predicts their speed, and
//! [`quality`] says what the compiler made of each kernel. The program `kernel-images` writes the
//! files that the library loads, and `kernel-quality` writes the tables.

pub mod assembler;
pub mod compile;
pub mod cubin;
pub mod device;
mod hash;
pub mod images;
pub mod model;
mod parallel;
pub mod quality;
mod tile_ir;

/// The compiler of the kernels mostly copies and drops syntax trees, and the interpreter tiles.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
