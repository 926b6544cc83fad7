//! The state of a call site. The runtime keeps it from the compilation until the program is freed.

use std::ffi::c_void;
use std::panic::catch_unwind;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

use crate::api::{Api, Context};
use crate::error::{Error, Result};
use crate::sys;

/// A type of state.
pub trait CallState: Sized + Send + Sync + 'static {
    /// Returns the type's registration in the runtimes of this process.
    fn kind() -> &'static Kind;
}

/// The registration of a type of state.
pub struct Kind {
    name: &'static str,
    info: TypeInfo,
    /// The address of each runtime's table, with its number for the type. Each runtime of a process
    /// has its own registry.
    known: Mutex<Vec<(usize, i64)>>,
}

struct TypeInfo(sys::XLA_FFI_TypeInfo);

// SAFETY: `Kind::of` makes a constant whose one pointer is null.
unsafe impl Sync for TypeInfo {}
// SAFETY: `Kind::of` makes a constant whose one pointer is null.
unsafe impl Send for TypeInfo {}

impl Kind {
    /// Returns the registration of `S` under `name`.
    pub const fn of<S: CallState>(name: &'static str) -> Kind {
        let info = sys::XLA_FFI_TypeInfo {
            struct_size: sys::XLA_FFI_TypeInfo_STRUCT_SIZE as usize,
            extension_start: ptr::null_mut(),
            deleter: Some(delete::<S>),
        };
        Kind { name, info: TypeInfo(info), known: Mutex::new(Vec::new()) }
    }

    /// Returns the runtime's number for the type, which it registers at the first call.
    ///
    /// # Errors
    /// If the runtime does not register the type.
    pub fn number(&'static self, api: Api) -> Result<i64> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, id)) = known.iter().find(|(address, _)| *address == api.address()) {
            return Ok(*id);
        }
        // The address tells copies of this library in one process apart.
        let name = format!("burst_attention.{}@{:p}", self.name, &raw const self.info);
        let id = api.register_type(&name, &self.info.0)?;
        known.push((api.address(), id));
        Ok(id)
    }
}

/// Hands `state` to the runtime.
///
/// # Errors
/// If the runtime refuses the state.
pub fn set<S: CallState>(api: Api, context: Context<'_>, state: S) -> Result<()> {
    let number = S::kind().number(api)?;
    let state = NonNull::from(Box::leak(Box::new(state)));
    api.set_state(context, number, state.cast()).inspect_err(|_| {
        // SAFETY: `leak` made the pointer, and a runtime that refuses a state does not keep it.
        drop(unsafe { Box::from_raw(state.as_ptr()) });
    })
}

/// Returns the state that the instantiate stage has set.
///
/// # Errors
/// If there is none.
pub fn get<'a, S: CallState>(api: Api, context: Context<'a>) -> Result<&'a S> {
    let state = api.state(context, S::kind().number(api)?)?.cast::<S>();
    // SAFETY: the runtime has checked the type's number, and keeps the state while the program
    // runs.
    Ok(unsafe { state.as_ref() })
}

unsafe extern "C" fn delete<S>(state: *mut c_void) {
    // SAFETY: the runtime passes the pointer that `set` gave it, once.
    let delete = || drop(unsafe { Box::from_raw(state.cast::<S>()) });
    if let Err(payload) = catch_unwind(std::panic::AssertUnwindSafe(delete)) {
        eprintln!("{}", Error::panic(payload));
    }
}
