//! The engine's kernels of one rank: tiles and accumulators become launches on the command list.

use std::ops::Range;

use burst_attention_kernels::launch::{
    self, Cast, CombineSoftmax, Delta, Forward, ForwardResults, KeyGrads, QueryGrads,
};

use super::buffer::{Buffer, sections};
use super::region::{Region, reads, writes};
use super::tiles::{CommandKernel, query_parts};
use crate::error::Result;
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::operands::{DeviceKind, Operand};
use crate::problem::Problem;
use crate::schedule::{Accumulator, Chunk, Merge, Payload, Place, Tile};

impl CommandKernel<'_> {
    /// Computes, in the first or second `half` of a backward tile, each gradient whose accumulator
    /// `wanted` accepts.
    fn backward(
        &mut self,
        half: usize,
        tile: &Tile,
        operands: &BackwardOperands<'_, Buffer>,
        wanted: impl Fn(Accumulator) -> bool,
    ) -> Result<()> {
        let (turn, step) = (self.turns[half], self.list.step());
        self.turns[half] += 1;
        let BackwardOperands { queries, keys, .. } = *operands;
        if let Some(sums) = operands.key_grads.filter(|_| wanted(tile.key_state)) {
            let is_last = self.final_writes.is_tile(Payload::KeyGrads, step, turn);
            self.key_grads(tile, [queries, keys, sums], is_last)?;
        }
        let query_grads = operands.query_grads.filter(|_| !self.operations.are_fused());
        if let Some(sums) = query_grads.filter(|_| wanted(tile.query_state)) {
            let is_last = self.final_writes.is_tile(Payload::QueryGrads, step, turn);
            self.query_grads(tile, [queries, keys, sums], is_last)?;
        }
        Ok(())
    }

    fn key_grads(&self, tile: &Tile, buffers: [&Buffer; 3], is_last: bool) -> Result<()> {
        if tile.keys.rows.is_empty() {
            return Ok(());
        }
        let [queries, keys, sums] = buffers;
        let [dk, dv] = [Operand::KeyGrad, Operand::ValueGrad].map(|it| self.memory.operand(it));
        // A tile without queries only defines the state of its keys.
        let adds = self.operations.are_fused() && !tile.queries.rows.is_empty();
        let dq_sums = adds.then(|| self.memory.home(Payload::QueryGrads));
        let ends = (tile.key_state.first, is_last);
        for part in self.parts(tile, (queries, keys), Payload::Keys, ends) {
            let operation = KeyGrads {
                rectangle: part.rectangle,
                features: part.features,
                q: part.q,
                k: part.k,
                v: part.v,
                dout: queries.rows_at(1, &part.queries),
                lse_log2: queries.statistics_at(2, &part.queries),
                delta: queries.statistics_at(3, &part.queries),
                dq_acc: dq_sums.as_ref().map(|sums| sums.rows_at(0, &part.queries)),
                fixed_order: self.operations.have_fixed_order(),
                results: self.results(queries, &part.queries),
                dk_acc: sums.optional_rows_at(0, &part.keys),
                dv_acc: sums.optional_rows_at(1, &part.keys),
                dk: is_last.then(|| dk.rows_at(0, &part.keys)),
                dv: is_last.then(|| dv.rows_at(0, &part.keys)),
                first: part.first,
                last: part.last,
            };
            self.push_tile(operation, buffers, dq_sums.as_ref())?;
        }
        Ok(())
    }

    /// Returns the results of some queries, if they are at home and delta follows from them.
    fn results(&self, queries: &Buffer, rows: &Range<usize>) -> Option<ForwardResults> {
        if self.lse_gradient || queries.region != Region::Home(Payload::Queries) {
            return None;
        }
        let at = |operand| self.memory.operand(operand).rows_at(0, rows);
        Some(ForwardResults { o: at(Operand::Out), lse: at(Operand::Lse) })
    }

    fn query_grads(&self, tile: &Tile, buffers: [&Buffer; 3], is_last: bool) -> Result<()> {
        if tile.queries.rows.is_empty() {
            return Ok(());
        }
        let [queries, keys, sums] = buffers;
        let dq = self.memory.operand(Operand::QueryGrad);
        let dslopes = self.memory.arrays.get(Operand::SlopeGrad);
        let dslopes = dslopes.map(|_| self.memory.operand(Operand::SlopeGrad));
        let ends = (tile.query_state.first, is_last);
        for part in self.parts(tile, (queries, keys), Payload::Queries, ends) {
            let operation = QueryGrads {
                rectangle: part.rectangle,
                features: part.features,
                q: part.q,
                k: part.k,
                v: part.v,
                dout: queries.rows_at(1, &part.queries),
                lse_log2: queries.statistics_at(2, &part.queries),
                delta: queries.statistics_at(3, &part.queries),
                dq_acc: sums.optional_rows_at(0, &part.queries),
                dq: is_last.then(|| dq.rows_at(0, &part.queries)),
                dslopes: dslopes.as_ref().map(|rows| rows.rows_at(0, &part.queries)),
                first: part.first,
                last: part.last,
            };
            self.push_tile(operation, buffers, None)?;
        }
        Ok(())
    }

    /// Returns each gradient whose sums are `payload`, and its columns.
    fn gradients(&self, payload: Payload) -> impl Iterator<Item = (Operand, usize)> {
        let problem = self.memory.problem;
        let heads = self.memory.heads_and_rows(payload).0;
        let columns = move |operand| problem.row(operand, DeviceKind::Cuda).0 / heads;
        payload.gradients(&problem.features).map(move |operand| (operand, columns(operand)))
    }

    /// Writes the results of rows: their sums at home, plus the sums that arrived, if any.
    fn write(&self, payload: Payload, rows: &Range<usize>, arrived: Option<&Buffer>) -> Result<()> {
        let home = self.memory.home(payload);
        let unscaled = self.operations.are_fused() && payload == Payload::QueryGrads;
        let scale = if unscaled { self.memory.problem.softmax_scale } else { 1.0 };
        for (n, (gradient, head_dim)) in self.gradients(payload).enumerate() {
            let operation = Cast {
                batch: self.memory.problem.batch,
                rows: rows.len(),
                heads: self.memory.heads_and_rows(payload).0,
                head_dim,
                element: self.element,
                a: home.rows_at(n, rows),
                b: arrived.map(|arrived| arrived.rows_at(n, rows)),
                out: self.memory.operand(gradient).rows_at(0, rows),
                scale,
            };
            let uses = [Some(&home), arrived].into_iter().flatten();
            self.push(operation, uses.map(|sums| reads(sums.region)))?;
        }
        Ok(())
    }

    /// Sets sums of dq to 0 · q: a query that is not finite has no finite gradient either.
    fn clear(&self, sums: &Buffer, queries: &Buffer, rows: &Range<usize>) -> Result<()> {
        let Problem { batch, heads, head_dim, .. } = *self.memory.problem;
        let operation = launch::AddGradient {
            batch,
            rows: rows.len(),
            heads,
            group: 1,
            head_dim,
            element: self.element,
            home: Some(sums.rows_at(0, rows)),
            arrived: queries.rows_at(0, rows),
            scale: 0.0,
            out: None,
            first: true,
            last: false,
        };
        self.push(operation, [writes(sums.region), reads(queries.region)])
    }

    /// Adds sums that arrived to the sums at home.
    fn accumulate(&self, payload: Payload, rows: &Range<usize>, arrived: &Buffer) -> Result<()> {
        let home = self.memory.home(payload);
        for (n, (_, head_dim)) in self.gradients(payload).enumerate() {
            let operation = launch::Accumulate {
                batch: self.memory.problem.batch,
                rows: rows.len(),
                heads: self.memory.heads_and_rows(payload).0,
                head_dim,
                home: home.rows_at(n, rows),
                arrived: arrived.rows_at(n, rows),
                scale: 1.0,
            };
            let uses = [writes(home.region), reads(arrived.region)];
            self.push(operation, uses)?;
        }
        Ok(())
    }

    /// Combines the softmax states of rows that arrived with the states at home. The last of them
    /// also writes the results.
    fn combine_softmax(&self, rows: &Range<usize>, arrived: &Buffer, last: bool) -> Result<()> {
        let Problem { batch, heads, value_dim, .. } = *self.memory.problem;
        let home = self.memory.home(Payload::Partial);
        let [o, lse] = [Operand::Out, Operand::Lse].map(|it| self.memory.operand(it));
        for part in &sections(self.memory.problem, rows) {
            let state = |buffer: &Buffer| launch::SoftmaxState {
                acc: buffer.rows_at(0, part),
                row_max: buffer.statistics_at(1, part),
                row_sum: buffer.statistics_at(2, part),
            };
            let operation = CombineSoftmax {
                batch,
                q_len: part.len(),
                heads,
                head_dim: value_dim,
                element: self.element,
                home: state(&home),
                arrived: state(arrived),
                o: last.then(|| o.rows_at(0, part)),
                lse: last.then(|| lse.rows_at(0, part)),
                last,
            };
            let uses = [writes(home.region), reads(arrived.region)];
            self.push(operation, uses)?;
        }
        Ok(())
    }
}

impl AttentionKernel for CommandKernel<'_> {
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
        let [o, lse] = [Operand::Out, Operand::Lse].map(|it| self.memory.operand(it));
        let ends = (tile.query_state.first, tile.query_state.last);
        for part in self.parts(tile, (queries, keys), Payload::Queries, ends) {
            let operation = Forward {
                rectangle: part.rectangle,
                features: part.features,
                q: part.q,
                k: part.k,
                v: part.v,
                acc: partial.optional_rows_at(0, &part.queries),
                row_max: partial.optional_statistics_at(1, &part.queries),
                row_sum: partial.optional_statistics_at(2, &part.queries),
                o: part.last.then(|| o.rows_at(0, &part.queries)),
                lse: part.last.then(|| lse.rows_at(0, &part.queries)),
                first: part.first,
                last: part.last,
            };
            self.push_tile(operation, [queries, keys, partial], None)?;
        }
        Ok(())
    }

    fn delta(&mut self) -> Result<()> {
        let Problem { batch, q_len, heads, head_dim: key_dim, value_dim: head_dim, .. } =
            *self.memory.problem;
        let queries = self.memory.home(Payload::Queries);
        let inputs = [Operand::Out, Operand::Lse, Operand::LseGrad];
        let [o, lse, dlse] = inputs.map(|input| self.memory.operand(input));
        let sums = self.operations.are_fused().then(|| self.memory.home(Payload::QueryGrads));
        // The kernel sets arrays to 0 that have the columns of o.
        let alike = sums.as_ref().filter(|_| key_dim == head_dim);
        for part in &query_parts(self.memory.problem, &(0..q_len)) {
            let operation = Delta {
                batch,
                q_len: part.len(),
                heads,
                head_dim,
                element: self.element,
                o: o.rows_at(0, part),
                dout: queries.rows_at(1, part),
                lse: lse.rows_at(0, part),
                dlse: self.lse_gradient.then(|| dlse.rows_at(0, part)),
                lse_log2: queries.statistics_at(2, part),
                delta: queries.statistics_at(3, part),
                zeros: alike.map(|sums| sums.rows_at(0, part)),
            };
            let written = [Some(&queries), alike].into_iter().flatten();
            self.push(operation, written.map(|rows| writes(rows.region)))?;
            if let Some(sums) = sums.as_ref().filter(|_| alike.is_none()) {
                self.clear(sums, &queries, part)?;
            }
        }
        Ok(())
    }

    /// Adds to the accumulators at home while the travelling accumulator is on its way.
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
            (Payload::Partial, last) => self.combine_softmax(rows, arrived, last),
            (_, true) => self.write(*payload, rows, Some(arrived)),
            (_, false) => self.accumulate(*payload, rows, arrived),
        }
    }

    fn finish(&mut self) -> Result<()> {
        let mut unfinished = self.final_writes.unfinished().iter();
        unfinished.try_for_each(|(payload, rows)| self.write(*payload, rows, None))
    }

    fn step(&mut self, index: usize, _name: std::fmt::Arguments<'_>) {
        self.list.begin(index);
        self.turns = [0; 2];
    }
}
