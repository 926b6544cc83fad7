//! Small kernels, written by hand, for every group of instructions and every kind of error.

mod arithmetic;
mod atomics;
mod bits;
mod blocks;
mod calls;
mod conversions;
mod floats;
mod kernel;
mod memory;
mod refused;
mod warps;
