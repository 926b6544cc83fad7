//! Descriptors: attributes by name.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use cudarc::cudnn::sys::cudnnBackendAttributeName_t::{self as Name, *};
use cudarc::cudnn::sys::cudnnBackendAttributeType_t as Type;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::{self as Kind, *};

use super::engine;
use super::evaluate::Graph;
use crate::call::{Outcome, put};
use crate::handles::Handles;
use crate::report::{has_log, lock, log};

/// `CUDNN_STATUS_BAD_PARAM`.
pub const BAD_PARAM: c_int = 2000;
/// `CUDNN_STATUS_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: c_int = 3000;

pub static DESCRIPTORS: Handles<Descriptor> = Handles::new("descriptor of cuDNN");
static LAST_ERROR: Mutex<String> = Mutex::new(String::new());

/// Returns what was wrong last.
pub fn last_error() -> String {
    lock(&LAST_ERROR).clone()
}

/// Returns a code, and keeps what is wrong.
pub fn wrong(code: c_int, text: impl Into<String>) -> c_int {
    *lock(&LAST_ERROR) = text.into();
    code
}

/// Returns what a descriptor describes, a plan or something else.
pub fn word(descriptor: *mut c_void) -> &'static str {
    let plan = CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
    let is_plan = DESCRIPTORS.get(descriptor).is_ok_and(|found| found.is(plan));
    if is_plan { "plan" } else { "other" }
}

/// The values of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    Numbers(Vec<i64>),
    Descriptors(Vec<Arc<Descriptor>>),
    Pointers(Vec<u64>),
    Text(String),
}

/// A descriptor.
#[derive(Debug)]
pub struct Descriptor {
    kind: c_int,
    attributes: Mutex<BTreeMap<c_int, Attribute>>,
    is_final: Mutex<bool>,
}

impl PartialEq for Descriptor {
    fn eq(&self, other: &Descriptor) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Descriptor {
    pub fn new(kind: c_int) -> Descriptor {
        Descriptor { kind, attributes: Mutex::default(), is_final: Mutex::default() }
    }

    /// Whether the descriptor is of a kind.
    pub fn is(&self, kind: Kind) -> bool {
        self.kind == kind as c_int
    }

    /// Sets an attribute.
    ///
    /// # Safety
    /// The caller must pass the address of `count` values of the type.
    pub unsafe fn set(&self, name: c_int, kind: c_int, count: usize, at: *const c_void) -> Outcome {
        if *lock(&self.is_final) {
            return Err(wrong(BAD_PARAM, format!("attribute {name} of a finalised descriptor")));
        }
        let is = |wanted: Type| kind == wanted as c_int;
        // SAFETY: the caller guarantees the values.
        let value = unsafe {
            if is(Type::CUDNN_TYPE_INT64) {
                Attribute::Numbers(values::<i64>(at, count).collect())
            } else if is(Type::CUDNN_TYPE_BOOLEAN) {
                Attribute::Numbers(values::<u8>(at, count).map(i64::from).collect())
            } else if is(Type::CUDNN_TYPE_CHAR) {
                let bytes: Vec<_> = values::<u8>(at, count).collect();
                Attribute::Text(String::from_utf8_lossy(&bytes).into())
            } else if is(Type::CUDNN_TYPE_VOID_PTR) || is(Type::CUDNN_TYPE_HANDLE) {
                Attribute::Pointers(values::<u64>(at, count).collect())
            } else if is(Type::CUDNN_TYPE_BACKEND_DESCRIPTOR) {
                let found = values::<*mut c_void>(at, count).map(|each| DESCRIPTORS.get(each));
                Attribute::Descriptors(found.collect::<Result<_, _>>()?)
            } else {
                Attribute::Numbers(values::<c_int>(at, count).map(i64::from).collect())
            }
        };
        lock(&self.attributes).insert(name, value);
        Ok(())
    }

    /// Writes an attribute where the caller wants it.
    ///
    /// # Safety
    /// The caller must pass room for `most` values.
    pub unsafe fn get(
        &self,
        name: c_int,
        most: usize,
        count: *mut i64,
        at: *mut c_void,
    ) -> Outcome {
        if name == CUDNN_ATTR_ENGINEHEUR_RESULTS as c_int {
            put(count, 1);
            if most > 0 {
                // SAFETY: the caller passes descriptors to be filled.
                let config = DESCRIPTORS.get(unsafe { at.cast::<*mut c_void>().read() })?;
                let graph = self.descriptor(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)?;
                let graph = Attribute::Descriptors(vec![graph]);
                let name = CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH as c_int;
                lock(&config.attributes).insert(name, graph);
            }
            return Ok(());
        }
        if name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE as c_int {
            put(count, 1);
            let config = self.descriptor(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)?;
            let graph = Graph::of_config(&config)?;
            put(at.cast(), engine::workspace_bytes(&config, &graph)?);
            return Ok(());
        }
        if name == CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION as c_int {
            let text = "{\"deviceName\":\"stand-in\"}";
            put(count, text.len() as i64);
            let bytes = text.len().min(most);
            // SAFETY: the caller passes room for `most` characters.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), at.cast(), bytes) };
            return Ok(());
        }
        Err(wrong(NOT_SUPPORTED, format!("attribute {name}")))
    }

    /// Finalises the descriptor. A configuration must have an engine that the version has, and a plan
    /// a graph that can be carried out.
    pub fn finalize(&self) -> Outcome {
        *lock(&self.is_final) = true;
        if self.is(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
            let config = self.descriptor(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)?;
            let graph = Graph::of_config(&config)?;
            engine::check_plan(&graph);
            if has_log() {
                log(&format!("plan {graph:?}"));
            }
        }
        if self.is(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) {
            engine::check_config(self)?;
        }
        Ok(())
    }

    fn attribute(&self, name: Name) -> Outcome<Attribute> {
        let found = lock(&self.attributes).get(&(name as c_int)).cloned();
        found.ok_or_else(|| wrong(BAD_PARAM, format!("{name:?} is missing")))
    }

    /// Returns the numbers of an attribute.
    pub fn numbers(&self, name: Name) -> Outcome<Vec<i64>> {
        match self.attribute(name)? {
            Attribute::Numbers(numbers) => Ok(numbers),
            other => Err(wrong(BAD_PARAM, format!("{name:?} is {other:?}"))),
        }
    }

    /// Returns the only number of an attribute.
    pub fn number(&self, name: Name) -> Outcome<i64> {
        self.numbers(name)?.first().copied().ok_or(BAD_PARAM)
    }

    /// Returns the addresses of an attribute.
    pub fn pointers(&self, name: Name) -> Outcome<Vec<u64>> {
        match self.attribute(name)? {
            Attribute::Pointers(pointers) => Ok(pointers),
            other => Err(wrong(BAD_PARAM, format!("{name:?} is {other:?}"))),
        }
    }

    /// Returns the descriptors of an attribute.
    pub fn descriptors(&self, name: Name) -> Outcome<Vec<Arc<Descriptor>>> {
        match self.attribute(name)? {
            Attribute::Descriptors(descriptors) => Ok(descriptors),
            other => Err(wrong(BAD_PARAM, format!("{name:?} is {other:?}"))),
        }
    }

    /// Returns the only descriptor of an attribute.
    pub fn descriptor(&self, name: Name) -> Outcome<Arc<Descriptor>> {
        self.descriptors(name)?.first().cloned().ok_or(BAD_PARAM)
    }

    /// Returns the only descriptor of an attribute, if it is set.
    pub fn optional(&self, name: Name) -> Option<Arc<Descriptor>> {
        match lock(&self.attributes).get(&(name as c_int)) {
            Some(Attribute::Descriptors(found)) => found.first().cloned(),
            _ => None,
        }
    }
}

/// Reads values.
///
/// # Safety
/// The caller must pass the address of `count` values.
unsafe fn values<T: Copy>(at: *const c_void, count: usize) -> impl Iterator<Item = T> {
    // SAFETY: the caller guarantees the values.
    (0..count).map(move |index| unsafe { at.cast::<T>().add(index).read_unaligned() })
}
