//! XLA's communicators, through its Collectives extension.

use std::mem::offset_of;
use std::ptr::{self, NonNull};

use burst_attention::cuda::nccl::Comm;

use super::call::CudaSite;
use crate::api::Api;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::sys;

/// XLA's Collectives extension, during a call.
pub struct Collectives(NonNull<sys::XLA_FFI_Collectives_Extension>);

/// The major version of the extension that this library knows. Minor versions only add to it.
const MAJOR: i32 = 0;

impl Collectives {
    /// Finds the extension of the runtime.
    ///
    /// # Errors
    /// If the runtime has no such extension, or one of another version.
    pub fn of(frame: &CallFrame<'_>, site: &CudaSite) -> Result<Collectives> {
        let missing = |reason: String| Error::NoCommunicator { axis: site.axis(), reason };
        let api = frame.runtime();
        let (major, minor) = api.version();
        let found = api
            .extension(frame.context(), sys::XLA_FFI_Extension_Collectives)
            .map_err(|error| missing(error.to_string()))?;
        let Some(found) = found else {
            let what = format!("its FFI {major}.{minor} has no Collectives extension here");
            return Err(missing(what));
        };
        // SAFETY: the runtime guarantees that every extension starts with this structure.
        let base = unsafe { found.read() };
        let least =
            offset_of!(sys::XLA_FFI_Collectives_Extension, get_communicator) + size_of::<usize>();
        if base.id.major_version != MAJOR || base.struct_size < least {
            let (version, size) = (base.id.major_version, base.struct_size);
            let what = format!(
                "its Collectives extension has major version {version} and {size} bytes, expected \
                 {MAJOR} and at least {least}"
            );
            return Err(missing(what));
        }
        Ok(Collectives(found.cast()))
    }

    /// Asks for a communicator of the ring's devices, before the program runs.
    ///
    /// # Errors
    /// The runtime's error.
    pub fn request(&self, api: Api, site: &CudaSite, communication_id: i64) -> Result<()> {
        let groups = groups(site);
        let mut arguments = sys::XLA_FFI_Communicator_Request_Args {
            struct_size: sys::XLA_FFI_Communicator_Request_Args_STRUCT_SIZE as usize,
            extension_start: ptr::null_mut(),
            group_mode: sys::XLA_FFI_GROUP_FLATTENED_ID,
            groups: groups.as_ptr(),
            num_groups: groups.len(),
            communication_id,
        };
        // SAFETY: `of` has checked that the structure reaches this far.
        let request = unsafe { (&raw const (*self.0.as_ptr()).request_communicator).read() };
        let request = request.ok_or_else(|| self.lacks(site, "request_communicator"))?;
        // SAFETY: the arguments have the header's type, and `groups` and `site` outlive the call.
        let error = unsafe { request(self.0.as_ptr(), &raw mut arguments) };
        api.check("request_communicator of XLA's Collectives extension", error)
    }

    /// Returns the communicator that was asked for.
    ///
    /// # Errors
    /// The runtime's error.
    pub fn get(&self, api: Api, site: &CudaSite, communication_id: i64) -> Result<Comm> {
        let groups = groups(site);
        let mut arguments = sys::XLA_FFI_Communicator_Get_Args {
            struct_size: sys::XLA_FFI_Communicator_Get_Args_STRUCT_SIZE as usize,
            extension_start: ptr::null_mut(),
            group_mode: sys::XLA_FFI_GROUP_FLATTENED_ID,
            groups: groups.as_ptr(),
            num_groups: groups.len(),
            communication_id,
            communicator: ptr::null_mut(),
        };
        // SAFETY: `of` has checked that the structure reaches this far.
        let get = unsafe { (&raw const (*self.0.as_ptr()).get_communicator).read() };
        let get = get.ok_or_else(|| self.lacks(site, "get_communicator"))?;
        // SAFETY: the arguments have the header's type, and `groups` and `site` outlive the call.
        let error = unsafe { get(self.0.as_ptr(), &raw mut arguments) };
        api.check("get_communicator of XLA's Collectives extension", error)?;
        if arguments.communicator.is_null() {
            return Err(self.lacks(site, "a communicator"));
        }
        Ok(Comm(arguments.communicator as usize))
    }

    fn lacks(&self, site: &CudaSite, what: &str) -> Error {
        let reason = format!("its Collectives extension has no {what}");
        Error::NoCommunicator { axis: site.axis(), reason }
    }
}

/// Returns the devices of the rings in XLA's type, each ring in the order of its ranks.
fn groups(site: &CudaSite) -> Vec<sys::XLA_FFI_ReplicaGroup> {
    let group = |ids: &[i64]| sys::XLA_FFI_ReplicaGroup { ids: ids.as_ptr(), size: ids.len() };
    site.groups.chunks(site.world_size()).map(group).collect()
}
