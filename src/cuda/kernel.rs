//! One rank's computation on a GPU: tiles become launches on the tape.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    Delta, Finish, Forward, KeyGrads, Launch, QueryGrads, Rectangle,
};

use super::last::Last;
use super::memory::{Buffer, Region, runs};
use super::rank::{Arrays, Memory};
use super::tape::{Op, Queue, Use, Work};
use crate::error::{Error, Result};
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::mask::Band;
use crate::problem::{Dtype, Problem};
use crate::schedule::{Chunk, Merge, Payload, Place, Schedule, State, Tile};

/// The tape that a rank's kernels and its transport share, and the step the engine is at.
#[derive(Debug, Default)]
pub struct Recording {
    ops: RefCell<Vec<Op>>,
    step: Cell<usize>,
}

impl Recording {
    /// Appends an operation of the current step.
    pub fn push(&self, queue: Queue, work: Work, uses: Vec<Use>) {
        self.ops.borrow_mut().push(Op { queue, step: self.step.get(), work, uses });
    }

    /// Index of the current step.
    pub fn step(&self) -> usize {
        self.step.get()
    }

    /// What was appended.
    pub fn into_ops(self) -> Vec<Op> {
        self.ops.into_inner()
    }
}

/// Puts the launches of one rank on a tape.
#[derive(Debug)]
pub struct TapeKernel<'a> {
    schedule: &'a Schedule,
    target: Target,
    element: Element,
    memory: Memory<'a>,
    last: &'a Last,
    tape: &'a Recording,
    /// How many steps the engine has begun.
    begun: usize,
    /// Tiles of this step that have had their turn, in each of the two halves of a backward tile.
    turns: [usize; 2],
}

pub(super) fn reads(region: Region) -> Use {
    Use { rank: 0, region, writes: false }
}

pub(super) fn writes(region: Region) -> Use {
    Use { rank: 0, region, writes: true }
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
    ) -> Result<TapeKernel<'a>> {
        let element = element_of(memory.problem.dtype)?;
        Ok(TapeKernel { schedule, target, element, memory, last, tape, begun: 0, turns: [0; 2] })
    }

    fn rectangle(&self, queries: &Range<usize>, keys: &Range<usize>, band: Band) -> Rectangle {
        let Problem { batch, heads, kv_heads, head_dim, softmax_scale, .. } = *self.memory.problem;
        // The band counts from the owners' first rows, a rectangle's from its own.
        let shift = queries.start as i64 - keys.start as i64;
        let shifted = |limit: i64| match limit {
            i64::MIN | i64::MAX => limit,
            limit => limit + shift,
        };
        Rectangle {
            batch,
            q_len: queries.len(),
            kv_len: keys.len(),
            heads,
            kv_heads,
            head_dim,
            element: self.element,
            lower: shifted(band.lower),
            upper: shifted(band.upper),
            softmax_scale,
        }
    }

    fn push(&self, launches: Vec<Launch>, uses: &[Use]) {
        for launch in launches {
            self.tape.push(Queue::Compute, Work::Launch(launch), uses.to_vec());
        }
    }

    /// The parts of a tile whose statistics lie in one array.
    fn parts(&self, queries: &Range<usize>) -> Vec<Range<usize>> {
        // A tile without queries only defines the state of its keys.
        if queries.is_empty() { vec![queries.clone()] } else { runs(self.memory.problem, queries) }
    }

    fn key_grads(
        &self,
        tile: &Tile,
        (queries, keys): (&Buffer, &Buffer),
        sums: &Buffer,
        is_last: bool,
    ) -> Result<()> {
        let rows = &tile.keys.rows;
        if rows.is_empty() {
            return Ok(());
        }
        let Arrays::Backward { dk, dv, .. } = self.memory.arrays else {
            return self.wrong_pass("key gradients");
        };
        let [dk, dv] = [dk, dv].map(|address| self.memory.result(address, Payload::KeyGrads));
        let parts = self.parts(&tile.queries.rows);
        for (n, part) in parts.iter().enumerate() {
            let launches = KeyGrads {
                rectangle: self.rectangle(part, rows, tile.band),
                general: None,
                q: queries.rows_at(0, part),
                k: keys.rows_at(0, rows),
                v: keys.rows_at(1, rows),
                dout: queries.rows_at(1, part),
                lse_log2: queries.statistics_at(2, part),
                delta: queries.statistics_at(3, part),
                dk_acc: sums.given_rows_at(0, rows),
                dv_acc: sums.given_rows_at(1, rows),
                dk: is_last.then(|| dk.rows_at(0, rows)),
                dv: is_last.then(|| dv.rows_at(0, rows)),
                first: tile.key_state.first && n == 0,
                last: is_last && n + 1 == parts.len(),
            };
            let uses = [reads(queries.region), reads(keys.region), writes(sums.region)];
            self.push(launches.launches(self.target)?, &uses);
        }
        Ok(())
    }

    fn query_grads(
        &self,
        tile: &Tile,
        (queries, keys): (&Buffer, &Buffer),
        sums: &Buffer,
        is_last: bool,
    ) -> Result<()> {
        if tile.queries.rows.is_empty() {
            return Ok(());
        }
        let Arrays::Backward { dq, .. } = self.memory.arrays else {
            return self.wrong_pass("query gradients");
        };
        let dq = self.memory.result(dq, Payload::QueryGrads);
        for part in &self.parts(&tile.queries.rows) {
            let launches = QueryGrads {
                rectangle: self.rectangle(part, &tile.keys.rows, tile.band),
                general: None,
                q: queries.rows_at(0, part),
                k: keys.rows_at(0, &tile.keys.rows),
                v: keys.rows_at(1, &tile.keys.rows),
                dout: queries.rows_at(1, part),
                lse_log2: queries.statistics_at(2, part),
                delta: queries.statistics_at(3, part),
                dq_acc: sums.given_rows_at(0, part),
                dq: is_last.then(|| dq.rows_at(0, part)),
                first: tile.query_state.first,
                last: is_last,
            };
            let uses = [reads(queries.region), reads(keys.region), writes(sums.region)];
            self.push(launches.launches(self.target)?, &uses);
        }
        Ok(())
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
        let step = self.tape.step.get();
        if let Some(sums) = operands.key_grads.filter(|_| wanted(tile.key_state)) {
            let is_last = self.last.is_tile(Payload::KeyGrads, step, turn);
            self.key_grads(tile, inputs, sums, is_last)?;
        }
        if let Some(sums) = operands.query_grads.filter(|_| wanted(tile.query_state)) {
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
        let Problem { batch, heads, kv_heads, head_dim, .. } = *self.memory.problem;
        for (n, address) in results.into_iter().enumerate() {
            let launches = Finish {
                batch,
                rows: rows.len(),
                heads: if payload == Payload::KeyGrads { kv_heads } else { heads },
                head_dim,
                element: self.element,
                a: home.rows_at(n, rows),
                b: arrived.map(|arrived| arrived.rows_at(n, rows)),
                out: self.memory.result(address, payload).rows_at(0, rows),
            };
            let uses = [reads(home.region)].into_iter().chain(arrived.map(|b| reads(b.region)));
            self.push(launches.launches(self.target)?, &Vec::from_iter(uses));
        }
        Ok(())
    }

    fn broken<R>(&self, what: impl Into<String>) -> Result<R> {
        let (rank, step) = (self.schedule.rank, self.tape.step.get());
        Err(Error::BrokenSchedule { rank, step, what: what.into() })
    }

    fn wrong_pass<R>(&self, what: &str) -> Result<R> {
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
        let (o, lse) = (self.memory.result(o, Payload::Queries), self.memory.per_query(lse));
        for part in &self.parts(&tile.queries.rows) {
            let launches = Forward {
                rectangle: self.rectangle(part, &tile.keys.rows, tile.band),
                general: None,
                q: queries.rows_at(0, part),
                k: keys.rows_at(0, &tile.keys.rows),
                v: keys.rows_at(1, &tile.keys.rows),
                acc: partial.given_rows_at(0, part),
                row_max: partial.given_statistics_at(1, part),
                row_sum: partial.given_statistics_at(2, part),
                o: last.then(|| o.rows_at(0, part)),
                lse: last.then(|| lse.rows_at(0, part)),
                first,
                last,
            };
            let uses = [reads(queries.region), reads(keys.region), writes(partial.region)];
            self.push(launches.launches(self.target)?, &uses);
        }
        Ok(())
    }

    fn delta(&mut self) -> Result<()> {
        let Arrays::Backward { o, lse, dlse, .. } = self.memory.arrays else {
            return self.wrong_pass("delta");
        };
        let Problem { batch, q_len, heads, head_dim, .. } = *self.memory.problem;
        let queries = self.memory.home(Payload::Queries);
        let o = self.memory.result(o, Payload::Queries);
        let [lse, dlse] = [lse, dlse].map(|address| self.memory.per_query(address));
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
            };
            self.push(launches.launches(self.target)?, &[writes(queries.region)]);
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
        if *payload == Payload::Partial {
            return Err(Error::Unsupported {
                what: "a forward ring in which queries travel".into(),
                executor: "CUDA",
                instead: "keys and values travel".into(),
            });
        }
        if !self.last.is_merge(*payload, rows.start) {
            return self.broken(format!("{} is added to after it came home", merge.chunk));
        }
        self.write(*payload, rows, Some(arrived))
    }

    fn finish(&mut self) -> Result<()> {
        let mut unfinished = self.last.unfinished().iter();
        unfinished.try_for_each(|(payload, rows)| self.write(*payload, rows, None))
    }

    fn step(&mut self, _name: std::fmt::Arguments<'_>) {
        self.tape.step.set(self.schedule.steps[self.begun].index);
        self.begun += 1;
        self.turns = [0; 2];
    }
}
