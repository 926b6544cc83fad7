//! Decoding of call frames with XLA's own C++ header, for tests that compare it with the library's.

pub use xla::Decoded;

// The bridge's generated code has neither docs nor safety comments.
#[allow(missing_docs, clippy::undocumented_unsafe_blocks)]
#[cxx::bridge(namespace = "decode_check")]
mod xla {
    /// The decoding of one operand, result or attribute.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Decoded {
        /// Whether it has the type that the test asks for.
        accepted: bool,
        /// Its fields, or the reason why it is refused.
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
    /// Wraps a call frame.
    ///
    /// # Safety
    /// `frame` points to a call frame whose pointers and lengths stay valid as long as the
    /// reference is used.
    pub unsafe fn new(frame: *mut burst_attention_ffi::sys::XLA_FFI_CallFrame) -> Reference {
        Reference(frame as usize)
    }

    /// Decodes operand `index` as a buffer of element type `dtype` (0: any) and `rank` (0, 1, 4;
    /// else any).
    pub fn argument(self, index: usize, dtype: u32, rank: i64) -> Decoded {
        // SAFETY: the caller of `new` guarantees a valid frame.
        unsafe { xla::argument(self.0, index, dtype, rank) }
    }

    /// Decodes result `index` as a buffer of element type `dtype` (0: any) and `rank` (0, 1, 4;
    /// else any).
    pub fn result(self, index: usize, dtype: u32, rank: i64) -> Decoded {
        // SAFETY: the caller of `new` guarantees a valid frame.
        unsafe { xla::result(self.0, index, dtype, rank) }
    }

    /// Decodes attribute `name`, of the call or of its attribute `dictionary`, as a `kind` of
    /// `dtype`.
    pub fn attribute(self, dictionary: &str, name: &str, kind: u32, dtype: u32) -> Decoded {
        // SAFETY: the caller of `new` guarantees a valid frame.
        unsafe { xla::attribute(self.0, dictionary, name, kind, dtype) }
    }

    /// Decodes the frame as a call for the execute stage with two operands and one result.
    pub fn signature(self) -> Decoded {
        // SAFETY: the caller of `new` guarantees a valid frame.
        unsafe { xla::signature(self.0) }
    }
}
