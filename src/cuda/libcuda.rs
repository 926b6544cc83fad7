//! The CUDA driver itself, called through cudarc, which finds `libcuda.so.1` at the first call.

use std::ffi::{CStr, CString, c_void};
use std::ptr;

use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cudarc::driver::sys;

use super::driver::{Context, Copy, Driver, Event, Function, Stream};
use super::error::CudaError;
use crate::error::Result;

/// The driver of this machine, found by [`LibCuda::find`].
#[derive(Debug)]
pub struct LibCuda(());

impl LibCuda {
    /// Finds the driver.
    ///
    /// # Errors
    /// [`CudaError::Library`] if the machine has no driver.
    pub fn find() -> Result<LibCuda> {
        // SAFETY: the function only opens the library, whose initialisers may run on any thread.
        if unsafe { sys::is_culib_present() } {
            return Ok(LibCuda(()));
        }
        let remedy = "it comes with NVIDIA's driver, which a machine with an NVIDIA GPU needs";
        let (library, reason) = ("libcuda.so.1", "no such library was found".into());
        Err(CudaError::Library { library, reason, remedy }.into())
    }

    /// Returns the newest CUDA version that the driver knows, such as 13.0.
    pub fn version(&self) -> Option<String> {
        let mut number = 0;
        // SAFETY: the driver writes one integer, and `number` is one.
        let code = unsafe { sys::cuDriverGetVersion(&raw mut number) };
        let text = || format!("{}.{}", number / 1000, number % 1000 / 10);
        (code == sys::CUresult::CUDA_SUCCESS).then(text)
    }
}

/// Returns the name of a code and the driver's message.
fn explain(code: sys::CUresult) -> String {
    let mut text = ptr::null();
    // SAFETY: the driver writes null or the address of a constant C string, and `text` is a
    // pointer.
    let known = unsafe { sys::cuGetErrorString(code, &raw mut text) };
    if known != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{code:?}");
    }
    // SAFETY: `text` is not null, so the driver has written the address of a constant C string.
    format!("{code:?}, {}", unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// Calls a function of the driver, and returns its code.
macro_rules! code {
    ($function:ident($($argument:expr),*)) => {
        // SAFETY: this module passes only handles that the driver made, and the addresses of
        // variables that outlive the call. The executor guarantees the memory of launches and
        // copies.
        unsafe { sys::$function($($argument),*) }
    };
}

/// Calls a function of the driver. The error names the purpose of the call.
macro_rules! call {
    ($function:ident($($argument:expr),*), $($purpose:tt)*) => {
        check(code!($function($($argument),*)), stringify!($function), format_args!($($purpose)*))
    };
}

/// Calls a function of the driver that says whether operations are over.
macro_rules! is_done {
    ($function:ident($argument:expr), $purpose:literal) => {
        match code!($function($argument)) {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, stringify!($function), format_args!($purpose)).map(|()| true),
        }
    };
}

fn check(code: sys::CUresult, call: &'static str, purpose: std::fmt::Arguments<'_>) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Driver { call, reason: format!("{purpose}: {}", explain(code)) }.into())
}

impl Driver for LibCuda {
    fn stream_context(&self, stream: Stream) -> Result<Context> {
        let mut context = ptr::null_mut();
        call!(cuStreamGetCtx(stream.0 as _, &raw mut context), "the context of XLA's stream")?;
        Ok(Context(context as usize))
    }

    fn push_context(&self, context: Context) -> Result<()> {
        call!(cuCtxPushCurrent_v2(context.0 as _), "making XLA's context current")
    }

    fn pop_context(&self) -> Result<()> {
        let mut context = ptr::null_mut();
        call!(cuCtxPopCurrent_v2(&raw mut context), "making the context before XLA's current")
    }

    fn capability(&self) -> Result<(i32, i32)> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let (mut device, mut major, mut minor) = (0, 0, 0);
        call!(cuCtxGetDevice(&raw mut device), "the device of XLA's context")?;
        call!(cuDeviceGetAttribute(&raw mut major, MAJOR, device), "compute capability")?;
        call!(cuDeviceGetAttribute(&raw mut minor, MINOR, device), "compute capability")?;
        Ok((major, minor))
    }

    fn create_stream(&self) -> Result<Stream> {
        let (mut lowest, mut highest) = (0, 0);
        call!(
            cuCtxGetStreamPriorityRange(&raw mut lowest, &raw mut highest),
            "priorities of streams"
        )?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = ptr::null_mut();
        call!(
            cuStreamCreateWithPriority(&raw mut stream, flags, highest),
            "a stream for messages"
        )?;
        Ok(Stream(stream as usize))
    }

    fn create_event(&self) -> Result<Event> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let mut event = ptr::null_mut();
        call!(cuEventCreate(&raw mut event, flags), "an event")?;
        Ok(Event(event as usize))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut address = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        call!(cuMemHostAlloc(&raw mut address, bytes, flags), "{bytes} bytes of host memory")?;
        Ok(address as u64)
    }

    unsafe fn write(&self, address: u64, byte: u8) {
        // SAFETY: the caller guarantees that the byte lies in host memory of this process and that
        // no operation uses it meanwhile.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(address as usize).write_volatile(byte) }
    }

    unsafe fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let byte = |at: u64| {
            // SAFETY: the caller guarantees that the byte lies in host memory of this process and
            // that no operation writes it meanwhile.
            unsafe { ptr::with_exposed_provenance::<u8>(at as usize).read_volatile() }
        };
        (address..address + bytes as u64).map(byte).collect()
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        call!(cuStreamSynchronize(stream.0 as _), "waiting for the other ranks of the ring")
    }

    fn is_over(&self, event: Event) -> Result<bool> {
        is_done!(cuEventQuery(event.0 as _), "looking at an event")
    }

    fn is_idle(&self, stream: Stream) -> Result<bool> {
        is_done!(cuStreamQuery(stream.0 as _), "looking at a stream")
    }

    fn load(&self, image: &[u8], entry: &str) -> Result<Function> {
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        let bytes = image.len();
        call!(
            cuModuleLoadData(&raw mut module, image.as_ptr().cast()),
            "the image of {entry}, {bytes} bytes"
        )?;
        let name = CString::new(entry).unwrap_or_default();
        let found = call!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()), "{entry}")
            // By default CUDA loads functions lazily, at the first launch, which may then block.
            .and_then(|()| call!(cuFuncLoad(function), "{entry}"));
        if let Err(error) = found {
            // An error of unloading would say less than the first error.
            let _ = call!(cuModuleUnload(module), "{entry}");
            return Err(error);
        }
        Ok(Function(function as usize))
    }

    fn launch(&self, stream: Stream, function: Function, launch: &Launch) -> Result<()> {
        let mut values: Vec<u64> = launch.values.iter().copied().map(bits).collect();
        let parameters = values.iter_mut().map(|value| (&raw mut *value).cast::<c_void>());
        let mut parameters: Vec<_> = parameters.collect();
        let ([x, y, z], [width, height, depth]) = (launch.grid, launch.block);
        call!(
            cuLaunchKernel(
                function.0 as _,
                x,
                y,
                z,
                width,
                height,
                depth,
                launch.shared_bytes,
                stream.0 as _,
                parameters.as_mut_ptr(),
                ptr::null_mut()
            ),
            "{}, grid {:?}",
            launch.code,
            launch.grid
        )
    }

    fn copy(&self, stream: Stream, copy: &Copy) -> Result<()> {
        let Copy { from, to } = *copy;
        if from.is_contiguous() && to.is_contiguous() {
            let bytes = from.bytes() as usize;
            return call!(
                cuMemcpyDtoDAsync_v2(to.address, from.address, bytes, stream.0 as _),
                "{bytes} bytes"
            );
        }
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: ptr::null(),
            srcDevice: from.address,
            srcArray: ptr::null_mut(),
            srcPitch: from.pitch as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: ptr::null_mut(),
            dstDevice: to.address,
            dstArray: ptr::null_mut(),
            dstPitch: to.pitch as usize,
            WidthInBytes: from.width as usize,
            Height: from.height as usize,
        };
        call!(
            cuMemcpy2DAsync_v2(&raw const copy, stream.0 as _),
            "{} rows of {} bytes",
            from.height,
            from.width
        )
    }

    fn record(&self, stream: Stream, event: Event) -> Result<()> {
        call!(cuEventRecord(event.0 as _, stream.0 as _), "marking a point of a stream")
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        call!(cuStreamWaitEvent(stream.0 as _, event.0 as _, 0), "letting a stream wait")
    }
}

/// Returns a word that starts with the bytes of a value, as launches take it on a little-endian
/// machine.
fn bits(value: Value) -> u64 {
    match value {
        Value::Pointer(address) => address,
        Value::I32(integer) => u64::from(integer as u32),
        Value::F32(number) => u64::from(number.to_bits()),
    }
}
