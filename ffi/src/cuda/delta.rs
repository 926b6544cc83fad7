//! Calls of the delta rule on a GPU, as `linear` runs them.
//!
//! All arrays of a call have the same heads. The operands and results of each call, in order:
//!
//! | call | operands | results |
//! |---|---|---|
//! | inverse | k, sums, beta | inverse |
//! | state | k, inverse, sums, beta, v | state, transfer |
//! | state | k, inverse, sums, beta, v, before | u |
//! | grad | k, inverse, sums, beta, q, dout | state, transfer |
//! | grad | k, inverse, sums, beta, q, dout, behind | dy |
//! | keys | k, sums, q, u, dout, dv, turned | dk, dots |

use burst_attention::Dtype;
use burst_attention_kernels::launch::{
    DeltaGrad, DeltaInverse, DeltaKeys, DeltaResults, DeltaState, DeltaTokens, LINEAR_TILE,
    TileOperation, column_tiles,
};

use super::linear::{activation, check_columns};
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
    fn new(part_rows: usize, k: &'a Buffer, sums: &Buffer, value_dim: usize) -> Result<Call<'a>> {
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
            k: address,
            sums: 0,
            beta: 0,
            inverse: 0,
        };
        let mut call = Call { tokens, dtype, outer };
        call.tokens.sums = call.statistics("sums", sums, heads)?;
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

fn wrong_count(expected: &str, arguments: &[Buffer]) -> Error {
    Error::mismatch("operands", expected, arguments.len())
}

pub(super) fn inverse(part_rows: usize, frame: &CallFrame<'_>) -> Decoded {
    let [k, sums, beta] = frame.arguments()?;
    let [inverse] = frame.results()?;
    // The call has no values.
    let (_, [.., head_dim]) = split("key", &k)?;
    let call = Call::new(part_rows, &k, &sums, head_dim)?.solved(&beta, &inverse)?;
    Ok(call.operation(DeltaInverse { tokens: call.tokens }))
}

pub(super) fn state(part_rows: usize, frame: &CallFrame<'_>) -> Decoded {
    let (arguments, results) = (frame.all_arguments()?, frame.all_results()?);
    let [k, inverse, sums, beta, v, before @ ..] = arguments.as_slice() else {
        return Err(wrong_count("5 or 6", &arguments));
    };
    let (_, [.., value_dim]) = split("value", v)?;
    let call = Call::new(part_rows, k, sums, value_dim)?.solved(beta, inverse)?;
    let results = call.results(before.first(), &results)?;
    let v = call.rows("value", v, value_dim)?;
    Ok(call.operation(DeltaState { tokens: call.tokens, v, results }))
}

pub(super) fn grad(part_rows: usize, frame: &CallFrame<'_>) -> Decoded {
    let (arguments, results) = (frame.all_arguments()?, frame.all_results()?);
    let [k, inverse, sums, beta, q, dout, behind @ ..] = arguments.as_slice() else {
        return Err(wrong_count("6 or 7", &arguments));
    };
    let (_, [.., value_dim]) = split("dout", dout)?;
    let call = Call::new(part_rows, k, sums, value_dim)?.solved(beta, inverse)?;
    let results = call.results(behind.first(), &results)?;
    let q = call.rows("query", q, call.tokens.head_dim)?;
    let dout = call.rows("dout", dout, value_dim)?;
    Ok(call.operation(DeltaGrad { tokens: call.tokens, q, dout, results }))
}

pub(super) fn keys(part_rows: usize, frame: &CallFrame<'_>) -> Decoded {
    let [k, sums, q, u, dout, dv, turned] = frame.arguments()?;
    let [dk, dots] = frame.results()?;
    let (_, [.., value_dim]) = split("u", &u)?;
    let call = Call::new(part_rows, &k, &sums, value_dim)?;
    let DeltaTokens { heads, head_dim, .. } = call.tokens;
    let columns = column_tiles(head_dim.max(value_dim), head_dim);
    let columns = columns.unwrap_or_else(|| unreachable!("sizes were checked"));
    let description = DeltaKeys {
        tokens: call.tokens,
        q: call.rows("query", &q, head_dim)?,
        u: call.rows("u", &u, value_dim)?,
        dout: call.rows("dout", &dout, value_dim)?,
        dv: call.rows("dv", &dv, value_dim)?,
        turned: call.states("turned", &turned, [value_dim, head_dim])?,
        dk: call.rows("dk", &dk, head_dim)?,
        dots: call.statistics("dots", &dots, heads * columns)?,
    };
    Ok(call.operation(description))
}
