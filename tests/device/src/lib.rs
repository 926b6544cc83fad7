//! Runs the commands of the CUDA executor without a device.
//!
//! A [`World`] is the memory of all ranks. It carries out the programs of a
//! [`Recorder`](burst_attention_recorder::Recorder), in a random order that the events between
//! streams and the messages between ranks allow. Kernels run on the interpreter; copies and
//! messages move bytes. The interpreter refuses to read memory that was never written, and a
//! [`World`] refuses memory of another device, so most wrong orders fail at once.
//!
//! A [`Ring`] is a problem with random inputs and exact results. It places the ranks' arrays in a
//! world, gathers results from there, and says how far they are from the exact ones.

mod case;
mod ring;
mod world;

pub use burst_attention_reference::Dense;
pub use case::{Case, Inputs, round};
pub use ring::{Kind, Ring, Shard};
pub use world::World;
