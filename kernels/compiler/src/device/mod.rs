//! The kernels in cuTile's dialect of Rust. A kernel says what one thread block does.
//!
//! Arrays have JAX's layout, `[batch, rows, heads, head_dim]`; per-row statistics are float32
//! `[batch, heads, rows]`. Every size is a run-time argument except the tile: `BM` query rows,
//! `BN` key rows, `DT` columns, the smallest tile that holds `head_dim` (and `value_dim`, where a
//! kernel has it). Elements of a tile beyond an array's end read as zero and are never written.
//!
//! Query row i sees key row j when `lower ≤ j − i ≤ upper`, both counted from the start of the
//! rectangle. Each block visits only the key (or query) tiles that the band touches: first the
//! tiles wholly inside the band, which need no mask, then the tiles that the band's edges or the
//! arrays' ends cut.
//!
//! The kernels with all features have one loop that masks every tile by the band and by segments,
//! applies the soft cap and ALiBi's bias to scores, and drops weights. Values, results and their
//! gradients have `value_dim` columns.
//!
//! Where masks are data, the arrays of segments hold packed numbers of rows, and the array of ranges
//! holds runs of rows to visit (`masks.rs`).
//!
//! The dialect wants each intermediate tile bound with its type. Generics of a called function need
//! other names than the generics of cuTile's own functions (so `DT`, not `D`). Names of functions
//! are unique among the modules that a kernel imports.
//!
//! Structs group the arguments of functions. The fields of a struct with generics have types in the
//! names of the function that reads them, so `BM` is `BM` everywhere. A function whose result has
//! such a generic takes a tile of that shape behind the struct, because the compiler infers from the
//! last argument. Fields are carried through branches and loops in the order of their names, and the
//! assembler may spill in one order and not in another.
//!
//! Bytecode holds line numbers of this source, though cubins do not. So a change that only moves
//! lines, such as a longer comment, makes the next build assemble the file's kernels again.

#![allow(missing_docs, reason = "the dialect's macro makes public items of its own")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the dialect: none of it is run as Rust")]

use cutile_compiler::ast::Module;

pub mod backward_keys;
pub mod backward_queries;
pub mod channels;
pub mod combine_softmax;
pub mod common;
pub mod decays;
pub mod decode;
pub mod decode_latents;
pub mod decode_merge;
pub mod delta_inverse;
pub mod delta_keys;
pub mod delta_parts;
pub mod delta_rule;
pub mod dropout;
pub mod forward;
pub mod latent_values;
pub mod latent_weights;
pub mod latents;
pub mod linear;
pub mod masks;
pub mod modes;
pub mod pages;
pub mod pairs;
pub mod pieces;
pub mod rows;
pub mod scores;
pub mod segments;
pub mod softmax;
pub mod units;
pub mod visible;
pub mod walk;

/// Returns the syntax tree of a module that holds kernels.
pub(crate) fn source(module: &str) -> fn() -> Module {
    macro_rules! among {
        ($($name:ident)*) => {
            match module {
                $(stringify!($name) => $name::$name::__module_ast_self,)*
                other => unreachable!("there is no module {other}"),
            }
        };
    }
    among!(forward backward_keys backward_queries segments masks rows combine_softmax linear channels
           delta_inverse delta_rule delta_keys decode decode_latents
           latent_weights latent_values decode_merge)
}
