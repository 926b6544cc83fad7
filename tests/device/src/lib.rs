//! What the CUDA executor enqueues, carried out without a device.
//!
//! A [`World`] is the memory of all ranks. It takes the programs that a
//! [`Recorder`](burst_attention::cuda::record::Recorder) wrote down and does what they say, in a
//! random order that the events between streams and the messages between ranks allow: kernels run
//! on the interpreter, copies and messages move bytes. The interpreter refuses what nobody wrote,
//! and a [`World`] what lies on another device, so that a wrong order mostly fails at once.
//!
//! A [`Ring`] is a problem with random inputs and what is right: it places the ranks' arrays in a
//! world, gathers results from there, and says how far off they are.

mod case;
#[path = "../../../kernels/interpreter/tests/kernels/dropout.rs"]
mod dropout;
#[allow(missing_docs, reason = "it is that of the kernels' tests, where nothing is public")]
#[path = "../../../kernels/interpreter/tests/kernels/reference.rs"]
mod reference;
mod ring;
mod world;

pub use case::{Case, Inputs, round};
pub use reference::{Dense, Real, dense};
pub use ring::{Kind, Ring, Shard};
pub use world::World;
