//! Handles: numbers that look like pointers, and what they stand for.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::code;
use crate::report::{complain, lock};

/// The objects of a type, by their handles. A handle is never used again.
pub struct Handles<T> {
    what: &'static str,
    next: AtomicUsize,
    objects: Mutex<BTreeMap<usize, Arc<T>>>,
}

impl<T> Handles<T> {
    /// Returns no objects. `what` names the type in complaints.
    pub const fn new(what: &'static str) -> Handles<T> {
        Handles { what, next: AtomicUsize::new(0x10_0000), objects: Mutex::new(BTreeMap::new()) }
    }

    /// Keeps an object and returns its handle.
    pub fn add(&self, object: Arc<T>) -> usize {
        let handle = self.next.fetch_add(0x10, Ordering::Relaxed);
        lock(&self.objects).insert(handle, object);
        handle
    }

    /// Returns the object of a handle.
    ///
    /// # Errors
    /// If there is none, or none any more.
    pub fn get<P>(&self, handle: *mut P) -> Result<Arc<T>, c_int> {
        lock(&self.objects).get(&(handle as usize)).cloned().ok_or_else(|| self.unknown(handle))
    }

    /// Forgets a handle and returns its object.
    ///
    /// # Errors
    /// As [`Handles::get`].
    pub fn remove<P>(&self, handle: *mut P) -> Result<Arc<T>, c_int> {
        lock(&self.objects).remove(&(handle as usize)).ok_or_else(|| self.unknown(handle))
    }

    /// Returns the handle of the first object that `fits`.
    pub fn find(&self, fits: impl Fn(&T) -> bool) -> Option<usize> {
        let objects = lock(&self.objects);
        objects.iter().find(|(_, object)| fits(object)).map(|(handle, _)| *handle)
    }

    fn unknown<P>(&self, handle: *mut P) -> c_int {
        complain(format!("{handle:?} is no {}, or one that was destroyed", self.what));
        code::INVALID_HANDLE
    }
}
