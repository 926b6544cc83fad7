//! The frame of a call: typed access to what XLA passes to a handler.
//!
//! Every size, type, rank and pointer is checked before it is used. One condition can't be checked:
//! that pointers which are not null point to as much memory as the frame says. The caller of
//! [`CallFrame::new`] guarantees it.

use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::NonNull;

use crate::api::{Api, Context, Promise};
use crate::attributes::Attributes;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::sys;

/// The frame of a handler's call.
#[derive(Debug)]
pub struct CallFrame<'a> {
    raw: NonNull<sys::XLA_FFI_CallFrame>,
    api: Api,
    life: PhantomData<&'a mut ()>,
}

impl<'a> CallFrame<'a> {
    /// Reads the table of functions out of a frame. A handler without the table can report no
    /// error, so it must abort on `None`.
    ///
    /// # Safety
    /// `raw` is null or points to a frame that can be read as far as its `struct_size` says. The
    /// frame's arrays are as long as it says, and everything that it points to lives for `'a`.
    pub unsafe fn api(raw: *mut sys::XLA_FFI_CallFrame) -> Option<Api> {
        let raw = NonNull::new(raw)?;
        // SAFETY: the caller guarantees a frame, and the size is the first field of every frame.
        let size = unsafe { (&raw const (*raw.as_ptr()).struct_size).read() };
        if size < offset_of!(sys::XLA_FFI_CallFrame, api) + size_of::<usize>() {
            return None;
        }
        // SAFETY: the check above shows that the frame reaches beyond this field, and XLA
        // guarantees that its table stays for the rest of the process.
        unsafe { Api::new((&raw const (*raw.as_ptr()).api).read()) }
    }

    /// Returns the frame behind `raw`.
    ///
    /// # Errors
    /// If the frame is shorter than the header says. A longer frame, of a newer runtime, is fine.
    ///
    /// # Safety
    /// `raw` is null or points to a frame that can be read as far as its `struct_size` says. The
    /// frame's arrays are as long as it says, and everything that it points to lives for `'a`.
    pub unsafe fn new(raw: *mut sys::XLA_FFI_CallFrame) -> Result<CallFrame<'a>> {
        // SAFETY: the caller guarantees what `CallFrame::api` demands of the frame.
        let (Some(api), Some(raw)) = (unsafe { Self::api(raw) }, NonNull::new(raw)) else {
            return Err(Error::malformed("call frame", "a table of functions", "none"));
        };
        // SAFETY: the caller guarantees a frame, and the size is the first field of every frame.
        let size = unsafe { (&raw const (*raw.as_ptr()).struct_size).read() };
        Error::check_size("call frame", size, sys::XLA_FFI_CallFrame_STRUCT_SIZE)?;
        Ok(CallFrame { raw, api, life: PhantomData })
    }

    fn raw(&self) -> &sys::XLA_FFI_CallFrame {
        // SAFETY: `new` has checked that the frame has all fields that the header counts. The
        // header does not count `future`, but XLA's frames of every version end with it.
        unsafe { self.raw.as_ref() }
    }

    /// Returns the runtime's functions.
    pub fn runtime(&self) -> Api {
        self.api
    }

    /// Returns the runtime's context of this call.
    pub fn context(&self) -> Context<'_> {
        // SAFETY: the caller of `new` guarantees that the context lives for `'a`, during the call.
        unsafe { Context::new(self.raw().ctx) }
    }

    /// Returns the runtime's query about the handler, if the frame holds a query instead of a call.
    ///
    /// # Errors
    /// If the query is shorter than the header says.
    pub fn metadata_query(&self) -> Result<Option<MetadataQuery<'a>>> {
        let Some(extension) = NonNull::new(self.raw().extension_start) else { return Ok(None) };
        // SAFETY: XLA guarantees that every extension starts with this structure.
        let base = unsafe { extension.read() };
        if base.type_ != sys::XLA_FFI_Extension_Metadata {
            return Ok(None);
        }
        let least = sys::XLA_FFI_Metadata_Extension_STRUCT_SIZE;
        Error::check_size("metadata extension", base.struct_size, least)?;
        // SAFETY: the checks above show the type and the size of the extension.
        let extension = unsafe { extension.cast::<sys::XLA_FFI_Metadata_Extension>().read() };
        let Some(metadata) = NonNull::new(extension.metadata) else {
            return Err(Error::malformed("metadata", "a place for them", "a null pointer"));
        };
        // SAFETY: XLA guarantees metadata behind the pointer, and the size is their first field.
        let size = unsafe { (&raw const (*metadata.as_ptr()).struct_size).read() };
        Error::check_size("metadata", size, sys::XLA_FFI_Metadata_STRUCT_SIZE)?;
        Ok(Some(MetadataQuery { metadata, version: self.api.version(), life: PhantomData }))
    }

    /// Checks that the call is for `stage`.
    ///
    /// # Errors
    /// If it is for another stage.
    pub fn expect_stage(&self, stage: sys::XLA_FFI_ExecutionStage) -> Result<()> {
        if self.raw().stage == stage {
            return Ok(());
        }
        Err(Error::mismatch("execution stage", stage_name(stage), stage_name(self.raw().stage)))
    }

    /// Returns all operands, of which there must be `N`.
    ///
    /// # Errors
    /// If there are more or fewer, or if one contradicts the header.
    pub fn arguments<const N: usize>(&self) -> Result<[Buffer; N]> {
        exactly("operands", self.all_arguments()?)
    }

    /// Returns all results, of which there must be `N`.
    ///
    /// # Errors
    /// If there are more or fewer, or if one contradicts the header.
    pub fn results<const N: usize>(&self) -> Result<[Buffer; N]> {
        exactly("results", self.all_results()?)
    }

    /// Returns all operands.
    ///
    /// # Errors
    /// If one contradicts the header.
    pub fn all_arguments(&self) -> Result<Vec<Buffer>> {
        let args = &self.raw().args;
        Error::check_size("operands", args.struct_size, sys::XLA_FFI_Args_STRUCT_SIZE)?;
        let kind = sys::XLA_FFI_ArgType_BUFFER;
        // SAFETY: the caller of `new` guarantees the length of the frame's arrays.
        let all = unsafe { buffers("operand", args.size, args.types, kind, args.args) }?;
        Ok(self.placed(all))
    }

    /// Returns all results.
    ///
    /// # Errors
    /// If one contradicts the header.
    pub fn all_results(&self) -> Result<Vec<Buffer>> {
        let rets = &self.raw().rets;
        Error::check_size("results", rets.struct_size, sys::XLA_FFI_Rets_STRUCT_SIZE)?;
        let kind = sys::XLA_FFI_RetType_BUFFER;
        // SAFETY: the caller of `new` guarantees the length of the frame's arrays.
        let all = unsafe { buffers("result", rets.size, rets.types, kind, rets.rets) }?;
        Ok(self.placed(all))
    }

    /// Gives each buffer without memory a place before the execute stage, when memory does not
    /// exist yet. So a call can be described, to learn which objects it needs.
    fn placed(&self, buffers: Vec<Buffer>) -> Vec<Buffer> {
        if self.raw().stage == sys::XLA_FFI_ExecutionStage_EXECUTE {
            return buffers;
        }
        buffers.into_iter().map(Buffer::rehearsed).collect()
    }

    /// Returns the static attributes.
    ///
    /// # Errors
    /// If the dictionary contradicts the header.
    pub fn attributes(&self) -> Result<Attributes<'a>> {
        // SAFETY: the caller of `new` guarantees the length of the frame's arrays, and `'a`.
        unsafe { Attributes::decode(&raw const self.raw().attrs) }
    }

    /// Makes the call asynchronous: the call ends when `promise` completes its future.
    pub fn set_future(&mut self, promise: &Promise) {
        // SAFETY: XLA's frames of every version end with this field, behind the counted fields.
        unsafe { (&raw mut (*self.raw.as_ptr()).future).write(promise.future()) }
    }
}

/// A query of the runtime about a handler, which takes the place of a call.
#[derive(Debug)]
pub struct MetadataQuery<'a> {
    metadata: NonNull<sys::XLA_FFI_Metadata>,
    version: (i32, i32),
    life: PhantomData<&'a mut ()>,
}

impl MetadataQuery<'_> {
    /// Answers the query with the oldest interface version that the handler supports, no traits,
    /// and the type of state that the handler creates. Runtimes refuse handlers with a newer
    /// version.
    pub fn answer(self, state_type: i64) {
        let metadata = self.metadata.as_ptr();
        let version = sys::XLA_FFI_Api_Version {
            struct_size: sys::XLA_FFI_Api_Version_STRUCT_SIZE as usize,
            extension_start: std::ptr::null_mut(),
            major_version: 0,
            minor_version: 1,
        };
        // SAFETY: `metadata_query` has checked the size of the structure, and XLA lets the handler
        // write its fields.
        unsafe {
            (&raw mut (*metadata).api_version).write(version);
            (&raw mut (*metadata).traits).write(0);
        }
        // The structure's size stops before this field, so the version decides whether it exists.
        if self.has_state_type() {
            let id = sys::XLA_FFI_TypeId { type_id: state_type };
            // SAFETY: `has_state_type` shows a runtime from 0.2 on, which has the field.
            unsafe { (&raw mut (*metadata).state_type_id).write(id) }
        }
    }

    fn has_state_type(&self) -> bool {
        self.version >= (0, 2)
    }
}

fn exactly<const N: usize>(what: &str, buffers: Vec<Buffer>) -> Result<[Buffer; N]> {
    buffers.try_into().map_err(|all: Vec<_>| {
        Error::mismatch(format!("number of {what}"), N.to_string(), all.len())
    })
}

/// Decodes operands or results.
///
/// # Safety
/// `types` and `entries` are null or have `size` elements. An entry of type `kind` is null or
/// points to a buffer description.
unsafe fn buffers(
    what: &str,
    size: i64,
    types: *const std::ffi::c_uint,
    kind: std::ffi::c_uint,
    entries: *const *mut std::ffi::c_void,
) -> Result<Vec<Buffer>> {
    let count = usize::try_from(size)
        .map_err(|_| Error::malformed(format!("number of {what}s"), "a natural number", size))?;
    if count > 0 && (types.is_null() || entries.is_null()) {
        return Err(Error::malformed(what, format!("{count} of them"), "a null pointer"));
    }
    let decode = |index| {
        let name = format!("{what} {index}");
        // SAFETY: the arrays are not null, and the caller guarantees `count` elements of each.
        let (type_, entry) = unsafe { (*types.add(index), *entries.add(index)) };
        if type_ != kind {
            return Err(Error::mismatch(name, "a buffer", format!("XLA type {type_}")));
        }
        // SAFETY: the entry has type `kind`, so the caller guarantees null or a buffer description.
        unsafe { Buffer::decode(&name, entry.cast()) }
    };
    (0..count).map(decode).collect()
}

fn stage_name(stage: sys::XLA_FFI_ExecutionStage) -> String {
    match stage {
        sys::XLA_FFI_ExecutionStage_INSTANTIATE => "instantiate".into(),
        sys::XLA_FFI_ExecutionStage_PREPARE => "prepare".into(),
        sys::XLA_FFI_ExecutionStage_INITIALIZE => "initialize".into(),
        sys::XLA_FFI_ExecutionStage_EXECUTE => "execute".into(),
        other => format!("XLA stage {other}"),
    }
}
