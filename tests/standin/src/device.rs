//! The devices, and the contexts of threads. Each device has one context, its primary one.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use crate::code;
use crate::report::lock;
use crate::settings::settings;
use crate::stream::Stream;

/// A device.
#[derive(Debug)]
pub struct Device {
    pub index: usize,
    /// The error after which the device is lost; 0 while it is not.
    lost: AtomicI32,
    streams: Mutex<Vec<Arc<Stream>>>,
    null: OnceLock<Arc<Stream>>,
}

static DEVICES: LazyLock<Vec<Device>> = LazyLock::new(|| {
    let device = |index| Device {
        index,
        lost: AtomicI32::new(0),
        streams: Mutex::default(),
        null: OnceLock::new(),
    };
    (0..settings().devices).map(device).collect()
});

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(vec![]) };
}

/// The handles of contexts begin here.
const CONTEXT: usize = 0xc000_0000;

/// Returns the device of an index.
///
/// # Errors
/// If there is none.
pub fn device(index: c_int) -> Result<&'static Device, c_int> {
    usize::try_from(index).ok().and_then(|index| DEVICES.get(index)).ok_or(code::INVALID_DEVICE)
}

impl Device {
    /// Returns the handle of the device's context.
    pub fn context<C>(&self) -> *mut C {
        (CONTEXT + 0x10 * self.index) as *mut C
    }

    /// Returns the device of a context.
    ///
    /// # Errors
    /// If it is no context.
    pub fn of_context<C>(context: *mut C) -> Result<&'static Device, c_int> {
        let index = (context as usize).checked_sub(CONTEXT).map(|offset| offset / 0x10);
        index.and_then(|index| DEVICES.get(index)).ok_or(code::INVALID_CONTEXT)
    }

    /// Returns the stream that handle 0 stands for.
    pub fn null_stream(&self) -> &Arc<Stream> {
        self.null.get_or_init(|| self.add_stream(0))
    }

    /// Creates a stream.
    pub fn add_stream(&self, priority: c_int) -> Arc<Stream> {
        let stream = Arc::new(Stream::new(self.index, priority));
        lock(&self.streams).push(stream.clone());
        stream
    }

    /// Forgets a stream.
    pub fn remove_stream(&self, stream: &Arc<Stream>) {
        lock(&self.streams).retain(|kept| !Arc::ptr_eq(kept, stream));
    }

    /// Waits until all streams are done.
    pub fn synchronize(&self) {
        let streams = lock(&self.streams).clone();
        streams.iter().for_each(|stream| stream.synchronize());
    }

    /// Lets every later call fail with this code, as after an illegal access.
    pub fn lose(&self, code: c_int) {
        // The first error stays.
        let _ = self.lost.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether the device works.
    ///
    /// # Errors
    /// The error after which it was lost.
    pub fn works(&self) -> Result<(), c_int> {
        match self.lost.load(Ordering::SeqCst) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

/// Lets all lost devices work again.
pub fn mend() {
    DEVICES.iter().for_each(|device| device.lost.store(0, Ordering::SeqCst));
}

/// Returns the device of this thread's current context, if it has one.
pub fn current_or_none() -> Option<usize> {
    // The program may call while it ends, when the thread's variables are gone.
    let last = CONTEXTS.try_with(|contexts| contexts.borrow().last().copied());
    last.ok().flatten()
}

/// Returns the device of this thread's current context.
///
/// # Errors
/// If it has none.
pub fn current() -> Result<&'static Device, c_int> {
    current_or_none().map(|index| &DEVICES[index]).ok_or(code::INVALID_CONTEXT)
}

/// Replaces this thread's current context.
pub fn set_current(index: Option<usize>) {
    CONTEXTS.with_borrow_mut(|contexts| {
        contexts.pop();
        contexts.extend(index);
    });
}

/// Makes a context current over the one that is.
pub fn push_current(index: usize) {
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(index));
}

/// Makes the context before this one current again. Returns the one that was.
///
/// # Errors
/// If there was none.
pub fn pop_current() -> Result<usize, c_int> {
    CONTEXTS.with_borrow_mut(Vec::pop).ok_or(code::INVALID_CONTEXT)
}
