//! Graphs: attention as operations that all versions of cuDNN know.
//!
//! Newer versions also have one operation for the whole forward pass, and one for a mask. Those
//! that are served know these graphs too, so one graph is enough.

use burst_attention_kernels::backend::cudnn::{Sdpa, SdpaArray, SdpaPass};
use cudarc::cudnn::sys::cudnnDataType_t::*;
use cudarc::cudnn::sys::cudnnPointwiseMode_t::{self as Mode, *};
use cudarc::cudnn::sys::cudnnReduceTensorOp_t::*;

use super::builder::{Builder, Pointwise, Tensor, packed};
use super::descriptor::Descriptor;
use super::functions::Functions;
use super::numbers::HostNumber;
use crate::error::Result;

/// The axes of a matrix of queries and keys along which rows and columns count.
const AXES: [i64; 2] = [2, 3];

/// A graph and the descriptors that it refers to.
#[derive(Debug)]
pub struct Graph {
    /// The graph is the last of them.
    pub descriptors: Vec<Descriptor>,
}

impl Graph {
    /// Returns the graph of a plan.
    ///
    /// # Errors
    /// If cuDNN refuses an operation.
    pub fn new(functions: &'static Functions, plan: &Sdpa) -> Result<Graph> {
        let mut builder = Builder::new(functions, plan);
        match plan.pass {
            SdpaPass::Forward => builder.forward()?,
            SdpaPass::Backward => builder.backward()?,
        }
        Ok(Graph { descriptors: builder.finish()? })
    }

    /// Returns the graph's own descriptor.
    pub fn descriptor(&self) -> &Descriptor {
        self.descriptors.last().expect("a graph keeps its descriptor last")
    }
}

impl Builder<'_> {
    /// Returns scale · q kᵀ.
    fn scaled_scores(&mut self, q: Tensor, kt: Tensor, scale: Tensor) -> Result<Tensor> {
        let scores = self.pairs()?;
        self.product(q, kt, scores)?;
        self.pointwise_pairs(CUDNN_POINTWISE_MUL, &[scores, scale])
    }

    /// Adds a float32 matrix of queries and keys that an operation computes.
    fn pointwise_pairs(&mut self, mode: Mode, inputs: &[Tensor]) -> Result<Tensor> {
        let out = self.pairs()?;
        self.pointwise(mode, inputs, out)?;
        Ok(out)
    }

    /// Hides the pairs that do not see each other.
    fn masked(&mut self, mut scores: Tensor) -> Result<Tensor> {
        let Sdpa { lower, upper, .. } = *self.plan;
        if !self.plan.has_mask() {
            return Ok(scores);
        }
        let hidden = self.host_number(HostNumber::Hidden)?;
        if let Some(upper) = upper {
            // A row sees column j if row + right ≥ j.
            let [mut row, column] = self.indices(scores)?;
            if upper != 0 {
                row = self.moved(row, HostNumber::Right)?;
            }
            scores = self.shown(scores, hidden, (CUDNN_POINTWISE_CMP_GE, [row, column]))?;
        }
        if lower.is_some() {
            // A row sees column j if j + left > row.
            let [row, column] = self.indices(scores)?;
            let column = self.moved(column, HostNumber::Left)?;
            scores = self.shown(scores, hidden, (CUDNN_POINTWISE_CMP_GT, [column, row]))?;
        }
        Ok(scores)
    }

    /// Returns the row and the column of each pair.
    fn indices(&mut self, scores: Tensor) -> Result<[Tensor; 2]> {
        let [row, column] = [self.pairs_of(CUDNN_DATA_INT32)?, self.pairs_of(CUDNN_DATA_INT32)?];
        for (index, axis) in [row, column].into_iter().zip(AXES) {
            let what = Pointwise { axis: Some(axis), ..CUDNN_POINTWISE_GEN_INDEX.into() };
            self.pointwise(what, &[scores], index)?;
        }
        Ok([row, column])
    }

    /// Returns an index plus a number of the host, in the number's type.
    fn moved(&mut self, index: Tensor, number: HostNumber) -> Result<Tensor> {
        let precision = number.data_type();
        let moved = self.pairs_of(precision)?;
        let number = self.host_number(number)?;
        let what = Pointwise { mode: CUDNN_POINTWISE_ADD, precision, axis: Some(AXES[1]) };
        self.pointwise(what, &[index, number], moved)?;
        Ok(moved)
    }

    /// Returns the scores where a comparison holds, and `hidden` elsewhere.
    fn shown(
        &mut self,
        scores: Tensor,
        hidden: Tensor,
        (mode, sides): (Mode, [Tensor; 2]),
    ) -> Result<Tensor> {
        let sees = self.pairs_of(CUDNN_DATA_BOOLEAN)?;
        let comparison = Pointwise { mode, precision: CUDNN_DATA_BOOLEAN, axis: None };
        self.pointwise(comparison, &sides, sees)?;
        self.pointwise_pairs(CUDNN_POINTWISE_BINARY_SELECT, &[scores, hidden, sees])
    }

    fn forward(&mut self) -> Result<()> {
        use SdpaArray::{Key, Lse, Out, Query, Value as Values};
        let scale = self.host_number(HostNumber::Scale)?;
        let [q, v, o, lse] = self.arrays([Query, Values, Out, Lse])?;
        let kt = self.array(Key, true)?;
        let scores = self.scaled_scores(q, kt, scale)?;
        let scores = self.masked(scores)?;
        let [largest, sum, log] = [self.per_row()?, self.per_row()?, self.per_row()?];
        self.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, largest)?;
        let shifted = self.pointwise_pairs(CUDNN_POINTWISE_SUB, &[scores, largest])?;
        let weights = self.pointwise_pairs(CUDNN_POINTWISE_EXP, &[shifted])?;
        self.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, sum)?;
        self.pointwise(CUDNN_POINTWISE_LOG, &[sum], log)?;
        self.pointwise(CUDNN_POINTWISE_ADD, &[largest, log], lse)?;
        let p = self.pairs_of(self.element())?;
        self.pointwise(CUDNN_POINTWISE_DIV, &[weights, sum], p)?;
        self.product(p, v, o)
    }

    fn backward(&mut self) -> Result<()> {
        use SdpaArray::{
            Delta, Key, KeyGrad, Lse, Out, OutGrad, Query, QueryGrad, Value as Values, ValueGrad,
        };
        let plan = self.plan;
        let [q, o, dout, lse] = self.arrays([Query, Out, OutGrad, Lse])?;
        let [dq, delta] = self.arrays([QueryGrad, Delta])?;
        let [kt, vt] = [self.array(Key, true)?, self.array(Values, true)?];
        let scale = self.host_number(HostNumber::Scale)?;
        let one = self.host_number(HostNumber::One)?;
        // delta = rowsum(dout ∘ o)
        let out = plan.dims(Out);
        let product = self.within(CUDNN_DATA_FLOAT, out, packed(out))?;
        self.pointwise(CUDNN_POINTWISE_MUL, &[dout, o], product)?;
        let rows = self.per_row()?;
        self.reduce(CUDNN_REDUCE_TENSOR_ADD, product, rows)?;
        self.pointwise(CUDNN_POINTWISE_MUL, &[rows, one], delta)?;
        // p = exp(scale · q kᵀ − lse), where the mask lets pairs see each other.
        let scaled = self.scaled_scores(q, kt, scale)?;
        let shifted = self.pointwise_pairs(CUDNN_POINTWISE_SUB, &[scaled, lse])?;
        let shifted = self.masked(shifted)?;
        let p = self.pointwise_pairs(CUDNN_POINTWISE_EXP, &[shifted])?;
        self.key_side(p, dout, ValueGrad)?;
        // ds = scale · p ∘ (dout vᵀ − delta)
        let dp = self.pairs()?;
        self.product(dout, vt, dp)?;
        let centred = self.pointwise_pairs(CUDNN_POINTWISE_SUB, &[dp, delta])?;
        let weighted = self.pointwise_pairs(CUDNN_POINTWISE_MUL, &[centred, p])?;
        let ds = self.pointwise_pairs(CUDNN_POINTWISE_MUL, &[weighted, scale])?;
        self.key_side(ds, q, KeyGrad)?;
        let k = self.within(self.element(), plan.dims(Key), plan.strides[&Key])?;
        self.reshape(kt, k)?;
        self.product(ds, k, dq)
    }

    /// Adds pairsᵀ · rows, the gradient of an array of keys for each query head.
    fn key_side(&mut self, pairs: Tensor, rows: Tensor, gradient: SdpaArray) -> Result<()> {
        let [batch, heads, q_len, kv_len] = self.pair_dims();
        let dims = [batch, heads, kv_len, q_len];
        let strides = [heads * q_len * kv_len, q_len * kv_len, 1, kv_len];
        let transposed = self.within(self.element(), dims, strides)?;
        self.reshape(pairs, transposed)?;
        let out = self.array(gradient, false)?;
        self.product(transposed, rows, out)
    }
}
