//! cuDNN, which computes tiles of attention that its plans serve.
//!
//! A plan is a graph of operations that cuDNN has compiled for a kind of device. It is prepared
//! before the first exchange, from the properties of the device alone, and devices of a kind share
//! it.

mod builder;
mod descriptor;
mod functions;
mod graph;
mod numbers;
mod plan;

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

use burst_attention_kernels::backend::LibraryCall;
use burst_attention_kernels::backend::cudnn::{NAME, Sdpa, Version};
use cudarc::driver::sys::{CUresult, cuCtxGetCurrent};

use super::driver::{Library, Plan, Stream};
use super::error::CudaError;
use super::objects::lock;
use crate::error::Result;

pub use functions::Functions;
pub use plan::{CompiledPlan, DeviceProperties};

/// cuDNN on the devices of this machine. It looks for the library at the first plan.
#[derive(Debug, Default)]
pub struct Cudnn {
    /// The device of each context, by the context's address.
    devices: Mutex<HashMap<usize, Arc<Device>>>,
    /// Plans by the properties of a kind of device and the text of the plan.
    plans: Mutex<HashMap<(String, String), Arc<CompiledPlan>>>,
    /// The plans of contexts; a [`Plan`] is an index.
    prepared: Mutex<Vec<Arc<Prepared>>>,
}

/// A device as cuDNN knows it.
#[derive(Debug)]
struct Device {
    /// cuDNN's handle, which belongs to a context.
    handle: *mut c_void,
    properties: DeviceProperties,
    /// The properties as text.
    text: String,
}

// SAFETY: threads may pass a handle on. The executor holds a device's lock while it issues, so no
// two threads use the handle of a device at once.
unsafe impl Send for Device {}
// SAFETY: see `Send`.
unsafe impl Sync for Device {}

/// A plan for a context.
#[derive(Debug)]
struct Prepared {
    functions: &'static Functions,
    device: Arc<Device>,
    plan: Arc<CompiledPlan>,
}

impl Cudnn {
    /// Returns the device of the context that is current.
    fn device(&self, functions: &'static Functions) -> Result<Arc<Device>> {
        let mut context = ptr::null_mut();
        // SAFETY: the driver writes a pointer, and `context` is one.
        let code = unsafe { cuCtxGetCurrent(&raw mut context) };
        if code != CUresult::CUDA_SUCCESS {
            let reason = format!("looking for the current context: {code:?}");
            return Err(CudaError::Driver { call: "cuCtxGetCurrent", reason }.into());
        }
        let mut devices = lock(&self.devices);
        if let Some(device) = devices.get(&(context as usize)) {
            return Ok(device.clone());
        }
        let mut handle = ptr::null_mut();
        // SAFETY: cuDNN writes a pointer, and `handle` is one.
        let code = unsafe { (functions.create_handle)(&raw mut handle) };
        functions.check("cudnnCreate", "making a handle", code)?;
        // SAFETY: cuDNN made the handle and keeps it.
        let properties = unsafe { DeviceProperties::of_handle(functions, handle) }?;
        let text = properties.to_json()?;
        let device = Arc::new(Device { handle, properties, text });
        devices.insert(context as usize, device.clone());
        Ok(device)
    }

    /// Returns a plan for a kind of device, and compiles it if there is none.
    fn compiled(
        &self,
        functions: &'static Functions,
        device: &Device,
        text: &str,
    ) -> Result<Arc<CompiledPlan>> {
        let mut plans = lock(&self.plans);
        let key = (device.text.clone(), text.to_owned());
        if let Some(plan) = plans.get(&key) {
            return Ok(plan.clone());
        }
        let sdpa: Sdpa = serde_json::from_str(text).map_err(|error| CudaError::Driver {
            call: "reading a plan",
            reason: error.to_string(),
        })?;
        let plan = CompiledPlan::new(functions, &sdpa, &device.properties)?;
        Ok(plans.entry(key).or_insert(Arc::new(plan)).clone())
    }
}

impl Library for Cudnn {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cudnn_version(&self) -> Option<Version> {
        Functions::load().ok().map(Functions::version)
    }

    fn prepare(&self, text: &str) -> Result<Plan> {
        let functions = Functions::load()?;
        let device = self.device(functions)?;
        let plan = self.compiled(functions, &device, text)?;
        let mut prepared = lock(&self.prepared);
        prepared.push(Arc::new(Prepared { functions, device, plan }));
        Ok(Plan(prepared.len() - 1))
    }

    fn enqueue(&self, stream: Stream, plan: Plan, call: &LibraryCall) -> Result<()> {
        let Prepared { functions, device, plan } = &*lock(&self.prepared)[plan.0].clone();
        // SAFETY: cuDNN made the handle, and XLA the stream, which belongs to the same context.
        let code = unsafe { (functions.set_stream)(device.handle, stream.0 as *mut c_void) };
        functions.check("cudnnSetStream", "on XLA's stream", code)?;
        // SAFETY: the executor guarantees the memory of a call.
        unsafe { plan.enqueue(functions, device.handle, call) }
    }
}
