//! What every kernel computes, from its description to memory, against dense float64.

mod bounded;
mod case;
mod dropout;
mod footprints;
mod forward;
mod general;
mod gradients;
mod join;
mod large;
mod linear;
mod modules;
mod mutants;
mod mutants_general;
mod problem;
mod reference;
mod rows;
mod segments;
mod values;
mod visits;
mod world;
