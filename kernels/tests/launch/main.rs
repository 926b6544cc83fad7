//! Launches of random and of huge descriptions: what they cover, in which order, and whether all
//! that the kernels address stays in their reach. No memory is needed: addresses are made up.

mod errors;
mod footprint;
mod linear;
mod order;
mod pieces;
mod trial;
