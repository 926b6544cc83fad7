//! Graphs: attention as cuDNN's operations.

use std::ffi::c_int;

use burst_attention_kernels::backend::cudnn::{Sdpa, SdpaArray, SdpaPass};
use burst_attention_kernels::instances::Element;
use cudarc::cudnn::sys::cudnnBackendAttributeName_t::{self as Name, *};
use cudarc::cudnn::sys::cudnnBackendAttributeType_t::*;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::{self as Kind, *};
use cudarc::cudnn::sys::cudnnDataType_t::{self as DataType, *};
use cudarc::cudnn::sys::cudnnPointwiseMode_t::{self as Pointwise, *};
use cudarc::cudnn::sys::cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_ADD;

use super::descriptor::{Descriptor, Value};
use super::functions::Functions;
use crate::error::Result;

/// The first number of the tensors that are no arrays.
const VIRTUAL: i64 = 100;
/// What takes the place of hidden scores.
const HIDDEN: f32 = -1e30;

/// A tensor of a graph, by its place among the descriptors.
#[derive(Debug, Clone, Copy)]
struct Tensor(usize);

/// Builds a graph. It keeps all descriptors, since cuDNN's refer to each other.
struct Builder<'a> {
    functions: &'static Functions,
    plan: &'a Sdpa,
    kept: Vec<Descriptor>,
    operations: Vec<usize>,
    next: i64,
}

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
        let (kept, operations) = (Vec::new(), Vec::new());
        let mut builder = Builder { functions, plan, kept, operations, next: VIRTUAL };
        match plan.pass {
            SdpaPass::Forward => builder.forward()?,
            SdpaPass::Backward => builder.backward()?,
        }
        let operations = std::mem::take(&mut builder.operations);
        builder.graph(&operations)?;
        Ok(Graph { descriptors: builder.kept })
    }

    /// Returns the graph's own descriptor.
    pub fn descriptor(&self) -> &Descriptor {
        self.descriptors.last().expect("a graph keeps its descriptor last")
    }
}

impl Builder<'_> {
    fn add(&mut self, kind: Kind, attributes: &[(Name, Value<'_>)]) -> Result<usize> {
        self.kept.push(Descriptor::new(self.functions, kind, attributes)?);
        Ok(self.kept.len() - 1)
    }

    /// Adds a descriptor some attributes of which are descriptors.
    fn add_over(
        &mut self,
        kind: Kind,
        parts: &[(Name, usize)],
        attributes: &[(Name, Value<'_>)],
    ) -> Result<usize> {
        let made = {
            let each: Vec<[&Descriptor; 1]> =
                parts.iter().map(|&(_, at)| [&self.kept[at]]).collect();
            let parts = parts.iter().zip(&each);
            let parts = parts.map(|((name, _), part)| (*name, Value::Descriptors(part)));
            let all: Vec<_> = parts.chain(attributes.iter().copied()).collect();
            Descriptor::new(self.functions, kind, &all)?
        };
        self.kept.push(made);
        Ok(self.kept.len() - 1)
    }

    fn graph(&mut self, operations: &[usize]) -> Result<usize> {
        let all: Vec<_> = operations.iter().map(|&at| &self.kept[at]).collect();
        let operations = [(CUDNN_ATTR_OPERATIONGRAPH_OPS, Value::Descriptors(&all))];
        let kind = CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR;
        let made = Descriptor::new(self.functions, kind, &operations)?;
        self.kept.push(made);
        Ok(self.kept.len() - 1)
    }

    fn tensor(
        &mut self,
        number: i64,
        data_type: DataType,
        dims: [i64; 4],
        strides: [i64; 4],
        (is_virtual, is_host): (bool, bool),
    ) -> Result<Tensor> {
        // Rows of statistics begin anywhere.
        let alignment = if is_host || dims[3] == 1 { 4 } else { 16 };
        let attributes = [
            (CUDNN_ATTR_TENSOR_UNIQUE_ID, Value::Integers(&[number])),
            (CUDNN_ATTR_TENSOR_DATA_TYPE, type_of(data_type)),
            (CUDNN_ATTR_TENSOR_DIMENSIONS, Value::Integers(&dims)),
            (CUDNN_ATTR_TENSOR_STRIDES, Value::Integers(&strides)),
            (CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Value::Integers(&[alignment])),
            (CUDNN_ATTR_TENSOR_IS_VIRTUAL, Value::Flag(is_virtual)),
            (CUDNN_ATTR_TENSOR_IS_BY_VALUE, Value::Flag(is_host)),
        ];
        self.add(CUDNN_BACKEND_TENSOR_DESCRIPTOR, &attributes).map(Tensor)
    }

    /// Adds an array of the plan, perhaps with rows and columns exchanged.
    fn array(&mut self, array: SdpaArray, transposed: bool) -> Result<Tensor> {
        let (mut dims, mut strides) = (self.plan.dims(array), self.plan.strides[&array]);
        if transposed {
            dims.swap(2, 3);
            strides.swap(2, 3);
        }
        let data_type = if self.plan.is_float32(array) { CUDNN_DATA_FLOAT } else { self.element() };
        self.tensor(array.number(), data_type, dims, strides, (false, false))
    }

    fn element(&self) -> DataType {
        match self.plan.element {
            Element::Bf16 => CUDNN_DATA_BFLOAT16,
            Element::F16 => CUDNN_DATA_HALF,
        }
    }

    fn number(&mut self) -> i64 {
        self.next += 1;
        self.next
    }

    /// Adds a tensor that exists within the graph alone.
    fn within(&mut self, data_type: DataType, dims: [i64; 4], strides: [i64; 4]) -> Result<Tensor> {
        let number = self.number();
        self.tensor(number, data_type, dims, strides, (true, false))
    }

    /// Adds a float32 matrix of queries and keys.
    fn pairs(&mut self) -> Result<Tensor> {
        let dims = self.pair_dims();
        self.within(CUDNN_DATA_FLOAT, dims, packed(dims))
    }

    fn pair_dims(&self) -> [i64; 4] {
        [self.plan.batch, self.plan.heads, self.plan.q_len, self.plan.kv_len]
    }

    /// Adds a number that the host gives with each call.
    fn host_number(&mut self, number: HostNumber) -> Result<Tensor> {
        let data_type =
            if number == HostNumber::Right { CUDNN_DATA_INT32 } else { CUDNN_DATA_FLOAT };
        self.tensor(number.number(), data_type, [1; 4], [1; 4], (false, true))
    }

    fn pointwise(&mut self, mode: Pointwise, inputs: &[Tensor], out: Tensor) -> Result<()> {
        let mode = Value::Enumeration(CUDNN_TYPE_POINTWISE_MODE, mode as c_int);
        let attributes = [
            (CUDNN_ATTR_POINTWISE_MODE, mode),
            (CUDNN_ATTR_POINTWISE_MATH_PREC, type_of(CUDNN_DATA_FLOAT)),
        ];
        let what = self.add(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, &attributes)?;
        let places = [CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC];
        let parts = [(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, what)];
        let inputs = places.into_iter().zip(inputs.iter().map(|tensor| tensor.0));
        let out = [(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out.0)];
        let parts: Vec<_> = parts.into_iter().chain(inputs).chain(out).collect();
        self.operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, &parts)
    }

    fn operation(&mut self, kind: Kind, parts: &[(Name, usize)]) -> Result<()> {
        let made = self.add_over(kind, parts, &[])?;
        self.operations.push(made);
        Ok(())
    }

    fn product(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<()> {
        let precision = [(CUDNN_ATTR_MATMUL_COMP_TYPE, type_of(CUDNN_DATA_FLOAT))];
        let what = self.add(CUDNN_BACKEND_MATMUL_DESCRIPTOR, &precision)?;
        let parts = [
            (CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.0),
            (CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.0),
            (CUDNN_ATTR_OPERATION_MATMUL_CDESC, c.0),
            (CUDNN_ATTR_OPERATION_MATMUL_DESC, what),
        ];
        self.operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, &parts)
    }

    fn sum(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let operator = CUDNN_REDUCE_TENSOR_ADD as c_int;
        let operator = Value::Enumeration(CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, operator);
        let attributes = [
            (CUDNN_ATTR_REDUCTION_OPERATOR, operator),
            (CUDNN_ATTR_REDUCTION_COMP_TYPE, type_of(CUDNN_DATA_FLOAT)),
        ];
        let what = self.add(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, &attributes)?;
        let parts = [
            (CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.0),
            (CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.0),
            (CUDNN_ATTR_OPERATION_REDUCTION_DESC, what),
        ];
        self.operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, &parts)
    }

    fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let parts =
            [(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.0), (CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.0)];
        self.operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &parts)
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
            let name = CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC;
            let right = (upper != 0).then_some((name, HostNumber::Right));
            scores = self.band([scores, hidden], right, CUDNN_POINTWISE_CMP_GE)?;
        }
        if lower.is_some() {
            // A row sees column j if j + left > row.
            let name = CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC;
            let left = Some((name, HostNumber::Left));
            scores = self.band([scores, hidden], left, CUDNN_POINTWISE_CMP_GT)?;
        }
        Ok(scores)
    }

    /// Hides the pairs on one side of a diagonal.
    fn band(
        &mut self,
        [scores, hidden]: [Tensor; 2],
        bound: Option<(Name, HostNumber)>,
        comparison: Pointwise,
    ) -> Result<Tensor> {
        let bound = match bound {
            Some((name, number)) => Some((name, self.host_number(number)?.0)),
            None => None,
        };
        let out = self.pairs()?;
        let parts = [
            (CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC, scores.0),
            (CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC, hidden.0),
            (CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC, out.0),
        ];
        let parts: Vec<_> = parts.into_iter().chain(bound).collect();
        let comparison = Value::Enumeration(CUDNN_TYPE_POINTWISE_MODE, comparison as c_int);
        let attributes = [(CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE, comparison)];
        let kind = CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR;
        let made = self.add_over(kind, &parts, &attributes)?;
        self.operations.push(made);
        Ok(out)
    }

    fn forward(&mut self) -> Result<()> {
        use SdpaArray::{Key, Lse, Out, Query, Value as Values};
        let scale = self.host_number(HostNumber::Scale)?;
        let mut parts = vec![(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, scale.0)];
        for (name, array) in [
            (CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, Query),
            (CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, Key),
            (CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, Values),
            (CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, Out),
            (CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, Lse),
        ] {
            parts.push((name, self.array(array, false)?.0));
        }
        let mut numbers = [VIRTUAL + 1, 0];
        if self.plan.has_mask() {
            let scores = self.pairs()?;
            self.masked(scores)?;
            numbers[1] = self.next;
            let operations = std::mem::take(&mut self.operations);
            let graph = self.graph(&operations)?;
            parts.push((CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH, graph));
        }
        let [input, output] = numbers.map(|number| [number]);
        let ends = [
            (CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, Value::Integers(&input)),
            (CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, Value::Integers(&output)),
        ];
        let ends = if self.plan.has_mask() { &ends[..] } else { &[] };
        let made = self.add_over(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR, &parts, ends)?;
        self.operations.push(made);
        Ok(())
    }

    fn backward(&mut self) -> Result<()> {
        use SdpaArray::{
            Delta, Key, KeyGrad, Lse, Out, OutGrad, Query, QueryGrad, Value as Values, ValueGrad,
        };
        let plan = self.plan;
        let float = CUDNN_DATA_FLOAT;
        let [q, o, dout, lse, dq, delta] = {
            let mut arrays = [Tensor(0); 6];
            for (at, array) in arrays.iter_mut().zip([Query, Out, OutGrad, Lse, QueryGrad, Delta]) {
                *at = self.array(array, false)?;
            }
            arrays
        };
        let [kt, vt] = [self.array(Key, true)?, self.array(Values, true)?];
        let scale = self.host_number(HostNumber::Scale)?;
        let one = self.host_number(HostNumber::One)?;
        // delta = rowsum(dout ∘ o)
        let out = [plan.batch, plan.heads, plan.q_len, plan.value_dim];
        let product = self.within(float, out, packed(out))?;
        self.pointwise(CUDNN_POINTWISE_MUL, &[dout, o], product)?;
        let per_row = [plan.batch, plan.heads, plan.q_len, 1];
        let rows = self.within(float, per_row, packed(per_row))?;
        self.sum(product, rows)?;
        self.pointwise(CUDNN_POINTWISE_MUL, &[rows, one], delta)?;
        // p = exp(scale · q kᵀ − lse), where the mask lets pairs see each other.
        let scores = self.pairs()?;
        self.product(q, kt, scores)?;
        let scaled = self.pairs()?;
        self.pointwise(CUDNN_POINTWISE_MUL, &[scores, scale], scaled)?;
        let shifted = self.pairs()?;
        self.pointwise(CUDNN_POINTWISE_SUB, &[scaled, lse], shifted)?;
        let shifted = self.masked(shifted)?;
        let p = self.pairs()?;
        self.pointwise(CUDNN_POINTWISE_EXP, &[shifted], p)?;
        self.key_side(p, dout, ValueGrad)?;
        // ds = scale · p ∘ (dout vᵀ − delta)
        let dp = self.pairs()?;
        self.product(dout, vt, dp)?;
        let centred = self.pairs()?;
        self.pointwise(CUDNN_POINTWISE_SUB, &[dp, delta], centred)?;
        let weighted = self.pairs()?;
        self.pointwise(CUDNN_POINTWISE_MUL, &[centred, p], weighted)?;
        let ds = self.pairs()?;
        self.pointwise(CUDNN_POINTWISE_MUL, &[weighted, scale], ds)?;
        self.key_side(ds, q, KeyGrad)?;
        let element = self.element();
        let k = self.within(element, plan.dims(Key), plan.strides[&Key])?;
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

/// A number that the host gives with each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostNumber {
    /// The factor on q·k.
    Scale,
    /// What takes the place of hidden scores.
    Hidden,
    /// How many columns a row sees up to its own.
    Left,
    /// How many columns a row sees after its own, an integer.
    Right,
    /// 1.
    One,
}

impl HostNumber {
    /// Returns its number in a graph.
    pub const fn number(self) -> i64 {
        self as i64 + 50
    }

    /// Returns the numbers of a plan's graph, as bits.
    pub fn of(plan: &Sdpa) -> Vec<(HostNumber, u32)> {
        // All that fit a tile's rows are exact in float32.
        let left = plan.lower.map(|lower| (1 - lower) as f32);
        let right = plan.upper.filter(|upper| *upper != 0);
        let numbers = [
            (HostNumber::Scale, Some(plan.softmax_scale.to_bits())),
            (HostNumber::Hidden, plan.has_mask().then(|| HIDDEN.to_bits())),
            (HostNumber::Left, left.map(f32::to_bits)),
            (HostNumber::Right, right.map(|right| right as u32)),
            (HostNumber::One, (plan.pass == SdpaPass::Backward).then(|| 1.0_f32.to_bits())),
        ];
        numbers.into_iter().filter_map(|(number, bits)| Some((number, bits?))).collect()
    }
}

fn type_of(data_type: DataType) -> Value<'static> {
    Value::Enumeration(CUDNN_TYPE_DATA_TYPE, data_type as c_int)
}

/// Returns the strides of a tensor without gaps.
const fn packed([_, heads, rows, columns]: [i64; 4]) -> [i64; 4] {
    [heads * rows * columns, rows * columns, columns, 1]
}
