//! Calls of the delta rule on a GPU, as `linear` runs them.
//!
//! All arrays of a call have the same heads. The operands and results of each call, in order, those
//! in brackets with decays of channels:
//!
//! | call | operands | results |
//! |---|---|---|
//! | inverse | k, sums, beta, \[pairs] | inverse |
//! | state | k, inverse, sums, beta, v, \[kh] | state, transfer |
//! | state | k, inverse, sums, beta, v, before, \[kh] | u |
//! | grad | k, inverse, sums, beta, q, dout, \[kh, pairs] | state, transfer |
//! | grad | k, inverse, sums, beta, q, dout, behind, \[kh, pairs] | dy |
//! | keys | k, sums, q, u, dout, dv, turned, \[met, keys_met, fades] | dk, dots |

use burst_attention::Dtype;
use burst_attention_kernels::launch::{
    DeltaGrad, DeltaInverse, DeltaKeys, DeltaResults, DeltaState, DeltaTokens, LINEAR_TILE,
    TileOperation, column_tiles,
};
use burst_attention_kernels::variant::Decays;

use super::linear::{LEVELS, activation, check_columns};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::shapes::split;

type Decoded = Result<Option<TileOperation>>;

/// A call's tokens, with what its arrays must look like.
struct Call<'a> {
    tokens: DeltaTokens,
    dtype: Dtype,
    /// Leading dimensions, which are folded into the batch.
    outer: &'a [usize],
}

impl<'a> Call<'a> {
    /// Reads keys and sums, of a call whose values have `value_dim` columns.
    fn new(
        (part_rows, decays): (usize, Decays),
        k: &'a Buffer,
        sums: &Buffer,
        value_dim: usize,
    ) -> Result<Call<'a>> {
        let (outer, [rows, heads, head_dim]) = split("key", k)?;
        let (element, dtype) = activation(k)?;
        check_columns(head_dim, value_dim)?;
        let batch = outer.iter().product();
        let address = k.address("key", dtype.into(), &k.dims)?;
        let tokens = DeltaTokens {
            batch,
            rows,
            heads,
            head_dim,
            value_dim,
            element,
            part_rows,
            decays,
            k: address,
            sums: 0,
            beta: 0,
            inverse: 0,
        };
        let mut call = Call { tokens, dtype, outer };
        call.tokens.sums = match decays {
            Decays::Heads => call.statistics("sums", sums, heads)?,
            _ => call.padded("sums", sums, head_dim)?,
        };
        Ok(call)
    }

    /// Reads beta and the inverses as well.
    fn solved(mut self, beta: &Buffer, inverse: &Buffer) -> Result<Call<'a>> {
        self.tokens.beta = self.statistics("beta", beta, self.tokens.heads)?;
        self.tokens.inverse = self.rows("inverse", inverse, LINEAR_TILE)?;
        Ok(self)
    }

    /// Returns the address of rows of all heads.
    fn rows(&self, name: &str, buffer: &Buffer, dim: usize) -> Result<u64> {
        let DeltaTokens { rows, heads, .. } = self.tokens;
        buffer.address(name, self.dtype.into(), &[self.outer, &[rows, heads, dim]].concat())
    }

    /// Returns the address of a number for each token of some heads.
    fn statistics(&self, name: &str, buffer: &Buffer, heads: usize) -> Result<u64> {
        let dims = [self.outer, &[heads, self.tokens.padded_rows()]].concat();
        buffer.address(name, Dtype::F32.into(), &dims)
    }

    /// Returns the address of rows of all heads up to the end of a tile.
    fn padded(&self, name: &str, buffer: &Buffer, dim: usize) -> Result<u64> {
        let dims = [self.outer, &[self.tokens.padded_rows(), self.tokens.heads, dim]].concat();
        buffer.address(name, Dtype::F32.into(), &dims)
    }

    /// Returns the address of the products of a tile's rows.
    fn pairs(&self, buffer: &Buffer) -> Result<u64> {
        self.padded("pairs", buffer, LINEAR_TILE)
    }

    /// Returns the address of keys with their decays to the end of a tile.
    fn kh(&self, buffer: &Buffer) -> Result<u64> {
        self.rows("kh", buffer, self.tokens.head_dim)
    }

    /// Returns the address of rows of all levels.
    fn level(&self, name: &str, buffer: &Buffer) -> Result<u64> {
        let DeltaTokens { rows, heads, head_dim, .. } = self.tokens;
        let dims = [self.outer, &[rows, LEVELS, heads, head_dim]].concat();
        buffer.address(name, self.dtype.into(), &dims)
    }

    /// Returns the address of a state for each part.
    fn states(&self, name: &str, buffer: &Buffer, dims: [usize; 2]) -> Result<u64> {
        let DeltaTokens { heads, .. } = self.tokens;
        let dims = [self.outer, &[self.tokens.parts(), heads], &dims].concat();
        buffer.address(name, Dtype::F32.into(), &dims)
    }

    /// Reads the results of a pass over parts, and its last operand if it has one.
    fn results(&self, before: Option<&Buffer>, results: &[Buffer]) -> Result<DeltaResults> {
        let DeltaTokens { head_dim, value_dim, .. } = self.tokens;
        Ok(match (before, results) {
            (Some(before), [values]) => DeltaResults::Tokens {
                before: self.states("state of parts", before, [head_dim, value_dim])?,
                values: self.rows("result", values, value_dim)?,
            },
            (None, [state, transfer]) => DeltaResults::Parts {
                state: self.states("state", state, [head_dim, value_dim])?,
                transfer: self.states("transfer", transfer, [head_dim, head_dim])?,
            },
            _ => {
                let expected = "1 with states of parts among the operands, otherwise 2";
                return Err(Error::mismatch("results", expected, results.len()));
            }
        })
    }

    fn operation(&self, operation: impl Into<TileOperation>) -> Option<TileOperation> {
        (self.tokens.batch > 0 && self.tokens.rows > 0).then(|| operation.into())
    }
}

/// The operands of a call: those of any decays, and those that decays of channels bring.
struct Operands<'a, const N: usize> {
    all: &'a [Buffer],
    own: &'a [Buffer],
    of_channels: Option<&'a [Buffer; N]>,
}

impl<'a, const N: usize> Operands<'a, N> {
    fn new(decays: Decays, all: &'a [Buffer]) -> Operands<'a, N> {
        let found = (decays != Decays::Heads).then(|| all.split_last_chunk()).flatten();
        let (own, of_channels) = found.map_or((all, None), |(own, found)| (own, Some(found)));
        Operands { all, own, of_channels }
    }

    /// Returns the first operands, of which there must be `M`, and the state of parts behind them.
    fn with_state<const M: usize>(&self) -> Result<(&'a [Buffer; M], Option<&'a Buffer>)> {
        match self.own.split_first_chunk() {
            Some((first, [])) => Ok((first, None)),
            Some((first, [state])) => Ok((first, Some(state))),
            _ => {
                let least = M + self.all.len() - self.own.len();
                let expected = format!("{least} or {}", least + 1);
                Err(Error::mismatch("operands", expected, self.all.len()))
            }
        }
    }

    /// Returns the operands that decays of channels do not bring, of which there must be `M`.
    fn exactly<const M: usize>(&self) -> Result<&'a [Buffer; M]> {
        <&[Buffer; M]>::try_from(self.own).map_err(|_| {
            let expected = M + self.all.len() - self.own.len();
            Error::mismatch("operands", expected.to_string(), self.all.len())
        })
    }
}

pub(super) fn inverse(of: (usize, Decays), frame: &CallFrame<'_>) -> Decoded {
    let arguments = frame.all_arguments()?;
    let operands = Operands::new(of.1, &arguments);
    let [k, sums, beta] = operands.exactly()?;
    let [inverse] = frame.results()?;
    // The call has no values.
    let (_, [.., head_dim]) = split("key", k)?;
    let call = Call::new(of, k, sums, head_dim)?.solved(beta, &inverse)?;
    let pairs = operands.of_channels.map_or(Ok(0), |[pairs]| call.pairs(pairs))?;
    Ok(call.operation(DeltaInverse { tokens: call.tokens, pairs }))
}

pub(super) fn state(of: (usize, Decays), frame: &CallFrame<'_>) -> Decoded {
    let (arguments, results) = (frame.all_arguments()?, frame.all_results()?);
    let operands = Operands::new(of.1, &arguments);
    let ([k, inverse, sums, beta, v], before) = operands.with_state()?;
    let (_, [.., value_dim]) = split("value", v)?;
    let call = Call::new(of, k, sums, value_dim)?.solved(beta, inverse)?;
    let results = call.results(before, &results)?;
    let v = call.rows("value", v, value_dim)?;
    let kh = operands.of_channels.map_or(Ok(0), |[kh]| call.kh(kh))?;
    Ok(call.operation(DeltaState { tokens: call.tokens, kh, v, results }))
}

pub(super) fn grad(of: (usize, Decays), frame: &CallFrame<'_>) -> Decoded {
    let (arguments, results) = (frame.all_arguments()?, frame.all_results()?);
    let operands = Operands::new(of.1, &arguments);
    let ([k, inverse, sums, beta, q, dout], behind) = operands.with_state()?;
    let (_, [.., value_dim]) = split("dout", dout)?;
    let call = Call::new(of, k, sums, value_dim)?.solved(beta, inverse)?;
    let results = call.results(behind, &results)?;
    let q = call.rows("query", q, call.tokens.head_dim)?;
    let dout = call.rows("dout", dout, value_dim)?;
    let (kh, pairs) = match operands.of_channels {
        Some([kh, pairs]) => (call.kh(kh)?, call.pairs(pairs)?),
        None => (0, 0),
    };
    Ok(call.operation(DeltaGrad { tokens: call.tokens, q, kh, dout, pairs, results }))
}

pub(super) fn keys(of: (usize, Decays), frame: &CallFrame<'_>) -> Decoded {
    let arguments = frame.all_arguments()?;
    let operands = Operands::new(of.1, &arguments);
    let [k, sums, q, u, dout, dv, turned] = operands.exactly()?;
    let [dk, dots] = frame.results()?;
    let (_, [.., value_dim]) = split("u", u)?;
    let call = Call::new(of, k, sums, value_dim)?;
    let DeltaTokens { heads, head_dim, .. } = call.tokens;
    let columns = column_tiles(head_dim.max(value_dim), head_dim);
    let columns = columns.unwrap_or_else(|| unreachable!("sizes were checked"));
    let (levels, dots) = match operands.of_channels {
        Some([met, keys_met, fades]) => {
            let all = [("met", met), ("keys_met", keys_met), ("fades", fades)];
            let [met, keys_met, fades] = all.map(|(name, buffer)| call.level(name, buffer));
            ([met?, keys_met?, fades?], call.padded("dots", &dots, head_dim)?)
        }
        None => ([0; 3], call.statistics("dots", &dots, heads * columns)?),
    };
    let description = DeltaKeys {
        tokens: call.tokens,
        q: call.rows("query", q, head_dim)?,
        u: call.rows("u", u, value_dim)?,
        dout: call.rows("dout", dout, value_dim)?,
        dv: call.rows("dv", dv, value_dim)?,
        turned: call.states("turned", turned, [value_dim, head_dim])?,
        levels,
        dk: call.rows("dk", &dk, head_dim)?,
        dots,
    };
    Ok(call.operation(description))
}
