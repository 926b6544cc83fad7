//! Operands and results of a call: copied descriptions of borrowed memory.

use std::fmt;
use std::ptr::NonNull;

use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::sys;

/// An operand or a result. The description is a copy, as the call frame does not outlive the
/// handler; the memory stays XLA's and lives until the call's future is completed.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Element type.
    pub dtype: DataType,
    /// Dimensions, row-major.
    pub dims: Vec<usize>,
    data: Option<NonNull<u8>>,
}

impl Buffer {
    /// Copies the description of one operand or result; `what` names it in messages.
    ///
    /// # Safety
    /// `raw` is null or points to a buffer description that can be read as far as its
    /// `struct_size` says, and whose `dims` point to `rank` numbers.
    pub(crate) unsafe fn decode(what: &str, raw: *const sys::XLA_FFI_Buffer) -> Result<Buffer> {
        let Some(raw) = NonNull::new(raw.cast_mut()) else {
            return Err(Error::malformed(what, "a buffer", "a null pointer"));
        };
        // SAFETY: the size is the first field, which every structure has.
        let size = unsafe { (&raw const (*raw.as_ptr()).struct_size).read() };
        let least = sys::XLA_FFI_Buffer_STRUCT_SIZE as usize;
        if size < least {
            return Err(Error::malformed(what, format!("at least {least} bytes"), size));
        }
        // SAFETY: the structure is as long as the header's, so all fields can be read.
        let buffer = unsafe { raw.as_ref() };
        let dims = if buffer.rank == 0 {
            Vec::new()
        } else {
            let rank = usize::try_from(buffer.rank).map_err(|_| {
                Error::malformed(format!("rank of {what}"), "a natural number", buffer.rank)
            })?;
            if buffer.dims.is_null() {
                return Err(Error::malformed(what, format!("{rank} dimensions"), "none"));
            }
            // SAFETY: not null, and the caller vouches for `rank` numbers.
            unsafe { std::slice::from_raw_parts(buffer.dims, rank) }
                .iter()
                .map(|&dim| {
                    usize::try_from(dim).map_err(|_| {
                        Error::malformed(format!("dimension of {what}"), "a natural number", dim)
                    })
                })
                .collect::<Result<Vec<_>>>()?
        };
        let decoded =
            Buffer { dtype: DataType(buffer.dtype), dims, data: NonNull::new(buffer.data.cast()) };
        let bytes = decoded.checked_bytes();
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(Error::malformed(what, "a size that fits the address space", &decoded));
        }
        Ok(decoded)
    }

    fn checked_bytes(&self) -> Option<usize> {
        // Types without whole bytes are never read here; one byte bounds their size.
        let width = self.dtype.bytes().unwrap_or(1).max(1);
        if self.dims.contains(&0) {
            return Some(0);
        }
        self.dims.iter().try_fold(width, |size, &dim| size.checked_mul(dim))
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        // Does not overflow: the size in bytes was checked, and a token counts as one element.
        if self.dims.contains(&0) { 0 } else { self.dims.iter().product() }
    }

    /// Size of the memory in bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes().unwrap_or(1)
    }

    /// Address of the memory.
    ///
    /// # Errors
    /// If there are elements but no memory.
    pub fn data(&self, name: &str) -> Result<NonNull<u8>> {
        match self.data {
            Some(data) => Ok(data),
            None if self.elements() == 0 => Ok(NonNull::dangling()),
            None => Err(Error::malformed(name, "memory", "a null pointer")),
        }
    }

    /// The buffer itself, if it has this element type.
    ///
    /// # Errors
    /// If it has another; the message names the operand `name`.
    pub fn typed(&self, name: &str, dtype: DataType) -> Result<&Buffer> {
        if self.dtype == dtype {
            return Ok(self);
        }
        Err(Error::mismatch(format!("dtype of {name}"), dtype.to_string(), self.dtype))
    }

    /// The dimensions, if there are `N`.
    ///
    /// # Errors
    /// If there are more or fewer; the message names the operand `name`.
    pub fn ranked<const N: usize>(&self, name: &str) -> Result<[usize; N]> {
        self.dims
            .as_slice()
            .try_into()
            .map_err(|_| Error::mismatch(format!("rank of {name}"), N.to_string(), self.dims.len()))
    }
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.dims)
    }
}
