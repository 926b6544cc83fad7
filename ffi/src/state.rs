//! What a call site keeps in the runtime, from when it is compiled until the program is freed.

use std::ffi::c_void;
use std::panic::catch_unwind;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

use crate::api::{Api, Context};
use crate::error::{Error, Result};
use crate::sys;

/// A type of state, as the runtimes of this process know it.
pub trait CallState: Sized + Send + Sync + 'static {
    /// Where the numbers are kept that runtimes gave to the type.
    fn kind() -> &'static Kind;
}

/// What runtimes know about a type of state.
pub struct Kind {
    name: &'static str,
    info: TypeInfo,
    /// Address of a runtime's table, and its number for the type. Each runtime of a process has
    /// its own registry.
    known: Mutex<Vec<(usize, i64)>>,
}

struct TypeInfo(sys::XLA_FFI_TypeInfo);

// SAFETY: it is constant, and its one pointer is null.
unsafe impl Sync for TypeInfo {}
// SAFETY: as above.
unsafe impl Send for TypeInfo {}

impl Kind {
    /// The kind of `S`, which `name` names.
    pub const fn of<S: CallState>(name: &'static str) -> Kind {
        let info = sys::XLA_FFI_TypeInfo {
            struct_size: sys::XLA_FFI_TypeInfo_STRUCT_SIZE as usize,
            extension_start: ptr::null_mut(),
            deleter: Some(delete::<S>),
        };
        Kind { name, info: TypeInfo(info), known: Mutex::new(Vec::new()) }
    }

    /// The runtime's number for it.
    ///
    /// # Errors
    /// If the runtime does not register it.
    pub fn number(&'static self, api: Api) -> Result<i64> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, id)) = known.iter().find(|(address, _)| *address == api.address()) {
            return Ok(*id);
        }
        // The address tells copies of this library apart.
        let name = format!("burst_attention.{}@{:p}", self.name, &raw const self.info);
        let id = api.register_type(&name, &self.info.0)?;
        known.push((api.address(), id));
        Ok(id)
    }
}

/// Hands `state` to the runtime.
///
/// # Errors
/// If the runtime refuses it.
pub fn set<S: CallState>(api: Api, context: Context<'_>, state: S) -> Result<()> {
    let number = S::kind().number(api)?;
    let state = NonNull::from(Box::leak(Box::new(state)));
    api.set_state(context, number, state.cast()).inspect_err(|_| {
        // SAFETY: the runtime did not take it.
        drop(unsafe { Box::from_raw(state.as_ptr()) });
    })
}

/// The state that was set when the call was instantiated.
///
/// # Errors
/// If there is none.
pub fn get<'a, S: CallState>(api: Api, context: Context<'a>) -> Result<&'a S> {
    let state = api.state(context, S::kind().number(api)?)?.cast::<S>();
    // SAFETY: the runtime checked the type, and keeps the state while the program runs.
    Ok(unsafe { state.as_ref() })
}

unsafe extern "C" fn delete<S>(state: *mut c_void) {
    // SAFETY: the runtime gives back what `set` handed over, once.
    let delete = || drop(unsafe { Box::from_raw(state.cast::<S>()) });
    if let Err(payload) = catch_unwind(std::panic::AssertUnwindSafe(delete)) {
        eprintln!("{}", Error::panic(payload));
    }
}
