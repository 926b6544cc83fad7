//! Simulates one sub-partition of a Hopper SM that runs a loop.
//!
//! Each computing warpgroup of a block has one warp on each of the four sub-partitions. All four
//! behave alike, so this simulates one of them. A warp issues in order, as the control bits of its
//! instructions say; warps share the pipes, the tensor core and shared memory.

use std::collections::HashMap;

use super::program::{Filling, Program, Unit};

/// Cycles that an instruction of a warp takes of a pipe with 16 lanes, and of a pipe with 4 lanes.
const LANES_16: f64 = 2.0;
const LANES_4: f64 = 8.0;
/// Latencies in cycles.
const INTEGER: f64 = 12.0;
const SHUFFLE: f64 = 24.0;
const SHARED: f64 = 29.0;
const PHASE: f64 = 24.0;
const BARRIER: f64 = 24.0;
const FENCE: f64 = 40.0;
const COPY_ISSUED: f64 = 60.0;
const REST: f64 = 25.0;
/// Cycles until operands are read: by most instructions, and by accesses to shared memory.
const READ: f64 = 12.0;
const READ_SHARED: f64 = 20.0;
/// Cycles from the end of a filling until a warp that waited for it continues.
const WAKE: f64 = 40.0;
/// Cycles from an arrival at an empty barrier until it counts, and until the producer begins.
const ARRIVAL: f64 = 10.0;
const PRODUCER: f64 = 30.0;
/// Cycles to the first byte, and bytes a cycle, of the tensor memory accelerator.
const TMA_LATENCY: f64 = 550.0;
const TMA_RATE: f64 = 48.0;
/// Latency of asynchronous copies by threads.
const COPY: f64 = 450.0;
/// Bytes a cycle of shared memory, and the largest share of them that tiles take.
const SHARED_RATE: f64 = 128.0;
const TILES_SHARE: f64 = 0.45;

/// The fitted parameters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fit {
    /// Additional issue slots that an arithmetic instruction takes while the tensor core works.
    pub contention: f64,
    /// Matrix products of a warp that may wait to begin.
    pub queue: usize,
    /// Whether the filling of tiles takes bandwidth from the products' operands: 0 or 1.
    pub tiles: f64,
    /// Latency of exponentials, and latency of a matrix product beyond its own cycles.
    pub special: f64,
    pub matrix: f64,
    /// The clock in GHz with which the reference kernels reach their published rates.
    pub clock: f64,
}

/// Iterations to run, and iterations before the measurement begins.
const ITERATIONS: usize = 18;
const WARM: usize = 8;

#[derive(Debug, Default)]
struct Warp {
    step: usize,
    iteration: usize,
    /// The earliest time of its next instruction, and the time of its last instruction.
    ready: f64,
    issued: f64,
    /// Times that each scoreboard waits for.
    scoreboards: [Vec<f64>; 6],
    /// Times when its matrix products begin, and when their groups end.
    begun: Vec<f64>,
    groups: Vec<f64>,
    /// Number of waits for each filling so far.
    waited: Vec<usize>,
    /// Time when it came to the barrier where it waits.
    at_barrier: Option<f64>,
    ends: Vec<f64>,
}

/// Times when the pipes are free.
#[derive(Debug, Default)]
struct Pipes {
    port: f64,
    float: [f64; 2],
    integer: f64,
    special: f64,
    memory: f64,
    uniform: f64,
    tensor: f64,
    shared: f64,
}

struct Machine<'a> {
    program: &'a Program,
    fit: Fit,
    warps: Vec<Warp>,
    pipes: Pipes,
    /// Times when each warp released each filling's memory: `[filling][warp]`.
    released: Vec<Vec<Vec<f64>>>,
    /// Times when each filling is complete, by its number.
    filled: Vec<Vec<f64>>,
    accelerator: f64,
    /// Share of shared memory's bandwidth that tiles take.
    tiles: f64,
    /// Times of arrivals at each barrier, given by step and iteration.
    barriers: HashMap<(usize, usize), Vec<f64>>,
}

/// Returns the cycles of an iteration for `warpgroups` that begin `apart` cycles after each other.
/// The tiles of an iteration hold `bytes` bytes.
pub(super) fn cycles(
    program: &Program,
    fit: Fit,
    warpgroups: usize,
    apart: f64,
    bytes: f64,
) -> f64 {
    let warp = |index: usize| Warp {
        ready: apart * index as f64,
        waited: vec![0; program.fillings.len()],
        ..Warp::default()
    };
    let mut machine = Machine {
        program,
        fit,
        warps: (0..warpgroups).map(warp).collect(),
        pipes: Pipes::default(),
        released: vec![vec![Vec::new(); warpgroups]; program.fillings.len()],
        filled: vec![Vec::new(); program.fillings.len()],
        accelerator: 0.0,
        tiles: 0.0,
        barriers: HashMap::new(),
    };
    while machine.warps[0].iteration < ITERATIONS {
        let Some((warp, time)) = machine.next() else { return f64::INFINITY };
        if machine.issue(warp, time) && warp == 0 && machine.warps[0].iteration == WARM + 1 {
            let ends = &machine.warps[0].ends;
            let period = (ends[WARM] - ends[WARM - 1]).max(1.0);
            machine.tiles = fit.tiles * TILES_SHARE.min(bytes / SHARED_RATE / period);
        }
    }
    let ends = &machine.warps[0].ends;
    (ends[ITERATIONS - 1] - ends[WARM + 1]) / (ITERATIONS - WARM - 2) as f64
}

impl Machine<'_> {
    /// Returns the warp that issues next, and when it is ready; `None` if all warps wait for each
    /// other.
    fn next(&mut self) -> Option<(usize, f64)> {
        let mut best: Option<(usize, f64)> = None;
        for warp in 0..self.warps.len() {
            if self.warps[warp].iteration >= ITERATIONS {
                continue;
            }
            let Some(ready) = self.ready(warp) else { continue };
            let key = |&(warp, ready): &(usize, f64)| {
                (f64::max(ready, self.pipes.port), self.warps[warp].issued)
            };
            if best.as_ref().is_none_or(|best| key(&(warp, ready)) < key(best)) {
                best = Some((warp, ready));
            }
        }
        best
    }

    /// Returns when a warp's next instruction may issue; `None` while the time depends on another
    /// warp.
    fn ready(&mut self, index: usize) -> Option<f64> {
        let program = self.program;
        let warp = &self.warps[index];
        let step = &program.steps[warp.step];
        let mut ready = warp.ready;
        for (number, ends) in warp.scoreboards.iter().enumerate() {
            if step.control.wait >> number & 1 == 1 {
                ready = ends.iter().copied().fold(ready, f64::max);
            }
        }
        match step.unit {
            Unit::Matrix { .. } => {
                let mut pending: Vec<f64> =
                    warp.begun.iter().copied().filter(|&begun| begun > ready).collect();
                pending.sort_by(f64::total_cmp);
                if pending.len() >= self.fit.queue {
                    ready = ready.max(pending[pending.len() - self.fit.queue]);
                }
            }
            Unit::Groups(unfinished) if warp.groups.len() > unfinished => {
                ready = ready.max(warp.groups[warp.groups.len() - unfinished - 1]);
            }
            Unit::Phase => {
                if let Some(filling) = step.needs {
                    let there = self.filled(filling, self.warps[index].waited[filling])?;
                    if there > ready {
                        ready = there + WAKE;
                    }
                }
            }
            Unit::Barrier => ready = self.barrier(index, ready)?,
            _ => {}
        }
        let pipes = &self.pipes;
        Some(ready.max(match step.unit {
            Unit::Float => pipes.float[0].min(pipes.float[1]),
            Unit::Product => pipes.float[0],
            Unit::Integer => pipes.integer,
            Unit::Special => pipes.special,
            Unit::Shared(_) | Unit::Shuffle | Unit::Copy => pipes.memory,
            Unit::Uniform => pipes.uniform,
            _ => 0.0,
        }))
    }

    /// Returns when all warps are at a barrier; `None` while a warp is missing.
    fn barrier(&mut self, index: usize, ready: f64) -> Option<f64> {
        let warp = &mut self.warps[index];
        let arrived = self.barriers.entry((warp.step, warp.iteration)).or_default();
        if warp.at_barrier.is_none() {
            warp.at_barrier = Some(ready);
            arrived.push(ready);
        }
        let all = arrived.len() == self.warps.len();
        let last = arrived.iter().copied().fold(f64::NEG_INFINITY, f64::max) + BARRIER;
        all.then(|| last.max(ready))
    }

    /// Returns when filling number `number` is complete; `None` if its memory is not released yet.
    fn filled(&mut self, filling: usize, number: usize) -> Option<f64> {
        let released = |number: usize| {
            let mut times = self.released[filling].iter().map(|times| times.get(number).copied());
            times.try_fold(f64::NEG_INFINITY, |last, time| Some(last.max(time?)))
        };
        match self.program.fillings[filling] {
            Filling::Copies { ahead } => match number.checked_sub(ahead) {
                None => Some(0.0),
                Some(number) => Some(released(number)? + COPY),
            },
            Filling::Tiles { stages, bytes } => {
                let Some(before) = number.checked_sub(stages) else { return Some(0.0) };
                if let Some(&there) = self.filled[filling].get(before) {
                    return Some(there);
                }
                let start = (released(before)? + PRODUCER).max(self.accelerator);
                self.accelerator = start + bytes / TMA_RATE;
                let there = start + TMA_LATENCY + bytes / TMA_RATE;
                self.filled[filling].push(there);
                Some(there)
            }
        }
    }

    /// Issues a warp's next instruction. Returns whether an iteration ends.
    fn issue(&mut self, index: usize, ready: f64) -> bool {
        let step = &self.program.steps[self.warps[index].step];
        let time = ready.max(self.pipes.port);
        self.pipes.port = time + 1.0;
        let arithmetic =
            matches!(step.unit, Unit::Float | Unit::Product | Unit::Integer | Unit::Special);
        if arithmetic && self.pipes.tensor > time {
            self.pipes.port += self.fit.contention;
        }
        let done = self.execute(index, time, step.unit);
        for &filling in &step.releases {
            let late = match self.program.fillings[filling] {
                Filling::Tiles { .. } => ARRIVAL,
                Filling::Copies { .. } => 0.0,
            };
            self.released[filling][index].push(time + late);
        }
        let warp = &mut self.warps[index];
        if let (Unit::Phase, Some(filling)) = (step.unit, step.needs) {
            warp.waited[filling] += 1;
        }
        let read = time
            + match step.unit {
                Unit::Shared(_) => READ_SHARED,
                Unit::Barrier => 5.0,
                Unit::Fence => FENCE,
                _ => READ,
            };
        for (scoreboard, end) in [(step.control.write, done), (step.control.read, read)] {
            if let Some(number) = scoreboard {
                let ends = &mut warp.scoreboards[usize::from(number)];
                ends.retain(|&end| end > time);
                ends.push(end);
            }
        }
        warp.at_barrier = None;
        warp.issued = time;
        warp.ready = time + f64::from(step.control.stall.max(1));
        warp.step += 1;
        if warp.step < self.program.steps.len() {
            return false;
        }
        warp.step = 0;
        warp.iteration += 1;
        warp.ends.push(time);
        true
    }

    /// Takes the pipe, and returns when the result is complete.
    fn execute(&mut self, index: usize, time: f64, unit: Unit) -> f64 {
        let pipes = &mut self.pipes;
        match unit {
            Unit::Float => {
                let pipe = usize::from(pipes.float[0] > pipes.float[1]);
                pipes.float[pipe] = time + LANES_16;
                time + REST
            }
            Unit::Product => {
                pipes.float[0] = time + LANES_16;
                time + REST
            }
            Unit::Integer => {
                pipes.integer = time + LANES_16;
                time + INTEGER
            }
            Unit::Uniform => {
                pipes.uniform = time + 1.0;
                time + REST
            }
            Unit::Special => {
                pipes.special = time + LANES_4;
                time + self.fit.special
            }
            Unit::Shuffle => {
                pipes.memory = time + 4.0;
                time + SHUFFLE
            }
            Unit::Shared(cycles) => {
                pipes.memory = time + f64::max(2.0, cycles / 2.0);
                pipes.shared = pipes.shared.max(time) + cycles;
                f64::max(time + SHARED, pipes.memory + SHARED - 4.0)
            }
            Unit::Copy => {
                pipes.memory = time + 8.0;
                time + COPY_ISSUED
            }
            Unit::Latency(cycles) => time + cycles,
            Unit::Phase => time + PHASE,
            Unit::Fence => time + FENCE,
            Unit::Matrix { tensor, shared, commits } => {
                self.multiply(index, time, (tensor, shared), commits);
                time + REST
            }
            Unit::Groups(_) | Unit::Barrier | Unit::Free => time + REST,
        }
    }

    /// Puts a product behind the products before it. Its operands may be fetched while the product
    /// before it runs. It ends when both its cycles and its fetches are over.
    fn multiply(&mut self, index: usize, time: f64, (tensor, shared): (f64, f64), commits: bool) {
        let (pipes, warp) = (&mut self.pipes, &mut self.warps[index]);
        let shared = if self.tiles > 0.0 { shared / (1.0 - self.tiles) } else { shared };
        let begin = pipes.tensor.max(time + self.fit.matrix / 2.0);
        pipes.shared = pipes.shared.max(begin - tensor) + shared;
        pipes.tensor = f64::max(begin + tensor, pipes.shared);
        warp.begun.push(begin);
        if commits {
            warp.groups.push(pipes.tensor + self.fit.matrix / 2.0);
        }
    }
}
