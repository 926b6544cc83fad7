//! What a rank needs beside its inputs and outputs, and where in the workspace it lies.

use std::collections::BTreeMap;
use std::ops::Range;

use burst_attention_kernels::launch::MAX_VIEW_BYTES;

use super::last::Last;
use super::memory::{ALIGNMENT, Array, Buffer, Region, bytes, runs};
use super::tape::Queue;
use crate::problem::{Features, Pass, Problem};
use crate::schedule::{Chunk, Payload, Place, Schedule};

/// The parts of a workspace, as bytes from its start. It depends on shapes alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Workspace {
    parts: BTreeMap<Region, Range<u64>>,
    /// Its length.
    pub bytes: u64,
}

impl Workspace {
    /// For one rank: accumulators of its own rows as far as one tile does not do it all, the
    /// statistics of the backward pass, a buffer for each slot as large as its largest chunk, and
    /// for each queue room to put statistics together that are sent in part.
    pub fn of_rank(problem: &Problem, schedule: &Schedule, last: &Last) -> Workspace {
        let mut sizes: BTreeMap<Region, u64> = BTreeMap::new();
        let pass = schedule.pass;
        let mut need = |region, bytes: u64| {
            let size = sizes.entry(region).or_default();
            *size = bytes.max(*size);
        };
        for (payload, len) in own(problem, pass) {
            if last.needs_state(payload) || takes_several_launches(problem, payload) {
                need(Region::Home(payload), bytes(problem, payload, pass, &(0..len)));
            }
        }
        if pass == Pass::Backward {
            need(Region::Home(Payload::Queries), statistics(problem, 0..problem.q_len, 0).1);
        }
        if problem.features.segments {
            need(Region::SegmentRanges, ranges(problem));
        }
        for step in &schedule.steps {
            let slot = |place| match place {
                Place::Slot(slot) => Some(slot),
                Place::Home => None,
            };
            let receives = step.exchanges.iter().flat_map(|exchange| &exchange.receives);
            let arriving = receives.filter_map(|t| Some((&t.chunk, slot(t.place)?)));
            let opened = step.opens.iter().map(|(chunk, slot)| (chunk, *slot));
            for (Chunk { payload, rows, .. }, slot) in arriving.chain(opened) {
                need(Region::Slot(*payload, slot), bytes(problem, *payload, pass, rows));
            }
            for exchange in &step.exchanges {
                let sends = exchange.sends.iter();
                let packed = sends.map(|send| packed(problem, pass, &send.chunk)).sum::<u64>();
                need(Region::Staging(Queue::of(exchange, step.index)), packed);
            }
        }
        let mut end = 0;
        let place = |(region, size): (Region, u64)| {
            let start = end;
            end = (start + size).next_multiple_of(ALIGNMENT);
            (region, start..start + size)
        };
        let parts = sizes.into_iter().filter(|(_, size)| *size > 0).map(place).collect();
        Workspace { parts, bytes: end }
    }

    /// Bytes that are enough on every rank. A batch several times as large needs at most as many
    /// times more.
    /// With `fused`, that is also true where no fused kernel computes the backward pass.
    pub fn bytes(problem: &Problem, schedules: &[Schedule], fused: bool) -> u64 {
        let of_rank = |schedule: &Schedule| {
            Workspace::of_rank(problem, schedule, &Last::of(problem, schedule, fused)).bytes
        };
        schedules.iter().map(of_rank).max().unwrap_or(0)
    }

    /// Where a part starts, in a workspace that starts at `base`.
    pub fn at(&self, region: Region, base: u64) -> Option<u64> {
        self.parts.get(&region).map(|part| base + part.start)
    }
}

/// Bytes of what one launch finds out about the segments of its resident rows.
fn ranges(problem: &Problem) -> u64 {
    let Problem { batch, q_len, kv_len, .. } = *problem;
    (batch * q_len.max(kv_len).div_ceil(64) * 4 * 4) as u64
}

/// The accumulators of a rank's own rows.
pub fn own(problem: &Problem, pass: Pass) -> Vec<(Payload, usize)> {
    match pass {
        Pass::Forward => vec![(Payload::Partial, problem.q_len)],
        Pass::Backward => {
            vec![(Payload::QueryGrads, problem.q_len), (Payload::KeyGrads, problem.kv_len)]
        }
    }
}

/// May one tile take several launches, which hand on a state? One that is too large for a launch
/// does, for gradients of keys one whose queries have statistics in several arrays, and with slopes
/// one of several pieces.
fn takes_several_launches(problem: &Problem, payload: Payload) -> bool {
    let Problem { q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *problem;
    let elements = (q_len * heads).max(kv_len * kv_heads) * head_dim.max(value_dim);
    let several = problem.features.slopes && problem.layout.pieces(0, 2, q_len).len() > 1;
    let cut = payload == Payload::KeyGrads && runs(problem, &(0..q_len)).len() > 1 || several;
    4 * elements as u64 >= MAX_VIEW_BYTES || cut
}

/// The two statistics of query rows in the backward pass from `address` on, and where they end.
pub fn statistics(problem: &Problem, rows: Range<usize>, address: u64) -> (Vec<Array>, u64) {
    // Queries whose vectors have no elements leave the statistics alone.
    let (head_dim, value_dim, features) = (0, 0, Features::default());
    let bare = Problem { head_dim, value_dim, features, ..problem.clone() };
    let region = Region::Home(Payload::Queries);
    let made = Buffer::at(&bare, region, Pass::Backward, rows, address);
    let (buffer, end) = made.unwrap_or_else(|| unreachable!("queries have arrays"));
    (buffer.arrays.into_iter().skip(2).collect(), end)
}

/// Bytes of what a chunk sends that has to be put together first. Which buffer it is sent from is
/// not looked at, so this may be more than is needed.
fn packed(problem: &Problem, pass: Pass, chunk: &Chunk) -> u64 {
    let whole = chunk.rows == (0..problem.q_len);
    match (chunk.payload, pass) {
        (Payload::Queries, Pass::Backward) | (Payload::Partial, _) if !whole => {
            statistics(problem, chunk.rows.clone(), 0).1
        }
        _ => 0,
    }
}
