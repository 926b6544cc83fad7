//! The runtime's functions for GPUs: a stream and, through an extension, communicators.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr;

use burst_attention_ffi::sys;

use crate::{Error, FakeRuntime, context, error};

/// A request for a communicator: the groups, and the number that tells communicators over the same
/// devices apart.
pub type Request = (Vec<Vec<i64>>, i64);

/// A device's stream and communicator.
pub struct FakeGpu {
    stream: usize,
    extension: Option<Box<sys::XLA_FFI_Collectives_Extension>>,
    /// The communicators, in the order of the first requests for their numbers. Null stands for a
    /// communicator that the runtime could not make.
    comms: Vec<usize>,
    requests: RefCell<Vec<Request>>,
}

impl FakeGpu {
    /// Returns a GPU with the Collectives extension.
    pub fn new(stream: usize, comms: &[usize]) -> Box<FakeGpu> {
        let (comms, requests) = (comms.to_vec(), RefCell::default());
        let mut gpu = Box::new(FakeGpu { stream, extension: None, comms, requests });
        let extension_base = sys::XLA_FFI_Extension {
            struct_size: size_of::<sys::XLA_FFI_Collectives_Extension>(),
            id: sys::XLA_FFI_ExtensionId {
                extension_type: sys::XLA_FFI_Extension_Collectives.into(),
                major_version: 0,
                minor_version: 1,
            },
            next: ptr::null(),
        };
        gpu.extension = Some(Box::new(sys::XLA_FFI_Collectives_Extension {
            extension_base,
            state: (&raw const *gpu).cast_mut().cast(),
            request_communicator: Some(request),
            get_communicator: Some(get),
            request_window: None,
            get_window: None,
        }));
        gpu
    }

    /// Returns the requests of the prepare stage.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.borrow().clone()
    }

    /// Returns the extension, for tests that break it.
    pub fn extension(&mut self) -> &mut Option<Box<sys::XLA_FFI_Collectives_Extension>> {
        &mut self.extension
    }
}

impl FakeRuntime {
    /// Returns this runtime, on a GPU.
    pub fn on_gpu(mut self, gpu: Box<FakeGpu>) -> FakeRuntime {
        self.table.XLA_FFI_Stream_Get = Some(get_stream);
        self.table.XLA_FFI_InvokeContext_FindExtension = Some(find_extension);
        self.context.gpu = Some(gpu);
        self
    }
}

fn gpu<'a>(ctx: *mut sys::XLA_FFI_InvokeContext) -> &'a FakeGpu {
    context(ctx).gpu.as_deref().expect("a runtime with a GPU")
}

unsafe extern "C" fn get_stream(args: *mut sys::XLA_FFI_Stream_Get_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &mut *args };
    args.stream = gpu(args.ctx).stream as *mut c_void;
    ptr::null_mut()
}

unsafe extern "C" fn find_extension(
    args: *mut sys::XLA_FFI_InvokeContext_FindExtension_Args,
) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &mut *args };
    let known = args.extension_type == i64::from(sys::XLA_FFI_Extension_Collectives);
    let extension = gpu(args.ctx).extension.as_deref().filter(|_| known);
    args.extension = extension.map_or(ptr::null(), |found| (&raw const *found).cast());
    ptr::null_mut()
}

fn of<'a>(extension: *const sys::XLA_FFI_Collectives_Extension) -> &'a FakeGpu {
    // SAFETY: `FakeGpu::new` made the extension with the address of its GPU, which lives as long.
    unsafe { &*(*extension).state.cast::<FakeGpu>() }
}

/// Returns the ids of `count` groups.
///
/// # Safety
/// `groups` points to `count` groups, and each of them to `size` ids.
unsafe fn groups(groups: *const sys::XLA_FFI_ReplicaGroup, count: usize) -> Vec<Vec<i64>> {
    // SAFETY: the caller guarantees `count` groups.
    let groups = unsafe { std::slice::from_raw_parts(groups, count) };
    // SAFETY: the caller guarantees `size` ids of each group.
    let ids = |group: &sys::XLA_FFI_ReplicaGroup| unsafe {
        std::slice::from_raw_parts(group.ids, group.size).to_vec()
    };
    groups.iter().map(ids).collect()
}

unsafe extern "C" fn request(
    extension: *const sys::XLA_FFI_Collectives_Extension,
    args: *mut sys::XLA_FFI_Communicator_Request_Args,
) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &*args };
    if args.group_mode != sys::XLA_FFI_GROUP_FLATTENED_ID {
        return error(3, "groups must be of flattened ids");
    }
    // SAFETY: handlers pass groups with the lengths that the arguments say.
    let groups = unsafe { groups(args.groups, args.num_groups) };
    of(extension).requests.borrow_mut().push((groups, args.communication_id));
    ptr::null_mut()
}

unsafe extern "C" fn get(
    extension: *const sys::XLA_FFI_Collectives_Extension,
    args: *mut sys::XLA_FFI_Communicator_Get_Args,
) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &mut *args };
    // SAFETY: handlers pass groups with the lengths that the arguments say.
    let asked = (unsafe { groups(args.groups, args.num_groups) }, args.communication_id);
    let gpu = of(extension);
    let mut different: Vec<Request> = Vec::new();
    for request in gpu.requests() {
        if !different.contains(&request) {
            different.push(request);
        }
    }
    let Some(place) = different.iter().position(|request| *request == asked) else {
        return error(9, "the communicator was not requested");
    };
    let comm = gpu.comms.get(place).copied().unwrap_or(0);
    args.communicator = comm as *mut sys::XLA_FFI_Communicator;
    ptr::null_mut()
}
