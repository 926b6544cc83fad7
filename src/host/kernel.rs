//! The kernel of one rank on the CPU.

use std::fmt;

use rayon::ThreadPool;

use super::array::HostArray;
use super::backward::{self, BackwardTile};
use super::buffer::HostBuffer;
use super::features::TileFeatures;
use super::forward::{self, ForwardTile, Outputs, SoftmaxState};
use super::isa::Isa;
use super::per_row;
use super::tile::TileInputs;
use super::trace::StepTimer;
use crate::error::Result;
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::operands::{Arrays, Operand, Side};
use crate::problem::{Dtype, Pass, Problem};
use crate::schedule::{Accumulator, Chunk, Merge, Payload, Place, Schedule, Tile};

/// The accumulators of a rank's own rows.
#[derive(Debug)]
enum Accumulators {
    Forward { state: HostBuffer },
    Backward { delta: HostArray, dq: HostBuffer, dkv: HostBuffer },
}

/// Computes the tiles of one rank, on a thread pool that all ranks share.
#[derive(Debug)]
pub struct HostKernel<'a> {
    isa: Isa,
    pool: &'a ThreadPool,
    problem: &'a Problem,
    arrays: Arrays<HostArray>,
    accumulators: Accumulators,
    timer: StepTimer,
}

impl<'a> HostKernel<'a> {
    /// Makes the kernel of one rank. In float32 the results themselves are the accumulators of the
    /// gradients.
    pub fn new(
        (isa, pool): (Isa, &'a ThreadPool),
        problem: &'a Problem,
        schedule: &Schedule,
        arrays: Arrays<HostArray>,
        ring: u64,
    ) -> HostKernel<'a> {
        let accumulators = match arrays.pass {
            Pass::Forward => Accumulators::Forward { state: softmax_state(problem, schedule) },
            Pass::Backward => {
                let sums = |payload: Payload, rows| match problem.dtype {
                    Dtype::F32 => {
                        let results: Vec<_> = payload.gradients(&problem.features).collect();
                        HostBuffer { arrays: all(&arrays, &results) }
                    }
                    _ => HostBuffer::accumulator(problem, payload, 0..rows),
                };
                let Problem { batch, q_len, kv_len, heads, .. } = *problem;
                Accumulators::Backward {
                    delta: HostArray::accumulator(batch, 0..q_len, heads, 1),
                    dq: sums(Payload::QueryGrads, q_len),
                    dkv: sums(Payload::KeyGrads, kv_len),
                }
            }
        };
        let timer = StepTimer::new(ring, schedule.rank);
        HostKernel { isa, pool, problem, arrays, accumulators, timer }
    }

    /// Returns the results of the forward pass, if a tile or merge is the last of its rows.
    fn outputs(&self, last: bool) -> Option<Outputs<'_>> {
        last.then(|| Outputs { o: &self.arrays[Operand::Out], lse: &self.arrays[Operand::Lse] })
    }

    /// Returns the part of a tile that both passes have in common.
    fn inputs<'b>(
        &'b self,
        tile: &Tile,
        queries: &'b HostBuffer,
        keys: &'b HostBuffer,
    ) -> TileInputs<'b> {
        TileInputs {
            q: &queries.arrays[0],
            k: &keys.arrays[0],
            v: &keys.arrays[1],
            q_rows: tile.queries.rows.clone(),
            k_rows: tile.keys.rows.clone(),
            band: tile.band,
            softmax_scale: self.problem.softmax_scale,
            soft_cap: self.problem.features.soft_cap,
            features: TileFeatures::new(self.problem, &self.arrays, tile, queries, keys),
            pairs: self.timer.pairs(),
        }
    }
}

/// Returns the arrays of some operands.
fn all(arrays: &Arrays<HostArray>, operands: &[Operand]) -> Vec<HostArray> {
    operands.iter().map(|operand| arrays[*operand].clone()).collect()
}

/// Returns the softmax state of a rank's own rows. It has no memory if one tile folds all keys of
/// each row.
fn softmax_state(problem: &Problem, schedule: &Schedule) -> HostBuffer {
    let mut states = schedule.steps.iter().flat_map(|step| &step.tiles).map(|t| t.query_state);
    let is_kept = states.any(|state| state.place == Place::Home && !(state.first && state.last));
    if is_kept {
        HostBuffer::accumulator(problem, Payload::Partial, 0..problem.q_len)
    } else {
        HostBuffer { arrays: vec![] }
    }
}

fn state_of(buffer: &HostBuffer) -> Option<SoftmaxState<'_>> {
    match buffer.arrays.as_slice() {
        [acc, m, l] => Some(SoftmaxState { acc, m, l }),
        _ => None,
    }
}

impl AttentionKernel for HostKernel<'_> {
    type Buffer = HostBuffer;

    fn home(&mut self, payload: Payload) -> Result<HostBuffer> {
        use Accumulators::{Backward, Forward};
        let own = |operands: &[Operand]| all(&self.arrays, operands);
        let (mut arrays, side) = match (&self.accumulators, payload) {
            (Forward { .. }, Payload::Queries) => (own(&[Operand::Query]), Side::Queries),
            (Backward { delta, .. }, Payload::Queries) => {
                let inputs = own(&[Operand::Query, Operand::OutGrad, Operand::Lse]);
                ([inputs, vec![delta.clone()]].concat(), Side::Queries)
            }
            (_, Payload::Keys) => (own(&[Operand::Key, Operand::Value]), Side::Keys),
            (Forward { state }, Payload::Partial) => return Ok(state.clone()),
            (Backward { dq, .. }, Payload::QueryGrads) => return Ok(dq.clone()),
            (Backward { dkv, .. }, Payload::KeyGrads) => return Ok(dkv.clone()),
            (Forward { .. }, _) => unreachable!("no gradients in the forward pass"),
            (Backward { .. }, _) => unreachable!("no softmax state in the backward pass"),
        };
        let travelling: Vec<_> = Operand::travelling(&self.problem.features, side).collect();
        arrays.extend(own(&travelling));
        Ok(HostBuffer { arrays })
    }

    fn accumulator(&mut self, chunk: &Chunk, _slot: usize) -> Result<HostBuffer> {
        Ok(HostBuffer::accumulator(self.problem, chunk.payload, chunk.rows.clone()))
    }

    fn forward(
        &mut self,
        tile: &Tile,
        queries: &HostBuffer,
        keys: &HostBuffer,
        state: &HostBuffer,
    ) -> Result<()> {
        let Accumulator { first, last, .. } = tile.query_state;
        let tile = ForwardTile {
            inputs: self.inputs(tile, queries, keys),
            state: state_of(state),
            out: self.outputs(last),
            first,
            last,
        };
        forward::forward(self.isa, self.pool, &tile);
        Ok(())
    }

    /// Computes delta, and clears the gradient of the slopes, to which every tile adds.
    fn delta(&mut self) -> Result<()> {
        if let Accumulators::Backward { delta, .. } = &self.accumulators {
            if let Some(dslopes) = self.arrays.get(Operand::SlopeGrad) {
                per_row::clear(self.pool, dslopes, &dslopes.rows);
            }
            let [o, dout, dlse] = [Operand::Out, Operand::OutGrad, Operand::LseGrad];
            let (o, dout, dlse) = (&self.arrays[o], &self.arrays[dout], &self.arrays[dlse]);
            per_row::delta(self.isa, self.pool, o, dout, dlse, delta);
        }
        Ok(())
    }

    /// Does nothing: the host kernel computes all three gradients in one pass over the tile, so it
    /// needs both accumulators.
    fn backward_begin(
        &mut self,
        _tile: &Tile,
        _operands: BackwardOperands<'_, HostBuffer>,
    ) -> Result<()> {
        Ok(())
    }

    fn backward_finish(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, HostBuffer>,
    ) -> Result<()> {
        let BackwardOperands { queries, keys, query_grads, key_grads } = operands;
        let (Some(dq), Some(dkv)) = (query_grads, key_grads) else {
            unreachable!("the engine gives both accumulators to backward_finish");
        };
        let tile = BackwardTile {
            inputs: self.inputs(tile, queries, keys),
            dout: &queries.arrays[1],
            lse: &queries.arrays[2],
            delta: &queries.arrays[3],
            query_grads: &dq.arrays,
            key_grads: &dkv.arrays,
            dq_first: tile.query_state.first,
            dkv_first: tile.key_state.first,
        };
        backward::backward(self.isa, self.pool, &tile);
        Ok(())
    }

    fn merge(&mut self, merge: &Merge, arrived: &HostBuffer) -> Result<()> {
        let home = self.home(merge.chunk.payload)?;
        if merge.chunk.payload == Payload::Partial {
            let (Some(home), Some(arrived)) = (state_of(&home), state_of(arrived)) else {
                unreachable!("a state that travelled has memory at home, too");
            };
            let (device, out) = ((self.isa, self.pool), self.outputs(merge.last));
            per_row::combine_softmax(device, home, arrived, &merge.chunk.rows, out);
            return Ok(());
        }
        for (home, arrived) in home.arrays.iter().zip(&arrived.arrays) {
            per_row::accumulate(self.pool, home, arrived, &merge.chunk.rows);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.timer.end();
        if self.problem.dtype == Dtype::F32 {
            return Ok(());
        }
        if let Accumulators::Backward { dq, dkv, .. } = &self.accumulators {
            let sums = dq.arrays.iter().chain(&dkv.arrays);
            let gradients = [Payload::QueryGrads, Payload::KeyGrads];
            let results = gradients.map(|sums| sums.gradients(&self.problem.features));
            for (sums, result) in sums.zip(results.into_iter().flatten()) {
                per_row::cast(self.isa, self.pool, sums, &self.arrays[result]);
            }
        }
        Ok(())
    }

    fn step(&mut self, _index: usize, name: fmt::Arguments<'_>) {
        self.timer.step(name);
    }
}
