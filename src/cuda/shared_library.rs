//! Shared libraries that JAX brings: tables of their functions, found at run time.

use std::ffi::c_int;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

/// Opens a library: the one that the process has loaded, or else the one that the loader finds.
///
/// # Errors
/// If there is no such library.
///
/// # Safety
/// The caller must guarantee that initialisers and finalisers of the library may run on any thread.
pub unsafe fn open(name: &str) -> Result<Library, libloading::Error> {
    /// Opens the library only if the process has loaded it.
    const RTLD_NOLOAD: c_int = 4;
    let flags = RTLD_LAZY | RTLD_LOCAL;
    // SAFETY: the caller guarantees what the library does when it is opened and closed.
    let open = |flags| unsafe { Library::open(Some(name), flags) };
    open(flags | RTLD_NOLOAD).or_else(|_| open(flags))
}

/// Declares a table of functions, each with its name in the library.
macro_rules! functions {
    (
        $(#[$doc:meta])* $table:ident:
        $($field:ident $symbol:literal ($($argument:ty),*) -> $result:ty;)*
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $table {
            $(#[doc = $symbol] pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Finds all functions.
            ///
            /// # Safety
            /// The caller must guarantee that the library's functions have the types of the table.
            unsafe fn find(
                library: &libloading::os::unix::Library,
            ) -> std::result::Result<$table, libloading::Error> {
                Ok($table {
                    // SAFETY: the caller guarantees the type.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

pub(super) use functions;
