//! Scratch memory of a thread, and tasks that work in it.

use std::cell::RefCell;
use std::ptr;

use super::simd::{Simd, Task};

/// A cache line of floats, for alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; Scratch::LINE]);

/// Hands out disjoint, aligned parts of scratch memory.
pub(super) struct Scratch {
    next: *mut f32,
    left: usize,
}

impl Scratch {
    const LINE: usize = 16;

    /// Calls `work` with the parts that `lay_out` takes from this thread's scratch memory. The
    /// parts hold arbitrary numbers, and are `work`'s alone while it runs. The memory stays with
    /// the thread for its next task. A task that runs within `work` gets other memory.
    ///
    /// `lay_out` runs twice: first to measure how many floats it takes, with pointers to no memory.
    pub fn with<T>(lay_out: impl Fn(&mut Scratch) -> T, work: impl FnOnce(T)) {
        thread_local! {
            static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
        }
        let mut measure = Scratch { next: ptr::null_mut(), left: usize::MAX };
        lay_out(&mut measure);
        let left = usize::MAX - measure.left;
        let mut lines = FREE.with_borrow_mut(|free| free.pop().unwrap_or_default());
        let count = left / Scratch::LINE;
        if lines.len() < count {
            lines.resize(count, Line([0.0; Scratch::LINE]));
        }
        work(lay_out(&mut Scratch { next: lines.as_mut_ptr().cast(), left }));
        FREE.with_borrow_mut(|free| free.push(lines));
    }

    /// Takes the next `len` floats.
    ///
    /// # Panics
    /// If the memory that was measured does not suffice.
    pub fn take(&mut self, len: usize) -> *mut f32 {
        let len = len.next_multiple_of(Scratch::LINE);
        assert!(len <= self.left, "scratch of {} floats left, {len} wanted", self.left);
        let part = self.next;
        self.next = part.wrapping_add(len);
        self.left -= len;
        part
    }
}

/// A task that works in scratch memory.
pub(super) trait ScratchTask {
    /// The parts of scratch memory that the task uses.
    type Parts;

    /// Takes the parts. The same parts have to be taken in each call.
    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> Self::Parts;

    /// Does the work. An implementation is `#[inline(always)]`, as [`Task::run`] is.
    ///
    /// # Safety
    /// The caller guarantees that `parts` come from `lay_out` for the same `S`, and that the
    /// memory is the task's alone while it works.
    unsafe fn work<S: Simd>(&self, simd: S, parts: Self::Parts);
}

/// Runs a task in this thread's scratch memory.
pub(super) struct InScratch<T>(pub T);

impl<T: ScratchTask> Task for InScratch<T> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let task = &self.0;
        Scratch::with(
            |scratch| task.lay_out::<S>(scratch),
            |parts| simd.vectorize(WithParts { task, parts }),
        );
    }
}

/// A task with its parts of scratch memory. What a closure calls is compiled without the
/// instructions of `S`, so [`InScratch`] calls the work by [`Simd::vectorize`] once more.
struct WithParts<'a, T: ScratchTask> {
    task: &'a T,
    parts: T::Parts,
}

impl<T: ScratchTask> Task for WithParts<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: `InScratch` is the only user: it laid the parts out for the same `S`, and
        // `Scratch::with` keeps them from all other tasks meanwhile.
        unsafe { self.task.work(simd, self.parts) }
    }
}
