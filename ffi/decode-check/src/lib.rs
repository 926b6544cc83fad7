//! Decoding of call frames with XLA's own C++ header, for tests that hold ours against it.

pub use xla::Decoded;

// The bridge's generated code has no room for lints.
#[allow(missing_docs, clippy::undocumented_unsafe_blocks)]
#[cxx::bridge(namespace = "decode_check")]
mod xla {
    /// What became of one operand, result or attribute.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Decoded {
        /// Did it have the type that was asked for?
        accepted: bool,
        /// Its fields, or else the reason.
        text: String,
    }

    unsafe extern "C++" {
        include!("decode.h");

        unsafe fn argument(frame: usize, index: usize, dtype: u32, rank: i64) -> Decoded;
        unsafe fn result(frame: usize, index: usize, dtype: u32, rank: i64) -> Decoded;
        unsafe fn attribute(
            frame: usize,
            dictionary: &str,
            name: &str,
            kind: u32,
            dtype: u32,
        ) -> Decoded;
        unsafe fn signature(frame: usize) -> Decoded;
    }
}

/// A call frame that XLA's header can decode.
#[derive(Debug, Clone, Copy)]
pub struct Reference(usize);

impl Reference {
    /// # Safety
    /// `frame` points to a call frame whose pointers and lengths hold for as long as this is used.
    pub unsafe fn new(frame: *mut burst_attention_ffi::sys::XLA_FFI_CallFrame) -> Reference {
        Reference(frame as usize)
    }

    /// Operand `index` as a buffer of element type `dtype` (0: any) and `rank` (0, 1, 4; else any).
    pub fn argument(self, index: usize, dtype: u32, rank: i64) -> Decoded {
        // SAFETY: the frame is as `new` demands.
        unsafe { xla::argument(self.0, index, dtype, rank) }
    }

    /// Result `index`, likewise.
    pub fn result(self, index: usize, dtype: u32, rank: i64) -> Decoded {
        // SAFETY: the frame is as `new` demands.
        unsafe { xla::result(self.0, index, dtype, rank) }
    }

    /// Attribute `name`, of the call or of its attribute `dictionary`, as a `kind` of `dtype`.
    pub fn attribute(self, dictionary: &str, name: &str, kind: u32, dtype: u32) -> Decoded {
        // SAFETY: the frame is as `new` demands.
        unsafe { xla::attribute(self.0, dictionary, name, kind, dtype) }
    }

    /// Is it a call for the execute stage with two operands and one result?
    pub fn signature(self) -> Decoded {
        // SAFETY: the frame is as `new` demands.
        unsafe { xla::signature(self.0) }
    }
}
