//! The strided arrays that host kernels read and write.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::problem::Dtype;

/// Memory that the executor owns, aligned to 64 bytes.
#[derive(Debug)]
pub struct Storage {
    ptr: NonNull<u8>,
    layout: std::alloc::Layout,
}

impl Storage {
    /// Allocates `len` float32 values, which are arbitrary until something writes them.
    pub fn new(len: usize) -> Arc<Storage> {
        let layout = std::alloc::Layout::from_size_align(len.max(1) * 4, 64)
            .expect("a payload fits the address space");
        // SAFETY: `len.max(1)` makes the size of the layout larger than zero.
        let ptr = unsafe { std::alloc::alloc(layout) };
        let Some(ptr) = NonNull::new(ptr) else { std::alloc::handle_alloc_error(layout) };
        Arc::new(Storage { ptr, layout })
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: `new` allocated `ptr` with this layout, and nothing else frees the memory.
        unsafe { std::alloc::dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

// SAFETY: `Storage` owns memory that any thread may free, and gives no access to its contents.
unsafe impl Send for Storage {}
// SAFETY: `&Storage` gives no access to the contents either.
unsafe impl Sync for Storage {}

/// A view `[batch, rows, heads, dim]`. The last axis is contiguous, and each other axis has a
/// stride.
///
/// The memory belongs to the caller of the executor, as XLA's buffers do, or `storage` keeps it
/// alive. Views may alias. The schedule decides which rows are read and written at a time, and its
/// checks prove that nothing else touches rows while they are written.
#[derive(Debug, Clone)]
pub struct HostArray {
    /// Address of the first element of the first row in `rows`.
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
    /// The memory, if the executor owns it.
    pub storage: Option<Arc<Storage>>,
}

// SAFETY: a `HostArray` only describes memory. All access goes through pointers from `row`, and
// each user of such a pointer states why it may access the memory.
unsafe impl Send for HostArray {}
// SAFETY: `&HostArray` only gives pointers, whose users state why they may access the memory.
unsafe impl Sync for HostArray {}

impl HostArray {
    /// Describes a row-major array `[batch, len, heads, dim]`, as JAX has it.
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

    /// Describes a contiguous array `[batch, heads, rows, dim]`.
    pub fn by_head(
        ptr: NonNull<u8>,
        dtype: Dtype,
        [batch, heads, rows, dim]: [usize; 4],
    ) -> HostArray {
        let by_row = HostArray::jax(ptr, dtype, [batch, heads, rows, dim]);
        let (row_stride, head_stride) = (by_row.head_stride, by_row.row_stride);
        HostArray { rows: 0..rows, heads, row_stride, head_stride, ..by_row }
    }

    /// Allocates a float32 array `[batch, heads, rows, dim]`, in which a head's rows are adjacent.
    pub fn accumulator(batch: usize, rows: Range<usize>, heads: usize, dim: usize) -> HostArray {
        let shape = [batch, heads, rows.len(), dim];
        let storage = Storage::new(shape.iter().product());
        let array = HostArray::by_head(storage.ptr, Dtype::F32, shape);
        HostArray { rows, storage: Some(storage), ..array }
    }

    /// Returns the address of element (batch, row, head, 0). Rows count from the start of the
    /// owner's shard.
    ///
    /// # Panics
    /// In debug builds, if an index lies outside of the view.
    pub fn row(&self, batch: usize, row: usize, head: usize) -> *mut u8 {
        debug_assert!(batch < self.batch && self.rows.contains(&row) && head < self.heads);
        let element = batch * self.batch_stride
            + (row - self.rows.start) * self.row_stride
            + head * self.head_stride;
        self.ptr.as_ptr().wrapping_add(element * self.dtype.bytes())
    }

    /// Returns a view of `rows` alone.
    ///
    /// # Panics
    /// If the view lacks some of `rows`.
    pub fn slice(&self, rows: Range<usize>) -> HostArray {
        assert!(self.rows.start <= rows.start && rows.end <= self.rows.end, "rows in the view");
        let skip = (rows.start - self.rows.start) * self.row_stride * self.dtype.bytes();
        // SAFETY: the assertion keeps the offset in the view, or one past its end for no rows.
        // Whoever described the array guarantees its memory.
        let ptr = unsafe { self.ptr.add(skip) };
        HostArray { ptr, rows, ..self.clone() }
    }

    /// Returns a view of the first `dim` elements of the last axis.
    ///
    /// # Panics
    /// If the view has fewer.
    pub fn first_columns(&self, dim: usize) -> HostArray {
        assert!(dim <= self.dim, "columns in the view");
        HostArray { dim, ..self.clone() }
    }

    /// Returns the bytes of data in `rows`, without gaps.
    pub fn bytes(&self, rows: &Range<usize>) -> usize {
        self.batch * rows.len() * self.heads * self.dim * self.dtype.bytes()
    }
}
