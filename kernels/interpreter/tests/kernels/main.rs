//! What every kernel computes, from its description to memory, against dense float64.

mod bounded;
mod case;
mod dropout;
mod extras;
mod features;
mod footprints;
mod forward;
mod fused;
mod gradients;
mod images;
mod join;
mod large;
mod linear;
mod modules;
mod mutants;
mod mutants_features;
mod problem;
mod ranges;
mod reference;
mod rows;
mod values;
mod visits;
mod world;
