//! From a call frame to a validated problem and borrowed buffers.

use std::sync::Arc;

use burst_attention::host::array::HostArray;
use burst_attention::host::checks::host_dims;
use burst_attention::operands::{Arrays, DeviceKind, Operand};
use burst_attention::{Layout, Pass, Problem, Travels};

use crate::attributes::Attributes;
use crate::buffer::Buffer;
use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::options::Options;
use crate::rendezvous::{Call, Work};
use crate::shapes::{Checked, Shapes, split};

/// Ranks that a ring of one process may have; more is taken for a garbled attribute.
pub(crate) const MAX_WORLD_SIZE: usize = 1 << 16;

/// What is known when a program is compiled: the attributes of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct CallSite {
    pub(crate) pass: Pass,
    pub(crate) world_size: usize,
    layout: Layout,
    pub(crate) options: Options,
    softmax_scale: f32,
    pub(crate) travels: Option<Travels>,
    pub(crate) axis: Arc<str>,
}

/// One rank's call.
#[derive(Debug)]
pub struct RankCall {
    /// What all ranks share.
    pub call: Call,
    /// Rank and ring. `None` if there is nothing to compute: then no rank waits for another.
    pub rank_and_ring: Option<[i32; 2]>,
    /// The rank's memory.
    pub arrays: Arrays<HostArray>,
}

/// The arrays of a call on a platform.
pub(crate) struct Given {
    pub shapes: Shapes,
    pub arrays: Arrays<Checked>,
    /// Operands and results that only the platform has.
    pub operands: Vec<Buffer>,
    pub results: Vec<Buffer>,
}

impl CallSite {
    /// Reads the attributes.
    ///
    /// # Errors
    /// If one is missing, of another type or out of range.
    pub fn decode(attributes: &Attributes<'_>, pass: Pass) -> Result<CallSite> {
        let travels = match pass {
            Pass::Forward => None,
            Pass::Backward => travels_of(attributes.get("backward")?)?,
        };
        Ok(CallSite {
            pass,
            world_size: world_size_of(attributes)?,
            layout: attributes.get::<&str>("layout")?.parse()?,
            options: Options::decode(attributes)?,
            softmax_scale: attributes.get("softmax_scale")?,
            travels,
            axis: attributes.get::<&str>("axis_name")?.into(),
        })
    }

    /// Reads operands and results of one rank's call.
    ///
    /// # Errors
    /// If they do not fit each other, or the core does not take the problem.
    pub fn decode_call(&self, frame: &CallFrame<'_>) -> Result<RankCall> {
        let given = self.arrays(frame, DeviceKind::Host, [1, 0])?;
        let problem = given.shapes.problem;
        let arrays = given.arrays.map(|operand, &Checked { data, dtype }| {
            let [len, heads, dim] = host_dims(&problem, operand);
            HostArray::jax(data, dtype, [problem.batch, len, heads, dim])
        });
        let empty = problem.batch == 0 || problem.q_len == 0 && problem.kv_len == 0;
        let rank_and_ring =
            if empty { None } else { Some(read_rank_and_ring(&given.operands[0])?) };
        let (family, axis) = (self.options.family, self.axis.clone());
        let work = Work { problem, family, pass: self.pass, travels: self.travels };
        let call = Call { work: Some(work), world_size: self.world_size, axis };
        Ok(RankCall { call, rank_and_ring, arrays })
    }

    /// Reads the arrays of a call, behind which come some operands and results that only the
    /// platform has.
    ///
    /// # Errors
    /// If their number is wrong, if they do not fit each other, or if the core does not take the
    /// problem.
    pub(crate) fn arrays(
        &self,
        frame: &CallFrame<'_>,
        kind: DeviceKind,
        [more_operands, more_results]: [usize; 2],
    ) -> Result<Given> {
        let features = self.options.features;
        let inputs: Vec<Operand> = Operand::inputs(self.pass, &features).collect();
        let results: Vec<Operand> = Operand::results(self.pass, &features).collect();
        let mut operands =
            counted("operands", frame.all_arguments()?, inputs.len() + more_operands)?;
        let mut outputs = counted("results", frame.all_results()?, results.len() + more_results)?;
        let shapes = self.shapes(&operands[0], &operands[1], &operands[2])?;
        let mut arrays = Arrays::none(self.pass);
        let inputs = inputs.iter().zip(operands.drain(..inputs.len()));
        let results = results.iter().zip(outputs.drain(..results.len()));
        for (&operand, buffer) in inputs.chain(results) {
            arrays.set(operand, shapes.check(operand, kind, &buffer)?);
        }
        Ok(Given { shapes, arrays, operands, results: outputs })
    }

    /// The problem that `q`, `k` and `v` pose.
    ///
    /// # Errors
    /// If they do not fit each other, or the core does not take the problem.
    pub(crate) fn shapes(&self, q: &Buffer, k: &Buffer, v: &Buffer) -> Result<Shapes> {
        let (outer, [q_len, heads, head_dim]) = split("query", q)?;
        let (k_outer, [kv_len, kv_heads, k_dim]) = split("key", k)?;
        if outer != k_outer || head_dim != k_dim {
            let expected = format!("{outer:?} + [length, heads, {head_dim}], as query's");
            return Err(Error::mismatch("shape of key", expected, format!("{:?}", k.dims)));
        }
        let (_, [.., value_dim]) = split("value", v)?;
        let Some(dtype) = q.dtype.activation() else {
            return Err(Error::mismatch("dtype of query", "float32, bfloat16 or float16", q.dtype));
        };
        let problem = Problem {
            // The number of elements was checked to fit, so this does not overflow, unless there
            // are none at all.
            batch: outer.iter().fold(1, |product, &dim| product.wrapping_mul(dim)),
            q_len,
            kv_len,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            dtype,
            window: self.options.window,
            softmax_scale: self.softmax_scale,
            features: self.options.features,
            layout: self.layout,
            world_size: self.world_size,
        };
        problem.validate()?;
        self.options.family.validate(self.world_size)?;
        Ok(Shapes { problem, outer: outer.to_vec() })
    }
}

/// All buffers, if they are `expected` in number.
fn counted(what: &str, all: Vec<Buffer>, expected: usize) -> Result<Vec<Buffer>> {
    if all.len() == expected {
        return Ok(all);
    }
    Err(Error::mismatch(format!("number of {what}"), expected.to_string(), all.len()))
}

/// Reads the length of a ring.
///
/// # Errors
/// If it is missing, of another type or out of range.
pub(crate) fn world_size_of(attributes: &Attributes<'_>) -> Result<usize> {
    let world_size = attributes.get::<i64>("world_size")?;
    let size = usize::try_from(world_size).ok().filter(|n| (1..=MAX_WORLD_SIZE).contains(n));
    size.ok_or_else(|| {
        Error::mismatch("world_size", format!("from 1 to {MAX_WORLD_SIZE}"), world_size)
    })
}

/// What travels backward, by its name in the public interface.
///
/// # Errors
/// If there is no such name.
pub(crate) fn travels_of(name: &str) -> Result<Option<Travels>> {
    match name {
        "auto" => Ok(None),
        "keys" => Ok(Some(Travels::Keys)),
        "queries" => Ok(Some(Travels::Queries)),
        other => Err(Error::mismatch("backward", "auto, keys or queries", format!("{other:?}"))),
    }
}

/// Reads rank and ring. vmap may have put dimensions in front, along which all entries are equal.
pub(crate) fn read_rank_and_ring(place: &Buffer) -> Result<[i32; 2]> {
    let data = place.typed("place", DataType::S32)?.data("place")?;
    if place.dims.last() != Some(&2) || place.elements() == 0 {
        let got = format!("{:?}", place.dims);
        return Err(Error::mismatch("shape of place", "[..., 2]: rank and ring", got));
    }
    // SAFETY: the buffer holds at least two int32, and on the host platform it is host memory.
    Ok(unsafe { data.cast::<[i32; 2]>().read_unaligned() })
}
