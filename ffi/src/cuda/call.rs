//! From a call frame to a ring on GPUs.

use burst_attention::cuda::rank::{Arrays, Extras};
use burst_attention::cuda::ring::{Call, Given};
use burst_attention::host::array::HostArray;
use burst_attention::host::extras::Extras as HostExtras;
use burst_attention::{Order, Pass, Problem};

use super::Spread;
use crate::attributes::Attributes;
use crate::buffer::Buffer;
use crate::call::CallSite;
use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::shapes::Shapes;
use crate::sys;

/// What is known when a program is compiled.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaSite {
    site: CallSite,
    backward_order: Order,
    /// Where the ranks are.
    pub spread: Spread,
    /// Devices of all rings of the mesh, ring after ring, as XLA numbers them in a program.
    pub groups: Vec<i64>,
    /// Tells our communicators from XLA's own over the same devices; the number after it is ours
    /// too.
    pub communication_id: i64,
}

/// One call with its memory.
#[derive(Debug)]
pub struct Ranks {
    /// What is computed.
    pub call: Call,
    /// Of this device's rank; in a virtual ring of all ranks.
    pub arrays: Vec<Arrays>,
    /// Workspace.
    pub given: Given,
}

impl CudaSite {
    /// Reads the attributes.
    ///
    /// # Errors
    /// If one is missing, of another type or out of range.
    pub fn decode(attributes: &Attributes<'_>, pass: Pass, spread: Spread) -> Result<CudaSite> {
        let site = CallSite::decode(attributes, pass)?;
        if spread == Spread::Virtual {
            let (backward_order, groups) = (order(attributes, pass)?, vec![]);
            return Ok(CudaSite { site, backward_order, spread, groups, communication_id: 0 });
        }
        if !attributes.names().any(|name| name == "groups") {
            let expected = "given: a program for GPUs has to be traced for a mesh of GPUs or for a \
                            jax.sharding.AbstractMesh";
            return Err(Error::mismatch("attribute groups", expected, "none, as for CPU devices"));
        }
        let groups: &[i64] = attributes.get("groups")?;
        let world_size = site.world_size;
        if groups.is_empty()
            || !groups.len().is_multiple_of(world_size)
            || groups.iter().any(|&id| id < 0)
        {
            let expected = format!("the ids of rings of {world_size} devices each");
            return Err(Error::mismatch("groups", expected, format!("{groups:?}")));
        }
        let (backward_order, groups) = (order(attributes, pass)?, groups.to_vec());
        let communication_id = attributes.get("communication_id")?;
        Ok(CudaSite { site, backward_order, spread, groups, communication_id })
    }

    /// Is the ring one device, which needs no communicator?
    pub fn is_alone(&self) -> bool {
        self.spread == Spread::Virtual || self.site.world_size == 1
    }

    /// Ranks of a ring.
    pub fn world_size(&self) -> usize {
        self.site.world_size
    }

    /// The numbers of the communicators, in the order of the executor's queues: a double ring has a
    /// second one, for its slow links.
    pub fn communication_ids(&self) -> impl Iterator<Item = i64> + use<> {
        let has_far_links = self.site.options.family().has_far_links(self.world_size());
        let first = self.communication_id;
        (first..).take(if has_far_links { 2 } else { 1 })
    }

    /// Name of the mesh axis.
    pub fn axis(&self) -> String {
        self.site.axis.to_string()
    }

    /// An error of the core, with the ring it happened in.
    pub fn failed(&self, error: burst_attention::Error) -> Error {
        Error::Ring { axis: self.axis(), error: Box::new(error) }
    }

    /// What is computed, from the shapes of q and k alone.
    ///
    /// # Errors
    /// If they do not fit each other, or the core does not take the problem.
    pub fn call(&self, frame: &CallFrame<'_>) -> Result<Call> {
        let operands = frame.all_arguments()?;
        let [q, k, v, ..] = operands.as_slice() else {
            return Err(Error::mismatch("number of operands", "3 or more", operands.len()));
        };
        self.call_of(&self.site.shapes(q, k, v)?)
    }

    fn call_of(&self, shapes: &Shapes) -> Result<Call> {
        let mut problem: Problem = shapes.problem.clone();
        if self.spread == Spread::Virtual {
            let world_size = self.site.world_size;
            if shapes.outer.len() < 2 || shapes.outer[0] != world_size {
                let expected = format!("[{world_size}, batch, length, heads, head_dim]");
                let got = format!("{:?} in front", shapes.outer);
                return Err(Error::mismatch("shape of query", expected, got));
            }
            problem.batch /= world_size;
        }
        Ok(Call {
            problem,
            family: self.site.options.family(),
            pass: self.site.pass,
            travels: self.site.travels,
            backward_order: self.backward_order,
        })
    }

    /// The call with its operands and results.
    ///
    /// # Errors
    /// If they do not fit each other.
    pub fn ranks(&self, frame: &CallFrame<'_>) -> Result<Ranks> {
        let (shapes, arrays, workspace) = match self.site.pass {
            Pass::Forward => self.forward(frame)?,
            Pass::Backward => self.backward(frame)?,
        };
        let call = self.call_of(&shapes)?;
        let u8 = DataType(sys::XLA_FFI_DataType_U8);
        let workspace = workspace.typed("workspace", u8)?;
        let given = Given {
            workspace: workspace.data("workspace")?.as_ptr() as u64,
            bytes: workspace.bytes() as u64,
        };
        let count = if self.spread == Spread::Virtual { self.site.world_size } else { 1 };
        let arrays = (0..count).map(|rank| of_rank(arrays, &call.problem, rank)).collect();
        Ok(Ranks { call, arrays, given })
    }

    fn forward(&self, frame: &CallFrame<'_>) -> Result<(Shapes, Arrays, Buffer)> {
        let ([q, k, v], extras, []) = self.site.operands(frame)?;
        let [o, lse, workspace] = frame.results()?;
        let shapes = self.site.shapes(&q, &k, &v)?;
        let arrays = Arrays::Forward {
            q: shapes.query("query", &q)?.address(),
            k: shapes.key("key", &k)?.address(),
            v: shapes.value("value", &v)?.address(),
            o: shapes.result("out", &o)?.address(),
            lse: shapes.rows("lse", &lse)?.address(),
            extras: addresses(&shapes.extras(&extras)?),
        };
        Ok((shapes, arrays, workspace))
    }

    fn backward(&self, frame: &CallFrame<'_>) -> Result<(Shapes, Arrays, Buffer)> {
        let ([dq, dk, dv], dslopes, [workspace]) = self.site.gradients(frame)?;
        let (inputs, extras, zeros) = match &dslopes {
            None => {
                let (inputs, extras, []) = self.site.operands(frame)?;
                (inputs, extras, None)
            }
            Some(_) => {
                let (inputs, extras, [zeros]) = self.site.operands(frame)?;
                (inputs, extras, Some(zeros))
            }
        };
        let [q, k, v, o, lse, dout, dlse] = inputs;
        let shapes = self.site.shapes(&q, &k, &v)?;
        let mut extras = addresses(&shapes.extras(&extras)?);
        if let Some((dslopes, zeros)) = dslopes.zip(zeros) {
            extras.dslopes = in_place(&shapes, &dslopes, &zeros)?;
        }
        let arrays = Arrays::Backward {
            q: shapes.query("query", &q)?.address(),
            k: shapes.key("key", &k)?.address(),
            v: shapes.value("value", &v)?.address(),
            o: shapes.result("out", &o)?.address(),
            lse: shapes.rows("lse", &lse)?.address(),
            dout: shapes.result("dout", &dout)?.address(),
            dlse: shapes.rows("dlse", &dlse)?.address(),
            dq: shapes.query("dq", &dq)?.address(),
            dk: shapes.key("dk", &dk)?.address(),
            dv: shapes.value("dv", &dv)?.address(),
            extras,
        };
        Ok((shapes, arrays, workspace))
    }
}

/// The order of sums: an attribute of the backward pass alone.
fn order(attributes: &Attributes<'_>, pass: Pass) -> Result<Order> {
    match pass {
        Pass::Forward => Ok(Order::Fixed),
        Pass::Backward => Ok(attributes.get::<&str>("backward_order")?.parse()?),
    }
}

/// Where the gradient of slopes is summed, by query: kernels add to the zeros that came, so the
/// result has to be that operand.
fn in_place(shapes: &Shapes, dslopes: &Buffer, zeros: &Buffer) -> Result<u64> {
    let dslopes = shapes.rows("dslopes", dslopes)?.address();
    let zeros = shapes.rows("zeros for dslopes", zeros)?.address();
    if dslopes != zeros {
        let expected = "the memory of the last operand (input_output_aliases)";
        return Err(Error::mismatch("result dslopes", expected, "other memory"));
    }
    Ok(dslopes)
}

/// Where the arrays of features lie, 0 for those that there are none of.
fn addresses(extras: &HostExtras) -> Extras {
    let at = |array: &Option<HostArray>| array.as_ref().map_or(0, |a| a.ptr.as_ptr() as u64);
    Extras {
        q_segments: at(&extras.q_segments),
        k_segments: at(&extras.k_segments),
        slopes: at(&extras.slopes),
        dropout: at(&extras.dropout),
        dslopes: at(&extras.dslopes),
    }
}

/// The arrays of a rank where all ranks' lie one after the other.
fn of_rank(arrays: Arrays, problem: &Problem, rank: usize) -> Arrays {
    let Problem { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *problem;
    let bytes = |elements: usize| (rank * batch * elements) as u64;
    let element = problem.dtype.bytes();
    let (of_q, of_o) =
        (bytes(q_len * heads * head_dim * element), bytes(q_len * heads * value_dim * element));
    let of_k = bytes(kv_len * kv_heads * head_dim * element);
    let of_v = bytes(kv_len * kv_heads * value_dim * element);
    let of_row = bytes(q_len * heads * 4);
    let moved = |extras: Extras| Extras {
        q_segments: extras.q_segments + bytes(4 * q_len),
        k_segments: extras.k_segments + bytes(4 * kv_len),
        slopes: extras.slopes + bytes(4 * heads),
        dropout: extras.dropout + bytes(4 * 4),
        dslopes: if extras.dslopes == 0 { 0 } else { extras.dslopes + of_row },
    };
    match arrays {
        Arrays::Forward { q, k, v, o, lse, extras } => Arrays::Forward {
            q: q + of_q,
            k: k + of_k,
            v: v + of_v,
            o: o + of_o,
            lse: lse + of_row,
            extras: moved(extras),
        },
        Arrays::Backward { q, k, v, o, lse, dout, dlse, dq, dk, dv, extras } => Arrays::Backward {
            q: q + of_q,
            k: k + of_k,
            v: v + of_v,
            o: o + of_o,
            lse: lse + of_row,
            dout: dout + of_o,
            dlse: dlse + of_row,
            dq: dq + of_q,
            dk: dk + of_k,
            dv: dv + of_v,
            extras: moved(extras),
        },
    }
}
