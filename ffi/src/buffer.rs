//! Operands and results of a call: copies of the descriptions of borrowed memory.

use std::fmt;
use std::num::NonZero;
use std::ptr::NonNull;
use std::slice;

use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::sys;

/// An operand or a result. The description is a copy, because the call frame does not outlive the
/// handler. The memory belongs to XLA and lives until the call's future is completed.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Element type.
    pub dtype: DataType,
    /// Dimensions, row-major.
    pub dims: Vec<usize>,
    data: Option<NonNull<u8>>,
}

/// A number of 32 bits, any bits of which are one.
pub(crate) trait Number {
    const DTYPE: DataType;
}

impl Number for i32 {
    const DTYPE: DataType = DataType::S32;
}

impl Number for f32 {
    const DTYPE: DataType = DataType::F32;
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
        // SAFETY: the caller guarantees a description, and the size is the first field of each.
        let size = unsafe { (&raw const (*raw.as_ptr()).struct_size).read() };
        Error::check_size(what, size, sys::XLA_FFI_Buffer_STRUCT_SIZE)?;
        // SAFETY: the check above shows that the structure has all fields of the header.
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
            // SAFETY: the pointer is not null, and the caller guarantees `rank` numbers.
            unsafe { slice::from_raw_parts(buffer.dims, rank) }
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

    /// Returns the buffer with an address that no memory has, if it has none.
    pub(crate) fn rehearsed(self) -> Buffer {
        const NOWHERE: NonNull<u8> = NonNull::without_provenance(NonZero::new(1 << 48).unwrap());
        Buffer { data: self.data.or(Some(NOWHERE)), ..self }
    }

    fn checked_bytes(&self) -> Option<usize> {
        // This library never reads types without whole bytes. One byte bounds their size.
        let width = self.dtype.bytes().unwrap_or(1).max(1);
        if self.dims.contains(&0) {
            return Some(0);
        }
        self.dims.iter().try_fold(width, |size, &dim| size.checked_mul(dim))
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        // `decode` has checked that the size in bytes, at least one for each element, does not
        // overflow.
        if self.dims.contains(&0) { 0 } else { self.dims.iter().product() }
    }

    /// Returns the size of the memory in bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes().unwrap_or(1)
    }

    /// Returns the address of the memory.
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

    /// Returns the address of the memory, if the buffer has this element type and these dimensions.
    ///
    /// # Errors
    /// If the buffer has another type, other dimensions or no memory; the message calls it `name`.
    pub fn memory(&self, name: &str, dtype: DataType, dims: &[usize]) -> Result<NonNull<u8>> {
        self.shaped(name, dtype, dims)?.data(name)
    }

    /// Returns the address of memory of a GPU as a number; 0 without memory, which launches refuse.
    ///
    /// # Errors
    /// If the buffer has another type or other dimensions; the message calls it `name`.
    pub fn address(&self, name: &str, dtype: DataType, dims: &[usize]) -> Result<u64> {
        let data = self.shaped(name, dtype, dims)?.data(name);
        Ok(data.map_or(0, |data| data.as_ptr() as u64))
    }

    /// Returns the elements of an operand.
    ///
    /// # Errors
    /// If the buffer has another type, other dimensions, or memory that is missing or not aligned.
    pub(crate) fn values<T: Number>(&self, name: &str, dims: &[usize]) -> Result<&[T]> {
        let data = self.aligned::<T>(name, dims)?;
        // SAFETY: XLA guarantees that the buffer has its elements for the duration of the call,
        // which the frame's arguments do not outlive. They are of type `T`, and aligned.
        Ok(unsafe { slice::from_raw_parts(data.as_ptr(), self.elements()) })
    }

    /// Returns the elements of a result.
    ///
    /// # Errors
    /// If the buffer has another type, other dimensions, or memory that is missing or not aligned.
    pub(crate) fn values_mut<T: Number>(&mut self, name: &str, dims: &[usize]) -> Result<&mut [T]> {
        let data = self.aligned::<T>(name, dims)?;
        // SAFETY: XLA guarantees that the buffer has its elements for the duration of the call,
        // which the frame's results do not outlive, and that this call alone uses the result
        // meanwhile. They are of type `T` and aligned, and any bits of XLA's memory are numbers.
        Ok(unsafe { slice::from_raw_parts_mut(data.as_ptr(), self.elements()) })
    }

    fn aligned<T: Number>(&self, name: &str, dims: &[usize]) -> Result<NonNull<T>> {
        let data = self.memory(name, T::DTYPE, dims)?.cast::<T>();
        if data.is_aligned() {
            return Ok(data);
        }
        Err(Error::malformed(name, "aligned memory", format!("{data:?}")))
    }

    fn shaped(&self, name: &str, dtype: DataType, dims: &[usize]) -> Result<&Buffer> {
        if self.dims == dims {
            return self.typed(name, dtype);
        }
        let (expected, got) = (format!("{dims:?}"), format!("{:?}", self.dims));
        Err(Error::mismatch(format!("shape of {name}"), expected, got))
    }

    /// Returns the buffer itself, if it has this element type.
    ///
    /// # Errors
    /// If the buffer has another type; the message calls it `name`.
    pub fn typed(&self, name: &str, dtype: DataType) -> Result<&Buffer> {
        if self.dtype == dtype {
            return Ok(self);
        }
        Err(Error::mismatch(format!("dtype of {name}"), dtype.to_string(), self.dtype))
    }

    /// Returns the dimensions, if there are `N`.
    ///
    /// # Errors
    /// If there are more or fewer; the message calls the buffer `name`.
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
