//! Compares the results of every kernel, from its description to memory, with dense float64.

mod bounded;
mod case;
mod combine_softmax;
mod decode;
mod feature_arrays;
mod features;
mod footprints;
mod forward;
mod fused;
mod gradients;
mod images;
mod large;
mod linear;
mod modules;
mod mutants;
mod mutants_features;
mod mutants_masks;
mod problem;
mod ranges;
mod reference;
mod rows;
mod runs;
mod values;
mod visible;
mod visits;
mod world;
