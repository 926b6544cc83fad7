//! One rank's memory: XLA's arrays and the workspace.

use std::ops::Range;

use burst_attention_kernels::launch::Rows;

use super::memory::{Array, Buffer, Region};
use super::tape::Queue;
use super::workspace::{Workspace, statistics};
use crate::problem::{Pass, Problem};
use crate::schedule::Payload;

/// Addresses of what the features of a problem need; any where they are off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Extras {
    /// int32 `[batch, seq]`, one for each query.
    pub q_segments: u64,
    /// int32 `[batch, seq]`, one for each key.
    pub k_segments: u64,
    /// float32 `[batch, heads]`
    pub slopes: u64,
    /// Of each batch entry the two words of a random key, the index of the entry, and that of the
    /// first query head, uint32 `[batch, 4]`.
    pub dropout: u64,
    /// Backward: what each query adds to the gradient of its head's slope, float32
    /// `[batch, seq, heads]`, zeros at first; 0 where nobody wants it.
    pub dslopes: u64,
}

/// Addresses of one rank's inputs and outputs, as XLA has them: row-major, without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrays {
    /// Of the forward pass.
    Forward {
        /// `[batch, seq, heads, head_dim]`
        q: u64,
        /// `[batch, seq, kv_heads, head_dim]`
        k: u64,
        /// `[batch, seq, kv_heads, value_dim]`
        v: u64,
        /// Result `[batch, seq, heads, value_dim]`.
        o: u64,
        /// Result, float32 `[batch, seq, heads]`.
        lse: u64,
        /// What features need.
        extras: Extras,
    },
    /// Of the backward pass.
    Backward {
        /// `[batch, seq, heads, head_dim]`
        q: u64,
        /// `[batch, seq, kv_heads, head_dim]`
        k: u64,
        /// `[batch, seq, kv_heads, value_dim]`
        v: u64,
        /// Of the forward pass `[batch, seq, heads, value_dim]`.
        o: u64,
        /// Of the forward pass, float32 `[batch, seq, heads]`.
        lse: u64,
        /// As `o`.
        dout: u64,
        /// As `lse`.
        dlse: u64,
        /// Result, as `q`.
        dq: u64,
        /// Result, as `k`.
        dk: u64,
        /// Result, as `v`.
        dv: u64,
        /// What features need.
        extras: Extras,
    },
}

impl Arrays {
    /// Those of a pass, the n-th of the list above at `at(n)`, those of features behind the ten of
    /// the backward pass.
    pub fn new(pass: Pass, at: impl Fn(u64) -> u64) -> Arrays {
        let [q, k, v, o, lse] = [0, 1, 2, 3, 4].map(&at);
        let [dout, dlse, dq, dk, dv] = [5, 6, 7, 8, 9].map(&at);
        let [q_segments, k_segments, slopes, dropout, dslopes] = [10, 11, 12, 13, 14].map(&at);
        let extras = Extras { q_segments, k_segments, slopes, dropout, dslopes };
        match pass {
            Pass::Forward => Arrays::Forward { q, k, v, o, lse, extras },
            Pass::Backward => Arrays::Backward { q, k, v, o, lse, dout, dlse, dq, dk, dv, extras },
        }
    }

    /// What features need.
    pub fn extras(&self) -> Extras {
        let (Arrays::Forward { extras, .. } | Arrays::Backward { extras, .. }) = *self;
        extras
    }

    /// The pass they belong to.
    pub fn pass(&self) -> Pass {
        match self {
            Arrays::Forward { .. } => Pass::Forward,
            Arrays::Backward { .. } => Pass::Backward,
        }
    }
}

/// Where one rank's memory lies.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// Inputs and outputs.
    pub arrays: Arrays,
    /// Start of the workspace.
    pub base: u64,
    /// Its parts.
    pub workspace: &'a Workspace,
}

impl Memory<'_> {
    /// The rank's own rows of a payload.
    pub fn home(&self, payload: Payload) -> Buffer {
        match payload {
            Payload::Queries => self.queries(),
            Payload::Keys => self.keys(),
            Payload::KeyGrads => self.own(payload, self.problem.kv_len),
            Payload::Partial | Payload::QueryGrads => self.own(payload, self.problem.q_len),
        }
    }

    /// A buffer for `rows` in a slot; none if the workspace has no such slot.
    pub fn slot(&self, payload: Payload, slot: usize, rows: &Range<usize>) -> Option<Buffer> {
        let region = Region::Slot(payload, slot);
        let address = self.workspace.at(region, self.base)?;
        let made = Buffer::at(self.problem, region, self.arrays.pass(), rows.clone(), address)?;
        Some(made.0)
    }

    /// Where what a queue sends is put together.
    pub fn staging(&self, queue: Queue) -> Option<u64> {
        self.workspace.at(Region::Staging(queue), self.base)
    }

    /// Room for what a launch finds out about the segments of `rows` resident rows.
    pub fn segment_ranges(&self, rows: usize) -> Rows {
        let address = self.workspace.at(Region::SegmentRanges, self.base).unwrap_or(0);
        Rows { address, batch_stride: 4 * rows.div_ceil(64) as u64 }
    }

    /// A result of the input's type: gradients as what they belong to, `dim` elements a head.
    pub fn result(&self, address: u64, payload: Payload, dim: usize) -> Buffer {
        let Problem { q_len, kv_len, heads, kv_heads, .. } = *self.problem;
        let (heads, len) = match payload {
            Payload::Keys | Payload::KeyGrads => (kv_heads, kv_len),
            _ => (heads, q_len),
        };
        let array = self.activations(address, heads * dim);
        Buffer::of(self.problem, payload, 0..len, vec![array])
    }

    /// Values `[batch, seq, heads]` in float32.
    pub fn per_query(&self, address: u64) -> Buffer {
        let Problem { q_len, heads, .. } = *self.problem;
        let array = Array::Rows { address, width: heads, element: 4 };
        Buffer::of(self.problem, Payload::Queries, 0..q_len, vec![array])
    }

    fn activations(&self, address: u64, width: usize) -> Array {
        Array::Rows { address, width, element: self.problem.dtype.bytes() }
    }

    /// Segments, if the problem has them.
    fn segments(&self, address: u64) -> Option<Array> {
        let array = Array::Rows { address, width: 1, element: 4 };
        self.problem.features.segments.then_some(array)
    }

    fn queries(&self) -> Buffer {
        let Problem { q_len, heads, head_dim, value_dim, .. } = *self.problem;
        let mut arrays = match self.arrays {
            Arrays::Forward { q, .. } => vec![self.activations(q, heads * head_dim)],
            Arrays::Backward { q, dout, .. } => {
                let region = Region::Home(Payload::Queries);
                let at = self.workspace.at(region, self.base).unwrap_or(0);
                let q = self.activations(q, heads * head_dim);
                let dout = self.activations(dout, heads * value_dim);
                [q, dout].into_iter().chain(statistics(self.problem, 0..q_len, at).0).collect()
            }
        };
        arrays.extend(self.segments(self.arrays.extras().q_segments));
        Buffer::of(self.problem, Payload::Queries, 0..q_len, arrays)
    }

    fn keys(&self) -> Buffer {
        let Problem { kv_len, kv_heads, head_dim, value_dim, .. } = *self.problem;
        let (Arrays::Forward { k, v, .. } | Arrays::Backward { k, v, .. }) = self.arrays;
        let mut arrays = vec![
            self.activations(k, kv_heads * head_dim),
            self.activations(v, kv_heads * value_dim),
        ];
        arrays.extend(self.segments(self.arrays.extras().k_segments));
        Buffer::of(self.problem, Payload::Keys, 0..kv_len, arrays)
    }

    /// An accumulator of this rank's own rows; without arrays where every tile does all of its
    /// rows, so that there is nothing to keep.
    fn own(&self, payload: Payload, len: usize) -> Buffer {
        let region = Region::Home(payload);
        let (problem, pass) = (self.problem, self.arrays.pass());
        let at = self.workspace.at(region, self.base);
        let made = at.and_then(|address| Buffer::at(problem, region, pass, 0..len, address));
        made.map_or_else(|| Buffer::of(problem, payload, 0..len, vec![]), |(buffer, _)| buffer)
    }
}
