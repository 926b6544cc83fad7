//! Reads a ring on GPUs from a call frame.

use burst_attention::cuda::call::Call;
use burst_attention::cuda::workspace::Workspace;
use burst_attention::operands::{Arrays, DeviceKind, Operand};
use burst_attention::{Order, Pass, Problem};
use burst_attention_kernels::backend::Kernels;

use super::Spread;
use crate::attributes::Attributes;
use crate::call::CallSite;
use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::shapes::Shapes;

/// The attributes of a call, which are known when a program is compiled.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaSite {
    site: CallSite,
    backward_order: Order,
    lse_gradient: bool,
    kernels: Kernels,
    /// The devices of the ranks.
    pub spread: Spread,
    /// The devices of all rings of the mesh, ring after ring, as XLA numbers them in a program.
    pub groups: Vec<i64>,
    /// A number that distinguishes the library's communicators from XLA's own over the same
    /// devices. The next number belongs to the library too.
    pub communication_id: i64,
}

/// A call with its memory.
#[derive(Debug)]
pub struct Ranks {
    /// The computation.
    pub call: Call,
    /// The arrays of this device's rank, or of all ranks in a virtual ring.
    pub arrays: Vec<Arrays<u64>>,
    /// The workspace.
    pub workspace: Workspace,
}

impl CudaSite {
    /// Reads the attributes.
    ///
    /// # Errors
    /// If one is missing, of another type or out of range.
    pub fn decode(attributes: &Attributes<'_>, pass: Pass, spread: Spread) -> Result<CudaSite> {
        let site = CallSite::decode(attributes, pass)?;
        let (backward_order, lse_gradient) = of_backward(attributes, pass)?;
        let kernels = attributes.get::<&str>("kernels")?;
        let kernels = Kernels::of_name(kernels)
            .map_err(|error| Error::mismatch("kernels", error, kernels))?;
        let alone = CudaSite {
            site,
            backward_order,
            lse_gradient,
            kernels,
            spread,
            groups: vec![],
            communication_id: 0,
        };
        if spread == Spread::Virtual {
            return Ok(alone);
        }
        if !attributes.names().any(|name| name == "groups") {
            let expected = "given: a program for GPUs has to be traced for a mesh of GPUs or for a \
                            jax.sharding.AbstractMesh";
            return Err(Error::mismatch("attribute groups", expected, "none, as for CPU devices"));
        }
        let groups: &[i64] = attributes.get("groups")?;
        let world_size = alone.site.world_size;
        if groups.is_empty()
            || !groups.len().is_multiple_of(world_size)
            || groups.iter().any(|&id| id < 0)
        {
            let expected = format!("the ids of rings of {world_size} devices each");
            return Err(Error::mismatch("groups", expected, format!("{groups:?}")));
        }
        let communication_id = attributes.get("communication_id")?;
        Ok(CudaSite { groups: groups.to_vec(), communication_id, ..alone })
    }

    /// Whether the ring is one device, which needs no communicator.
    pub fn is_alone(&self) -> bool {
        self.spread == Spread::Virtual || self.site.world_size == 1
    }

    /// Returns the number of ranks of a ring.
    pub fn world_size(&self) -> usize {
        self.site.world_size
    }

    /// Returns the numbers of the communicators, in the order of the executor's queues. A double
    /// ring has a second communicator, for its slow links.
    pub fn communication_ids(&self) -> impl Iterator<Item = i64> + use<> {
        let has_far_links = self.site.options.family.has_far_links(self.world_size());
        let first = self.communication_id;
        (first..).take(if has_far_links { 2 } else { 1 })
    }

    /// Returns the name of the mesh axis.
    pub fn axis(&self) -> String {
        self.site.axis.to_string()
    }

    /// Adds the mesh axis of the ring to an error of the core, if the ring has several devices.
    pub fn failed(&self, error: &burst_attention::Error) -> Error {
        if self.is_alone() {
            return Error::Core(error.clone());
        }
        Error::Ring { axis: self.axis(), error: Box::new(error.clone()) }
    }

    /// Returns the computation, from the shapes of q, k and v alone.
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
            travels: self.site.travels,
            backward_order: self.backward_order,
            lse_gradient: self.lse_gradient,
            kernels: self.kernels,
            ..Call::new(problem, self.site.options.family, self.site.pass)
        })
    }

    /// Returns the call with its operands and results.
    ///
    /// # Errors
    /// If they do not fit each other.
    pub fn ranks(&self, frame: &CallFrame<'_>) -> Result<Ranks> {
        let added = match self.site.pass {
            Pass::Forward => vec![],
            Pass::Backward => Operand::gradients_of(&self.site.options.features).collect(),
        };
        let given = self.site.arrays(frame, DeviceKind::Cuda, [added.len(), 1])?;
        for (&gradient, zeros) in added.iter().zip(&given.operands) {
            let zeros = given.shapes.check(gradient, DeviceKind::Cuda, zeros)?;
            if zeros.data != given.arrays[gradient].data {
                let name = format!("result {}", gradient.name());
                let expected = "the memory of its zeros among the operands (input_output_aliases)";
                return Err(Error::mismatch(name, expected, "other memory"));
            }
        }
        let call = self.call_of(&given.shapes)?;
        let workspace = given.results[0].typed("workspace", DataType::U8)?;
        let workspace = Workspace {
            address: workspace.data("workspace")?.as_ptr() as u64,
            bytes: workspace.bytes() as u64,
        };
        let of_rank = |rank: usize| {
            given.arrays.map(|operand, array| {
                array.data.as_ptr() as u64 + bytes_before(&call.problem, operand, rank)
            })
        };
        let count = if self.spread == Spread::Virtual { self.site.world_size } else { 1 };
        let arrays = (0..count).map(of_rank).collect();
        Ok(Ranks { call, arrays, workspace })
    }
}

/// Returns the bytes of an operand that the ranks before `rank` hold, where the shards of all
/// ranks lie one after another.
fn bytes_before(problem: &Problem, operand: Operand, rank: usize) -> u64 {
    let dims = operand.dims(DeviceKind::Cuda).iter().map(|dim| problem.length(*dim));
    let elements = rank * problem.batch * dims.product::<usize>();
    (elements * operand.element(DeviceKind::Cuda).bytes(problem.dtype)) as u64
}

/// Returns attributes of the backward pass alone: the order of sums, and whether lse has a gradient.
fn of_backward(attributes: &Attributes<'_>, pass: Pass) -> Result<(Order, bool)> {
    match pass {
        Pass::Forward => Ok((Order::Fixed, true)),
        Pass::Backward => {
            let order = attributes.get::<&str>("backward_order")?.parse()?;
            Ok((order, attributes.get("lse_gradient")?))
        }
    }
}
