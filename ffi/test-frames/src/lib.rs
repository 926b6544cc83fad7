//! Call frames made by hand and a runtime that records the handlers' calls, for tests that call the
//! handlers as XLA does.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::{Condvar, LazyLock, Mutex};
use std::thread::ThreadId;

use burst_attention_ffi::sys;

pub mod gpu;

/// An operand, a result or a deliberately broken description of one.
#[derive(Clone)]
pub struct FakeBuffer {
    /// XLA's type of the operand or result; a buffer, unless a test breaks it.
    pub kind: u32,
    /// Element type.
    pub dtype: sys::XLA_FFI_DataType,
    /// Dimensions, row-major.
    pub dims: Vec<i64>,
    /// Address of the memory.
    pub data: *mut c_void,
    /// Size of XLA's structure, unless a test breaks it.
    pub struct_size: usize,
}

impl FakeBuffer {
    /// Returns the description of the memory at `data`.
    pub fn new(dtype: sys::XLA_FFI_DataType, dims: &[i64], data: *mut c_void) -> FakeBuffer {
        let struct_size = sys::XLA_FFI_Buffer_STRUCT_SIZE as usize;
        let kind = sys::XLA_FFI_ArgType_BUFFER;
        FakeBuffer { kind, dtype, dims: dims.to_vec(), data, struct_size }
    }
}

/// An attribute.
#[derive(Clone)]
pub enum FakeAttribute {
    /// Element type and bytes of the value.
    Scalar(sys::XLA_FFI_DataType, Vec<u8>),
    /// Element type, number of elements and their bytes.
    Array(sys::XLA_FFI_DataType, usize, Vec<u8>),
    /// Text.
    Text(String),
    /// A nested dictionary.
    Dictionary(Vec<(String, FakeAttribute)>),
}

/// A call frame that owns everything it points to.
pub struct FakeFrame {
    /// The frame, for tests that change it.
    pub raw: Box<sys::XLA_FFI_CallFrame>,
    _owned: Owned,
}

/// The values that raw pointers of a frame point to.
#[derive(Default)]
struct Owned(Vec<Box<dyn std::any::Any>>);

impl Owned {
    /// Keeps `value` and returns its address, which stays.
    fn keep<T: 'static>(&mut self, value: T) -> *mut T {
        let mut boxed = Box::new(value);
        let address = &raw mut *boxed;
        self.0.push(boxed);
        address
    }

    fn keep_all<T: 'static>(&mut self, values: Vec<T>) -> *mut T {
        let kept = self.keep(values);
        // SAFETY: `keep` returned the address of a live vector that no other code uses.
        unsafe { (*kept).as_mut_ptr() }
    }

    /// Keeps `bytes` and returns their address, which is aligned for all numbers.
    fn keep_bytes(&mut self, bytes: &[u8]) -> *mut c_void {
        let mut words = vec![0u128; bytes.len().div_ceil(16).max(1)];
        // SAFETY: `words` has at least `bytes.len()` bytes, and the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), words.as_mut_ptr().cast(), bytes.len()) };
        self.keep_all(words).cast()
    }

    fn text(&mut self, text: &str) -> sys::XLA_FFI_ByteSpan {
        let bytes = self.keep_all(text.as_bytes().to_vec());
        sys::XLA_FFI_ByteSpan { ptr: bytes.cast(), len: text.len() }
    }

    fn buffer(&mut self, buffer: &FakeBuffer) -> *mut c_void {
        let raw = sys::XLA_FFI_Buffer {
            struct_size: buffer.struct_size,
            extension_start: ptr::null_mut(),
            dtype: buffer.dtype,
            data: buffer.data,
            rank: buffer.dims.len() as i64,
            dims: self.keep_all(buffer.dims.clone()),
        };
        self.keep(raw).cast()
    }

    fn attributes(&mut self, mut entries: Vec<(String, FakeAttribute)>) -> sys::XLA_FFI_Attrs {
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        let (mut types, mut names, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (name, value) in entries {
            let name = self.text(&name);
            names.push(self.keep(name));
            let (kind, value) = self.attribute(value);
            types.push(kind);
            values.push(value);
        }
        sys::XLA_FFI_Attrs {
            struct_size: sys::XLA_FFI_Attrs_STRUCT_SIZE as usize,
            extension_start: ptr::null_mut(),
            size: names.len() as i64,
            types: self.keep_all(types),
            names: self.keep_all(names),
            attrs: self.keep_all(values),
        }
    }

    fn attribute(&mut self, value: FakeAttribute) -> (sys::XLA_FFI_AttrType, *mut c_void) {
        match value {
            FakeAttribute::Scalar(dtype, bytes) => {
                let value = self.keep_bytes(&bytes);
                let scalar = sys::XLA_FFI_Scalar { dtype, value };
                (sys::XLA_FFI_AttrType_SCALAR, self.keep(scalar).cast())
            }
            FakeAttribute::Array(dtype, size, bytes) => {
                let data = self.keep_bytes(&bytes);
                let array = sys::XLA_FFI_Array { dtype, size, data };
                (sys::XLA_FFI_AttrType_ARRAY, self.keep(array).cast())
            }
            FakeAttribute::Text(text) => {
                let span = self.text(&text);
                (sys::XLA_FFI_AttrType_STRING, self.keep(span).cast())
            }
            FakeAttribute::Dictionary(entries) => {
                let attrs = self.attributes(entries);
                (sys::XLA_FFI_AttrType_DICTIONARY, self.keep(attrs).cast())
            }
        }
    }
}

impl FakeFrame {
    /// Returns a frame for the execute stage.
    pub fn new(
        args: &[FakeBuffer],
        rets: &[FakeBuffer],
        attributes: Vec<(String, FakeAttribute)>,
        runtime: &FakeRuntime,
    ) -> FakeFrame {
        let mut owned = Owned::default();
        let kinds = |buffers: &[FakeBuffer]| buffers.iter().map(|b| b.kind).collect::<Vec<_>>();
        let arg_types = owned.keep_all(kinds(args));
        let ret_types = owned.keep_all(kinds(rets));
        let arg_entries = args.iter().map(|buffer| owned.buffer(buffer)).collect();
        let ret_entries = rets.iter().map(|buffer| owned.buffer(buffer)).collect();
        let raw = Box::new(sys::XLA_FFI_CallFrame {
            struct_size: sys::XLA_FFI_CallFrame_STRUCT_SIZE as usize,
            extension_start: ptr::null_mut(),
            api: &raw const *runtime.table,
            ctx: runtime.context(),
            stage: sys::XLA_FFI_ExecutionStage_EXECUTE,
            args: sys::XLA_FFI_Args {
                struct_size: sys::XLA_FFI_Args_STRUCT_SIZE as usize,
                extension_start: ptr::null_mut(),
                size: args.len() as i64,
                types: arg_types,
                args: owned.keep_all(arg_entries),
            },
            rets: sys::XLA_FFI_Rets {
                struct_size: sys::XLA_FFI_Rets_STRUCT_SIZE as usize,
                extension_start: ptr::null_mut(),
                size: rets.len() as i64,
                types: ret_types,
                rets: owned.keep_all(ret_entries),
            },
            attrs: owned.attributes(attributes),
            future: ptr::null_mut(),
        });
        FakeFrame { raw, _owned: owned }
    }

    /// Returns the frame's address, for a handler.
    pub fn address(&mut self) -> *mut sys::XLA_FFI_CallFrame {
        &raw mut *self.raw
    }
}

/// The runtime's context of a running call.
pub struct FakeContext {
    /// Number of the program's run.
    pub run_id: i64,
    /// Number of the device.
    pub device: i32,
    /// The state of the call site, once a handler has set it.
    pub state: Cell<*mut c_void>,
    /// The device's GPU, if it is one.
    pub gpu: Option<Box<gpu::FakeGpu>>,
}

/// A runtime: its table of functions and one device's context.
pub struct FakeRuntime {
    /// The table of functions.
    pub table: Box<sys::XLA_FFI_Api>,
    /// The context of the device's calls.
    pub context: Box<FakeContext>,
}

/// A completed future.
#[derive(Clone)]
pub struct Completed {
    /// The error, if the call failed.
    pub error: Option<String>,
    /// The thread that completed the future.
    pub thread: ThreadId,
}

struct Futures {
    completed: Mutex<HashMap<usize, Completed>>,
    changed: Condvar,
}

static FUTURES: LazyLock<Futures> =
    LazyLock::new(|| Futures { completed: Mutex::default(), changed: Condvar::new() });

/// Waits until `future` is completed.
pub fn wait_for(future: *mut sys::XLA_FFI_Future) -> Completed {
    let completed = FUTURES.completed.lock().expect("no poison");
    let key = future as usize;
    let completed = FUTURES
        .changed
        .wait_while(completed, |completed| !completed.contains_key(&key))
        .expect("no poison");
    completed[&key].clone()
}

/// Returns code and message of an error that a handler returned, and frees the error.
pub fn take_error(error: *mut sys::XLA_FFI_Error) -> Option<(u32, String)> {
    if error.is_null() {
        return None;
    }
    // SAFETY: `error` makes every error of this runtime, and a handler returns each error once.
    let (code, message) = *unsafe { Box::from_raw(error.cast::<(u32, CString)>()) };
    Some((code, message.into_string().expect("UTF-8")))
}

impl FakeRuntime {
    /// Returns a runtime of version 0.`minor`.
    pub fn new(minor: i32, run_id: i64, device: i32) -> FakeRuntime {
        // SAFETY: zero is a value of every field: numbers, pointers and optional functions.
        let mut table: Box<sys::XLA_FFI_Api> = Box::new(unsafe { std::mem::zeroed() });
        table.struct_size = size_of::<sys::XLA_FFI_Api>();
        table.api_version.struct_size = sys::XLA_FFI_Api_Version_STRUCT_SIZE as usize;
        table.api_version.minor_version = minor;
        table.XLA_FFI_Error_Create = Some(create_error);
        table.XLA_FFI_Error_GetDetails = Some(error_details);
        table.XLA_FFI_Error_Destroy = Some(destroy_error);
        table.XLA_FFI_Type_Register = Some(register_type);
        table.XLA_FFI_State_Set = Some(set_state);
        table.XLA_FFI_State_Get = Some(get_state);
        table.XLA_FFI_Future_Create = Some(create_future);
        table.XLA_FFI_Future_SetAvailable = Some(set_available);
        table.XLA_FFI_Future_SetError = Some(set_error);
        table.XLA_FFI_RunId_Get = Some(get_run_id);
        table.XLA_FFI_DeviceOrdinal_Get = Some(get_device_ordinal);
        let context = FakeContext { run_id, device, state: Cell::new(ptr::null_mut()), gpu: None };
        FakeRuntime { table, context: Box::new(context) }
    }

    fn context(&self) -> *mut sys::XLA_FFI_InvokeContext {
        (&raw const *self.context).cast_mut().cast()
    }
}

type Error = *mut sys::XLA_FFI_Error;

fn error(code: u32, message: &str) -> Error {
    let message = CString::new(message).expect("no zero bytes");
    Box::into_raw(Box::new((code, message))).cast()
}

fn context<'a>(context: *mut sys::XLA_FFI_InvokeContext) -> &'a FakeContext {
    // SAFETY: handlers return the pointer that `FakeRuntime::context` put into the frame, and the
    // runtime of a test outlives its calls.
    unsafe { &*context.cast::<FakeContext>() }
}

unsafe extern "C" fn create_error(args: *mut sys::XLA_FFI_Error_Create_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &*args };
    // SAFETY: the header demands a C string.
    let message = unsafe { CStr::from_ptr(args.message) };
    error(args.errc, message.to_str().expect("UTF-8"))
}

unsafe extern "C" fn error_details(args: *mut sys::XLA_FFI_Error_GetDetails_Args) {
    // SAFETY: handlers pass valid arguments, with an error that `error` made.
    unsafe {
        let (code, message) = &*(*args).error.cast::<(u32, CString)>();
        (*args).errc = *code;
        (*args).message = message.as_ptr();
    }
}

unsafe extern "C" fn destroy_error(args: *mut sys::XLA_FFI_Error_Destroy_Args) {
    // SAFETY: handlers pass valid arguments, as the header demands.
    take_error(unsafe { (*args).error });
}

unsafe extern "C" fn register_type(args: *mut sys::XLA_FFI_Type_Register_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    unsafe { (*(*args).type_id).type_id = 77 };
    ptr::null_mut()
}

unsafe extern "C" fn set_state(args: *mut sys::XLA_FFI_State_Set_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &*args };
    context(args.ctx).state.set(args.state);
    ptr::null_mut()
}

unsafe extern "C" fn get_state(args: *mut sys::XLA_FFI_State_Get_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &mut *args };
    args.state = context(args.ctx).state.get();
    if args.state.is_null() { error(5, "no state is set") } else { ptr::null_mut() }
}

unsafe extern "C" fn create_future(args: *mut sys::XLA_FFI_Future_Create_Args) -> Error {
    // SAFETY: handlers pass valid arguments. The address is never freed and names the future.
    unsafe { (*args).future = Box::into_raw(Box::new(0u8)).cast() };
    ptr::null_mut()
}

fn complete(future: *mut sys::XLA_FFI_Future, error: Option<String>) -> Error {
    let thread = std::thread::current().id();
    let mut completed = FUTURES.completed.lock().expect("no poison");
    let before = completed.insert(future as usize, Completed { error, thread });
    assert!(before.is_none(), "completed twice");
    FUTURES.changed.notify_all();
    ptr::null_mut()
}

unsafe extern "C" fn set_available(args: *mut sys::XLA_FFI_Future_SetAvailable_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    complete(unsafe { (*args).future }, None)
}

unsafe extern "C" fn set_error(args: *mut sys::XLA_FFI_Future_SetError_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    let args = unsafe { &*args };
    complete(args.future, take_error(args.error).map(|(_, message)| message))
}

unsafe extern "C" fn get_run_id(args: *mut sys::XLA_FFI_RunId_Get_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    unsafe { (*args).run_id = context((*args).ctx).run_id };
    ptr::null_mut()
}

unsafe extern "C" fn get_device_ordinal(args: *mut sys::XLA_FFI_DeviceOrdinal_Get_Args) -> Error {
    // SAFETY: handlers pass valid arguments, as the header demands.
    unsafe { (*args).device_ordinal = context((*args).ctx).device };
    ptr::null_mut()
}
