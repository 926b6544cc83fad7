//! Carries graphs out in host memory, operation by operation. Matrix products round their inputs to
//! the type of the activations, as tensor cores do; sums are float32.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t::{self as Name, *};
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::*;
use cudarc::cudnn::sys::cudnnPointwiseMode_t::*;

use super::descriptor::{BAD_PARAM, Descriptor, NOT_SUPPORTED, wrong};
use super::tensor::{Element, Tensor, Values};
use crate::call::Outcome;
use crate::memory::{By, Touch};
use crate::stream::Stream;

/// An operation.
#[derive(Debug, Clone)]
enum Operation {
    Pointwise { mode: i64, inputs: Vec<Tensor>, out: Tensor },
    Band { scores: Tensor, hidden: Tensor, bound: Option<Tensor>, side: Side, out: Tensor },
    Product { a: Tensor, b: Tensor, out: Tensor },
    Sum { x: Tensor, out: Tensor },
    Reshape { x: Tensor, out: Tensor },
    Attention { scale: Tensor, arrays: Box<[Tensor; 5]>, mask: Option<Mask> },
}

/// The side of a diagonal on which a band hides scores.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Side {
    Left,
    Right,
}

/// The graph within attention, which hides scores.
#[derive(Debug, Clone)]
struct Mask {
    graph: Arc<Vec<Operation>>,
    input: i64,
    output: i64,
}

/// A graph of operations, in an order in which they can be carried out.
#[derive(Debug, Clone)]
pub struct Graph(Arc<Vec<Operation>>);

fn tensor(of: &Descriptor, name: Name) -> Outcome<Tensor> {
    Tensor::of(&*of.descriptor(name)?)
}

impl Operation {
    fn of(descriptor: &Descriptor) -> Outcome<Operation> {
        let at = |name| tensor(descriptor, name);
        if descriptor.is(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
            let what = descriptor.descriptor(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)?;
            let names =
                [CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC];
            let inputs = names.into_iter().filter_map(|name| descriptor.optional(name));
            return Ok(Operation::Pointwise {
                mode: what.number(CUDNN_ATTR_POINTWISE_MODE)?,
                inputs: inputs.map(|input| Tensor::of(&input)).collect::<Result<_, _>>()?,
                out: at(CUDNN_ATTR_OPERATION_POINTWISE_YDESC)?,
            });
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR) {
            return Operation::band(descriptor);
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
            return Ok(Operation::Product {
                a: at(CUDNN_ATTR_OPERATION_MATMUL_ADESC)?,
                b: at(CUDNN_ATTR_OPERATION_MATMUL_BDESC)?,
                out: at(CUDNN_ATTR_OPERATION_MATMUL_CDESC)?,
            });
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
            let (x, out) = (
                at(CUDNN_ATTR_OPERATION_REDUCTION_XDESC)?,
                at(CUDNN_ATTR_OPERATION_REDUCTION_YDESC)?,
            );
            return Ok(Operation::Sum { x, out });
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR) {
            let (x, out) =
                (at(CUDNN_ATTR_OPERATION_RESHAPE_XDESC)?, at(CUDNN_ATTR_OPERATION_RESHAPE_YDESC)?);
            return Ok(Operation::Reshape { x, out });
        }
        if descriptor.is(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR) {
            let graph = descriptor.optional(CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH);
            let mask = |graph: Arc<Descriptor>| -> Outcome<Mask> {
                let input = CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID;
                let output = CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID;
                let (input, output) = (descriptor.number(input)?, descriptor.number(output)?);
                Ok(Mask { graph: Graph::of(&graph)?.0, input, output })
            };
            return Ok(Operation::Attention {
                scale: at(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC)?,
                arrays: Box::new([
                    at(CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC)?,
                    at(CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC)?,
                    at(CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC)?,
                    at(CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC)?,
                    at(CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC)?,
                ]),
                mask: graph.map(mask).transpose()?,
            });
        }
        Err(wrong(NOT_SUPPORTED, "an operation that is unknown"))
    }

    /// Returns a mask that hides one side of a diagonal. The comparison tells the side.
    fn band(descriptor: &Descriptor) -> Outcome<Operation> {
        let comparison =
            descriptor.number(CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE)?;
        let (side, bound) = match comparison {
            mode if mode == CUDNN_POINTWISE_CMP_GT as i64 => {
                (Side::Left, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC)
            }
            mode if mode == CUDNN_POINTWISE_CMP_GE as i64 => {
                (Side::Right, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC)
            }
            mode => return Err(wrong(NOT_SUPPORTED, format!("comparison {mode} of a band"))),
        };
        let bound = descriptor.optional(bound).map(|bound| Tensor::of(&bound)).transpose()?;
        if side == Side::Left && bound.is_none() {
            return Err(wrong(BAD_PARAM, "a band without its left bound"));
        }
        Ok(Operation::Band {
            scores: tensor(descriptor, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC)?,
            hidden: tensor(descriptor, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC)?,
            bound,
            side,
            out: tensor(descriptor, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC)?,
        })
    }

    /// Returns the inputs and the outputs.
    fn tensors(&self) -> (Vec<&Tensor>, Vec<&Tensor>) {
        match self {
            Operation::Pointwise { inputs, out, .. } => (inputs.iter().collect(), vec![out]),
            Operation::Band { scores, hidden, bound, out, .. } => {
                ([scores, hidden].into_iter().chain(bound).collect(), vec![out])
            }
            Operation::Product { a, b, out } => (vec![a, b], vec![out]),
            Operation::Sum { x, out } | Operation::Reshape { x, out } => (vec![x], vec![out]),
            Operation::Attention { scale, arrays, mask } => {
                let [q, k, v, o, lse] = &**arrays;
                let within = mask.iter().flat_map(|mask| mask.graph.iter());
                let hosts = within.flat_map(|one| one.tensors().0).filter(|input| input.is_host);
                ([scale, q, k, v].into_iter().chain(hosts).collect(), vec![o, lse])
            }
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

    /// Returns the graph of a plan.
    ///
    /// # Errors
    /// If it has an operation that is unknown.
    pub fn of_plan(plan: &Descriptor) -> Outcome<Graph> {
        let config = plan.descriptor(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)?;
        match config.optional(CUDNN_ATTR_ENGINECFG_ENGINE) {
            Some(engine) => Graph::of(&*engine.descriptor(CUDNN_ATTR_ENGINE_OPERATION_GRAPH)?),
            None => Graph::of(&*config.descriptor(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)?),
        }
    }

    /// Returns the tensors in memory that are read and that are written.
    fn in_memory(&self) -> (Vec<Tensor>, Vec<Tensor>) {
        let (mut read, mut written) = (vec![], vec![]);
        for operation in &*self.0 {
            let (inputs, outputs) = operation.tensors();
            read.extend(inputs.into_iter().cloned());
            written.extend(outputs.into_iter().cloned());
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
    let graph = Graph::of_plan(plan)?;
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
    touches.push(Touch::write(by, workspace, 256));
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
    for operation in graph {
        let (inputs, outputs) = operation.tensors();
        for input in inputs {
            // SAFETY: the caller guarantees the memory.
            let load = || unsafe { input.load(places[&input.number]) };
            known.entry(input.number).or_insert_with(load);
        }
        for (out, values) in outputs.into_iter().zip(results(operation, known)) {
            let values = values.rounded(out.element);
            if !out.is_virtual {
                // SAFETY: the caller guarantees the memory.
                unsafe { out.store(places[&out.number], &values) };
            }
            known.insert(out.number, values);
        }
    }
}

/// Returns the outputs of an operation.
fn results(operation: &Operation, known: &BTreeMap<i64, Values>) -> Vec<Values> {
    let of = |tensor: &Tensor| &known[&tensor.number];
    match operation {
        Operation::Pointwise { mode, inputs, out } => {
            let inputs: Vec<_> = inputs.iter().map(of).collect();
            vec![Values::new(out.dims, |at| pointwise(*mode, &inputs, at))]
        }
        Operation::Band { scores, hidden, bound, side, out } => {
            let (scores, hidden) = (of(scores), of(hidden).get([0; 4]));
            let bound = bound.as_ref().map_or(0.0, |bound| of(bound).get([0; 4]));
            vec![Values::new(out.dims, |at| {
                let (row, column) = (at[2] as f32, at[3] as f32);
                let is_seen = match side {
                    Side::Left => column + bound > row,
                    Side::Right => row + bound >= column,
                };
                if is_seen { scores.get(at) } else { hidden }
            })]
        }
        Operation::Product { a, b, out } => {
            let element = if a.element == Element::Float32 { b.element } else { a.element };
            let (a, b) = (of(a).clone().rounded(element), of(b));
            let groups = out.dims[1] / b.dims[1];
            vec![Values::new(out.dims, |[n, h, i, j]| {
                let shared = [n, h / groups];
                (0..a.dims[3])
                    .map(|t| a.get([n, h, i, t]) * b.get([shared[0], shared[1], t, j]))
                    .sum()
            })]
        }
        Operation::Sum { x, out } => {
            let x = of(x);
            let ratio: [usize; 4] = std::array::from_fn(|axis| x.dims[axis] / out.dims[axis]);
            vec![Values::new(out.dims, |at| {
                let parts = (0..ratio.iter().product()).map(|part: usize| {
                    let part = [
                        part / (ratio[1] * ratio[2] * ratio[3]),
                        part / (ratio[2] * ratio[3]) % ratio[1],
                        part / ratio[3] % ratio[2],
                        part % ratio[3],
                    ];
                    x.get(std::array::from_fn(|axis| at[axis] * ratio[axis] + part[axis]))
                });
                parts.sum()
            })]
        }
        // All reshapes of attention exchange rows and columns.
        Operation::Reshape { x, out } => {
            let x = of(x);
            vec![Values::new(out.dims, |[n, h, i, j]| x.get([n, h, j, i]))]
        }
        Operation::Attention { scale, arrays, mask } => {
            let [q, k, v, o, lse] = &**arrays;
            let scale = of(scale).get([0; 4]);
            attention(scale, [of(q), of(k), of(v)], (o, lse), mask.as_ref(), known)
        }
    }
}

fn pointwise(mode: i64, inputs: &[&Values], at: [usize; 4]) -> f32 {
    let is = |wanted| mode == wanted as i64;
    let x = |which: usize| inputs[which].get(at);
    if is(CUDNN_POINTWISE_MUL) {
        x(0) * x(1)
    } else if is(CUDNN_POINTWISE_SUB) {
        x(0) - x(1)
    } else if is(CUDNN_POINTWISE_EXP) {
        x(0).exp()
    } else {
        f32::NAN
    }
}

/// Returns o and lse.
fn attention(
    scale: f32,
    [q, k, v]: [&Values; 3],
    (o, lse): (&Tensor, &Tensor),
    mask: Option<&Mask>,
    known: &BTreeMap<i64, Values>,
) -> Vec<Values> {
    let (groups, keys) = (q.dims[1] / k.dims[1], k.dims[2]);
    let dims = [q.dims[0], q.dims[1], q.dims[2], keys];
    let mut scores = Values::new(dims, |[n, h, i, j]| {
        let dot: f32 =
            (0..q.dims[3]).map(|t| q.get([n, h, i, t]) * k.get([n, h / groups, j, t])).sum();
        scale * dot
    });
    if let Some(mask) = mask {
        let mut within = known.clone();
        within.insert(mask.input, scores);
        // SAFETY: a mask has no tensors in memory.
        unsafe { run(&mask.graph, &BTreeMap::new(), &mut within) };
        scores = within.remove(&mask.output).expect("the mask's output");
    }
    let largest = |[n, h, i]: [usize; 3]| {
        (0..keys).map(|j| scores.get([n, h, i, j])).fold(f32::NEG_INFINITY, f32::max)
    };
    let sum = |[n, h, i]: [usize; 3], most: f32| -> f32 {
        (0..keys).map(|j| (scores.get([n, h, i, j]) - most).exp()).sum()
    };
    let found = Values::new(lse.dims, |[n, h, i, _]| {
        let most = largest([n, h, i]);
        most + sum([n, h, i], most).ln()
    });
    let out = Values::new(o.dims, |[n, h, i, c]| {
        let most = largest([n, h, i]);
        let total: f32 = (0..keys)
            .map(|j| {
                let p = o.element.round((scores.get([n, h, i, j]) - most).exp());
                p * v.get([n, h / groups, j, c])
            })
            .sum();
        total / sum([n, h, i], most)
    });
    vec![out, found]
}
