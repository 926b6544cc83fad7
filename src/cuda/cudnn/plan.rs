//! Plans: graphs that cuDNN has compiled for a kind of device.

use std::ffi::c_void;
use std::ptr;

use burst_attention_kernels::backend::LibraryCall;
use burst_attention_kernels::backend::cudnn::{Sdpa, SdpaOrder, Version, WORKSPACE};
use cudarc::cudnn::sys::cudnnBackendAttributeName_t::{self as Name, *};
use cudarc::cudnn::sys::cudnnBackendAttributeType_t::{CUDNN_TYPE_HEUR_MODE, CUDNN_TYPE_KNOB_TYPE};
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::*;
use cudarc::cudnn::sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;
use cudarc::cudnn::sys::cudnnBackendKnobType_t::{self as Knob, *};

use super::descriptor::{Descriptor, Value};
use super::functions::Functions;
use super::graph::Graph;
use super::numbers::HostNumber;
use crate::cuda::error::CudaError;
use crate::error::Result;

/// The first version with the knobs of tiles in the engine of Blackwell.
const OTHER_KNOBS: Version = Version(92_300);

/// The properties of a kind of device.
#[derive(Debug)]
pub struct DeviceProperties(Descriptor);

impl DeviceProperties {
    /// Returns the properties of a handle's device.
    ///
    /// # Errors
    /// If cuDNN can't tell them.
    ///
    /// # Safety
    /// The caller must pass a handle of cuDNN.
    pub unsafe fn of_handle(
        functions: &'static Functions,
        handle: *mut c_void,
    ) -> Result<DeviceProperties> {
        DeviceProperties::new(functions, CUDNN_ATTR_DEVICEPROP_HANDLE, Value::Handle(handle))
    }

    /// Returns the properties that a text describes, in cuDNN's own JSON. No device need be present.
    ///
    /// # Errors
    /// If cuDNN does not understand it.
    pub fn from_json(functions: &'static Functions, text: &str) -> Result<DeviceProperties> {
        let name = CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION;
        DeviceProperties::new(functions, name, Value::Text(text))
    }

    fn new(
        functions: &'static Functions,
        name: Name,
        value: Value<'_>,
    ) -> Result<DeviceProperties> {
        let kind = CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR;
        Descriptor::new(functions, kind, &[(name, value)]).map(DeviceProperties)
    }

    /// Returns the properties as text.
    ///
    /// # Errors
    /// If cuDNN can't tell them.
    pub fn to_json(&self) -> Result<String> {
        self.0.text(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION)
    }
}

/// An engine of cuDNN, and its knobs.
struct Engine {
    index: i64,
    knobs: Vec<(Knob, i64)>,
}

impl Engine {
    /// Returns the engine that computes a backward pass in a fixed order of sums, as cuDNN's frontend
    /// chooses it; `None` if any order will do. cuDNN proposes an engine whose workspace is
    /// quadratic.
    fn in_fixed_order(sdpa: &Sdpa, version: Version) -> Option<Engine> {
        let tiles = |rows, columns, stages| {
            vec![
                (CUDNN_KNOB_TYPE_TILE_M, rows),
                (CUDNN_KNOB_TYPE_TILE_N, columns),
                (CUDNN_KNOB_TYPE_KERNEL_CFG, 2),
                (CUDNN_KNOB_TYPE_STREAM_K, 0),
                (CUDNN_KNOB_TYPE_TILE_CGA_M, 0),
                (CUDNN_KNOB_TYPE_STAGES, stages),
            ]
        };
        let (index, knobs) = match sdpa.order {
            SdpaOrder::Any => return None,
            SdpaOrder::Fixed => (6, tiles(2, 1, 4)),
            SdpaOrder::FixedRounded if version < OTHER_KNOBS => {
                (5, vec![(CUDNN_KNOB_TYPE_KERNEL_CFG, 31), (CUDNN_KNOB_TYPE_STAGES, 2)])
            }
            SdpaOrder::FixedRounded if sdpa.head_dim == 256 => (5, tiles(3, 2, 3)),
            SdpaOrder::FixedRounded => (5, tiles(3, 2, 2)),
        };
        Some(Engine { index, knobs })
    }
}

/// Returns the configuration that cuDNN proposes first, and what it refers to.
fn proposed(
    functions: &'static Functions,
    graph: &Graph,
    device: &DeviceProperties,
    sdpa: &Sdpa,
) -> Result<(Descriptor, Vec<Descriptor>)> {
    let mode = Value::Enumeration(CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A as i32);
    let asked = [
        (CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, Value::Descriptors(&[graph.descriptor()])),
        (CUDNN_ATTR_ENGINEHEUR_MODE, mode),
        (CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, Value::Descriptors(&[&device.0])),
    ];
    let heuristics = Descriptor::new(functions, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &asked)?;
    let kind = CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    match heuristics.first(CUDNN_ATTR_ENGINEHEUR_RESULTS, kind)? {
        Some(config) => Ok((config, vec![heuristics])),
        None => {
            let reason = format!("nothing computes {sdpa:?}");
            Err(CudaError::Driver { call: "cuDNN's heuristics", reason }.into())
        }
    }
}

/// Returns the descriptor of an engine's configuration, and the descriptors that it refers to.
fn configured(
    functions: &'static Functions,
    graph: &Graph,
    device: &DeviceProperties,
    Engine { index, knobs }: Engine,
) -> Result<(Descriptor, Vec<Descriptor>)> {
    let asked = [
        (CUDNN_ATTR_ENGINE_OPERATION_GRAPH, Value::Descriptors(&[graph.descriptor()])),
        (CUDNN_ATTR_ENGINE_GLOBAL_INDEX, Value::Integers(&[index])),
        (CUDNN_ATTR_ENGINE_DEVICEPROP, Value::Descriptors(&[&device.0])),
    ];
    let engine = Descriptor::new(functions, CUDNN_BACKEND_ENGINE_DESCRIPTOR, &asked)?;
    let choice = |(knob, value): (Knob, i64)| {
        let knob = Value::Enumeration(CUDNN_TYPE_KNOB_TYPE, knob as i32);
        let chosen = [
            (CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, knob),
            (CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, Value::Integers(&[value])),
        ];
        Descriptor::new(functions, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, &chosen)
    };
    let mut kept = knobs.into_iter().map(choice).collect::<Result<Vec<_>>>()?;
    let choices: Vec<_> = kept.iter().collect();
    let configured = [
        (CUDNN_ATTR_ENGINECFG_ENGINE, Value::Descriptors(&[&engine])),
        (CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, Value::Descriptors(&choices)),
    ];
    let config = Descriptor::new(functions, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &configured)?;
    kept.push(engine);
    Ok((config, kept))
}

/// A plan for a kind of device.
#[derive(Debug)]
pub struct CompiledPlan {
    plan: Descriptor,
    sdpa: Sdpa,
    /// What the plan refers to.
    _kept: (Graph, Vec<Descriptor>),
}

impl CompiledPlan {
    /// Compiles the first plan that cuDNN proposes, or the plan with a fixed order of sums.
    ///
    /// # Errors
    /// If cuDNN refuses, or needs more workspace than the call has.
    pub fn new(
        functions: &'static Functions,
        sdpa: &Sdpa,
        device: &DeviceProperties,
    ) -> Result<CompiledPlan> {
        let graph = Graph::new(functions, sdpa)?;
        let (config, mut kept) = match Engine::in_fixed_order(sdpa, functions.version()) {
            Some(engine) => configured(functions, &graph, device, engine)?,
            None => proposed(functions, &graph, device, sdpa)?,
        };
        let configured =
            [(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, Value::Descriptors(&[&config]))];
        let kind = CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
        let plan = Descriptor::new(functions, kind, &configured)?;
        let (needed, given) =
            (plan.integer(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?, sdpa.workspace_bytes);
        if needed > given {
            let reason = format!("expected at most {given} bytes of workspace, got {needed}");
            let reason = format!("{reason}, for {sdpa:?}");
            return Err(CudaError::Driver { call: "cuDNN's plan", reason }.into());
        }
        kept.push(config);
        Ok(CompiledPlan { plan, sdpa: sdpa.clone(), _kept: (graph, kept) })
    }

    /// Enqueues a call on the handle's stream.
    ///
    /// # Errors
    /// If cuDNN refuses.
    ///
    /// # Safety
    /// The caller must pass a handle of cuDNN for a device of the plan's kind, and guarantee that
    /// the memory of the call belongs to that device until the handle's stream has passed the call.
    pub unsafe fn enqueue(
        &self,
        functions: &'static Functions,
        handle: *mut c_void,
        call: &LibraryCall,
    ) -> Result<()> {
        let (mut numbers, mut pointers, mut workspace) = (vec![], vec![], ptr::null_mut());
        for (number, array) in &call.arrays {
            let address = array.bytes.start as *mut c_void;
            if *number == WORKSPACE {
                workspace = address;
            } else {
                numbers.push(*number);
                pointers.push(address);
            }
        }
        // cuDNN reads numbers of the host before it returns.
        let given = HostNumber::of(&self.sdpa);
        for (number, value) in &given {
            numbers.push(number.number());
            pointers.push(ptr::from_ref(value).cast_mut().cast());
        }
        let arrays = [
            (CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Value::Integers(&numbers)),
            (CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Value::Pointers(&pointers)),
            (CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Value::Pointers(&[workspace])),
        ];
        let pack = Descriptor::new(functions, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &arrays)?;
        // SAFETY: the caller guarantees the handle and the memory.
        unsafe { self.plan.execute(handle, &pack) }
    }
}
