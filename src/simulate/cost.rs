//! What a schedule costs: the seconds of its tiles, and the bytes of its messages and buffers.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use burst_attention_kernels::backend;
use burst_attention_kernels::cost::{self, Cost, CudnnParts};
use burst_attention_kernels::launch::TileOperation;

use super::kernels::{Kernels, Speed};
use crate::cuda::served::{Operations, Served};
use crate::problem::{Order, Pass, Problem};
use crate::schedule::{Chunk, Merge, Payload, Place, Schedule, Step, Tile};

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

impl AddAssign for Halves {
    fn add_assign(&mut self, more: Halves) {
        self.before += more.before;
        self.after += more.after;
    }
}

/// Costs of a schedule of one problem on the kernels of a machine.
pub(super) struct Costs<'a> {
    problem: &'a Problem,
    kernels: &'a Kernels,
    pass: Pass,
    operations: Operations<'a>,
    /// The tiles that cuDNN computes, if the machine has it.
    served: Option<Served>,
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
        let pass = schedule.pass;
        let asked = (backend::Kernels::Cudnn, Order::Any);
        let served = |target| Served::of(problem, schedule, target, asked);
        let served = kernels.library.and_then(served);
        let operations = Operations::of(problem, schedule, served.is_some());
        Costs { problem, kernels, pass, operations, served }
    }

    /// Seconds that the tiles and merges of a step take.
    pub fn step(&self, step: &Step) -> Halves {
        let merges = step.merges.iter().map(|merge| self.merge(merge)).sum();
        let mut sum = Halves { before: 0.0, after: merges };
        for index in 0..step.tiles.len() {
            sum += match self.pass {
                Pass::Forward => self.forward(step, index),
                Pass::Backward => self.backward(step, index),
            };
        }
        sum
    }

    /// A tile whose state is at home is computed while states arrive. Other tiles wait for them;
    /// of cuDNN's tiles only the sums wait.
    fn forward(&self, step: &Step, index: usize) -> Halves {
        let (tile, place) = (&step.tiles[index], step.tiles[index].query_state.place);
        let operation = self.operations.forward(tile).into();
        if let Some((call, sums, _)) = self.by_library(&operation, step, index) {
            let sums = halves(place, sums);
            return Halves { before: call + sums.before, after: sums.after };
        }
        halves(place, self.by_own(&operation, tile_flops(self.problem, self.pass, tile)))
    }

    fn backward(&self, step: &Step, index: usize) -> Halves {
        let tile = &step.tiles[index];
        let flops = tile_flops(self.problem, self.pass, tile);
        if self.kernels.one_backward {
            let seconds = flops / self.kernels.rate(self.pass) + self.kernels.launch;
            return Halves { before: seconds, after: 0.0 };
        }
        let operation = self.operations.all_gradients(step, index).into();
        if let Some((call, queries, keys)) = self.by_library(&operation, step, index) {
            let keys = halves(tile.key_state.place, keys);
            return Halves { before: call + queries + keys.before, after: keys.after };
        }
        // For each pair, the kernel of dq multiplies 2D + Dv elements, and the kernel of dk and dv
        // 2D + 2Dv, because each computes s and dp itself. They divide FLOPs accordingly.
        let Problem { head_dim, value_dim, .. } = *self.problem;
        let products = [2 * head_dim + value_dim, 2 * head_dim + 2 * value_dim];
        let part = |at: usize| flops * products[at] as f64 / (products[0] + products[1]) as f64;
        let mut sum = Halves::default();
        if !tile.queries.rows.is_empty() {
            let operation = self.operations.query_grads(step, index).into();
            sum += halves(tile.query_state.place, self.by_own(&operation, part(0)));
        }
        if !tile.keys.rows.is_empty() {
            let operation = self.operations.key_grads(step, index).into();
            sum += halves(tile.key_state.place, self.by_own(&operation, part(1)));
        }
        sum
    }

    /// Seconds of an operation by this library's kernels, which has so many FLOPs by convention.
    fn by_own(&self, operation: &TileOperation, flops: f64) -> f64 {
        let known = match self.kernels.speed(self.pass) {
            Speed::Blocks(target) => {
                cost::own(operation, target).map(|cost| self.kernels.seconds(cost, target))
            }
            Speed::Rate(_) => None,
        };
        let by_rate = || flops / self.kernels.own_rate(self.pass) + self.kernels.launch;
        known.unwrap_or_else(by_rate)
    }

    /// Seconds of cuDNN's call for an operation, of adding its results to the sums of queries, and
    /// of adding them to the sums of keys; `None` where cuDNN does not compute the tile.
    fn by_library(
        &self,
        operation: &TileOperation,
        step: &Step,
        index: usize,
    ) -> Option<(f64, f64, f64)> {
        let target = self.kernels.library?;
        let served = self.served.as_ref()?;
        if !served.has(&self.operations, step, index) {
            return None;
        }
        let CudnnParts { call, queries, keys } = cost::cudnn_parts(operation, target)?;
        let seconds =
            |cost: Option<Cost>| cost.map_or(0.0, |cost| self.kernels.seconds(cost, target));
        let call = match self.kernels.speed(self.pass) {
            Speed::Blocks(_) => seconds(Some(call)),
            Speed::Rate(rate) => {
                let flops = tile_flops(self.problem, self.pass, &step.tiles[index]);
                flops / rate + self.kernels.launch
            }
        };
        Some((call, seconds(queries), seconds(keys)))
    }

    /// Seconds in which an accumulator that arrived is added to the one at home. Only where blocks
    /// are counted its bytes take time.
    fn merge(&self, merge: &Merge) -> f64 {
        let Speed::Blocks(target) = self.kernels.speed(self.pass) else {
            return self.kernels.launch;
        };
        let Problem { batch, heads, kv_heads, head_dim, value_dim, .. } = *self.problem;
        let (columns, launches) = match merge.chunk.payload {
            Payload::Partial => (heads * value_dim, 1),
            Payload::KeyGrads => (kv_heads * (head_dim + value_dim), 2),
            _ => (heads * head_dim, 1),
        };
        // Both accumulators are read, and the sum is written, or the result in 16 bits.
        let bytes = batch * merge.chunk.rows.len() * columns * if merge.last { 10 } else { 12 };
        let seconds = cost::memory_seconds(bytes, target).unwrap_or_default();
        seconds + self.kernels.launch * f64::from(launches)
    }

    /// Bytes of a message with a chunk.
    pub fn chunk(&self, chunk: &Chunk) -> u64 {
        (chunk.rows.len() * self.row(chunk.payload)) as u64
    }

    /// [`Payload::row_bytes`], with accumulators of the size that the kernels give them.
    fn row(&self, payload: Payload) -> usize {
        let bytes = payload.row_bytes(self.problem, self.pass);
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
                *size = self.chunk(chunk).max(*size);
            }
        }
        sizes.into_values().sum()
    }
}
