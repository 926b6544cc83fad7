//! The executor on CPU devices: kernels, the exchange within a process, and threads for rings.

pub mod array;
pub mod backward;
pub mod buffer;
pub mod checks;
pub mod decode;
pub mod features;
pub mod forward;
pub mod isa;
pub mod kernel;
pub mod linear;
mod matmul;
mod pack;
pub mod per_row;
mod philox;
pub mod ring;
mod scratch;
mod simd;
mod softmax;
pub mod threads;
pub mod tile;
pub mod trace;
pub mod transport;
mod visibility;
