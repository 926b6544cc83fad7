//! The functions of cuDNN's backend interface, in the `libcudnn.so.9` that JAX has loaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use burst_attention_kernels::backend::cudnn::Version;

use crate::cuda::error::CudaError;
use crate::cuda::shared_library::{functions, open};
use crate::error::Result;

const LIBRARY: &str = "libcudnn.so.9";
/// cuDNN aborts the process when it makes a graph and can't load this library.
const NEEDED: &str = "libcublasLt.so.13";
/// Before version 9.21 cuDNN compiles kernels with this library, and has no plan without it.
const COMPILER: &str = "libnvrtc.so.13";
const WITHOUT_COMPILER: Version = Version(92_100);
const REMEDY: &str = "it comes with jax[cuda13], as the packages nvidia-cudnn-cu13, nvidia-cublas \
                      and nvidia-cuda-nvrtc";
const OTHER_VERSION: &str =
    "install nvidia-cudnn-cu13 of such a version, or leave cuDNN out by kernels=\"tile\"";
const SUCCESS: c_int = 0;

functions! {
    /// A table of cuDNN's functions.
    Functions:
    version "cudnnGetVersion" () -> usize;
    error_string "cudnnGetErrorString" (c_int) -> *const c_char;
    last_error "cudnnGetLastErrorString" (*mut c_char, usize) -> ();
    create "cudnnBackendCreateDescriptor" (c_int, *mut *mut c_void) -> c_int;
    destroy "cudnnBackendDestroyDescriptor" (*mut c_void) -> c_int;
    set "cudnnBackendSetAttribute" (*mut c_void, c_int, c_int, i64, *const c_void) -> c_int;
    get "cudnnBackendGetAttribute"
        (*const c_void, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;
    finalize "cudnnBackendFinalize" (*mut c_void) -> c_int;
    execute "cudnnBackendExecute" (*mut c_void, *mut c_void, *mut c_void) -> c_int;
    create_handle "cudnnCreate" (*mut *mut c_void) -> c_int;
    set_stream "cudnnSetStream" (*mut c_void, *mut c_void) -> c_int;
}

impl Functions {
    /// Returns the functions of the library that JAX has loaded, or else of the one that the loader
    /// finds.
    ///
    /// # Errors
    /// [`CudaError::Library`] if there is no such library, or one of an untested version.
    pub fn load() -> Result<&'static Functions> {
        static CUDNN: OnceLock<Functions> = OnceLock::new();
        // Only success is kept, since JAX may load the library later.
        if let Some(found) = CUDNN.get() {
            return Ok(found);
        }
        let missing = |library| {
            move |error: libloading::Error| {
                let (reason, remedy) = (error.to_string(), REMEDY);
                CudaError::Library { library, reason, remedy }
            }
        };
        // SAFETY: NVIDIA's libraries guarantee that their initialisers and finalisers may run on
        // any thread.
        let (needed, library) = unsafe { (open(NEEDED), open(LIBRARY)) };
        let (needed, library) =
            (needed.map_err(missing(NEEDED))?, library.map_err(missing(LIBRARY))?);
        // SAFETY: `functions!` declares each function with its type in cudnn_graph.h, which is the
        // same in all versions 9. Enumerations are C integers there.
        let found = unsafe { Functions::find(&library) }.map_err(missing(LIBRARY))?;
        let version = found.version();
        if !version.is_tested() {
            let (oldest, newest) = (Version::OLDEST, Version(Version::TOO_NEW.0 - 1));
            let reason = format!("expected version {oldest} to {newest}, got {version}");
            let (library, remedy) = (LIBRARY, OTHER_VERSION);
            return Err(CudaError::Library { library, reason, remedy }.into());
        }
        if version < WITHOUT_COMPILER {
            // SAFETY: as above.
            let compiler = unsafe { open(COMPILER) }.map_err(missing(COMPILER))?;
            std::mem::forget(compiler);
        }
        // The functions stay valid because the libraries are never closed.
        std::mem::forget((needed, library));
        Ok(CUDNN.get_or_init(|| found))
    }

    /// Returns the version.
    pub fn version(&self) -> Version {
        // SAFETY: the function takes no arguments.
        Version(unsafe { (self.version)() })
    }

    /// Turns a code into an error. It names the function and its purpose.
    ///
    /// # Errors
    /// [`CudaError::Driver`], unless the code says success.
    pub fn check(&self, call: &'static str, purpose: &str, code: c_int) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut told = [0; 512];
        // SAFETY: cuDNN writes at most as many characters as it is told, the last of them null, and
        // returns a constant C string for any code.
        let (name, last) = unsafe {
            (self.last_error)(told.as_mut_ptr(), told.len());
            (CStr::from_ptr((self.error_string)(code)), CStr::from_ptr(told.as_ptr()))
        };
        let (name, last) = (name.to_string_lossy(), last.to_string_lossy());
        Err(CudaError::Driver { call, reason: format!("{purpose}: {name}: {last}") }.into())
    }
}
