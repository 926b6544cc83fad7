//! The frame of a call: typed access to what XLA passes to a handler.
//!
//! Every size, type, rank and pointer is checked before it is used. What can't be checked, that
//! non-null pointers point to as much memory as the frame says, is the promise of [`CallFrame::new`].

use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::NonNull;

use crate::api::{Api, Context, Promise};
use crate::attributes::Attributes;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::sys;

/// A call of a handler.
#[derive(Debug)]
pub struct CallFrame<'a> {
    raw: NonNull<sys::XLA_FFI_CallFrame>,
    api: Api,
    life: PhantomData<&'a mut ()>,
}

impl<'a> CallFrame<'a> {
    /// Reads the table of functions out of a frame. Without it no error can be reported, so `None`
    /// leaves a handler nothing but to abort.
    ///
    /// # Safety
    /// `raw` is null or points to a frame that can be read as far as its `struct_size` says. Its
    /// arrays are as long as it says, and all that it points to lives for `'a`.
    pub unsafe fn api(raw: *mut sys::XLA_FFI_CallFrame) -> Option<Api> {
        let raw = NonNull::new(raw)?;
        // SAFETY: the size is the first field, which every structure has.
        let size = unsafe { (&raw const (*raw.as_ptr()).struct_size).read() };
        if size < offset_of!(sys::XLA_FFI_CallFrame, api) + size_of::<usize>() {
            return None;
        }
        // SAFETY: the frame reaches beyond this field; the table is the runtime's.
        unsafe { Api::new((&raw const (*raw.as_ptr()).api).read()) }
    }

    /// Checks the frame's own size.
    ///
    /// # Errors
    /// If the frame is shorter than the header says. A longer one, of a newer runtime, is fine.
    ///
    /// # Safety
    /// As for [`CallFrame::api`].
    pub unsafe fn new(raw: *mut sys::XLA_FFI_CallFrame) -> Result<CallFrame<'a>> {
        // SAFETY: passed on.
        let (Some(api), Some(raw)) = (unsafe { Self::api(raw) }, NonNull::new(raw)) else {
            return Err(Error::malformed("call frame", "a table of functions", "none"));
        };
        // SAFETY: `api` has looked at the frame.
        let size = unsafe { (&raw const (*raw.as_ptr()).struct_size).read() };
        let least = sys::XLA_FFI_CallFrame_STRUCT_SIZE as usize;
        if size < least {
            return Err(Error::malformed("call frame", format!("at least {least} bytes"), size));
        }
        Ok(CallFrame { raw, api, life: PhantomData })
    }

    fn raw(&self) -> &sys::XLA_FFI_CallFrame {
        // SAFETY: the frame is as long as the header's, which counts all but `future`; that field
        // is there in every version, behind the counted ones.
        unsafe { self.raw.as_ref() }
    }

    /// The runtime's functions.
    pub fn runtime(&self) -> Api {
        self.api
    }

    /// The runtime's context of this call.
    pub fn context(&self) -> Context<'_> {
        // SAFETY: the frame is that of a running call.
        unsafe { Context::new(self.raw().ctx) }
    }

    /// What the runtime wants to know about the handler, if it only asks.
    ///
    /// # Errors
    /// If the query is shorter than the header says.
    pub fn metadata_query(&self) -> Result<Option<MetadataQuery<'a>>> {
        let Some(extension) = NonNull::new(self.raw().extension_start) else { return Ok(None) };
        // SAFETY: the runtime's list of extensions starts with this structure.
        let base = unsafe { extension.read() };
        if base.type_ != sys::XLA_FFI_Extension_Metadata {
            return Ok(None);
        }
        let least = sys::XLA_FFI_Metadata_Extension_STRUCT_SIZE as usize;
        if base.struct_size < least {
            let expected = format!("at least {least} bytes");
            return Err(Error::malformed("metadata extension", expected, base.struct_size));
        }
        // SAFETY: the type says which structure this is the start of, and its size fits.
        let extension = unsafe { extension.cast::<sys::XLA_FFI_Metadata_Extension>().read() };
        let Some(metadata) = NonNull::new(extension.metadata) else {
            return Err(Error::malformed("metadata", "a place for them", "a null pointer"));
        };
        // SAFETY: the size is the first field, which every structure has.
        let size = unsafe { (&raw const (*metadata.as_ptr()).struct_size).read() };
        let least = sys::XLA_FFI_Metadata_STRUCT_SIZE as usize;
        if size < least {
            return Err(Error::malformed("metadata", format!("at least {least} bytes"), size));
        }
        Ok(Some(MetadataQuery { metadata, version: self.api.version(), life: PhantomData }))
    }

    /// Refuses a call for another stage than `stage`.
    ///
    /// # Errors
    /// If it is.
    pub fn expect_stage(&self, stage: sys::XLA_FFI_ExecutionStage) -> Result<()> {
        if self.raw().stage == stage {
            return Ok(());
        }
        Err(Error::mismatch("execution stage", stage_name(stage), stage_name(self.raw().stage)))
    }

    /// All operands, of which there must be `N`.
    ///
    /// # Errors
    /// If there are more or fewer, or one contradicts the header.
    pub fn arguments<const N: usize>(&self) -> Result<[Buffer; N]> {
        exactly("operands", self.all_arguments()?)
    }

    /// All results, of which there must be `N`.
    ///
    /// # Errors
    /// If there are more or fewer, or one contradicts the header.
    pub fn results<const N: usize>(&self) -> Result<[Buffer; N]> {
        exactly("results", self.all_results()?)
    }

    /// All operands.
    ///
    /// # Errors
    /// If one contradicts the header.
    pub fn all_arguments(&self) -> Result<Vec<Buffer>> {
        let args = &self.raw().args;
        let least = sys::XLA_FFI_Args_STRUCT_SIZE as usize;
        check_size("operands", args.struct_size, least)?;
        let kind = sys::XLA_FFI_ArgType_BUFFER;
        // SAFETY: the creator of this frame vouches for its arrays.
        unsafe { buffers("operand", args.size, args.types, kind, args.args) }
    }

    /// All results.
    ///
    /// # Errors
    /// If one contradicts the header.
    pub fn all_results(&self) -> Result<Vec<Buffer>> {
        let rets = &self.raw().rets;
        let least = sys::XLA_FFI_Rets_STRUCT_SIZE as usize;
        check_size("results", rets.struct_size, least)?;
        let kind = sys::XLA_FFI_RetType_BUFFER;
        // SAFETY: the creator of this frame vouches for its arrays.
        unsafe { buffers("result", rets.size, rets.types, kind, rets.rets) }
    }

    /// The static attributes.
    ///
    /// # Errors
    /// If the dictionary contradicts the header.
    pub fn attributes(&self) -> Result<Attributes<'a>> {
        // SAFETY: the creator of this frame vouches for its arrays and for `'a`.
        unsafe { Attributes::decode(&raw const self.raw().attrs) }
    }

    /// Makes the call asynchronous: it ends when `promise` is kept.
    pub fn set_future(&mut self, promise: &Promise) {
        // SAFETY: the field is there in every version, behind the counted ones.
        unsafe { (&raw mut (*self.raw.as_ptr()).future).write(promise.future()) }
    }
}

/// A question of the runtime about a handler, asked instead of a call.
#[derive(Debug)]
pub struct MetadataQuery<'a> {
    metadata: NonNull<sys::XLA_FFI_Metadata>,
    version: (i32, i32),
    life: PhantomData<&'a mut ()>,
}

impl MetadataQuery<'_> {
    /// Answers it: the oldest interface version that the handler gets along with (runtimes refuse
    /// handlers that are newer than themselves), no traits, and the type of state it creates.
    pub fn answer(self, state_type: i64) {
        let metadata = self.metadata.as_ptr();
        let version = sys::XLA_FFI_Api_Version {
            struct_size: sys::XLA_FFI_Api_Version_STRUCT_SIZE as usize,
            extension_start: std::ptr::null_mut(),
            major_version: 0,
            minor_version: 1,
        };
        // SAFETY: the size of the structure was checked; it is the runtime's to be filled in.
        unsafe {
            (&raw mut (*metadata).api_version).write(version);
            (&raw mut (*metadata).traits).write(0);
        }
        // The structure's size stops before this field, so only the version tells if it is there.
        if self.has_state_type() {
            let id = sys::XLA_FFI_TypeId { type_id: state_type };
            // SAFETY: runtimes from 0.2 on have the field.
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

fn check_size(what: &str, size: usize, least: usize) -> Result<()> {
    if size < least {
        return Err(Error::malformed(what, format!("at least {least} bytes"), size));
    }
    Ok(())
}

/// Operands or results.
///
/// # Safety
/// `types` and `entries` are null or have `size` elements, of which each is null or, if it is of
/// type `kind`, points to a buffer description.
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
        // SAFETY: not null, and the caller vouches for `count` elements of each.
        let (type_, entry) = unsafe { (*types.add(index), *entries.add(index)) };
        if type_ != kind {
            return Err(Error::mismatch(name, "a buffer", format!("XLA type {type_}")));
        }
        // SAFETY: the type says that it is a buffer.
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
