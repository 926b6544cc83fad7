//! CUDA kernels of BurstAttention, compiled from Rust by cuTile to images that the driver loads.
//!
//! [`record`] says what each kernel takes, [`instances`] which images there are, [`launch`] turns
//! what is to be computed into checked launches, [`cubin`] reads what the compiler made. The
//! kernels' source is in `src/device/`; `build.rs` compiles it, and so does the interpreter, which
//! runs it on the CPU. This crate knows neither the ring nor XLA, nor the driver.

pub mod cubin;
pub mod images;
pub mod instances;
pub mod launch;
#[cfg(feature = "cuda")]
mod parallel;
#[cfg(feature = "cuda")]
pub mod quality;
pub mod record;
