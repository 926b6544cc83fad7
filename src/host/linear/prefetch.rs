//! Brings memory into the cache before it is needed.

use crate::host::matmul::Matrix;
use crate::host::pack::HeadRows;
use crate::host::simd::Simd;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows of `bytes` bytes, `stride` bytes apart.
#[derive(Clone, Copy)]
struct Stream {
    at: *const u8,
    stride: usize,
    bytes: usize,
    rows: usize,
}

const NONE: Stream = Stream { at: std::ptr::null(), stride: 0, bytes: 0, rows: 0 };

/// The rows that the next chunk reads. They are brought into the cache between parts of this
/// chunk's products. A head's rows lie far apart in the arrays, so the CPU does not foresee them:
/// without the prefetch both passes over 32,768 tokens of 8 heads, head_dim 64, take 5 to 9 %
/// longer.
pub(super) struct Prefetch {
    streams: [Stream; Prefetch::MOST],
    next: usize,
    pace: usize,
}

impl Prefetch {
    const MOST: usize = 5;

    /// Returns a prefetch of no rows.
    pub fn none() -> Prefetch {
        Prefetch { streams: [NONE; Prefetch::MOST], next: 0, pace: 0 }
    }

    /// Adds rows of an array.
    pub fn and(self, rows: &HeadRows<'_>) -> Prefetch {
        let HeadRows { array, batch, head, rows } = rows;
        let bytes = array.dtype.bytes();
        self.with(Stream {
            at: array.row(*batch, rows.start, *head),
            stride: array.row_stride * bytes,
            bytes: array.dim * bytes,
            rows: rows.len(),
        })
    }

    /// Adds rows of scratch.
    pub fn and_scratch(self, matrix: Matrix, rows: usize) -> Prefetch {
        let stride = matrix.row * size_of::<f32>();
        self.with(Stream { at: matrix.at.cast(), stride, bytes: stride, rows })
    }

    fn with(mut self, stream: Stream) -> Prefetch {
        if let Some(free) = self.streams.iter_mut().find(|stream| stream.rows == 0) {
            *free = stream;
        }
        self
    }

    /// Spreads all rows over a number of products. Each product calls [`Prefetch::fetch`] once for
    /// every few rows of a chunk.
    pub fn over(mut self, products: usize) -> Prefetch {
        const CALLS: usize = 11;
        let most = self.streams.iter().map(|stream| stream.rows).max().unwrap_or(0);
        self.pace = (most * Prefetch::MOST).div_ceil(products * CALLS);
        self
    }

    /// Asks for the next rows.
    #[inline(always)]
    pub fn fetch<S: Simd>(&mut self, simd: S) {
        for next in self.next..self.next + self.pace {
            let (stream, row) = (&self.streams[next % Prefetch::MOST], next / Prefetch::MOST);
            if row < stream.rows {
                let at = stream.at.wrapping_add(row * stream.stride);
                for skip in (0..stream.bytes).step_by(LINE) {
                    simd.prefetch(at.wrapping_add(skip));
                }
            }
        }
        self.next += self.pace;
    }
}
