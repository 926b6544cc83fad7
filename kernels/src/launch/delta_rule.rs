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
    /// What has a decay: heads, or columns of k.
    #[serde(default)]
    pub decays: Decays,
    /// Keys `[batch, rows, heads, head_dim]`. With decays of columns of k, keys and queries have
    /// their decays from the beginning of each tile, except in the kernel of keys.
    pub k: u64,
    /// Float32 `[batch, heads, padded rows]`, of columns `[batch, padded rows, heads, head_dim]`:
    /// sums of log decays from each tile's first token on, in base 2. Behind the last token its sum
    /// is repeated.
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
    /// With decays of columns of k, float32 `[batch, padded rows, heads, 64]`: the result of
    /// [`ChannelPairs`] for keys in place of queries. Then k and the sums are left alone.
    ///
    /// [`ChannelPairs`]: super::ChannelPairs
    #[serde(default)]
    pub pairs: u64,
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
    /// With decays of columns of k, keys with their decays to the end of each tile.
    #[serde(default)]
    pub kh: u64,
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
    /// With decays of columns of k, keys with their decays to the end of each tile.
    #[serde(default)]
    pub kh: u64,
    /// Gradients of the output `[batch, rows, heads, value_dim]`.
    pub dout: u64,
    /// With decays of columns of k, float32 `[batch, padded rows, heads, 64]`: the result of
    /// [`ChannelPairs`] with each tile transposed.
    ///
    /// [`ChannelPairs`]: super::ChannelPairs
    #[serde(default)]
    pub pairs: u64,
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
    /// With decays of columns of k, three arrays `[batch, rows, 6, heads, head_dim]`, as
    /// [`LinearAttend::levels`] has them: queries of odd blocks and keys of even blocks, keys of both,
    /// and the decays.
    ///
    /// [`LinearAttend::levels`]: super::LinearAttend::levels
    #[serde(default)]
    pub levels: [u64; 3],
    /// Result `[batch, rows, heads, head_dim]`.
    pub dk: u64,
    /// Float32 result `[batch, heads · tiles, padded rows]`: the products by row of dk with k, for
    /// each tile of columns of k. With decays of these columns it is `[batch, padded rows, heads,
    /// head_dim]`: the products of all elements, without what a token's own query gives it.
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
            decays: self.decays,
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
        let pairs = (Operand::Pairs, self.pairs);
        let others = [&self.tokens.solved()[..], &[pairs]].concat();
        self.tokens.job(Kernel::DeltaRuleInverse, &[], &others)
    }
}

impl DeltaState {
    fn job(&self) -> LinearJob {
        let pass = (Kernel::DeltaRuleState, Operand::Corrected);
        let others = [(Operand::KeysToEnd, self.kh), (Operand::V, self.v)];
        self.tokens.pass(pass, self.results, &others)
    }
}

impl DeltaGrad {
    fn job(&self) -> LinearJob {
        let pass = (Kernel::DeltaRuleGrad, Operand::Dy);
        let DeltaGrad { q, kh, dout, pairs, .. } = *self;
        let others = [
            (Operand::Q, q),
            (Operand::KeysToEnd, kh),
            (Operand::Dout, dout),
            (Operand::Pairs, pairs),
        ];
        self.tokens.pass(pass, self.results, &others)
    }
}

impl DeltaKeys {
    fn job(&self) -> LinearJob {
        let DeltaKeys { q, u, dout, dv, turned, levels, dk, dots, .. } = *self;
        let [met, keys_met, fades] = levels;
        let arrays = [
            (Operand::Q, q),
            (Operand::Corrected, u),
            (Operand::Dout, dout),
            (Operand::Dv, dv),
            (Operand::Turned, turned),
            (Operand::Dk, dk),
            (Operand::KeyDots, dots),
            (Operand::Met, met),
            (Operand::KeysMet, keys_met),
            (Operand::Fades, fades),
        ];
        self.tokens.job(Kernel::DeltaRuleKeys, &[self.tokens.head_dim], &arrays)
    }
}

launches!(DeltaInverse, DeltaState, DeltaGrad, DeltaKeys);
