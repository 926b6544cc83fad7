//! Carries graphs out in host memory, operation by operation. Matrix products round their inputs to
//! the type of the activations, as tensor cores do; sums are float32.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t::*;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::*;
use cudarc::cudnn::sys::cudnnPointwiseMode_t::{self as Mode, *};
use cudarc::cudnn::sys::cudnnReduceTensorOp_t::*;

use super::descriptor::{BAD_PARAM, Descriptor, NOT_SUPPORTED, wrong};
use super::engine;
use super::tensor::{Element, Tensor, Values};
use crate::call::Outcome;
use crate::memory::{By, Touch};
use crate::stream::Stream;

/// An operation.
#[derive(Debug, Clone)]
enum Operation {
    Pointwise { mode: Mode, axis: usize, inputs: Vec<Tensor>, out: Tensor },
    Product { a: Tensor, b: Tensor, out: Tensor },
    Reduction { is_sum: bool, x: Tensor, out: Tensor },
    Reshape { x: Tensor, out: Tensor },
}

/// The modes of pointwise operations that are known.
const MODES: [Mode; 10] = [
    CUDNN_POINTWISE_ADD,
    CUDNN_POINTWISE_SUB,
    CUDNN_POINTWISE_MUL,
    CUDNN_POINTWISE_DIV,
    CUDNN_POINTWISE_EXP,
    CUDNN_POINTWISE_LOG,
    CUDNN_POINTWISE_GEN_INDEX,
    CUDNN_POINTWISE_CMP_GE,
    CUDNN_POINTWISE_CMP_GT,
    CUDNN_POINTWISE_BINARY_SELECT,
];

/// A graph of operations, in an order in which they can be carried out.
#[derive(Debug, Clone)]
pub struct Graph(Arc<Vec<Operation>>);

impl Operation {
    /// Returns the number of the quotient of weights and their sums, if this operation computes it.
    fn quotient(&self) -> Option<i64> {
        match self {
            Operation::Pointwise { mode: CUDNN_POINTWISE_DIV, out, .. } if out.is_virtual => {
                Some(out.number)
            }
            _ => None,
        }
    }

    fn of(descriptor: &Descriptor) -> Outcome<Operation> {
        let at = |name| Tensor::of(&*descriptor.descriptor(name)?);
        if descriptor.is(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
            return Operation::pointwise(descriptor);
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
            return Ok(Operation::Product {
                a: at(CUDNN_ATTR_OPERATION_MATMUL_ADESC)?,
                b: at(CUDNN_ATTR_OPERATION_MATMUL_BDESC)?,
                out: at(CUDNN_ATTR_OPERATION_MATMUL_CDESC)?,
            });
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
            let what = descriptor.descriptor(CUDNN_ATTR_OPERATION_REDUCTION_DESC)?;
            let operator = what.number(CUDNN_ATTR_REDUCTION_OPERATOR)?;
            let is = |wanted| operator == wanted as i64;
            if !is(CUDNN_REDUCE_TENSOR_ADD) && !is(CUDNN_REDUCE_TENSOR_MAX) {
                return Err(wrong(NOT_SUPPORTED, format!("reduction {operator}")));
            }
            return Ok(Operation::Reduction {
                is_sum: is(CUDNN_REDUCE_TENSOR_ADD),
                x: at(CUDNN_ATTR_OPERATION_REDUCTION_XDESC)?,
                out: at(CUDNN_ATTR_OPERATION_REDUCTION_YDESC)?,
            });
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR) {
            let (x, out) =
                (at(CUDNN_ATTR_OPERATION_RESHAPE_XDESC)?, at(CUDNN_ATTR_OPERATION_RESHAPE_YDESC)?);
            return Ok(Operation::Reshape { x, out });
        }
        Err(wrong(NOT_SUPPORTED, "an operation that is unknown"))
    }

    fn pointwise(descriptor: &Descriptor) -> Outcome<Operation> {
        let what = descriptor.descriptor(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)?;
        let number = what.number(CUDNN_ATTR_POINTWISE_MODE)?;
        let mode = MODES.into_iter().find(|mode| *mode as i64 == number);
        let unknown = || wrong(NOT_SUPPORTED, format!("pointwise mode {number}"));
        let names = [
            CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        let inputs = names.into_iter().filter_map(|name| descriptor.optional(name));
        let out = descriptor.descriptor(CUDNN_ATTR_OPERATION_POINTWISE_YDESC)?;
        Ok(Operation::Pointwise {
            mode: mode.ok_or_else(unknown)?,
            // Only the mode that counts must have an axis.
            axis: match mode {
                Some(CUDNN_POINTWISE_GEN_INDEX) => what.number(CUDNN_ATTR_POINTWISE_AXIS)? as usize,
                _ => 0,
            },
            inputs: inputs.map(|input| Tensor::of(&input)).collect::<Result<_, _>>()?,
            out: Tensor::of(&out)?,
        })
    }

    /// Returns the inputs and the output.
    fn tensors(&self) -> (Vec<&Tensor>, &Tensor) {
        match self {
            Operation::Pointwise { inputs, out, .. } => (inputs.iter().collect(), out),
            Operation::Product { a, b, out } => (vec![a, b], out),
            Operation::Reduction { x, out, .. } | Operation::Reshape { x, out } => (vec![x], out),
        }
    }
}

impl Graph {
    fn of(descriptor: &Descriptor) -> Outcome<Graph> {
        let operations = descriptor.descriptors(CUDNN_ATTR_OPERATIONGRAPH_OPS)?;
        let operations: Result<Vec<_>, _> =
            operations.iter().map(|operation| Operation::of(operation)).collect();
        Ok(Graph(Arc::new(operations?)))
    }

    /// Returns the graph of a configuration.
    ///
    /// # Errors
    /// If it has an operation that is unknown.
    pub fn of_config(config: &Descriptor) -> Outcome<Graph> {
        match config.optional(CUDNN_ATTR_ENGINECFG_ENGINE) {
            Some(engine) => Graph::of(&*engine.descriptor(CUDNN_ATTR_ENGINE_OPERATION_GRAPH)?),
            None => Graph::of(&*config.descriptor(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)?),
        }
    }

    /// Returns the statistics in memory that the graph reads: float32, one for each row.
    pub fn statistics_read(&self) -> impl Iterator<Item = &Tensor> {
        let inputs = self.0.iter().flat_map(|operation| operation.tensors().0);
        inputs.filter(|input| !input.is_virtual && !input.is_host && input.dims[3] == 1)
    }

    /// Returns the sizes of the matrix of pairs, and the columns of queries.
    ///
    /// # Errors
    /// If the graph has no product.
    pub fn sizes(&self) -> Outcome<([usize; 4], usize)> {
        let product = self.0.iter().find_map(|operation| match operation {
            Operation::Product { a, out, .. } => Some((out.dims, a.dims[3])),
            _ => None,
        });
        product.ok_or_else(|| wrong(NOT_SUPPORTED, "a graph without a product"))
    }

    /// Returns the tensors in memory that are read and that are written.
    fn in_memory(&self) -> (Vec<Tensor>, Vec<Tensor>) {
        let (mut read, mut written) = (vec![], vec![]);
        for operation in &*self.0 {
            let (inputs, out) = operation.tensors();
            read.extend(inputs.into_iter().cloned());
            written.push(out.clone());
        }
        let is_array = |tensor: &Tensor| !tensor.is_virtual && !tensor.is_host;
        read.retain(|tensor| {
            is_array(tensor) && written.iter().all(|one| one.number != tensor.number)
        });
        written.retain(is_array);
        (read, written)
    }
}

/// Enqueues a plan with its arrays.
///
/// # Errors
/// If an array is missing.
pub fn enqueue(stream: &Arc<Stream>, plan: &Descriptor, pack: &Descriptor) -> Outcome {
    let config = plan.descriptor(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)?;
    let graph = Graph::of_config(&config)?;
    let numbers = pack.numbers(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS)?;
    let pointers = pack.pointers(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS)?;
    if numbers.iter().collect::<BTreeSet<_>>().len() != pointers.len() {
        return Err(wrong(BAD_PARAM, format!("{numbers:?} for {} pointers", pointers.len())));
    }
    let places: BTreeMap<i64, u64> = numbers.into_iter().zip(pointers).collect();
    let place = |tensor: &Tensor| {
        let missing = || wrong(BAD_PARAM, format!("tensor {} has no pointer", tensor.number));
        places.get(&tensor.number).copied().ok_or_else(missing)
    };
    let by = By::Kernel(stream.device);
    let (read, written) = graph.in_memory();
    let mut touches = vec![];
    for tensor in &read {
        touches.push(Touch::read(by, place(tensor)?, tensor.span()));
    }
    for tensor in &written {
        touches.push(Touch::write(by, place(tensor)?, tensor.span()));
    }
    let [workspace] = pack.pointers(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)?[..] else {
        return Err(wrong(BAD_PARAM, "expected one workspace"));
    };
    touches.push(Touch::write(by, workspace, engine::workspace_bytes(&config, &graph)? as u64));
    // Numbers of the host are read before the call returns.
    let mut given = BTreeMap::new();
    for tensor in graph.0.iter().flat_map(|operation| operation.tensors().0) {
        if tensor.is_host {
            // SAFETY: the caller passes the address of a number.
            given.insert(tensor.number, unsafe { tensor.load(place(tensor)?) });
        }
    }
    stream.touch("cuDNN's attention", touches, move |_| {
        let mut known = given;
        // SAFETY: the stream has checked the ranges.
        unsafe { run(&graph.0, &places, &mut known) };
    });
    Ok(())
}

/// Carries operations out.
///
/// # Safety
/// The caller must pass the address of each tensor in memory.
unsafe fn run(graph: &[Operation], places: &BTreeMap<i64, u64>, known: &mut BTreeMap<i64, Values>) {
    let quotients: BTreeSet<i64> = graph.iter().filter_map(Operation::quotient).collect();
    for operation in graph {
        let (inputs, out) = operation.tensors();
        for input in inputs {
            // SAFETY: the caller guarantees the memory.
            let load = || unsafe { input.load(places[&input.number]) };
            known.entry(input.number).or_insert_with(load);
        }
        let mut values = result(operation, known, &quotients);
        if !quotients.contains(&out.number) {
            values = values.rounded(out.element);
        }
        if !out.is_virtual {
            // SAFETY: the caller guarantees the memory.
            unsafe { out.store(places[&out.number], &values) };
        }
        known.insert(out.number, values);
    }
}

/// Returns the output of an operation. An engine of attention rounds weights for the product with
/// values, and divides its results by their sums: so a quotient of weights holds rounded weights
/// over sums, which no product rounds again.
fn result(
    operation: &Operation,
    known: &BTreeMap<i64, Values>,
    quotients: &BTreeSet<i64>,
) -> Values {
    let of = |tensor: &Tensor| &known[&tensor.number];
    match operation {
        Operation::Pointwise { inputs, out, .. } if quotients.contains(&out.number) => {
            let (weights, sums) = (of(&inputs[0]).clone().rounded(out.element), of(&inputs[1]));
            Values::new(out.dims, |at| weights.get(at) / sums.get(at))
        }
        Operation::Pointwise { mode, axis, inputs, out } => {
            let inputs: Vec<_> = inputs.iter().map(of).collect();
            Values::new(out.dims, |at| pointwise(*mode, *axis, &inputs, at))
        }
        Operation::Product { a, b, out } => {
            let element = if a.element == Element::Float32 { b.element } else { a.element };
            let is_quotient = quotients.contains(&a.number);
            let (a, b) = (of(a).clone(), of(b));
            let a = if is_quotient { a } else { a.rounded(element) };
            let groups = out.dims[1] / b.dims[1];
            Values::new(out.dims, |[n, h, i, j]| {
                let shared = [n, h / groups];
                (0..a.dims[3])
                    .map(|t| a.get([n, h, i, t]) * b.get([shared[0], shared[1], t, j]))
                    .sum()
            })
        }
        Operation::Reduction { is_sum, x, out } => {
            let x = of(x);
            let ratio: [usize; 4] = std::array::from_fn(|axis| x.dims[axis] / out.dims[axis]);
            Values::new(out.dims, |at| {
                let parts = (0..ratio.iter().product()).map(|part: usize| {
                    let part = [
                        part / (ratio[1] * ratio[2] * ratio[3]),
                        part / (ratio[2] * ratio[3]) % ratio[1],
                        part / ratio[3] % ratio[2],
                        part % ratio[3],
                    ];
                    x.get(std::array::from_fn(|axis| at[axis] * ratio[axis] + part[axis]))
                });
                if *is_sum { parts.sum() } else { parts.fold(f32::NEG_INFINITY, f32::max) }
            })
        }
        // All reshapes of attention exchange rows and columns.
        Operation::Reshape { x, out } => {
            let x = of(x);
            Values::new(out.dims, |[n, h, i, j]| x.get([n, h, j, i]))
        }
    }
}

fn pointwise(mode: Mode, axis: usize, inputs: &[&Values], at: [usize; 4]) -> f32 {
    let x = |which: usize| inputs[which].get(at);
    match mode {
        CUDNN_POINTWISE_ADD => x(0) + x(1),
        CUDNN_POINTWISE_SUB => x(0) - x(1),
        CUDNN_POINTWISE_MUL => x(0) * x(1),
        CUDNN_POINTWISE_DIV => x(0) / x(1),
        CUDNN_POINTWISE_EXP => x(0).exp(),
        CUDNN_POINTWISE_LOG => x(0).ln(),
        CUDNN_POINTWISE_GEN_INDEX => at[axis] as f32,
        CUDNN_POINTWISE_CMP_GE => f32::from(x(0) >= x(1)),
        CUDNN_POINTWISE_CMP_GT => f32::from(x(0) > x(1)),
        CUDNN_POINTWISE_BINARY_SELECT => x(if x(2) == 0.0 { 1 } else { 0 }),
        other => unreachable!("{other:?} is not among the modes"),
    }
}
