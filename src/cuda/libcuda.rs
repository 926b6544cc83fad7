//! The CUDA driver itself, through cudarc, which finds `libcuda.so.1` when it is first called.

use std::ffi::{CStr, CString, c_void};
use std::ptr;

use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cudarc::driver::sys;

use super::driver::{Context, Copy, Driver, Event, Function, Stream};
use crate::error::{Error, Result};

/// The driver of this machine; made by [`LibCuda::find`].
#[derive(Debug)]
pub struct LibCuda(());

impl LibCuda {
    /// The driver, if there is one.
    ///
    /// # Errors
    /// [`Error::Library`].
    pub fn find() -> Result<LibCuda> {
        // SAFETY: it only opens the library.
        if unsafe { sys::is_culib_present() } {
            return Ok(LibCuda(()));
        }
        Err(Error::Library {
            library: "libcuda.so.1",
            reason: "no such library was found".into(),
            remedy: "it comes with NVIDIA's driver, which a machine with an NVIDIA GPU needs",
        })
    }

    /// The newest CUDA that it knows, such as 13.0.
    pub fn version(&self) -> Option<String> {
        let mut number = 0;
        // SAFETY: the call writes one integer.
        let code = unsafe { sys::cuDriverGetVersion(&raw mut number) };
        let text = || format!("{}.{}", number / 1000, number % 1000 / 10);
        (code == sys::CUresult::CUDA_SUCCESS).then(text)
    }
}

/// What the driver says of a code.
fn explain(code: sys::CUresult) -> String {
    let mut text = ptr::null();
    // SAFETY: the call writes the address of a constant C string, or null.
    let known = unsafe { sys::cuGetErrorString(code, &raw mut text) };
    if known != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{code:?}");
    }
    // SAFETY: as above.
    format!("{code:?}, {}", unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// Calls a function of the driver; what it was for goes into the error.
macro_rules! call {
    ($function:ident($($argument:expr),*), $($purpose:tt)*) => {{
        // SAFETY: handles are the driver's own, and places to write to live for the call.
        let code = unsafe { sys::$function($($argument),*) };
        if code == sys::CUresult::CUDA_SUCCESS {
            Ok(())
        } else {
            let reason = format!("{}: {}", format_args!($($purpose)*), explain(code));
            Err(Error::Driver { call: stringify!($function), reason })
        }
    }};
}

impl Stream {
    fn raw(self) -> sys::CUstream {
        self.0 as sys::CUstream
    }
}

impl Event {
    fn raw(self) -> sys::CUevent {
        self.0 as sys::CUevent
    }
}

impl Driver for LibCuda {
    fn stream_context(&self, stream: Stream) -> Result<Context> {
        let mut context = ptr::null_mut();
        call!(cuStreamGetCtx(stream.raw(), &raw mut context), "the context of XLA's stream")?;
        Ok(Context(context as usize))
    }

    fn push_context(&self, context: Context) -> Result<()> {
        call!(cuCtxPushCurrent_v2(context.0 as sys::CUcontext), "making XLA's context current")
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
            "a stream for what travels"
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
        let mut address = 0;
        call!(cuMemAlloc_v2(&raw mut address, bytes), "{bytes} bytes")?;
        Ok(address)
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
            // With CUDA's lazy loading, the default, the first launch would do this, and may block.
            .and_then(|()| call!(cuFuncLoad(function), "{entry}"));
        if let Err(error) = found {
            // The first error says more than a second one.
            let _ = call!(cuModuleUnload(module), "{entry}");
            return Err(error);
        }
        Ok(Function(function as usize))
    }

    fn launch(&self, stream: Stream, function: Function, launch: &Launch) -> Result<()> {
        let mut values: Vec<u64> = launch.values.iter().copied().map(bits).collect();
        let mut parameters: Vec<*mut c_void> =
            values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let [x, y, z] = launch.grid;
        // One thread: the number of threads is the image's own.
        call!(
            cuLaunchKernel(
                function.0 as sys::CUfunction,
                x,
                y,
                z,
                1,
                1,
                1,
                0,
                stream.raw(),
                parameters.as_mut_ptr(),
                ptr::null_mut()
            ),
            "{}, grid {:?}",
            launch.instance,
            launch.grid
        )
    }

    fn copy(&self, stream: Stream, copy: &Copy) -> Result<()> {
        let Copy { from, to } = *copy;
        if from.is_run() && to.is_run() {
            let bytes = from.bytes() as usize;
            return call!(
                cuMemcpyDtoDAsync_v2(to.address, from.address, bytes, stream.raw()),
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
            cuMemcpy2DAsync_v2(&raw const copy, stream.raw()),
            "{} rows of {} bytes",
            from.height,
            from.width
        )
    }

    fn record(&self, stream: Stream, event: Event) -> Result<()> {
        call!(cuEventRecord(event.raw(), stream.raw()), "marking a point of a stream")
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        call!(cuStreamWaitEvent(stream.raw(), event.raw(), 0), "letting a stream wait")
    }
}

/// A value as the first bytes of a word, as launches take it on a little-endian machine.
fn bits(value: Value) -> u64 {
    match value {
        Value::Pointer(address) => address,
        Value::I32(integer) => u64::from(integer as u32),
        Value::F32(number) => u64::from(number.to_bits()),
    }
}
