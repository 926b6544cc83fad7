//! What a schedule costs: the seconds of its tiles, and the bytes of its messages and buffers.

use std::collections::BTreeMap;

use super::machine::{Kernels, TileLibrary};
use crate::cuda::served::ServedTiles;
use crate::problem::{Pass, Problem};
use crate::schedule::{Accumulator, Chunk, Payload, Place, Schedule, Step, Tile};

/// Seconds of a step's work before and after [`crate::schedule::Due::Fold`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Halves {
    pub before: f64,
    pub after: f64,
}

/// Seconds of work that waits for an accumulator, unless that is at home.
fn halves(place: Place, seconds: f64) -> Halves {
    match place {
        Place::Home => Halves { before: seconds, after: 0.0 },
        Place::Slot(_) => Halves { before: 0.0, after: seconds },
    }
}

/// Costs of a schedule of one problem on the kernels of a machine.
pub(super) struct Costs<'a> {
    problem: &'a Problem,
    kernels: &'a Kernels,
    /// cuDNN and the tiles of the schedule that it computes, if the machine has it.
    library: Option<(TileLibrary, Option<ServedTiles<'a>>)>,
}

/// FLOP/s of kernels.
struct Rates {
    forward: f64,
    backward: f64,
}

/// What computes a tile.
enum Computes {
    /// This library's kernels, at these rates.
    Own(Rates),
    /// cuDNN.
    Library(TileLibrary),
}

/// Returns the FLOPs of one tile, by convention: two for each multiplication of the products that
/// define it. With D and Dv elements in the vectors of keys and values, each query head takes for
/// each allowed pair
///
/// ```text
/// forward   2·(D + Dv)       s = q·k,  o += p v
/// backward  2·(3D + 2Dv)     s, dout·v;  dv += p dout,  dk += ds q,  dq += ds k
/// ```
///
/// Products that a kernel computes again do not count.
pub fn tile_flops(problem: &Problem, pass: Pass, tile: &Tile) -> f64 {
    let Problem { batch, heads, head_dim, value_dim, .. } = *problem;
    let per_pair = match pass {
        Pass::Forward => 2 * (head_dim + value_dim),
        Pass::Backward => 2 * (3 * head_dim + 2 * value_dim),
    };
    let pairs = tile.band.pairs(&tile.queries.rows, &tile.keys.rows);
    pairs as f64 * (batch * heads * per_pair) as f64
}

impl<'a> Costs<'a> {
    pub fn of(problem: &'a Problem, schedule: &Schedule, kernels: &'a Kernels) -> Costs<'a> {
        let served = |library: TileLibrary| ServedTiles::of(problem, schedule, library.target);
        let library = kernels.library.map(|library| (library, served(library)));
        Costs { problem, kernels, library }
    }

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

    /// A tile whose state is at home is computed while states arrive. Other tiles wait for them;
    /// of cuDNN's tiles only the sums wait.
    fn forward(&self, tile: &Tile) -> Halves {
        let Accumulator { place, first, last } = tile.query_state;
        let Kernels { forward, launch, .. } = *self.kernels;
        let seconds = |rate| tile_flops(self.problem, Pass::Forward, tile) / rate + launch;
        let library = match self.computes(tile) {
            Computes::Own(rates) => return halves(place, seconds(rates.forward)),
            Computes::Library(library) => library,
        };
        // o in 16 bits is read, and the running state is read and written.
        let sums = match first && last {
            true => 0.0,
            false => self.sums(library, tile.queries.rows.len() * self.problem.heads, 10),
        };
        let sums = halves(place, sums);
        Halves { before: seconds(forward) + sums.before, after: sums.after }
    }

    fn backward(&self, tile: &Tile) -> Halves {
        let Kernels { backward, launch, one_backward, .. } = *self.kernels;
        let flops = tile_flops(self.problem, Pass::Backward, tile);
        let seconds = flops / backward + launch;
        match self.computes(tile) {
            Computes::Own(_) if one_backward => Halves { before: seconds, after: 0.0 },
            Computes::Own(rates) => self.two_kernels(tile, flops / rates.backward),
            Computes::Library(library) => {
                let Problem { heads, kv_heads, .. } = *self.problem;
                // dq in float32 is cleared, read and added. dk and dv of each query head are read, in
                // 16 bits, and added for each head of keys.
                let (queries, keys) = (tile.queries.rows.len(), tile.keys.rows.len());
                let queries = self.sums(library, queries * heads, 16);
                let keys = 2.0 * self.sums(library, keys * (kv_heads * 8 + heads * 2), 1);
                let keys = halves(tile.key_state.place, keys);
                Halves { before: seconds + queries + keys.before, after: keys.after }
            }
        }
    }

    /// Says what computes a tile.
    fn computes(&self, tile: &Tile) -> Computes {
        let Kernels { forward, backward, .. } = *self.kernels;
        match &self.library {
            None => Computes::Own(Rates { forward, backward }),
            Some((library, Some(served))) if served.has(tile) => Computes::Library(*library),
            Some((TileLibrary { forward, backward, .. }, _)) => {
                Computes::Own(Rates { forward: *forward, backward: *backward })
            }
        }
    }

    /// Seconds in which a kernel adds a library's results to sums: rows of all heads, with bytes for
    /// each element.
    fn sums(&self, library: TileLibrary, rows: usize, bytes: usize) -> f64 {
        let Problem { batch, value_dim, .. } = *self.problem;
        (batch * rows * value_dim * bytes) as f64 / library.memory + self.kernels.launch
    }

    /// For each pair, the kernel of dq multiplies 2D + Dv elements, and the kernel of dk and dv
    /// 2D + 2Dv, because each computes s and dp itself. They divide the tile's seconds accordingly.
    fn two_kernels(&self, tile: &Tile, seconds: f64) -> Halves {
        let Problem { head_dim, value_dim, .. } = *self.problem;
        let products = [2 * head_dim + value_dim, 2 * head_dim + 2 * value_dim];
        let all = (products[0] + products[1]) as f64;
        let mut halves = Halves::default();
        let sides = [(&tile.queries, tile.query_state), (&tile.keys, tile.key_state)];
        for ((operand, state), products) in sides.into_iter().zip(products) {
            if operand.rows.is_empty() {
                continue;
            }
            let seconds = seconds * products as f64 / all + self.kernels.launch;
            let part = self::halves(state.place, seconds);
            halves =
                Halves { before: halves.before + part.before, after: halves.after + part.after };
        }
        halves
    }

    /// Bytes of a message with a chunk.
    pub fn chunk(&self, chunk: &Chunk, pass: Pass) -> u64 {
        (chunk.rows.len() * self.row(chunk.payload, pass)) as u64
    }

    /// [`Payload::row_bytes`], with accumulators of the size that the kernels give them.
    fn row(&self, payload: Payload, pass: Pass) -> usize {
        let bytes = payload.row_bytes(self.problem, pass);
        // The statistics, a maximum and a sum for each query head, stay float32.
        let statistics = match payload {
            Payload::Partial => self.problem.batch * self.problem.heads * 8,
            _ => 0,
        };
        match payload.is_accumulator() {
            true => (bytes - statistics) / 4 * self.kernels.sum_bytes + statistics,
            false => bytes,
        }
    }

    /// Bytes of all of a rank's buffers for travelling chunks. Each is as large as the largest
    /// chunk that it ever holds.
    pub fn buffers(&self, schedule: &Schedule) -> u64 {
        let mut sizes: BTreeMap<(Payload, Place), u64> = BTreeMap::new();
        for step in &schedule.steps {
            let receives = step.exchanges.iter().flat_map(|exchange| &exchange.receives);
            let arriving = receives.map(|receive| (&receive.chunk, receive.place));
            let opened = step.opens.iter().map(|(chunk, slot)| (chunk, Place::Slot(*slot)));
            for (chunk, place) in arriving.chain(opened) {
                let size = sizes.entry((chunk.payload, place)).or_default();
                *size = self.chunk(chunk, schedule.pass).max(*size);
            }
        }
        sizes.into_values().sum()
    }
}
