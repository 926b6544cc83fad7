//! Baselines of publications, to compare schedules with. Scripts say what each rank does, and the
//! clock of [`burst_attention::simulate`] times them.
//!
//! Ring Self-Attention (arXiv:2105.13120) keeps the scores of a rank's queries with all keys, whole
//! and masked, in its memory. Keys go round, then values. No message overlaps with computing:
//!
//! ```text
//! forward     s = q kᵀ (k goes round)        p = softmax(s)     o = p v (v goes round)
//! backward    dp = dout vᵀ (v goes round)    dv += pᵀ dout      ds = softmax'(p, dp)
//!             dq = ds k (k goes round)       dk += dsᵀ q        sums of dk and dv over ranks
//! ```
//!
//! Megatron's tensor parallelism with sequence parallelism (arXiv:2205.05198) gathers activations,
//! of which each rank holds a part of the rows, computes a part of the heads with a kernel that
//! keeps no scores, and scatters sums of the outputs over rows. Linear layers are left out, and so
//! is the second gathering of the inputs in the backward pass, which their products hide.

use std::iter::once;

use burst_attention::schedule::{for_each_rank, schedule};
use burst_attention::simulate::{Kernels, Machine, Report, Script, run, tile_flops};
use burst_attention::{Family, Layout, Pass, Problem, Result, Travels};
use serde::Deserialize;

/// Passes over the scores in memory. Forward: written, read and written by the softmax, read.
/// Backward: dp is written, p read for dv; p and dp are read for ds, which is written; ds is read
/// for dq and for dk.
const SOFTMAX: [f64; 2] = [2.0, 3.0];

/// Copies of the scores in memory at one time. Forward: s and p. Backward: p, dp and ds.
const COPIES: [u64; 2] = [2, 3];

/// A method of a publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// Every rank keeps the scores of its queries with all keys.
    RingSelfAttention,
    /// Ranks gather activations, and each computes a part of the heads.
    MegatronTp,
}

/// Times one pass of `problem` on `machine`, whose ranks exchange `memory` bytes per second with
/// their memory. Only scores that a rank keeps take time by this rate.
///
/// # Errors
/// [`burst_attention::Error::InvalidProblem`] for a machine that the simulator can't calculate
/// with, or whose nodes do not divide the ranks.
pub fn predict(
    problem: &Problem,
    baseline: Baseline,
    pass: Pass,
    machine: &Machine,
    memory: f64,
) -> Result<Report> {
    machine.validate()?;
    let (travels, scripts) = match baseline {
        Baseline::RingSelfAttention => {
            (Some(Travels::Keys), ring_self_attention(problem, pass, machine, memory)?)
        }
        Baseline::MegatronTp => (None, megatron_tp(problem, pass, machine)?),
    };
    run(pass, travels, &scripts, machine, false)
}

/// Returns the scripts of Ring Self-Attention.
fn ring_self_attention<'a>(
    problem: &Problem,
    pass: Pass,
    machine: &'a Machine,
    memory: f64,
) -> Result<Vec<Script<'a>>> {
    let mut flops = Vec::with_capacity(problem.world_size);
    for_each_rank(problem, Family::Ring, pass, Some(Travels::Keys), |schedule| {
        let tiles = schedule.steps.iter().flat_map(|step| &step.tiles);
        flops.push(tiles.map(|tile| tile_flops(problem, pass, tile)).sum());
    })?;
    let kept = Kept { problem, kernels: &machine.kernels, memory, pass };
    let script = |(rank, flops)| {
        let mut script = Script::new(rank, machine);
        let Problem { head_dim, value_dim, .. } = *problem;
        match pass {
            Pass::Forward => {
                kept.ring(&mut script, rank, head_dim, 1, 1.0);
                kept.softmax(&mut script);
                kept.ring(&mut script, rank, value_dim, 1, 1.0);
            }
            Pass::Backward => {
                kept.ring(&mut script, rank, value_dim, 2, 2.0);
                kept.softmax(&mut script);
                kept.ring(&mut script, rank, head_dim, 2, 2.0);
                kept.sum(&mut script, rank, head_dim);
                kept.sum(&mut script, rank, value_dim);
            }
        }
        script.report.flops = flops;
        script.report.buffer_bytes = kept.buffer_bytes();
        script
    };
    Ok(flops.into_iter().enumerate().map(script).collect())
}

/// Returns the scripts of Megatron's tensor parallelism. Where ranks can't have equally many heads,
/// some compute heads of padding.
fn megatron_tp<'a>(problem: &Problem, pass: Pass, machine: &'a Machine) -> Result<Vec<Script<'a>>> {
    let Problem { batch, q_len, kv_len, heads, head_dim, dtype, world_size, .. } = *problem;
    let node = machine.network.ranks_per_node.min(world_size);
    Family::DoubleRing { inner: node }.validate(world_size)?;
    let padded = heads.div_ceil(world_size);
    let local = Problem {
        q_len: q_len * world_size,
        kv_len: kv_len * world_size,
        heads: padded,
        kv_heads: padded,
        world_size: 1,
        layout: Layout::Contiguous,
        ..problem.clone()
    };
    let schedules = schedule(&local, Family::Ring, pass, Travels::Keys)?;
    // A row of activations is as wide as all heads of queries.
    let rows = (batch * q_len * heads * head_dim * dtype.bytes()) as u64;
    let nodes = world_size / node;
    let script = |rank: usize| {
        let mut script = Script::new(rank, machine);
        let first = rank - rank % node;
        let within = (first..first + node).filter(move |peer| *peer != rank);
        let between =
            (0..nodes).map(move |at| at * node + rank % node).filter(move |peer| *peer != rank);
        script.exchange(between.clone(), between.clone(), rows);
        script.exchange(within.clone(), within.clone(), rows * nodes as u64);
        for schedule in &schedules {
            script.follow(&local, schedule, |_| rank);
        }
        script.exchange(within.clone(), within, rows * nodes as u64);
        script.exchange(between.clone(), between, rows);
        script.report.flops *= heads as f64 / (padded * world_size) as f64;
        script.report.buffer_bytes += rows * world_size as u64;
        script
    };
    Ok((0..world_size).map(script).collect())
}

/// A rank's attention with scores that it keeps.
struct Kept<'a> {
    problem: &'a Problem,
    kernels: &'a Kernels,
    /// Bytes per second between a rank and its memory.
    memory: f64,
    pass: Pass,
}

impl Kept<'_> {
    /// Bytes of the scores of a rank's queries with the keys of one rank.
    fn block(&self) -> f64 {
        let Problem { batch, q_len, kv_len, heads, dtype, .. } = *self.problem;
        (batch * heads * q_len * kv_len * dtype.bytes()) as f64
    }

    /// Bytes of a rank's keys or values with `width` elements in a vector.
    fn chunk(&self, width: usize) -> u64 {
        let Problem { batch, kv_len, kv_heads, dtype, .. } = *self.problem;
        (batch * kv_len * kv_heads * width * dtype.bytes()) as u64
    }

    /// Adds a round of chunks. For each chunk the rank computes this many `products` over `width`
    /// columns, which pass the scores this many times.
    fn ring(
        &self,
        script: &mut Script<'_>,
        rank: usize,
        width: usize,
        products: usize,
        passes: f64,
    ) {
        let Problem { batch, q_len, kv_len, heads, world_size, .. } = *self.problem;
        let flops = (products * 2 * batch * heads * q_len * kv_len * width) as f64;
        let rate = self.kernels.rate(self.pass);
        let work = flops / rate
            + passes * self.block() / self.memory
            + self.kernels.launch * products as f64;
        script.compute(work);
        for _ in 1..world_size {
            self.hop(script, rank, width);
            script.compute(work);
        }
        script.report.tiles += products * world_size;
    }

    /// Adds the softmax, or its derivative.
    fn softmax(&self, script: &mut Script<'_>) {
        let bytes = SOFTMAX[self.pass as usize] * self.block() * self.problem.world_size as f64;
        script.compute(bytes / self.memory + self.kernels.launch);
    }

    /// Adds the sum over ranks of a gradient that each has for all rows, as a ring sums it: each
    /// chunk goes round twice.
    fn sum(&self, script: &mut Script<'_>, rank: usize, width: usize) {
        for _ in 0..2 * (self.problem.world_size - 1) {
            self.hop(script, rank, width);
        }
    }

    /// Adds a step in which the rank passes a chunk on, and the next one comes.
    fn hop(&self, script: &mut Script<'_>, rank: usize, width: usize) {
        let world_size = self.problem.world_size;
        let [to, from] = [1, world_size - 1].map(|step| (rank + step) % world_size);
        script.exchange(once(to), once(from), self.chunk(width));
    }

    /// Bytes of the scores, of a chunk that comes and one that leaves, and in the backward pass of
    /// the sums of all ranks' rows.
    fn buffer_bytes(&self) -> u64 {
        let world_size = self.problem.world_size as u64;
        let Problem { head_dim, value_dim, .. } = *self.problem;
        let scores = COPIES[self.pass as usize] * self.block() as u64 * world_size;
        let chunks = if world_size > 1 { 2 * self.chunk(head_dim.max(value_dim)) } else { 0 };
        let sums = match self.pass {
            Pass::Forward => 0,
            Pass::Backward => world_size * self.chunk(head_dim + value_dim),
        };
        scores + chunks + sums
    }
}
