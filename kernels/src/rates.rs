//! Predicted rates of the kernels on H100 and H200, as `make kernel-quality WRITE=1` wrote them.

/// A table with a line for each case: its name, then TFLOP/s, where a causal problem counts as half.
/// The second column's name has the version of the model.
pub const TABLE: &str = include_str!("../rates.tsv");
