//! cuDNN, which computes tiles of attention that its plans serve.
//!
//! A plan is a graph of operations that cuDNN has compiled for a kind of device. It is prepared
//! before the first exchange, from the properties of the device alone.

mod descriptor;
mod functions;
mod graph;

use burst_attention_kernels::backend::cudnn::Sdpa;
use cudarc::cudnn::sys::cudnnBackendAttributeName_t::*;
use cudarc::cudnn::sys::cudnnBackendAttributeType_t::CUDNN_TYPE_HEUR_MODE;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::*;
use cudarc::cudnn::sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;

use descriptor::{Descriptor, Value};
pub use functions::{Functions, OLDEST, TOO_NEW};
use graph::Graph;

use crate::cuda::error::CudaError;
use crate::error::Result;

/// The properties of a kind of device.
#[derive(Debug)]
pub struct DeviceProperties(Descriptor);

impl DeviceProperties {
    /// Returns the properties that a text describes, in cuDNN's own JSON.
    ///
    /// # Errors
    /// If cuDNN does not understand it.
    pub fn from_json(functions: &'static Functions, text: &str) -> Result<DeviceProperties> {
        let json = [(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, Value::Text(text))];
        Descriptor::new(functions, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &json).map(DeviceProperties)
    }
}

/// A plan for a kind of device.
#[derive(Debug)]
pub struct Plan {
    #[allow(dead_code)]
    plan: Descriptor,
    /// Bytes of workspace.
    pub workspace_bytes: i64,
    /// What the plan refers to.
    _kept: (Graph, [Descriptor; 2]),
}

impl Plan {
    /// Compiles a plan, the first that cuDNN proposes.
    ///
    /// # Errors
    /// If cuDNN refuses.
    pub fn new(
        functions: &'static Functions,
        sdpa: &Sdpa,
        device: &DeviceProperties,
    ) -> Result<Plan> {
        let graph = Graph::new(functions, sdpa)?;
        let mode = Value::Enumeration(CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A as i32);
        let heuristics = Descriptor::new(
            functions,
            CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
            &[
                (CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, Value::Descriptors(&[graph.descriptor()])),
                (CUDNN_ATTR_ENGINEHEUR_MODE, mode),
                (CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, Value::Descriptors(&[&device.0])),
            ],
        )?;
        let first =
            heuristics.first(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?;
        let Some(config) = first else {
            let reason = format!("no engine computes {sdpa:?}");
            return Err(CudaError::Driver { call: "cuDNN's heuristics", reason }.into());
        };
        let config_only =
            [(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, Value::Descriptors(&[&config]))];
        let plan =
            Descriptor::new(functions, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &config_only)?;
        let workspace_bytes = plan.integer(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
        Ok(Plan { plan, workspace_bytes, _kept: (graph, [heuristics, config]) })
    }
}
