//! The functions of cuDNN's backend interface, in the `libcudnn.so.9` that JAX has loaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::cuda::error::CudaError;
use crate::cuda::shared_library::{functions, open};
use crate::error::Result;

const LIBRARY: &str = "libcudnn.so.9";
/// cuDNN aborts the process when it makes a graph and can't load this library.
const NEEDED: &str = "libcublasLt.so.13";
const REMEDY: &str =
    "it comes with jax[cuda13], as the packages nvidia-cudnn-cu13 and nvidia-cublas";
const SUCCESS: c_int = 0;

/// The oldest version that is used. Before it, statistics in the order of this library are not read
/// correctly in the backward pass.
pub const OLDEST: usize = 92_600;
/// The first version that is not used, since it has not been tested.
pub const TOO_NEW: usize = 93_000;

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
        let unusable = |library, reason| CudaError::Library { library, reason, remedy: REMEDY };
        let missing =
            |library| move |error: libloading::Error| unusable(library, error.to_string());
        // SAFETY: NVIDIA's libraries guarantee that their initialisers and finalisers may run on
        // any thread.
        let (needed, library) = unsafe { (open(NEEDED), open(LIBRARY)) };
        let (needed, library) =
            (needed.map_err(missing(NEEDED))?, library.map_err(missing(LIBRARY))?);
        // SAFETY: `functions!` declares each function with its type in cudnn_graph.h, which is the
        // same in all versions 9. Enumerations are C integers there.
        let found = unsafe { Functions::find(&library) }.map_err(missing(LIBRARY))?;
        // SAFETY: the function takes no arguments.
        let version = unsafe { (found.version)() };
        if !(OLDEST..TOO_NEW).contains(&version) {
            let [oldest, newest] = [OLDEST, TOO_NEW - 1].map(text_of);
            let reason = format!("expected version {oldest} to {newest}, got {}", text_of(version));
            return Err(unusable(LIBRARY, reason).into());
        }
        // The functions stay valid because the libraries are never closed.
        std::mem::forget((needed, library));
        Ok(CUDNN.get_or_init(|| found))
    }

    /// Returns the version, such as 9.28.1.
    pub fn version_text(&self) -> String {
        // SAFETY: the function takes no arguments.
        text_of(unsafe { (self.version)() })
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

/// Returns a version as cuDNN's documentation writes it.
fn text_of(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
