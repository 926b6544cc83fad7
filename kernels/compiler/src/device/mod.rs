//! The kernels themselves, in cuTile's dialect of Rust: what one thread block does.
//!
//! Arrays are as JAX has them, `[batch, rows, heads, head_dim]`; per-row statistics are float32
//! `[batch, heads, rows]`. Every size is a run-time argument except the tile: `BM` query rows,
//! `BN` key rows, `DT` columns, the smallest tile that holds `head_dim` (and `value_dim`, where a
//! kernel has that); what a tile holds beyond an array's end reads as zero and is never written.
//!
//! Query row i sees key row j when `lower ≤ j − i ≤ upper`, both counted from the start of the
//! rectangle. Each block visits only the key (or query) tiles that the band touches: first those
//! wholly inside it, which need no mask, then those that its edges or the arrays' ends cut.
//!
//! The general variants have one loop that masks every tile: by the band, by segments, and with
//! scores under a soft cap and with ALiBi's bias, and that drops weights. Their values, results and
//! gradients of these have `value_dim` columns.
//!
//! The dialect wants each intermediate tile bound with its type, and generics of a called function
//! named otherwise than those of cuTile's own (so `DT`, not `D`).

#![allow(missing_docs, reason = "the dialect's macro makes public items of its own")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the dialect: none of it is run as Rust")]

pub mod backward_keys;
pub mod backward_queries;
pub mod common;
pub mod dropout;
pub mod forward;
pub mod join;
pub mod linear;
pub mod rows;
pub mod scores;
pub mod segments;
