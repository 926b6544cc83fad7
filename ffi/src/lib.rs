//! XLA custom calls of BurstAttention: the only code that knows XLA, and the C ABI.
//!
//! From the bottom: [`sys`] is bindgen's view of XLA's header; [`api`], [`frame`], [`buffer`] and
//! [`attributes`] make it safe; [`call`] decodes a call into the core's problem and arrays;
//! [`rendezvous`] and [`hub`] bring the ranks of a ring together; XLA calls [`handlers`], and C
//! programs call [`exports`].
//!
//! On CPU a handler must not block, as devices share threads. It registers its rank and returns a
//! future. When the last rank of a ring has come, the ring runs on threads of its own, and then
//! each rank's future is completed on yet another thread: the rest of that device's program runs
//! there and may wait for the other devices.
//!
//! On CUDA ([`cuda`]) a handler enqueues its rank's part of the ring and returns.

mod answer;
pub mod api;
pub mod attributes;
pub mod buffer;
pub mod call;
mod choose;
pub mod clock;
pub mod cuda;
pub mod data_type;
mod describe;
pub mod error;
pub mod exports;
pub mod frame;
mod handler;
pub mod handlers;
pub mod hub;
mod images;
mod kernels;
mod limit;
mod linear;
mod machine;
mod options;
pub mod rendezvous;
mod request;
mod shapes;
mod simulate;
pub mod state;
#[doc(hidden)]
pub mod sys;
