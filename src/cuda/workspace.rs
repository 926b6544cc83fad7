//! The workspace: the memory that a rank needs besides its inputs and outputs.

use std::collections::BTreeMap;
use std::ops::Range;

use burst_attention_kernels::launch::{MAX_VIEW_BYTES, Visible};

use super::buffer::{ALIGNMENT, Array, Buffer, sections};
use super::call::Call;
use super::final_writes::{FinalWrites, accumulators};
use super::region::{Queue, Region};
use super::tiles::scratch_bytes;
use crate::problem::{Features, Pass, Problem};
use crate::schedule::{Chunk, Payload, Place, Schedule};

/// The memory that XLA lends to a call as workspace: of one rank, or of all ranks in a virtual
/// ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workspace {
    /// The address of the first byte.
    pub address: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// The parts of one rank's workspace, as bytes from its start. They depend on shapes alone.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkspaceLayout {
    parts: BTreeMap<Region, Range<u64>>,
    /// The length of the workspace.
    pub bytes: u64,
}

impl WorkspaceLayout {
    /// Lays out the workspace of one rank. It holds the accumulators of the rank's own rows that
    /// need a state between launches, the statistics of the backward pass, a buffer for each slot
    /// as large as the slot's largest chunk, and for each queue the memory in which statistics are
    /// packed before a part of them is sent. Backends get scratch memory for one tile.
    pub fn of_rank(
        call: &Call,
        schedule: &Schedule,
        final_writes: &FinalWrites,
    ) -> WorkspaceLayout {
        let problem = &call.problem;
        let mut sizes: BTreeMap<Region, u64> = BTreeMap::new();
        let pass = schedule.pass;
        let mut need = |region, bytes: u64| {
            let size = sizes.entry(region).or_default();
            *size = bytes.max(*size);
        };
        let bytes = |payload, rows| Buffer::at(problem, (payload, Place::Home), pass, rows, 0).1;
        for (payload, len) in accumulators(problem, pass) {
            if final_writes.needs_state(payload) || takes_several_launches(problem, payload) {
                need(Region::Home(payload), bytes(payload, 0..len));
            }
        }
        if pass == Pass::Backward {
            need(Region::Home(Payload::Queries), statistics(problem, 0..problem.q_len, 0).1);
        }
        need(Region::Masks, masks(problem));
        need(Region::Scratch, scratch_bytes(call, schedule));
        for step in &schedule.steps {
            let receives = step.exchanges.iter().flat_map(|exchange| &exchange.receives);
            let arriving = receives.filter_map(|transfer| match transfer.place {
                Place::Slot(slot) => Some((&transfer.chunk, slot)),
                Place::Home => None,
            });
            let opened = step.opens.iter().map(|(chunk, slot)| (chunk, *slot));
            for (Chunk { payload, rows, .. }, slot) in arriving.chain(opened) {
                need(Region::Slot(*payload, slot), bytes(*payload, rows.clone()));
            }
            for exchange in &step.exchanges {
                let sends = exchange.sends.iter();
                let staged = sends.map(|send| staged(problem, pass, &send.chunk)).sum::<u64>();
                need(Region::Staging(Queue::of(exchange, step.index)), staged);
            }
        }
        let mut end = 0;
        let place = |(region, size): (Region, u64)| {
            let start = end;
            end = (start + size).next_multiple_of(ALIGNMENT);
            (region, start..start + size)
        };
        let parts = sizes.into_iter().filter(|(_, size)| *size > 0).map(place).collect();
        WorkspaceLayout { parts, bytes: end }
    }

    /// Returns the bytes that are enough on every rank. A batch n times as large needs at most n
    /// times as many. With `fused`, the bytes are also enough where no fused kernel computes the
    /// backward pass.
    pub fn bytes(call: &Call, schedules: &[Schedule], fused: bool) -> u64 {
        let of_rank = |schedule| {
            let final_writes = FinalWrites::of(&call.problem, schedule, fused);
            WorkspaceLayout::of_rank(call, schedule, &final_writes).bytes
        };
        schedules.iter().map(of_rank).max().unwrap_or(0)
    }

    /// Returns the address of a part, in a workspace that starts at `base`.
    pub fn at(&self, region: Region, base: u64) -> Option<u64> {
        self.parts.get(&region).map(|part| base + part.start)
    }
}

/// Returns the bytes in which launches pack masks as data, or keep the segment ranges of resident
/// rows.
fn masks(problem: &Problem) -> u64 {
    let Problem { batch, q_len, kv_len, features, .. } = *problem;
    match (features.has_query_positions(), features.segments) {
        (true, _) => Visible::workspace_bytes(batch, q_len, kv_len),
        (false, true) => (batch * q_len.max(kv_len).div_ceil(64) * 4 * 4) as u64,
        (false, false) => 0,
    }
}

/// Whether one tile may take several launches, which hand on a state. A tile does if it is too
/// large for one launch, or if kernels count places and the layout has several strided
/// ranges. For gradients of keys, it also does if the statistics of its queries lie in several
/// arrays.
fn takes_several_launches(problem: &Problem, payload: Payload) -> bool {
    let Problem { q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *problem;
    let elements = (q_len * heads).max(kv_len * kv_heads) * head_dim.max(value_dim);
    let several =
        problem.features.count_positions() && problem.layout.strided_ranges(0, 2, q_len).len() > 1;
    let cut = payload == Payload::KeyGrads && sections(problem, &(0..q_len)).len() > 1 || several;
    4 * elements as u64 >= MAX_VIEW_BYTES || cut
}

/// Returns the two statistics of query rows in the backward pass from `address` on, and their end.
pub fn statistics(problem: &Problem, rows: Range<usize>, address: u64) -> (Vec<Array>, u64) {
    // Vectors without elements take no memory, so only the statistics do.
    let (head_dim, value_dim, features) = (0, 0, Features::default());
    let bare = Problem { head_dim, value_dim, features, ..problem.clone() };
    let queries = (Payload::Queries, Place::Home);
    let (buffer, end) = Buffer::at(&bare, queries, Pass::Backward, rows, address);
    (buffer.arrays.into_iter().skip(2).collect(), end)
}

/// Returns the bytes of a chunk that have to be packed before they are sent. It does not depend on
/// the buffer of the chunk, so it may be more than is needed.
fn staged(problem: &Problem, pass: Pass, chunk: &Chunk) -> u64 {
    let whole = chunk.rows == (0..problem.q_len);
    match (chunk.payload, pass) {
        (Payload::Queries, Pass::Backward) | (Payload::Partial, _) if !whole => {
            statistics(problem, chunk.rows.clone(), 0).1
        }
        _ => 0,
    }
}
