//! The delta rule over one device's tokens: what to compute, and the launches.

use serde::Deserialize;

use super::linear::{LinearJob, LinearState, Part};
use super::lower::launches;
use crate::element::Element;
use crate::kernel::Kernel;
use crate::record::Operand;
use crate::variant::Decays;

/// The tokens of a call, with what all kernels of the delta rule read. Arrays are row-major without
/// gaps, and all have as many heads.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaTokens {
    /// Batch entries.
    pub batch: usize,
    /// Tokens.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Columns of keys and queries, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Columns of values, a multiple of 8 up to 256.
    pub value_dim: usize,
    /// Type of the activations.
    pub element: Element,
    /// Tokens of a part, a multiple of the tile; the last part may have fewer.
    pub part_rows: usize,
    /// Keys `[batch, rows, heads, head_dim]`.
    pub k: u64,
    /// Float32 `[batch, heads, padded rows]`: sums of log decays from each tile's first token on,
    /// in base 2. Behind the last token its sum is repeated.
    pub sums: u64,
    /// Float32 `[batch, heads, padded rows]`: rates. Behind the last token they are 0. The kernel of
    /// keys does not read them.
    pub beta: u64,
    /// The inverses of tiles `[batch, rows, heads, 64]`: row t is row t of its tile's inverse. The
    /// kernel of keys does not read them.
    pub inverse: u64,
}

/// Computes [`DeltaTokens::inverse`].
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaInverse {
    /// The tokens, and where the result lies.
    pub tokens: DeltaTokens,
}

/// The results of a pass over the tiles of parts.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeltaResults {
    /// A value of each token and column.
    Tokens {
        /// Float32 `[batch, parts, heads, head_dim, value_dim]`: the state before each part, or the
        /// gradient of the state behind it.
        before: u64,
        /// Result `[batch, rows, heads, value_dim]`: corrected values, or dY.
        values: u64,
    },
    /// What each part does to any state, or to the gradient of any state.
    Parts {
        /// Float32 result `[batch, parts, heads, head_dim, value_dim]`: what a state of zeros
        /// becomes.
        state: u64,
        /// Float32 result `[batch, parts, heads, head_dim, head_dim]`: what the columns of the
        /// identity become, with values of 0.
        transfer: u64,
    },
}

/// Goes through the tiles of each part with the state.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaState {
    /// The tokens.
    pub tokens: DeltaTokens,
    /// Values `[batch, rows, heads, value_dim]`.
    pub v: u64,
    /// What to compute.
    pub results: DeltaResults,
}

/// Goes back through the tiles of each part with the gradient of the state.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaGrad {
    /// The tokens.
    pub tokens: DeltaTokens,
    /// Queries `[batch, rows, heads, head_dim]`.
    pub q: u64,
    /// Gradients of the output `[batch, rows, heads, value_dim]`.
    pub dout: u64,
    /// What to compute.
    pub results: DeltaResults,
}

/// Computes the gradient of keys from gradients of the states that they add to.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaKeys {
    /// The tokens.
    pub tokens: DeltaTokens,
    /// Queries `[batch, rows, heads, head_dim]`.
    pub q: u64,
    /// Corrected values `[batch, rows, heads, value_dim]`.
    pub u: u64,
    /// Gradients of the output `[batch, rows, heads, value_dim]`.
    pub dout: u64,
    /// Gradients of the values `[batch, rows, heads, value_dim]`.
    pub dv: u64,
    /// Float32 `[batch, parts, heads, value_dim, head_dim]`: the turned gradient of the state behind
    /// each part.
    pub turned: u64,
    /// Result `[batch, rows, heads, head_dim]`.
    pub dk: u64,
    /// Float32 result `[batch, heads · tiles, padded rows]`: the products by row of dk with k, for
    /// each tile of columns of k.
    pub dots: u64,
}

impl DeltaTokens {
    /// Returns the number of parts.
    pub fn parts(&self) -> usize {
        self.linear().parts()
    }

    /// Returns the elements of the last dimension of `sums`.
    pub fn padded_rows(&self) -> usize {
        self.linear().padded_rows()
    }

    fn linear(&self) -> LinearState {
        let DeltaTokens { batch, rows, heads, head_dim, value_dim, element, k, sums, .. } = *self;
        LinearState {
            batch,
            rows,
            heads,
            kv_heads: heads,
            head_dim,
            value_dim,
            element,
            part: Part { rows: self.part_rows, reverse: false },
            decays: Decays::Heads,
            k,
            v: 0,
            sums,
            state: 0,
        }
    }

    fn job(&self, kernel: Kernel, columns: &[usize], others: &[(Operand, u64)]) -> LinearJob {
        let keys = [(Operand::K, self.k), (Operand::Sums, self.sums)];
        LinearJob::new(kernel, self.linear(), (self.heads, columns), &[&keys, others].concat())
    }

    fn solved(&self) -> [(Operand, u64); 2] {
        [(Operand::Beta, self.beta), (Operand::Inverse, self.inverse)]
    }

    fn pass(
        &self,
        (kernel, values): (Kernel, Operand),
        results: DeltaResults,
        others: &[(Operand, u64)],
    ) -> LinearJob {
        let (of_states, of_transfers) = (self.value_dim, self.head_dim);
        let (columns, addresses) = match results {
            DeltaResults::Tokens { before, values } => (vec![of_states], [before, values, 0, 0]),
            DeltaResults::Parts { state, transfer } => {
                (vec![of_states, of_transfers], [0, 0, state, transfer])
            }
        };
        let operands = [Operand::Before, values, Operand::State, Operand::Transfer];
        let found: Vec<_> = operands.into_iter().zip(addresses).collect();
        self.job(kernel, &columns, &[&self.solved()[..], others, &found].concat())
    }
}

impl DeltaInverse {
    fn job(&self) -> LinearJob {
        self.tokens.job(Kernel::DeltaRuleInverse, &[], &self.tokens.solved())
    }
}

impl DeltaState {
    fn job(&self) -> LinearJob {
        let pass = (Kernel::DeltaRuleState, Operand::Corrected);
        self.tokens.pass(pass, self.results, &[(Operand::V, self.v)])
    }
}

impl DeltaGrad {
    fn job(&self) -> LinearJob {
        let pass = (Kernel::DeltaRuleGrad, Operand::Dy);
        self.tokens.pass(pass, self.results, &[(Operand::Q, self.q), (Operand::Dout, self.dout)])
    }
}

impl DeltaKeys {
    fn job(&self) -> LinearJob {
        let DeltaKeys { q, u, dout, dv, turned, dk, dots, .. } = *self;
        let arrays = [
            (Operand::Q, q),
            (Operand::Corrected, u),
            (Operand::Dout, dout),
            (Operand::Dv, dv),
            (Operand::Turned, turned),
            (Operand::Dk, dk),
            (Operand::Dots, dots),
        ];
        self.tokens.job(Kernel::DeltaRuleKeys, &[self.tokens.head_dim], &arrays)
    }
}

launches!(DeltaInverse, DeltaState, DeltaGrad, DeltaKeys);
