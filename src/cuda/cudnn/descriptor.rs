//! Descriptors: the objects of cuDNN's backend interface.

use std::ffi::{c_int, c_void};
use std::ptr;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind,
};

use super::functions::Functions;
use crate::error::Result;

/// A descriptor.
#[derive(Debug)]
pub struct Descriptor {
    functions: &'static Functions,
    raw: *mut c_void,
}

// SAFETY: cuDNN allows any thread to use a descriptor, and allows threads to share one that is
// finalised. Setters need a `&mut Descriptor`.
unsafe impl Send for Descriptor {}
// SAFETY: see `Send`.
unsafe impl Sync for Descriptor {}

/// The value of an attribute.
#[derive(Debug, Clone, Copy)]
pub enum Value<'a> {
    /// Integers.
    Integers(&'a [i64]),
    /// Whether something is so.
    Flag(bool),
    /// A value of an enumeration.
    Enumeration(Type, c_int),
    /// Descriptors.
    Descriptors(&'a [&'a Descriptor]),
    /// Text.
    Text(&'a str),
    /// Addresses.
    Pointers(&'a [*mut c_void]),
    /// A handle of cuDNN.
    Handle(*mut c_void),
}

impl Descriptor {
    /// Creates a descriptor, sets its attributes and finalises it.
    ///
    /// # Errors
    /// If cuDNN refuses.
    pub fn new(
        functions: &'static Functions,
        kind: Kind,
        attributes: &[(Name, Value<'_>)],
    ) -> Result<Descriptor> {
        let descriptor = Descriptor::empty(functions, kind)?;
        for (name, value) in attributes {
            descriptor.set(*name, *value)?;
        }
        // SAFETY: the descriptor exists.
        let code = unsafe { (functions.finalize)(descriptor.raw) };
        functions.check("cudnnBackendFinalize", &format!("{kind:?}"), code)?;
        Ok(descriptor)
    }

    /// Creates a descriptor without attributes.
    fn empty(functions: &'static Functions, kind: Kind) -> Result<Descriptor> {
        let mut raw = ptr::null_mut();
        // SAFETY: cuDNN writes the address of a descriptor, and `raw` is a pointer.
        let code = unsafe { (functions.create)(kind as c_int, &raw mut raw) };
        functions.check("cudnnBackendCreateDescriptor", &format!("{kind:?}"), code)?;
        Ok(Descriptor { functions, raw })
    }

    fn set(&self, name: Name, value: Value<'_>) -> Result<()> {
        let pointers: Vec<*mut c_void>;
        let (kind, count, at): (Type, usize, *const c_void) = match value {
            Value::Integers(values) => {
                (Type::CUDNN_TYPE_INT64, values.len(), values.as_ptr().cast())
            }
            Value::Handle(ref value) => (Type::CUDNN_TYPE_HANDLE, 1, ptr::from_ref(value).cast()),
            Value::Flag(ref value) => (Type::CUDNN_TYPE_BOOLEAN, 1, ptr::from_ref(value).cast()),
            Value::Enumeration(kind, ref value) => (kind, 1, ptr::from_ref(value).cast()),
            Value::Text(text) => (Type::CUDNN_TYPE_CHAR, text.len(), text.as_ptr().cast()),
            Value::Pointers(values) => {
                (Type::CUDNN_TYPE_VOID_PTR, values.len(), values.as_ptr().cast())
            }
            Value::Descriptors(values) => {
                pointers = values.iter().map(|descriptor| descriptor.raw).collect();
                (Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, pointers.len(), pointers.as_ptr().cast())
            }
        };
        let (functions, kind, count) = (self.functions, kind as c_int, count as i64);
        // SAFETY: `at` points to `count` values of the type.
        let code = unsafe { (functions.set)(self.raw, name as c_int, kind, count, at) };
        functions.check("cudnnBackendSetAttribute", &format!("{name:?}"), code)
    }

    /// Returns an integer.
    ///
    /// # Errors
    /// If cuDNN refuses.
    pub fn integer(&self, name: Name) -> Result<i64> {
        let mut value = 0_i64;
        self.read(name, Type::CUDNN_TYPE_INT64, 1, ptr::from_mut(&mut value).cast())?;
        Ok(value)
    }

    /// Returns a text.
    ///
    /// # Errors
    /// If cuDNN refuses.
    pub fn text(&self, name: Name) -> Result<String> {
        let length = self.read(name, Type::CUDNN_TYPE_CHAR, 0, ptr::null_mut())?;
        let mut text = vec![0_u8; length as usize];
        self.read(name, Type::CUDNN_TYPE_CHAR, length, text.as_mut_ptr().cast())?;
        Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
    }

    /// Returns the first of the descriptors that an attribute lists; `None` if it lists none.
    ///
    /// # Errors
    /// If cuDNN refuses.
    pub fn first(&self, name: Name, kind: Kind) -> Result<Option<Descriptor>> {
        // cuDNN fills a descriptor that exists. It may announce more than it then finds, and a
        // descriptor that was not filled crashes those that refer to it.
        let mut first = Descriptor::empty(self.functions, kind)?;
        let at = ptr::from_mut(&mut first.raw).cast();
        let found = self.read(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, at)?;
        Ok((found > 0).then_some(first))
    }

    /// Reads up to `most` values and returns how many there are.
    fn read(&self, name: Name, kind: Type, most: i64, at: *mut c_void) -> Result<i64> {
        let (mut count, functions) = (0, self.functions);
        // SAFETY: the callers pass room for `most` values of the type.
        let code = unsafe {
            (functions.get)(self.raw, name as c_int, kind as c_int, most, &raw mut count, at)
        };
        functions.check("cudnnBackendGetAttribute", &format!("{name:?}"), code)?;
        Ok(count)
    }

    /// Enqueues a plan on the handle's stream, with its arrays.
    ///
    /// # Errors
    /// If cuDNN refuses.
    ///
    /// # Safety
    /// The caller must pass a handle of cuDNN, and guarantee that the memory of the arrays belongs
    /// to the handle's device until its stream has passed the call.
    pub unsafe fn execute(&self, handle: *mut c_void, pack: &Descriptor) -> Result<()> {
        // SAFETY: the caller guarantees the handle and the memory.
        let code = unsafe { (self.functions.execute)(handle, self.raw, pack.raw) };
        self.functions.check("cudnnBackendExecute", "a plan of attention", code)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: nothing uses the descriptor any more. Nobody could act upon an error.
        unsafe { (self.functions.destroy)(self.raw) };
    }
}
