//! What a schedule costs: the seconds of its tiles, the bytes of its messages and buffers.

use super::machine::Kernels;
use crate::problem::{Pass, Problem};
use crate::schedule::{Chunk, Payload, Place, Schedule, Step, Tile};

/// Seconds of a step's work before and after [`crate::schedule::Due::Fold`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Halves {
    pub before: f64,
    pub after: f64,
}

/// Costs of one problem on the kernels of a machine.
pub(super) struct Costs<'a> {
    pub problem: &'a Problem,
    pub kernels: &'a Kernels,
}

/// FLOPs of one tile, by convention: two for each multiplication of the products that define it.
/// With D and Dv elements in the vectors of keys and values, an allowed pair costs each query head
///
/// ```text
/// forward   2·(D + Dv)       s = q·k,  o += p v
/// backward  2·(3D + 2Dv)     s, dout·v;  dv += p dout,  dk += ds q,  dq += ds k
/// ```
///
/// What a kernel computes again does not count.
pub fn tile_flops(problem: &Problem, pass: Pass, tile: &Tile) -> f64 {
    let Problem { batch, heads, head_dim, value_dim, .. } = *problem;
    let per_pair = match pass {
        Pass::Forward => 2 * (head_dim + value_dim),
        Pass::Backward => 2 * (3 * head_dim + 2 * value_dim),
    };
    let pairs = tile.band.pairs(&tile.queries.rows, &tile.keys.rows);
    pairs as f64 * (batch * heads * per_pair) as f64
}

impl Costs<'_> {
    /// Seconds that the tiles and merges of a step take.
    pub fn step(&self, pass: Pass, step: &Step) -> Halves {
        let mut sum = Halves { before: 0.0, after: self.kernels.launch * step.merges.len() as f64 };
        for tile in &step.tiles {
            let Halves { before, after } = match pass {
                Pass::Forward => self.forward(tile),
                Pass::Backward => self.backward(tile),
            };
            sum.before += before;
            sum.after += after;
        }
        sum
    }

    /// A tile whose state is at home is computed while states arrive, another one after that.
    fn forward(&self, tile: &Tile) -> Halves {
        let flops = tile_flops(self.problem, Pass::Forward, tile);
        let seconds = flops / self.kernels.forward + self.kernels.launch;
        match tile.query_state.place {
            Place::Home => Halves { before: seconds, after: 0.0 },
            Place::Slot(_) => Halves { before: 0.0, after: seconds },
        }
    }

    /// The kernel of dq does products of 2D + Dv elements for each pair, that of dk and dv of
    /// 2D + 2Dv: each computes s and dp for itself. They divide the tile's seconds accordingly.
    fn backward(&self, tile: &Tile) -> Halves {
        let Kernels { backward, launch, one_backward, .. } = *self.kernels;
        let seconds = tile_flops(self.problem, Pass::Backward, tile) / backward;
        if one_backward {
            return Halves { before: seconds + launch, after: 0.0 };
        }
        let Problem { head_dim, value_dim, .. } = *self.problem;
        let products = [2 * head_dim + value_dim, 2 * head_dim + 2 * value_dim];
        let all = (products[0] + products[1]) as f64;
        let mut halves = Halves::default();
        let sides = [(&tile.queries, tile.query_state), (&tile.keys, tile.key_state)];
        for ((operand, state), products) in sides.into_iter().zip(products) {
            if operand.rows.is_empty() {
                continue;
            }
            let seconds = seconds * products as f64 / all + launch;
            match state.place {
                Place::Home => halves.before += seconds,
                Place::Slot(_) => halves.after += seconds,
            }
        }
        halves
    }

    /// Bytes of a message with this chunk.
    pub fn chunk(&self, chunk: &Chunk, pass: Pass) -> u64 {
        (chunk.rows.len() * self.row(chunk.payload, pass)) as u64
    }

    /// [`Problem::row_bytes`], with sums of the size that the kernels make them.
    fn row(&self, payload: Payload, pass: Pass) -> usize {
        let bytes = self.problem.row_bytes(payload, pass);
        // Statistics, a maximum and a sum of each query head, stay float32.
        let statistics = match payload {
            Payload::Partial => self.problem.batch * self.problem.heads * 8,
            _ => 0,
        };
        match payload.is_accumulator() {
            true => (bytes - statistics) / 4 * self.kernels.sum_bytes + statistics,
            false => bytes,
        }
    }

    /// Bytes of all buffers of a rank for what travels, each as large as the largest chunk that it
    /// ever holds.
    pub fn buffers(&self, schedule: &Schedule) -> u64 {
        // There are few buffers.
        let mut sizes: Vec<(Payload, Place, u64)> = Vec::new();
        for step in &schedule.steps {
            let receives = step.exchanges.iter().flat_map(|exchange| &exchange.receives);
            let arriving = receives.map(|receive| (&receive.chunk, receive.place));
            let opened = step.opens.iter().map(|(chunk, slot)| (chunk, Place::Slot(*slot)));
            for (chunk, place) in arriving.chain(opened) {
                let size = self.chunk(chunk, schedule.pass);
                let this = |known: &&mut (Payload, Place, u64)| {
                    (known.0, known.1) == (chunk.payload, place)
                };
                match sizes.iter_mut().find(this) {
                    Some(known) => known.2 = known.2.max(size),
                    None => sizes.push((chunk.payload, place, size)),
                }
            }
        }
        sizes.iter().map(|(.., size)| size).sum()
    }
}
