//! The host executor: CPU kernels, the in-process transport and the threads that run rings.

pub mod array;
pub mod backward;
pub mod buffer;
pub mod cast;
mod checks;
pub mod extras;
pub mod forward;
pub mod isa;
pub mod kernel;
pub mod linear;
mod matmul;
mod pack;
pub mod partial;
mod philox;
pub mod ring;
mod simd;
mod softmax;
pub mod threads;
pub mod trace;
pub mod transport;
