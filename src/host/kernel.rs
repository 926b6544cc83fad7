//! One rank's computation on the CPU.

use std::fmt;

use rayon::ThreadPool;

use super::array::HostArray;
use super::backward::{self, BackwardTile};
use super::buffer::HostBuffer;
use super::cast;
use super::extras::{Extras, Positions, TileExtras};
use super::forward::{self, ForwardTile, Partial};
use super::isa::Isa;
use super::partial::merge_partial;
use super::trace::Span;
use crate::error::Result;
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::problem::{Dtype, Pass, Problem};
use crate::schedule::{Chunk, Merge, Payload, Place, Schedule, Tile};

/// Inputs and outputs of one rank in the forward pass.
#[derive(Debug, Clone)]
pub struct ForwardBuffers {
    /// Queries `[batch, seq, heads, head_dim]`.
    pub q: HostArray,
    /// Keys `[batch, seq, kv_heads, head_dim]`.
    pub k: HostArray,
    /// Values `[batch, seq, kv_heads, value_dim]`.
    pub v: HostArray,
    /// Result `[batch, seq, heads, value_dim]`, or float32 where the backward pass shall start from
    /// an o that was not rounded.
    pub o: HostArray,
    /// Result, float32 `[batch, seq, heads, 1]`.
    pub lse: HostArray,
    /// What the features of the problem need.
    pub extras: Extras,
}

/// Inputs and outputs of one rank in the backward pass.
#[derive(Debug, Clone)]
pub struct BackwardBuffers {
    /// Queries `[batch, seq, heads, head_dim]`.
    pub q: HostArray,
    /// Keys `[batch, seq, kv_heads, head_dim]`.
    pub k: HostArray,
    /// Values `[batch, seq, kv_heads, value_dim]`.
    pub v: HostArray,
    /// The forward result, of q's type or float32.
    pub o: HostArray,
    /// The forward result, float32 `[batch, seq, heads, 1]`.
    pub lse: HostArray,
    /// Cotangent of o.
    pub dout: HostArray,
    /// Cotangent of lse.
    pub dlse: HostArray,
    /// Result, like the queries.
    pub dq: HostArray,
    /// Result, like the keys.
    pub dk: HostArray,
    /// Result, like the values.
    pub dv: HostArray,
    /// What the features of the problem need.
    pub extras: Extras,
}

/// The arrays of a rank with the accumulators of its own rows.
#[derive(Debug)]
enum Arrays {
    Forward { io: Box<ForwardBuffers>, partial: HostBuffer },
    Backward { io: Box<BackwardBuffers>, delta: HostArray, dq: HostBuffer, dkv: HostBuffer },
}

/// Computes the tiles of one rank on a thread pool shared with all others.
#[derive(Debug)]
pub struct HostKernel<'a> {
    isa: Isa,
    pool: &'a ThreadPool,
    problem: &'a Problem,
    arrays: Arrays,
    span: Span,
}

impl<'a> HostKernel<'a> {
    /// For the forward pass over `schedule`.
    pub fn forward(
        (isa, pool): (Isa, &'a ThreadPool),
        problem: &'a Problem,
        schedule: &Schedule,
        io: ForwardBuffers,
        ring: u64,
    ) -> HostKernel<'a> {
        // State is kept between steps only where one tile does not do it all.
        let mut at_home = schedule.steps.iter().flat_map(|step| &step.tiles).map(|t| t.query_state);
        let carries =
            at_home.any(|state| state.place == Place::Home && !(state.first && state.last));
        let partial = if carries {
            HostBuffer::accumulator(problem, Payload::Partial, 0..problem.q_len)
        } else {
            HostBuffer { arrays: vec![] }
        };
        let arrays = Arrays::Forward { io: Box::new(io), partial };
        HostKernel { isa, pool, problem, arrays, span: Span::new(ring, schedule.rank) }
    }

    /// For the backward pass over `schedule`. Float32 gradients are accumulated in the outputs.
    pub fn backward(
        (isa, pool): (Isa, &'a ThreadPool),
        problem: &'a Problem,
        schedule: &Schedule,
        io: BackwardBuffers,
        ring: u64,
    ) -> HostKernel<'a> {
        let delta = HostArray::accumulator(problem.batch, 0..problem.q_len, problem.heads, 1);
        let accumulator = |payload, outputs: Vec<HostArray>, rows| {
            if problem.dtype == Dtype::F32 {
                HostBuffer { arrays: outputs }
            } else {
                HostBuffer::accumulator(problem, payload, 0..rows)
            }
        };
        let dq = accumulator(Payload::QueryGrads, vec![io.dq.clone()], problem.q_len);
        let outputs = vec![io.dk.clone(), io.dv.clone()];
        let dkv = accumulator(Payload::KeyGrads, outputs, problem.kv_len);
        let arrays = Arrays::Backward { io: Box::new(io), delta, dq, dkv };
        HostKernel { isa, pool, problem, arrays, span: Span::new(ring, schedule.rank) }
    }

    /// What a tile needs beside its operands; segments come last in the buffers of both sides.
    fn tile_extras<'b>(
        &'b self,
        tile: &Tile,
        queries: &'b HostBuffer,
        keys: &'b HostBuffer,
    ) -> TileExtras<'b> {
        let Problem { features, q_len, kv_len, .. } = *self.problem;
        let extras = self.extras();
        let segments = features
            .segments
            .then(|| [queries, keys].map(|side| side.arrays.last()))
            .and_then(|[queries, keys]| Some([queries?, keys?]));
        TileExtras {
            segments,
            slopes: extras.slopes.as_ref(),
            dropout: extras.dropout.as_ref().zip(features.dropout),
            dslopes: extras.dslopes.as_ref(),
            positions: [
                Positions::new(self.problem, tile.queries.owner, q_len),
                Positions::new(self.problem, tile.keys.owner, kv_len),
            ],
        }
    }

    fn extras(&self) -> &Extras {
        match &self.arrays {
            Arrays::Forward { io, .. } => &io.extras,
            Arrays::Backward { io, .. } => &io.extras,
        }
    }

    /// Where the forward pass leaves its results.
    fn outputs(&self) -> Option<(&HostArray, &HostArray)> {
        match &self.arrays {
            Arrays::Forward { io, .. } => Some((&io.o, &io.lse)),
            Arrays::Backward { .. } => None,
        }
    }
}

fn partial_of(buffer: &HostBuffer) -> Option<Partial<'_>> {
    match buffer.arrays.as_slice() {
        [acc, m, l] => Some(Partial { acc, m, l }),
        _ => None,
    }
}

impl AttentionKernel for HostKernel<'_> {
    type Buffer = HostBuffer;

    fn home(&mut self, payload: Payload) -> Result<HostBuffer> {
        let mut arrays = match (&self.arrays, payload) {
            (Arrays::Forward { io, .. }, Payload::Queries) => vec![io.q.clone()],
            (Arrays::Forward { io, .. }, Payload::Keys) => vec![io.k.clone(), io.v.clone()],
            (Arrays::Forward { partial, .. }, Payload::Partial) => partial.arrays.clone(),
            (Arrays::Backward { io, delta, .. }, Payload::Queries) => {
                vec![io.q.clone(), io.dout.clone(), io.lse.clone(), delta.clone()]
            }
            (Arrays::Backward { io, .. }, Payload::Keys) => vec![io.k.clone(), io.v.clone()],
            (Arrays::Backward { dq, .. }, Payload::QueryGrads) => dq.arrays.clone(),
            (Arrays::Backward { dkv, .. }, Payload::KeyGrads) => dkv.arrays.clone(),
            (Arrays::Forward { .. }, _) => unreachable!("no gradients in the forward pass"),
            (Arrays::Backward { .. }, _) => unreachable!("no softmax state in the backward pass"),
        };
        arrays.extend(match payload {
            Payload::Queries => self.extras().q_segments.clone(),
            Payload::Keys => self.extras().k_segments.clone(),
            _ => None,
        });
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
        partial: &HostBuffer,
    ) -> Result<()> {
        let state = tile.query_state;
        let extras = self.tile_extras(tile, queries, keys);
        let tile = ForwardTile {
            q: &queries.arrays[0],
            k: &keys.arrays[0],
            v: &keys.arrays[1],
            state: partial_of(partial),
            out: if state.last { self.outputs() } else { None },
            q_rows: tile.queries.rows.clone(),
            k_rows: tile.keys.rows.clone(),
            band: tile.band,
            first: state.first,
            last: state.last,
            softmax_scale: self.problem.softmax_scale,
            soft_cap: self.problem.features.soft_cap,
            extras,
        };
        forward::forward(self.isa, self.pool, &tile);
        Ok(())
    }

    /// Before all else, so what is only ever added to begins here, too.
    fn delta(&mut self) -> Result<()> {
        if let Arrays::Backward { io, delta, .. } = &self.arrays {
            if let Some(dslopes) = &io.extras.dslopes {
                dslopes.clear();
            }
            cast::delta(self.isa, self.pool, &io.o, &io.dout, &io.dlse, delta);
        }
        Ok(())
    }

    /// The host kernel makes all three gradients in one pass over the tile, so it waits for both
    /// accumulators.
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
        let extras = self.tile_extras(tile, queries, keys);
        let tile = BackwardTile {
            q: &queries.arrays[0],
            k: &keys.arrays[0],
            v: &keys.arrays[1],
            dout: &queries.arrays[1],
            lse: &queries.arrays[2],
            delta: &queries.arrays[3],
            dq: &dq.arrays[0],
            dk: &dkv.arrays[0],
            dv: &dkv.arrays[1],
            q_rows: tile.queries.rows.clone(),
            k_rows: tile.keys.rows.clone(),
            band: tile.band,
            dq_first: tile.query_state.first,
            dkv_first: tile.key_state.first,
            softmax_scale: self.problem.softmax_scale,
            soft_cap: self.problem.features.soft_cap,
            extras,
        };
        backward::backward(self.isa, self.pool, &tile);
        Ok(())
    }

    fn merge(&mut self, merge: &Merge, arrived: &HostBuffer) -> Result<()> {
        let home = self.home(merge.chunk.payload)?;
        if merge.chunk.payload == Payload::Partial {
            let (Some(home), Some(arrived)) = (partial_of(&home), partial_of(arrived)) else {
                unreachable!("a state that travelled is kept at home, too");
            };
            let out = if merge.last { self.outputs() } else { None };
            merge_partial((self.isa, self.pool), home, arrived, &merge.chunk.rows, out);
            return Ok(());
        }
        for (target, arrived) in home.arrays.iter().zip(&arrived.arrays) {
            cast::merge(self.pool, target, arrived, &merge.chunk.rows);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.span.end();
        if self.problem.dtype == Dtype::F32 {
            return Ok(());
        }
        if let Arrays::Backward { io, dq, dkv, .. } = &self.arrays {
            cast::cast(self.isa, self.pool, &dq.arrays[0], &io.dq);
            cast::cast(self.isa, self.pool, &dkv.arrays[0], &io.dk);
            cast::cast(self.isa, self.pool, &dkv.arrays[1], &io.dv);
        }
        Ok(())
    }

    fn step(&mut self, _index: usize, name: fmt::Arguments<'_>) {
        self.span.step(name);
    }
}

/// One rank's memory, of either pass.
#[derive(Debug, Clone)]
pub enum RankBuffers {
    /// Of the forward pass.
    Forward(Box<ForwardBuffers>),
    /// Of the backward pass.
    Backward(Box<BackwardBuffers>),
}

/// Which buffers a pass needs.
#[derive(Debug, Clone)]
pub enum RingBuffers {
    /// One entry for each rank.
    Forward(Vec<ForwardBuffers>),
    /// One entry for each rank.
    Backward(Vec<BackwardBuffers>),
}

impl RingBuffers {
    /// The pass these buffers belong to.
    pub fn pass(&self) -> Pass {
        match self {
            RingBuffers::Forward(_) => Pass::Forward,
            RingBuffers::Backward(_) => Pass::Backward,
        }
    }
}
