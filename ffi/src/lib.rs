//! XLA custom calls of BurstAttention: the only code that knows XLA, and the C ABI.
//!
//! From the bottom: [`sys`] is bindgen's view of XLA's header; [`api`], [`frame`], [`buffer`] and
//! [`attributes`] make this view safe; [`call`] decodes a call into the core's problem and arrays;
//! [`rendezvous`] and [`coordinator`] bring the ranks of a ring together; XLA calls [`handlers`],
//! and C programs call [`exports`].
//!
//! On CPU a handler must not block, because devices share threads. It registers its rank and
//! returns a future. When the last rank of a ring has come, the ring runs on threads of its own.
//! Then each rank's future is completed on yet another thread, because the rest of that device's
//! program runs there and may wait for other devices.
//!
//! On CUDA ([`cuda`]) a handler enqueues its rank's part of the ring and returns.

mod answer;
pub mod api;
pub mod attributes;
mod backends;
pub mod buffer;
pub mod call;
mod choose;
pub mod clock;
pub mod coordinator;
pub mod cuda;
pub mod data_type;
mod decode;
mod describe;
pub mod error;
pub mod exports;
pub mod frame;
mod handler;
pub mod handlers;
mod images;
mod json;
mod kernels;
mod linear;
mod machine;
mod meeting;
mod options;
mod rank_timeout;
pub mod rendezvous;
mod shapes;
mod simulate;
pub mod state;
#[doc(hidden)]
pub mod sys;
mod travels;
mod workspace;
