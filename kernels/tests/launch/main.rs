//! Launches of random and of huge descriptions: the rows that they cover, their order, and whether
//! every view stays within the reach of 32-bit offsets. Addresses are made up, so the tests need no
//! memory.

mod cuts;
mod decode;
mod delta_rule;
mod errors;
mod footprint;
mod fused;
mod images;
mod linear;
mod masks;
mod order;
mod random;
mod samples;
mod segments;
mod trial;
