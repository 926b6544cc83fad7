//! From a call frame to a validated problem and borrowed buffers.

use std::sync::Arc;

use burst_attention::host::ring::{BackwardBuffers, ForwardBuffers, RankBuffers, RingBuffers};
use burst_attention::{Layout, Pass, Problem, Travels};

use crate::attributes::Attributes;
use crate::buffer::Buffer;
use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::options::Options;
use crate::rendezvous::Call;
use crate::shapes::{Shapes, split};

/// Ranks that a ring of one process may have; more is taken for a garbled attribute.
const MAX_WORLD_SIZE: usize = 1 << 16;

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
    /// Rank and ring; `None` if there is nothing to compute, as then nobody needs to meet.
    pub place: Option<[i32; 2]>,
    /// Its memory.
    pub buffers: RankBuffers,
}

impl CallSite {
    /// Reads the attributes.
    ///
    /// # Errors
    /// If one is missing, of another type or out of range.
    pub fn decode(attributes: &Attributes<'_>, pass: Pass) -> Result<CallSite> {
        let world_size = attributes.get::<i64>("world_size")?;
        let travels = match pass {
            Pass::Forward => None,
            Pass::Backward => travels_of(attributes.get("backward")?)?,
        };
        Ok(CallSite {
            pass,
            world_size: usize::try_from(world_size)
                .ok()
                .filter(|size| (1..=MAX_WORLD_SIZE).contains(size))
                .ok_or_else(|| {
                    let expected = format!("from 1 to {MAX_WORLD_SIZE}");
                    Error::mismatch("world_size", expected, world_size)
                })?,
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
        match self.pass {
            Pass::Forward => self.forward(frame),
            Pass::Backward => self.backward(frame),
        }
    }

    fn forward(&self, frame: &CallFrame<'_>) -> Result<RankCall> {
        let ([q, k, v], extras, [place]) = self.operands(frame)?;
        let ([o, lse], _, []) = apart("results", frame.all_results()?, 0)?;
        let shapes = self.shapes(&q, &k, &v)?;
        let buffers = ForwardBuffers {
            q: shapes.query("query", &q)?.host(),
            k: shapes.key("key", &k)?.host(),
            v: shapes.value("value", &v)?.host(),
            o: shapes.output(&o)?.host(),
            lse: shapes.rows("lse", &lse)?.host(),
            extras: shapes.extras(&extras)?,
        };
        self.placed(shapes.problem, &place, RankBuffers::Forward(Box::new(buffers)))
    }

    fn backward(&self, frame: &CallFrame<'_>) -> Result<RankCall> {
        let ([q, k, v, o, lse, dout, dlse], extras, [place]) = self.operands(frame)?;
        let ([dq, dk, dv], dslopes, []) = self.gradients(frame)?;
        let shapes = self.shapes(&q, &k, &v)?;
        let mut extras = shapes.extras(&extras)?;
        if let Some(dslopes) = dslopes {
            extras.dslopes = Some(shapes.slopes("dslopes", &dslopes)?);
        }
        let buffers = BackwardBuffers {
            q: shapes.query("query", &q)?.host(),
            k: shapes.key("key", &k)?.host(),
            v: shapes.value("value", &v)?.host(),
            o: shapes.output(&o)?.host(),
            lse: shapes.rows("lse", &lse)?.host(),
            dout: shapes.result("dout", &dout)?.host(),
            dlse: shapes.rows("dlse", &dlse)?.host(),
            dq: shapes.query("dq", &dq)?.host(),
            dk: shapes.key("dk", &dk)?.host(),
            dv: shapes.value("dv", &dv)?.host(),
            extras,
        };
        self.placed(shapes.problem, &place, RankBuffers::Backward(Box::new(buffers)))
    }

    /// The first `N` operands, those of features, and the last `M`.
    ///
    /// # Errors
    /// If their number is wrong.
    pub(crate) fn operands<const N: usize, const M: usize>(
        &self,
        frame: &CallFrame<'_>,
    ) -> Result<([Buffer; N], Vec<Buffer>, [Buffer; M])> {
        let features = self.options.features();
        let segments = if features.segments { 2 } else { 0 };
        let extras =
            segments + usize::from(features.slopes) + usize::from(features.dropout.is_some());
        apart("operands", frame.all_arguments()?, extras)
    }

    /// The results of a backward pass: dq, dk and dv, with slopes the gradient of those, and the
    /// last `M`.
    ///
    /// # Errors
    /// If their number is wrong.
    pub(crate) fn gradients<const M: usize>(
        &self,
        frame: &CallFrame<'_>,
    ) -> Result<([Buffer; 3], Option<Buffer>, [Buffer; M])> {
        let of_slopes = usize::from(self.options.features().slopes);
        let (gradients, dslopes, last) = apart("results", frame.all_results()?, of_slopes)?;
        Ok((gradients, dslopes.into_iter().next(), last))
    }

    fn placed(&self, problem: Problem, place: &Buffer, buffers: RankBuffers) -> Result<RankCall> {
        let empty = problem.batch == 0 || problem.q_len == 0 && problem.kv_len == 0;
        let place = if empty { None } else { Some(read_place(place)?) };
        let (family, axis) = (self.options.family(), self.axis.clone());
        let call = Call { problem, family, pass: self.pass, travels: self.travels, axis };
        Ok(RankCall { call, place, buffers })
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
            window: self.options.window(),
            softmax_scale: self.softmax_scale,
            features: self.options.features(),
            layout: self.layout,
            world_size: self.world_size,
        };
        problem.validate()?;
        self.options.family().validate(self.world_size)?;
        Ok(Shapes { problem, outer: outer.to_vec() })
    }
}

/// The first `N`, so many, and the last `M`.
fn apart<const N: usize, const M: usize>(
    what: &str,
    all: Vec<Buffer>,
    between: usize,
) -> Result<([Buffer; N], Vec<Buffer>, [Buffer; M])> {
    let expected = N + between + M;
    if let (Some((first, rest)), true) = (all.split_first_chunk::<N>(), all.len() == expected)
        && let Some((middle, last)) = rest.split_last_chunk::<M>()
    {
        return Ok((first.clone(), middle.to_vec(), last.clone()));
    }
    Err(Error::mismatch(format!("number of {what}"), expected.to_string(), all.len()))
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

/// Rank and ring. vmap may have put dimensions in front, along which all entries are equal.
fn read_place(place: &Buffer) -> Result<[i32; 2]> {
    let data = place.typed("place", DataType::S32)?.data("place")?;
    if place.dims.last() != Some(&2) || place.elements() == 0 {
        let got = format!("{:?}", place.dims);
        return Err(Error::mismatch("shape of place", "[..., 2]: rank and ring", got));
    }
    // SAFETY: the buffer holds at least two int32, and on the host platform it is host memory.
    Ok(unsafe { data.cast::<[i32; 2]>().read_unaligned() })
}

/// Puts the ranks' memory together; all are of the same pass.
///
/// # Errors
/// If they are not.
pub fn gather(ranks: Vec<RankBuffers>) -> Result<RingBuffers> {
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for rank in ranks {
        match rank {
            RankBuffers::Forward(buffers) => forward.push(*buffers),
            RankBuffers::Backward(buffers) => backward.push(*buffers),
        }
    }
    match (forward.is_empty(), backward.is_empty()) {
        (false, true) => Ok(RingBuffers::Forward(forward)),
        (true, false) => Ok(RingBuffers::Backward(backward)),
        _ => Err(Error::mismatch("pass of a ring", "one for all ranks", "both or none")),
    }
}
