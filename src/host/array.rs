//! Borrowed or shared strided arrays: what host kernels read and write.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::problem::Dtype;

/// Memory that the executor owns, 64-byte aligned, uninitialised to begin with.
#[derive(Debug)]
pub struct Storage {
    ptr: NonNull<u8>,
    layout: std::alloc::Layout,
}

impl Storage {
    /// Room for `len` float32 values. Their contents are arbitrary until written.
    pub fn new(len: usize) -> Arc<Storage> {
        let layout = std::alloc::Layout::from_size_align(len.max(1) * 4, 64)
            .expect("a payload fits the address space");
        // SAFETY: the layout has a size above zero.
        let ptr = unsafe { std::alloc::alloc(layout) };
        let Some(ptr) = NonNull::new(ptr) else { std::alloc::handle_alloc_error(layout) };
        Arc::new(Storage { ptr, layout })
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { std::alloc::dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

// SAFETY: `Storage` only owns memory; who touches which part when is decided by a schedule.
unsafe impl Send for Storage {}
// SAFETY: as above; there is no access through `&Storage`.
unsafe impl Sync for Storage {}

/// A view `[batch, rows, heads, dim]` with element strides for all but the last, contiguous, axis.
///
/// The memory belongs to the caller of the executor (XLA's buffers, `storage` is `None`) or is
/// kept alive by `storage`. Views may alias; which rows are written while others are read is
/// decided by the schedule and proven by its checks.
#[derive(Debug, Clone)]
pub struct HostArray {
    /// Element (0, `first_row`, 0, 0).
    pub ptr: NonNull<u8>,
    /// Element type.
    pub dtype: Dtype,
    /// Length of the batch axis.
    pub batch: usize,
    /// Local rows of the owner that the view covers.
    pub rows: Range<usize>,
    /// Length of the head axis.
    pub heads: usize,
    /// Length of the last axis; 1 for lse and delta.
    pub dim: usize,
    /// Elements between batch entries.
    pub batch_stride: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between heads.
    pub head_stride: usize,
    /// Keeps the memory alive where the executor owns it.
    pub storage: Option<Arc<Storage>>,
}

// SAFETY: a `HostArray` is a description of memory; all access to that memory is through the
// unsafe `row` pointers, whose users state why it is theirs.
unsafe impl Send for HostArray {}
// SAFETY: as above.
unsafe impl Sync for HostArray {}

impl HostArray {
    /// A row-major array `[batch, len, heads, dim]` as JAX has it.
    pub fn jax(ptr: NonNull<u8>, dtype: Dtype, [batch, len, heads, dim]: [usize; 4]) -> HostArray {
        HostArray {
            ptr,
            dtype,
            batch,
            rows: 0..len,
            heads,
            dim,
            batch_stride: len * heads * dim,
            row_stride: heads * dim,
            head_stride: dim,
            storage: None,
        }
    }

    /// A contiguous array `[batch, heads, rows, dim]`.
    pub fn by_head(
        ptr: NonNull<u8>,
        dtype: Dtype,
        [batch, heads, rows, dim]: [usize; 4],
    ) -> HostArray {
        HostArray {
            ptr,
            dtype,
            batch,
            rows: 0..rows,
            heads,
            dim,
            batch_stride: heads * rows * dim,
            row_stride: dim,
            head_stride: rows * dim,
            storage: None,
        }
    }

    /// New float32 memory, stored `[batch, heads, rows, dim]` so that a head's rows are adjacent.
    pub fn accumulator(batch: usize, rows: Range<usize>, heads: usize, dim: usize) -> HostArray {
        let shape = [batch, heads, rows.len(), dim];
        let storage = Storage::new(shape.iter().product());
        let array = HostArray::by_head(storage.ptr, Dtype::F32, shape);
        HostArray { rows, storage: Some(storage), ..array }
    }

    /// Address of element (batch, row, head, 0); `row` counts from the start of the owner's shard.
    ///
    /// # Panics
    /// In debug builds, if an index lies outside the view.
    pub fn row(&self, batch: usize, row: usize, head: usize) -> *mut u8 {
        debug_assert!(batch < self.batch && self.rows.contains(&row) && head < self.heads);
        let element = batch * self.batch_stride
            + (row - self.rows.start) * self.row_stride
            + head * self.head_stride;
        self.ptr.as_ptr().wrapping_add(element * self.dtype.bytes())
    }

    /// The same memory, restricted to `rows`.
    ///
    /// # Panics
    /// If `rows` are not all in the view.
    pub fn slice(&self, rows: Range<usize>) -> HostArray {
        assert!(self.rows.start <= rows.start && rows.end <= self.rows.end, "rows in the view");
        let skip = (rows.start - self.rows.start) * self.row_stride * self.dtype.bytes();
        // SAFETY: the offset stays inside the view (or one past its end for no rows).
        let ptr = unsafe { self.ptr.add(skip) };
        HostArray { ptr, rows, ..self.clone() }
    }

    /// Bytes of data in `rows`, without gaps.
    pub fn bytes(&self, rows: &Range<usize>) -> usize {
        self.batch * rows.len() * self.heads * self.dim * self.dtype.bytes()
    }
}
