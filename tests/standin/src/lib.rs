//! GPUs that are not there: a CUDA driver, CUDA runtime, NCCL and NVML over host memory.
//!
//! JAX's own CUDA plugin starts and runs over this library, and so does the product. XLA's real
//! runtime then calls the product's handlers as it does on GPUs, and this library checks every
//! call:
//!
//! - Device memory is host memory with an owner and bounds. It begins as poison, and its addresses
//!   are not used again after it is freed ([`memory`]).
//! - Each stream is a thread, which carries operations out in order, with random delays
//!   ([`stream`]). Vector clocks over streams, events and what the host saw find operations that
//!   touch the same bytes in no order ([`order`]).
//! - The project's kernels, recognised by the bytes of their images, run on the interpreter of
//!   Tile IR; XLA's kernels, which come as PTX text, run on the interpreter of PTX ([`kernel`]).
//! - NCCL blocks where the real one may block: a host at the first contact with a peer, and an
//!   exchange until each message has been taken ([`nccl`]).
//!
//! A misuse is a complaint on stderr, which `standin_complaints` returns to the test. A test can
//! make each call fail, or do nothing, with `standin_fail`. A function that the library lacks
//! returns an error and complains with its name.

mod call;
mod code;
mod cudart;
mod cudnn;
mod device;
mod driver;
mod graph;
mod handles;
mod kernel;
mod memory;
mod nccl;
mod nvml;
mod order;
mod report;
mod settings;
mod stream;
mod unknown;
mod watched;
