//! What a report of a problem should say about this library.

use std::ffi::{CStr, CString};
use std::sync::LazyLock;

use burst_attention::host::isa::Isa;
use burst_attention::host::ring::Executor;

use crate::{kernels, sys};

/// The version of the package, as a C string.
pub fn version() -> &'static CStr {
    let version = concat!(env!("CARGO_PKG_VERSION"), "\0");
    CStr::from_bytes_with_nul(version.as_bytes()).expect("one zero byte, at the end")
}

/// A JSON object, as a C string. Asking for it starts the compute threads.
pub fn describe() -> &'static CStr {
    static TEXT: LazyLock<CString> =
        LazyLock::new(|| CString::new(json()).expect("quoting leaves no zero bytes"));
    &TEXT
}

fn json() -> String {
    let available: Vec<_> = Isa::available().iter().map(|isa| quoted(isa.name())).collect();
    let executor = match Executor::global() {
        Ok(executor) => format!(
            "\"instruction_set\":{},\"compute_threads\":{}",
            quoted(executor.isa.name()),
            executor.pool.current_num_threads()
        ),
        Err(error) => format!("\"error\":{}", quoted(&error.to_string())),
    };
    format!(
        "{{\"version\":{},{executor},\"available_instruction_sets\":[{}],\
         \"cuda_kernel_images\":{},\"xla_ffi_api\":\"{}.{}\"}}",
        quoted(env!("CARGO_PKG_VERSION")),
        available.join(","),
        kernels::images(),
        sys::XLA_FFI_API_MAJOR,
        sys::XLA_FFI_API_MINOR,
    )
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let escape = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_computes() {
        let text = describe().to_str().expect("UTF-8");
        for part in
            ["\"version\":\"", "\"instruction_set\":\"", "\"portable\"", "\"cuda_kernel_images\":"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(quoted("a\"b\\\n"), "\"a\\\"b\\\\\\u000a\"");
    }
}
