//! One rank's computation on a GPU: tiles become launches on the tape.

use std::ops::Range;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{self, Delta, Finish, Forward, Join};

use super::last::Last;
use super::memory::{Buffer, runs};
use super::rank::{Arrays, Memory};
use super::recording::{Recording, reads, writes};
use crate::error::{Error, Result};
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::problem::{Dtype, Problem};
use crate::schedule::{Chunk, Merge, Payload, Place, Schedule, State, Tile};

/// Puts the launches of one rank on a tape.
#[derive(Debug)]
pub struct TapeKernel<'a> {
    schedule: &'a Schedule,
    pub(super) target: Target,
    pub(super) element: Element,
    pub(super) memory: Memory<'a>,
    last: &'a Last,
    pub(super) tape: &'a Recording,
    /// How many steps the engine has begun.
    begun: usize,
    /// Tiles of this step that have had their turn, in each of the two halves of a backward tile.
    turns: [usize; 2],
    /// Whether one kernel computes all gradients of a tile and adds to dq at home, in any order.
    pub(super) fused: bool,
}

/// The CUDA kernels' name of a type.
///
/// # Errors
/// [`Error::Unsupported`] for float32.
pub fn element_of(dtype: Dtype) -> Result<Element> {
    match dtype {
        Dtype::Bf16 => Ok(Element::Bf16),
        Dtype::F16 => Ok(Element::F16),
        Dtype::F32 => Err(Error::Unsupported {
            what: "float32".into(),
            executor: "CUDA",
            instead: "cast query, key and value to bfloat16 or float16 (sums are float32 all the \
                      same), or compute on CPU devices"
                .into(),
        }),
    }
}

impl<'a> TapeKernel<'a> {
    /// For one rank's schedule.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for float32.
    pub fn new(
        schedule: &'a Schedule,
        target: Target,
        memory: Memory<'a>,
        last: &'a Last,
        tape: &'a Recording,
        fused: bool,
    ) -> Result<TapeKernel<'a>> {
        let element = element_of(memory.problem.dtype)?;
        Ok(TapeKernel {
            schedule,
            target,
            element,
            memory,
            last,
            tape,
            begun: 0,
            turns: [0; 2],
            fused,
        })
    }

    /// Both gradients of a backward tile whose turn it is in `half`, of the accumulators that
    /// `wanted` says.
    fn backward(
        &mut self,
        half: usize,
        tile: &Tile,
        operands: &BackwardOperands<'_, Buffer>,
        wanted: impl Fn(State) -> bool,
    ) -> Result<()> {
        let turn = self.turns[half];
        self.turns[half] += 1;
        let inputs = (operands.queries, operands.keys);
        let step = self.tape.step();
        if let Some(sums) = operands.key_grads.filter(|_| wanted(tile.key_state)) {
            let is_last = self.last.is_tile(Payload::KeyGrads, step, turn);
            self.key_grads(tile, inputs, sums, is_last)?;
        }
        let query_grads = operands.query_grads.filter(|_| !self.fused);
        if let Some(sums) = query_grads.filter(|_| wanted(tile.query_state)) {
            let is_last = self.last.is_tile(Payload::QueryGrads, step, turn);
            self.query_grads(tile, inputs, sums, is_last)?;
        }
        Ok(())
    }

    /// Writes the results of rows: their sums at home, with those that came home if there are.
    fn write(&self, payload: Payload, rows: &Range<usize>, arrived: Option<&Buffer>) -> Result<()> {
        let Arrays::Backward { dq, dk, dv, .. } = self.memory.arrays else {
            return self.wrong_pass("gradients");
        };
        let results = if payload == Payload::KeyGrads { vec![dk, dv] } else { vec![dq] };
        let home = self.memory.home(payload);
        let (heads, dims) = self.sums(payload);
        let unscaled = self.fused && payload == Payload::QueryGrads;
        let scale = if unscaled { self.memory.problem.softmax_scale } else { 1.0 };
        for (n, (address, head_dim)) in results.into_iter().zip(dims).enumerate() {
            let launches = Finish {
                batch: self.memory.problem.batch,
                rows: rows.len(),
                heads,
                head_dim,
                element: self.element,
                a: home.rows_at(n, rows),
                b: arrived.map(|arrived| arrived.rows_at(n, rows)),
                out: self.memory.result(address, payload, head_dim).rows_at(0, rows),
                scale,
            };
            let uses = [reads(home.region)].into_iter().chain(arrived.map(|b| reads(b.region)));
            self.push(launches.launches(self.target)?, &Vec::from_iter(uses));
        }
        Ok(())
    }

    /// Heads of the arrays of gradients, and columns of each.
    fn sums(&self, payload: Payload) -> (usize, Vec<usize>) {
        let Problem { heads, kv_heads, head_dim, value_dim, .. } = *self.memory.problem;
        match payload {
            Payload::KeyGrads => (kv_heads, vec![head_dim, value_dim]),
            _ => (heads, vec![head_dim]),
        }
    }

    /// Adds sums that came home to those at home.
    fn add(&self, payload: Payload, rows: &Range<usize>, arrived: &Buffer) -> Result<()> {
        let home = self.memory.home(payload);
        let (heads, dims) = self.sums(payload);
        for (n, head_dim) in dims.into_iter().enumerate() {
            let merge = launch::Merge {
                batch: self.memory.problem.batch,
                rows: rows.len(),
                heads,
                head_dim,
                home: home.rows_at(n, rows),
                arrived: arrived.rows_at(n, rows),
            };
            let uses = [writes(home.region), reads(arrived.region)];
            self.push(merge.launches(self.target)?, &uses);
        }
        Ok(())
    }

    /// Joins the softmax states of rows that came home with those at home; the last one writes
    /// results.
    fn join(&self, rows: &Range<usize>, arrived: &Buffer, last: bool) -> Result<()> {
        let Arrays::Forward { o, lse, .. } = self.memory.arrays else {
            return self.wrong_pass("softmax states");
        };
        let Problem { batch, heads, value_dim, .. } = *self.memory.problem;
        let home = self.memory.home(Payload::Partial);
        let o = self.memory.result(o, Payload::Queries, value_dim);
        let lse = self.memory.per_query(lse);
        for part in &runs(self.memory.problem, rows) {
            let state = |buffer: &Buffer| launch::State {
                acc: buffer.rows_at(0, part),
                row_max: buffer.statistics_at(1, part),
                row_sum: buffer.statistics_at(2, part),
            };
            let launches = Join {
                batch,
                q_len: part.len(),
                heads,
                head_dim: value_dim,
                element: self.element,
                home: state(&home),
                came: state(arrived),
                o: last.then(|| o.rows_at(0, part)),
                lse: last.then(|| lse.rows_at(0, part)),
                last,
            };
            let uses = [writes(home.region), reads(arrived.region)];
            self.push(launches.launches(self.target)?, &uses);
        }
        Ok(())
    }

    pub(super) fn broken<R>(&self, what: impl Into<String>) -> Result<R> {
        let (rank, step) = (self.schedule.rank, self.tape.step());
        Err(Error::BrokenSchedule { rank, step, what: what.into() })
    }

    pub(super) fn wrong_pass<R>(&self, what: &str) -> Result<R> {
        self.broken(format!("{what} are asked for, but the arrays are those of the other pass"))
    }
}

impl AttentionKernel for TapeKernel<'_> {
    type Buffer = Buffer;

    fn home(&mut self, payload: Payload) -> Result<Buffer> {
        Ok(self.memory.home(payload))
    }

    fn accumulator(&mut self, chunk: &Chunk, slot: usize) -> Result<Buffer> {
        match self.memory.slot(chunk.payload, slot, &chunk.rows) {
            Some(buffer) => Ok(buffer),
            None => self.broken(format!("the workspace has no slot {slot} for {chunk}")),
        }
    }

    fn forward(
        &mut self,
        tile: &Tile,
        queries: &Buffer,
        keys: &Buffer,
        partial: &Buffer,
    ) -> Result<()> {
        let Arrays::Forward { o, lse, .. } = self.memory.arrays else {
            return self.wrong_pass("outputs");
        };
        let State { first, last, .. } = tile.query_state;
        let o = self.memory.result(o, Payload::Queries, self.memory.problem.value_dim);
        let lse = self.memory.per_query(lse);
        let key_parts = self.key_parts(&tile.keys.rows);
        for part in &self.parts(&tile.queries.rows) {
            for (n, rows) in key_parts.iter().enumerate() {
                let last = last && n + 1 == key_parts.len();
                let launches = Forward {
                    rectangle: self.rectangle(part, rows, tile.band),
                    features: self.features(tile, (queries, part), (keys, rows), part.len()),
                    q: queries.rows_at(0, part),
                    k: keys.rows_at(0, rows),
                    v: keys.rows_at(1, rows),
                    acc: partial.given_rows_at(0, part),
                    row_max: partial.given_statistics_at(1, part),
                    row_sum: partial.given_statistics_at(2, part),
                    o: last.then(|| o.rows_at(0, part)),
                    lse: last.then(|| lse.rows_at(0, part)),
                    first: first && n == 0,
                    last,
                };
                let uses = [reads(queries.region), reads(keys.region), writes(partial.region)];
                self.push_tile(launches.launches(self.target)?, &uses);
            }
        }
        Ok(())
    }

    fn delta(&mut self) -> Result<()> {
        let Arrays::Backward { o, lse, dlse, .. } = self.memory.arrays else {
            return self.wrong_pass("delta");
        };
        let Problem { batch, q_len, heads, value_dim: head_dim, .. } = *self.memory.problem;
        let queries = self.memory.home(Payload::Queries);
        let o = self.memory.result(o, Payload::Queries, head_dim);
        let [lse, dlse] = [lse, dlse].map(|address| self.memory.per_query(address));
        let sums = self.fused.then(|| self.memory.home(Payload::QueryGrads));
        for part in &self.parts(&(0..q_len)) {
            let launches = Delta {
                batch,
                q_len: part.len(),
                heads,
                head_dim,
                element: self.element,
                o: o.rows_at(0, part),
                dout: queries.rows_at(1, part),
                lse: lse.rows_at(0, part),
                dlse: Some(dlse.rows_at(0, part)),
                lse_log2: queries.statistics_at(2, part),
                delta: queries.statistics_at(3, part),
                zeros: sums.as_ref().map(|sums| sums.rows_at(0, part)),
            };
            let uses = [writes(queries.region)].into_iter();
            let uses = uses.chain(sums.iter().map(|sums| writes(sums.region)));
            self.push(launches.launches(self.target)?, &Vec::from_iter(uses));
        }
        Ok(())
    }

    /// What is at home may be added to while the travelling accumulator is on its way.
    fn backward_begin(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, Buffer>,
    ) -> Result<()> {
        self.backward(0, tile, &operands, |state| state.place == Place::Home)
    }

    fn backward_finish(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, Buffer>,
    ) -> Result<()> {
        self.backward(1, tile, &operands, |state| state.place != Place::Home)
    }

    fn merge(&mut self, merge: &Merge, arrived: &Buffer) -> Result<()> {
        let Chunk { payload, rows, .. } = &merge.chunk;
        match (payload, merge.last) {
            (Payload::Partial, last) => self.join(rows, arrived, last),
            (_, true) => self.write(*payload, rows, Some(arrived)),
            (_, false) => self.add(*payload, rows, arrived),
        }
    }

    fn finish(&mut self) -> Result<()> {
        let mut unfinished = self.last.unfinished().iter();
        unfinished.try_for_each(|(payload, rows)| self.write(*payload, rows, None))
    }

    fn step(&mut self, _index: usize, _name: std::fmt::Arguments<'_>) {
        self.tape.begin(self.schedule.steps[self.begun].index);
        self.begun += 1;
        self.turns = [0; 2];
    }
}
