//! Builds graphs: tensors and operations as cuDNN's descriptors.

use std::ffi::c_int;

use burst_attention_kernels::backend::cudnn::{Sdpa, SdpaArray};
use burst_attention_kernels::instances::Element;
use cudarc::cudnn::sys::cudnnBackendAttributeName_t::{self as Name, *};
use cudarc::cudnn::sys::cudnnBackendAttributeType_t::*;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::{self as Kind, *};
use cudarc::cudnn::sys::cudnnDataType_t::{self as DataType, *};
use cudarc::cudnn::sys::cudnnPointwiseMode_t as Mode;
use cudarc::cudnn::sys::cudnnReduceTensorOp_t as Reduction;

use super::descriptor::{Descriptor, Value};
use super::functions::Functions;
use super::numbers::HostNumber;
use crate::error::Result;

/// The first number of the tensors that are no arrays.
const VIRTUAL: i64 = 100;

/// A tensor of a graph, by its place among the descriptors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor(usize);

/// Builds a graph. It keeps all descriptors, since cuDNN's refer to each other.
#[derive(Debug)]
pub(super) struct Builder<'a> {
    functions: &'static Functions,
    pub(super) plan: &'a Sdpa,
    kept: Vec<Descriptor>,
    operations: Vec<usize>,
    next: i64,
}

/// What an operation computes element by element.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pointwise {
    pub(super) mode: Mode,
    /// The type of the arithmetic.
    pub(super) precision: DataType,
    /// The axis along which it counts.
    pub(super) axis: Option<i64>,
}

impl From<Mode> for Pointwise {
    fn from(mode: Mode) -> Pointwise {
        Pointwise { mode, precision: CUDNN_DATA_FLOAT, axis: None }
    }
}

impl<'a> Builder<'a> {
    pub(super) fn new(functions: &'static Functions, plan: &'a Sdpa) -> Builder<'a> {
        Builder { functions, plan, kept: Vec::new(), operations: Vec::new(), next: VIRTUAL }
    }

    /// Makes the graph of all operations. Returns all descriptors, the graph's last.
    pub(super) fn finish(mut self) -> Result<Vec<Descriptor>> {
        let made = {
            let all: Vec<_> = self.operations.iter().map(|&at| &self.kept[at]).collect();
            let operations = [(CUDNN_ATTR_OPERATIONGRAPH_OPS, Value::Descriptors(&all))];
            let kind = CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR;
            Descriptor::new(self.functions, kind, &operations)?
        };
        self.kept.push(made);
        Ok(self.kept)
    }

    fn add(&mut self, kind: Kind, attributes: &[(Name, Value<'_>)]) -> Result<usize> {
        self.kept.push(Descriptor::new(self.functions, kind, attributes)?);
        Ok(self.kept.len() - 1)
    }

    /// Adds an operation, whose attributes are descriptors.
    fn operation(&mut self, kind: Kind, parts: &[(Name, usize)]) -> Result<()> {
        let made = {
            let each: Vec<[&Descriptor; 1]> =
                parts.iter().map(|&(_, at)| [&self.kept[at]]).collect();
            let parts = parts.iter().zip(&each);
            let parts = parts.map(|((name, _), part)| (*name, Value::Descriptors(part)));
            Descriptor::new(self.functions, kind, &parts.collect::<Vec<_>>())?
        };
        self.operations.push(self.kept.len());
        self.kept.push(made);
        Ok(())
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
    pub(super) fn array(&mut self, array: SdpaArray, transposed: bool) -> Result<Tensor> {
        let (mut dims, mut strides) = (self.plan.dims(array), self.plan.strides[&array]);
        if transposed {
            dims.swap(2, 3);
            strides.swap(2, 3);
        }
        let data_type = if self.plan.is_float32(array) { CUDNN_DATA_FLOAT } else { self.element() };
        self.tensor(array.number(), data_type, dims, strides, (false, false))
    }

    /// Adds arrays of the plan.
    pub(super) fn arrays<const N: usize>(&mut self, arrays: [SdpaArray; N]) -> Result<[Tensor; N]> {
        let mut tensors = [Tensor(0); N];
        for (tensor, array) in tensors.iter_mut().zip(arrays) {
            *tensor = self.array(array, false)?;
        }
        Ok(tensors)
    }

    /// Returns the type of the activations.
    pub(super) fn element(&self) -> DataType {
        match self.plan.element {
            Element::Bf16 => CUDNN_DATA_BFLOAT16,
            Element::F16 => CUDNN_DATA_HALF,
        }
    }

    /// Adds a tensor that exists within the graph alone.
    pub(super) fn within(
        &mut self,
        data_type: DataType,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<Tensor> {
        self.next += 1;
        self.tensor(self.next, data_type, dims, strides, (true, false))
    }

    /// Adds a matrix of queries and keys, without gaps.
    pub(super) fn pairs_of(&mut self, data_type: DataType) -> Result<Tensor> {
        let dims = self.pair_dims();
        self.within(data_type, dims, packed(dims))
    }

    /// Adds a float32 matrix of queries and keys.
    pub(super) fn pairs(&mut self) -> Result<Tensor> {
        self.pairs_of(CUDNN_DATA_FLOAT)
    }

    pub(super) fn pair_dims(&self) -> [i64; 4] {
        [self.plan.batch, self.plan.heads, self.plan.q_len, self.plan.kv_len]
    }

    /// Adds a float32 number of each query.
    pub(super) fn per_row(&mut self) -> Result<Tensor> {
        let dims = [self.plan.batch, self.plan.heads, self.plan.q_len, 1];
        self.within(CUDNN_DATA_FLOAT, dims, packed(dims))
    }

    /// Adds a number that the host gives with each call.
    pub(super) fn host_number(&mut self, number: HostNumber) -> Result<Tensor> {
        self.tensor(number.number(), number.data_type(), [1; 4], [1; 4], (false, true))
    }

    pub(super) fn pointwise(
        &mut self,
        what: impl Into<Pointwise>,
        inputs: &[Tensor],
        out: Tensor,
    ) -> Result<()> {
        let Pointwise { mode, precision, axis } = what.into();
        let axis = axis.map(|axis| [axis]);
        let axis = axis.iter().map(|axis| (CUDNN_ATTR_POINTWISE_AXIS, Value::Integers(axis)));
        let mode = Value::Enumeration(CUDNN_TYPE_POINTWISE_MODE, mode as c_int);
        let attributes = [
            (CUDNN_ATTR_POINTWISE_MODE, mode),
            (CUDNN_ATTR_POINTWISE_MATH_PREC, type_of(precision)),
        ];
        let attributes: Vec<_> = attributes.into_iter().chain(axis).collect();
        let what = self.add(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, &attributes)?;
        let places = [
            CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        let parts = [(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, what)];
        let inputs = places.into_iter().zip(inputs.iter().map(|tensor| tensor.0));
        let out = [(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out.0)];
        let parts: Vec<_> = parts.into_iter().chain(inputs).chain(out).collect();
        self.operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, &parts)
    }

    pub(super) fn product(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<()> {
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

    /// Adds a sum or another reduction to the dimensions of `y`.
    pub(super) fn reduce(&mut self, operator: Reduction, x: Tensor, y: Tensor) -> Result<()> {
        let operator = Value::Enumeration(CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, operator as c_int);
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

    pub(super) fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let parts =
            [(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.0), (CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.0)];
        self.operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &parts)
    }
}

fn type_of(data_type: DataType) -> Value<'static> {
    Value::Enumeration(CUDNN_TYPE_DATA_TYPE, data_type as c_int)
}

/// Returns the strides of a tensor without gaps.
pub(super) const fn packed([_, heads, rows, columns]: [i64; 4]) -> [i64; 4] {
    [heads * rows * columns, rows * columns, columns, 1]
}
