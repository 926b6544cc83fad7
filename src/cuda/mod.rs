//! The executor on NVIDIA GPUs.
//!
//! The engine walks a rank's schedule onto a command list (`commands`): launches of the CUDA
//! kernels and exchanges, with the memory that they use. Then `synchronise` adds the events that
//! the streams need, and only then the executor issues the commands: kernels on XLA's stream,
//! messages on one stream of its own, or on two in a double ring. The host waits for nothing, and a
//! call creates nothing except at its first run on a device.
//!
//! From the bottom: [`driver`] and [`nccl`] are the libraries' calls, and [`libcuda`] is the driver
//! itself; `region`, `buffer`, [`workspace`] and [`rank`] say where arrays lie; `tiles`, `kernel`
//! and `transport` implement the engine's two traits; `gradients` chooses the operations that compute
//! the gradients of tiles, and `served` says what predictions ask of them; `lower` makes the command
//! list of a [`call`];
//! `objects` keeps the objects of each device; `connect` makes the first contact with peers, and
//! `issue` issues the command list. The [`executor`] uses all of them.

mod buffer;
pub mod call;
mod commands;
mod connect;
pub mod cudnn;
pub mod driver;
pub mod error;
pub mod executor;
mod final_writes;
mod gradients;
mod issue;
mod kernel;
pub mod libcuda;
mod lower;
pub mod nccl;
mod objects;
pub mod rank;
mod region;
pub(crate) mod served;
mod shared_library;
mod synchronise;
mod tiles;
mod transport;
pub mod workspace;
