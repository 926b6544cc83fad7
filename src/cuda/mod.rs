//! The executor on NVIDIA GPUs.
//!
//! The engine walks a rank's schedule onto a [`tape`]: launches of the CUDA kernels and exchanges,
//! with the memory they use. Events are added where the streams need them, and only then all of it is
//! issued: kernels on XLA's stream, messages on one of our own, or two in a double ring. Nothing
//! waits on the host, and nothing is created but when a device is first seen.
//!
//! From the bottom: [`driver`] and [`nccl`] are the libraries' calls; [`memory`], [`workspace`] and
//! [`rank`] say where things lie; [`kernel`] and [`transport`] (which write to a [`recording`]) are the engine's two traits;
//! [`ring`] puts a ring together, [`device`] issues it. What needs no ring is issued by `alone.rs`.
//! [`record`] is a driver for tests.

mod alone;
pub mod device;
pub mod driver;
pub mod kernel;
pub mod last;
pub mod libcuda;
pub mod memory;
pub mod nccl;
pub mod rank;
pub mod record;
pub mod recording;
pub mod ring;
pub mod tape;
mod tiles;
pub mod transport;
pub mod workspace;
