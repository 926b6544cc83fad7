//! Launches of random and of huge descriptions: what they cover, in which order, and whether all
//! that the kernels address stays in their reach. No memory is needed: addresses are made up.

mod errors;
mod footprint;
mod fused;
mod images;
mod linear;
mod order;
mod pieces;
mod random;
mod samples;
mod segments;
mod trial;
