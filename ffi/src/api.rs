//! The runtime's table of functions.

use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::{self, NonNull};

use crate::error::{Error, Result};
use crate::sys;

/// The runtime's table of functions. It is static data of the runtime, so handlers may keep and
/// share it.
#[derive(Debug, Clone, Copy)]
pub struct Api {
    table: NonNull<sys::XLA_FFI_Api>,
    size: usize,
    /// Major and minor version of the runtime.
    version: (i32, i32),
}

// SAFETY: the caller of `Api::new` guarantees that the table stays as it is for the rest of the
// process, and XLA that its functions may be called from any thread.
unsafe impl Send for Api {}
// SAFETY: the caller of `Api::new` and XLA guarantee the same for shared references.
unsafe impl Sync for Api {}

/// Returns a function of the table, or an error that names the function that the runtime lacks.
/// Older runtimes have a shorter table than the header, so the macro checks the size before it
/// reads a field.
macro_rules! function {
    ($api:expr, $name:ident) => {{
        let end = offset_of!(sys::XLA_FFI_Api, $name) + size_of::<sys::$name>();
        let function = if end <= $api.size {
            // SAFETY: the check above shows that the table reaches beyond this entry.
            unsafe { (&raw const (*$api.table.as_ptr()).$name).read() }
        } else {
            None
        };
        let (major, minor) = $api.version;
        function.ok_or(Error::OldRuntime { major, minor, missing: stringify!($name) })
    }};
}

/// Makes the arguments of a function of the table, with the size that the header gives.
macro_rules! arguments {
    ($name:ident, $size:ident, { $($fields:tt)* }) => {
        sys::$name {
            struct_size: sys::$size as usize,
            extension_start: ptr::null_mut(),
            $($fields)*
        }
    };
}

/// Calls a function of the table and returns the arguments with the fields that the function set.
macro_rules! call {
    ($api:expr, $name:ident, $args:ident, $size:ident, { $($fields:tt)* }) => {{
        let function = function!($api, $name)?;
        let mut arguments = arguments!($args, $size, { $($fields)* });
        // SAFETY: the arguments have the header's type and size, and they borrow from live values.
        // The caller of `Context::new` guarantees that the call of a `Context` runs.
        let error = unsafe { function(&mut arguments) };
        $api.check(stringify!($name), error)?;
        arguments
    }};
}

impl Api {
    /// Returns the table, unless it is too short for functions that report errors.
    ///
    /// # Safety
    /// `table` is null or points to a table that can be read as far as its `struct_size` says and
    /// that stays as it is for the rest of the process.
    pub unsafe fn new(table: *const sys::XLA_FFI_Api) -> Option<Api> {
        let table = NonNull::new(table.cast_mut())?;
        // SAFETY: the caller guarantees a table, and the size is the first field of every table.
        let size = unsafe { (&raw const (*table.as_ptr()).struct_size).read() };
        let least = offset_of!(sys::XLA_FFI_Api, XLA_FFI_Error_Create)
            + size_of::<sys::XLA_FFI_Error_Create>();
        if size < least {
            return None;
        }
        // SAFETY: the check above shows that the table reaches beyond its version.
        let version = unsafe { (&raw const (*table.as_ptr()).api_version).read() };
        Some(Api { table, size, version: (version.major_version, version.minor_version) })
    }

    /// Returns major and minor version of the runtime's interface.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns the address of the table, which tells runtimes of one process apart.
    pub fn address(&self) -> usize {
        self.table.as_ptr() as usize
    }

    /// Returns `error` as the runtime's kind of error, which belongs to its receiver.
    pub fn error(&self, error: &Error) -> *mut sys::XLA_FFI_Error {
        let message = CString::new(error.to_string().replace('\0', "\u{fffd}"))
            .expect("zero bytes were replaced");
        let mut arguments = arguments!(
            XLA_FFI_Error_Create_Args,
            XLA_FFI_Error_Create_Args_STRUCT_SIZE,
            { message: message.as_ptr(), errc: error.code() }
        );
        match function!(self, XLA_FFI_Error_Create) {
            // SAFETY: the arguments have the header's type and size, and the runtime copies the
            // message.
            Ok(create) => unsafe { create(&mut arguments) },
            Err(_) => unreachable!("`Api::new` checked the size of the table"),
        }
    }

    /// Turns an error of the runtime, or null, into a result, and frees the error.
    pub(crate) fn check(&self, call: &'static str, error: *mut sys::XLA_FFI_Error) -> Result<()> {
        if error.is_null() {
            return Ok(());
        }
        let mut details = arguments!(
            XLA_FFI_Error_GetDetails_Args,
            XLA_FFI_Error_GetDetails_Args_STRUCT_SIZE,
            { error, message: ptr::null(), errc: 0 }
        );
        if let Ok(get) = function!(self, XLA_FFI_Error_GetDetails) {
            // SAFETY: the arguments have the header's type and size, and the error is the
            // runtime's. Older runtimes read a prefix of the arguments and set the message too.
            unsafe { get(&mut details) };
        }
        let message = if details.message.is_null() {
            "the runtime gives no reason".into()
        } else {
            // SAFETY: the header guarantees a C string that lives as long as the error.
            unsafe { CStr::from_ptr(details.message) }.to_string_lossy().into_owned()
        };
        let mut destroy =
            arguments!(XLA_FFI_Error_Destroy_Args, XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, {
                error
            });
        if let Ok(function) = function!(self, XLA_FFI_Error_Destroy) {
            // SAFETY: the error belongs to this function, which does not use it again.
            unsafe { function(&mut destroy) };
        }
        Err(Error::Runtime { call, message })
    }

    /// Returns the number of this run of the program, which all devices of a process share.
    ///
    /// # Errors
    /// If the runtime has none for this context.
    pub fn run_id(&self, context: Context<'_>) -> Result<i64> {
        let arguments = call!(
            self,
            XLA_FFI_RunId_Get,
            XLA_FFI_RunId_Get_Args,
            XLA_FFI_RunId_Get_Args_STRUCT_SIZE,
            { ctx: context.raw, run_id: 0 }
        );
        Ok(arguments.run_id)
    }

    /// Returns the number of the device that runs the call.
    ///
    /// # Errors
    /// If the runtime has none for this context.
    pub fn device_ordinal(&self, context: Context<'_>) -> Result<i32> {
        let arguments = call!(
            self,
            XLA_FFI_DeviceOrdinal_Get,
            XLA_FFI_DeviceOrdinal_Get_Args,
            XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE,
            { ctx: context.raw, device_ordinal: 0 }
        );
        Ok(arguments.device_ordinal)
    }

    /// Returns the stream of the call, a `CUstream` on CUDA.
    ///
    /// # Errors
    /// If the runtime has none for this context.
    pub fn stream(&self, context: Context<'_>) -> Result<usize> {
        let arguments = call!(
            self,
            XLA_FFI_Stream_Get,
            XLA_FFI_Stream_Get_Args,
            XLA_FFI_Stream_Get_Args_STRUCT_SIZE,
            { ctx: context.raw, stream: ptr::null_mut() }
        );
        Ok(arguments.stream as usize)
    }

    /// Returns an extension of the runtime for this call, if the runtime offers it.
    ///
    /// # Errors
    /// If the runtime has no extensions, or if the search fails.
    pub fn extension(
        &self,
        context: Context<'_>,
        kind: u32,
    ) -> Result<Option<NonNull<sys::XLA_FFI_Extension>>> {
        let arguments = call!(
            self,
            XLA_FFI_InvokeContext_FindExtension,
            XLA_FFI_InvokeContext_FindExtension_Args,
            XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE,
            { ctx: context.raw, extension_type: i64::from(kind), extension: ptr::null() }
        );
        Ok(NonNull::new(arguments.extension.cast_mut()))
    }

    /// Registers a type of state, and returns the number that the runtime gives it.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn register_type(&self, name: &str, info: &'static sys::XLA_FFI_TypeInfo) -> Result<i64> {
        let mut id = sys::XLA_FFI_TypeId { type_id: 0 };
        call!(
            self,
            XLA_FFI_Type_Register,
            XLA_FFI_Type_Register_Args,
            XLA_FFI_Type_Register_Args_STRUCT_SIZE,
            {
                name: sys::XLA_FFI_ByteSpan { ptr: name.as_ptr().cast(), len: name.len() },
                type_id: &mut id,
                type_info: info,
            }
        );
        Ok(id.type_id)
    }

    /// Hands the state of a call site to the runtime, which deletes the state later.
    ///
    /// # Errors
    /// If the runtime refuses the state. Then the state still belongs to the caller.
    pub fn set_state(
        &self,
        context: Context<'_>,
        type_id: i64,
        state: NonNull<c_void>,
    ) -> Result<()> {
        let mut id = sys::XLA_FFI_TypeId { type_id };
        call!(
            self,
            XLA_FFI_State_Set,
            XLA_FFI_State_Set_Args,
            XLA_FFI_State_Set_Args_STRUCT_SIZE,
            {
                ctx: context.raw,
                stage: sys::XLA_FFI_ExecutionStage_INSTANTIATE,
                type_id: &mut id,
                state: state.as_ptr(),
            }
        );
        Ok(())
    }

    /// Returns the state that the instantiate stage of the call site has set.
    ///
    /// # Errors
    /// If there is no state of this type.
    pub fn state(&self, context: Context<'_>, type_id: i64) -> Result<NonNull<c_void>> {
        let mut id = sys::XLA_FFI_TypeId { type_id };
        let arguments = call!(
            self,
            XLA_FFI_State_Get,
            XLA_FFI_State_Get_Args,
            XLA_FFI_State_Get_Args_STRUCT_SIZE,
            {
                ctx: context.raw,
                stage: sys::XLA_FFI_ExecutionStage_INSTANTIATE,
                type_id: &mut id,
                state: ptr::null_mut(),
            }
        );
        NonNull::new(arguments.state)
            .ok_or_else(|| Error::malformed("state of the call", "a state", "a null pointer"))
    }

    /// Makes a future and returns its promise.
    ///
    /// # Errors
    /// If the runtime can't make one.
    pub fn future(&self) -> Result<Promise> {
        // `Promise::complete` must not fail, so this checks the functions that it calls.
        function!(self, XLA_FFI_Future_SetAvailable)?;
        function!(self, XLA_FFI_Future_SetError)?;
        let arguments = call!(
            self,
            XLA_FFI_Future_Create,
            XLA_FFI_Future_Create_Args,
            XLA_FFI_Future_Create_Args_STRUCT_SIZE,
            { future: ptr::null_mut() }
        );
        let future = NonNull::new(arguments.future)
            .ok_or_else(|| Error::malformed("future", "a future", "a null pointer"))?;
        Ok(Promise { api: *self, future: Some(future) })
    }
}

/// The runtime's context of a running call.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    raw: *mut sys::XLA_FFI_InvokeContext,
    life: PhantomData<&'a ()>,
}

impl Context<'_> {
    /// Wraps the runtime's pointer.
    ///
    /// # Safety
    /// `raw` is the context of a call that runs for the lifetime.
    pub(crate) unsafe fn new(raw: *mut sys::XLA_FFI_InvokeContext) -> Self {
        Context { raw, life: PhantomData }
    }
}

/// The right and the duty to complete a future.
#[derive(Debug)]
pub struct Promise {
    api: Api,
    future: Option<NonNull<sys::XLA_FFI_Future>>,
}

// SAFETY: XLA lets any thread complete a future, and only the owner of the promise does so.
unsafe impl Send for Promise {}

impl Promise {
    /// Returns the future, for the call frame.
    pub(crate) fn future(&self) -> *mut sys::XLA_FFI_Future {
        self.future.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// Completes the future. The rest of the device's program may run on this thread before the
    /// function returns, so call it on a thread that has nothing else to do and holds no lock.
    pub fn complete(mut self, outcome: std::result::Result<(), &Error>) {
        self.set(outcome);
    }

    fn set(&mut self, outcome: std::result::Result<(), &Error>) {
        let Some(future) = self.future.take() else { return };
        let future = future.as_ptr();
        let answer = match outcome {
            Ok(()) => {
                let mut arguments = arguments!(
                    XLA_FFI_Future_SetAvailable_Args,
                    XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE,
                    { future }
                );
                function!(self.api, XLA_FFI_Future_SetAvailable)
                    // SAFETY: the runtime made the future, and `take` lets it complete only once.
                    .map(|function| unsafe { function(&mut arguments) })
            }
            Err(error) => {
                let mut arguments = arguments!(
                    XLA_FFI_Future_SetError_Args,
                    XLA_FFI_Future_SetError_Args_STRUCT_SIZE,
                    { future, error: self.api.error(error) }
                );
                function!(self.api, XLA_FFI_Future_SetError)
                    // SAFETY: the runtime made the future, `take` lets it complete only once, and
                    // the error passes to the runtime.
                    .map(|function| unsafe { function(&mut arguments) })
            }
        };
        let checked = answer.and_then(|error| self.api.check("completing a future", error));
        if let Err(error) = checked {
            // No caller is left for the error, and without an end the device would wait for ever.
            eprintln!("burst_attention: {error}");
            std::process::abort();
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.set(Err(&Error::Abandoned));
    }
}
