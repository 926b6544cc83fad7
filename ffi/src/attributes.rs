//! Static attributes of a call.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::sys;

/// A dictionary of attributes: of a call, or nested in another dictionary.
#[derive(Debug, Clone)]
pub struct Attributes<'a> {
    entries: Vec<(&'a str, Attribute<'a>)>,
}

/// An attribute that has not been read as a type yet.
#[derive(Debug, Clone, Copy)]
pub struct Attribute<'a> {
    kind: sys::XLA_FFI_AttrType,
    value: NonNull<c_void>,
    life: PhantomData<&'a ()>,
}

/// A type of attributes. An attribute of another type is refused.
pub trait FromAttribute<'a>: Sized {
    /// Reads attribute `name`.
    ///
    /// # Errors
    /// If the attribute has another type, or contradicts the header.
    fn from_attribute(name: &str, attribute: &Attribute<'a>) -> Result<Self>;
}

impl<'a> Attributes<'a> {
    /// Collects the entries of a dictionary.
    ///
    /// # Safety
    /// `raw` is null or points to a dictionary that can be read as far as its `struct_size` says;
    /// its arrays are as long as it says and, with all that they point to, live for `'a`.
    pub(crate) unsafe fn decode(raw: *const sys::XLA_FFI_Attrs) -> Result<Attributes<'a>> {
        let what = "dictionary of attributes";
        let Some(raw) = NonNull::new(raw.cast_mut()) else {
            return Err(Error::malformed(what, "a dictionary", "a null pointer"));
        };
        // SAFETY: the caller guarantees a dictionary, and the size is the first field of each.
        let size = unsafe { (&raw const (*raw.as_ptr()).struct_size).read() };
        Error::check_size(what, size, sys::XLA_FFI_Attrs_STRUCT_SIZE)?;
        // SAFETY: the check above shows that the structure has all fields of the header.
        let attrs = unsafe { raw.as_ref() };
        let count = usize::try_from(attrs.size)
            .map_err(|_| Error::malformed(what, "a natural number of entries", attrs.size))?;
        if count == 0 {
            return Ok(Attributes { entries: Vec::new() });
        }
        if attrs.types.is_null() || attrs.names.is_null() || attrs.attrs.is_null() {
            return Err(Error::malformed(what, format!("{count} entries"), "a null pointer"));
        }
        let entry = |index| {
            // SAFETY: the arrays are not null, and the caller guarantees `count` elements of each.
            let (kind, name, value) = unsafe {
                (*attrs.types.add(index), *attrs.names.add(index), *attrs.attrs.add(index))
            };
            // SAFETY: the caller guarantees that the entry points to a live span or to null.
            let name = unsafe { name.as_ref() }
                .ok_or_else(|| Error::malformed("attribute's name", "a string", "null"))
                // SAFETY: the caller guarantees that the bytes of the span live for `'a`.
                .and_then(|span| unsafe { text("name of an attribute", span) })?;
            let value = NonNull::new(value)
                .ok_or_else(|| Error::malformed(name, "a value", "a null pointer"))?;
            Ok((name, Attribute { kind, value, life: PhantomData }))
        };
        Ok(Attributes { entries: (0..count).map(entry).collect::<Result<_>>()? })
    }

    /// Reads attribute `name` as a `T`.
    ///
    /// # Errors
    /// If it is missing or of another type.
    pub fn get<T: FromAttribute<'a>>(&self, name: &str) -> Result<T> {
        let Some((_, attribute)) = self.entries.iter().find(|(entry, _)| *entry == name) else {
            let names = self.names().collect::<Vec<_>>().join(", ");
            let (name, got) = (format!("attribute {name}"), format!("only [{names}]"));
            return Err(Error::mismatch(name, "given", got));
        };
        T::from_attribute(name, attribute)
    }

    /// Reads the scale of a call.
    ///
    /// # Errors
    /// If it is missing, of another type or not finite.
    pub fn scale(&self) -> Result<f32> {
        let scale: f32 = self.get("scale")?;
        if scale.is_finite() {
            return Ok(scale);
        }
        Err(Error::mismatch("attribute scale", "finite", scale))
    }

    /// Returns the names of all entries, in XLA's order.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.entries.iter().map(|(name, _)| *name)
    }
}

/// Returns the bytes of a span as text.
///
/// # Safety
/// The span points to `len` bytes that live for `'a`.
unsafe fn text<'a>(what: &str, span: &sys::XLA_FFI_ByteSpan) -> Result<&'a str> {
    let bytes = if span.len == 0 {
        &[]
    } else if span.ptr.is_null() {
        return Err(Error::malformed(what, format!("{} bytes", span.len), "a null pointer"));
    } else {
        // SAFETY: the pointer is not null, and the caller guarantees `len` bytes that live for
        // `'a`.
        unsafe { std::slice::from_raw_parts(span.ptr.cast::<u8>(), span.len) }
    };
    std::str::from_utf8(bytes).map_err(|error| Error::malformed(what, "UTF-8", error))
}

impl Attribute<'_> {
    fn check_kind(&self, name: &str, kind: sys::XLA_FFI_AttrType) -> Result<()> {
        if self.kind == kind {
            return Ok(());
        }
        let name = format!("attribute {name}");
        Err(Error::mismatch(name, kind_name(kind), kind_name(self.kind)))
    }

    /// Returns the structure of an attribute of this kind.
    fn read<S: Copy>(&self, name: &str, kind: sys::XLA_FFI_AttrType) -> Result<S> {
        self.check_kind(name, kind)?;
        // SAFETY: the caller of `Attributes::decode` guarantees that the value is alive, and its
        // kind says that the value is an `S`.
        Ok(unsafe { self.value.cast::<S>().read_unaligned() })
    }

    fn typed(
        name: &str,
        expected: sys::XLA_FFI_DataType,
        got: sys::XLA_FFI_DataType,
    ) -> Result<()> {
        if expected == got {
            return Ok(());
        }
        let name = format!("dtype of attribute {name}");
        Err(Error::mismatch(name, DataType(expected).to_string(), DataType(got)))
    }
}

fn kind_name(kind: sys::XLA_FFI_AttrType) -> String {
    match kind {
        sys::XLA_FFI_AttrType_ARRAY => "an array".into(),
        sys::XLA_FFI_AttrType_DICTIONARY => "a dictionary".into(),
        sys::XLA_FFI_AttrType_SCALAR => "a scalar".into(),
        sys::XLA_FFI_AttrType_STRING => "a string".into(),
        other => format!("XLA attribute type {other}"),
    }
}

/// Reads a scalar of this element type.
fn scalar<T: Copy>(
    name: &str,
    attribute: &Attribute<'_>,
    dtype: sys::XLA_FFI_DataType,
) -> Result<T> {
    let scalar: sys::XLA_FFI_Scalar = attribute.read(name, sys::XLA_FFI_AttrType_SCALAR)?;
    Attribute::typed(name, dtype, scalar.dtype)?;
    let value = NonNull::new(scalar.value.cast::<T>())
        .ok_or_else(|| Error::malformed(name, "a value", "a null pointer"))?;
    // SAFETY: the pointer is not null, and XLA guarantees that it points to a value of the element
    // type, which is a `T`.
    Ok(unsafe { value.read_unaligned() })
}

impl FromAttribute<'_> for bool {
    fn from_attribute(name: &str, attribute: &Attribute<'_>) -> Result<bool> {
        match scalar::<u8>(name, attribute, sys::XLA_FFI_DataType_PRED)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Error::malformed(name, "a bool of 0 or 1", other)),
        }
    }
}

impl<'a> FromAttribute<'a> for &'a str {
    fn from_attribute(name: &str, attribute: &Attribute<'a>) -> Result<&'a str> {
        let span = attribute.read(name, sys::XLA_FFI_AttrType_STRING)?;
        // SAFETY: the caller of `Attributes::decode` guarantees that the bytes live for `'a`.
        unsafe { text(name, &span) }
    }
}

impl<'a> FromAttribute<'a> for Attributes<'a> {
    fn from_attribute(name: &str, attribute: &Attribute<'a>) -> Result<Attributes<'a>> {
        attribute.check_kind(name, sys::XLA_FFI_AttrType_DICTIONARY)?;
        // SAFETY: the entry's kind says that its value is a dictionary, and the caller of the outer
        // `Attributes::decode` guarantees that the value lives for `'a`.
        unsafe { Attributes::decode(attribute.value.as_ptr().cast()) }
    }
}

macro_rules! numbers {
    ($($native:ty => $dtype:ident),* $(,)?) => {$(
        impl FromAttribute<'_> for $native {
            fn from_attribute(name: &str, attribute: &Attribute<'_>) -> Result<$native> {
                scalar(name, attribute, sys::$dtype)
            }
        }

        impl<'a> FromAttribute<'a> for &'a [$native] {
            fn from_attribute(name: &str, attribute: &Attribute<'a>) -> Result<&'a [$native]> {
                let array: sys::XLA_FFI_Array =
                    attribute.read(name, sys::XLA_FFI_AttrType_ARRAY)?;
                Attribute::typed(name, sys::$dtype, array.dtype)?;
                if array.size == 0 {
                    return Ok(&[]);
                }
                let data = array.data.cast::<$native>();
                if data.is_null() || !data.is_aligned() {
                    return Err(Error::malformed(name, "aligned memory", format!("{data:?}")));
                }
                // SAFETY: the pointer is aligned and not null, and the caller of
                // `Attributes::decode` guarantees `size` elements that live for `'a`.
                Ok(unsafe { std::slice::from_raw_parts(data, array.size) })
            }
        }
    )*};
}

numbers! {
    i8 => XLA_FFI_DataType_S8,
    i16 => XLA_FFI_DataType_S16,
    i32 => XLA_FFI_DataType_S32,
    i64 => XLA_FFI_DataType_S64,
    u8 => XLA_FFI_DataType_U8,
    u16 => XLA_FFI_DataType_U16,
    u32 => XLA_FFI_DataType_U32,
    u64 => XLA_FFI_DataType_U64,
    f32 => XLA_FFI_DataType_F32,
    f64 => XLA_FFI_DataType_F64,
}
