//! What a schedule takes, of many ranks too.
//!
//! The clock's work grows with the square of the number of ranks. But with equal shards, what a pass
//! takes grows evenly with that number: each further node adds as many steps as the one before. So
//! two smaller worlds say what a large one takes.

use super::cost::Costs;
use super::heads::{Volume, between_groups, volume};
use super::machine::{Link, Machine};
use super::method::{Method, predict};
use super::report::Bytes;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Family, ring};

/// Most ranks that are simulated, if that is at least four nodes; twice as many in windows.
const MOST: usize = 32;

/// What both passes take together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Seconds.
    pub seconds: f64,
    /// Seconds of them in which the rank that waits longest waits for messages.
    pub exposed: f64,
    /// Bytes that all ranks send.
    pub sent: Bytes,
    /// What travels in the backward pass, if anything does.
    pub backward: Option<Travels>,
    /// Worked out from smaller worlds.
    pub estimated: bool,
}

/// What both passes of `problem` take together: by the clock for up to 32 ranks or four nodes, for
/// more by the difference between two smaller worlds of shards of the same length. Without `backward`,
/// the side travels back that costs fewer bytes.
///
/// # Errors
/// As [`predict`] has them.
pub fn cost(
    problem: &Problem,
    method: Method,
    backward: Option<Travels>,
    machine: &Machine,
) -> Result<Cost> {
    machine.validate()?;
    let world_size = problem.world_size;
    if method == (Method::Heads { inner: world_size }) && world_size > MOST {
        return all_to_all(problem, machine);
    }
    let unit = match method {
        Method::Heads { inner } | Method::Travel(Family::DoubleRing { inner }) => {
            Family::DoubleRing { inner }.validate(world_size)?;
            inner
        }
        Method::Travel(_) if machine.network.ranks_per_node < world_size => {
            machine.network.ranks_per_node
        }
        Method::Travel(_) => 1,
    };
    let units = (MOST / unit).max(4);
    let most = units * unit;
    // Beyond what a window reaches, further ranks add nothing but what they send themselves.
    let reach = reach(problem, unit).unwrap_or(world_size).min(world_size);
    let settles = reach < world_size && reach <= 2 * most;
    let [small, large] = if settles { [reach, reach + unit] } else { [units / 2 * unit, most] };
    if world_size <= most.max(large) {
        return simulated(problem, method, backward, machine);
    }
    let [few, many] = [small, large].map(|world_size| {
        simulated(&Problem { world_size, ..problem.clone() }, method, backward, machine)
    });
    let (few, many) = (few?, many?);
    let line = |few: f64, many: f64, to: usize| {
        let further = (to - large) as f64 / (large - small) as f64;
        (many + (many - few) * further).max(0.0)
    };
    let reached = if settles { large } else { reach };
    let bytes = |of: fn(&Bytes) -> u64| {
        let (few, many) = (of(&few.sent) as f64, of(&many.sent) as f64);
        let of_each = || line(few / small as f64, many / large as f64, reached);
        (if settles { line(few, many, world_size) } else { of_each() * world_size as f64 }) as u64
    };
    Ok(Cost {
        seconds: line(few.seconds, many.seconds, reached),
        exposed: line(few.exposed, many.exposed, reached),
        sent: Bytes { within: bytes(|sent| sent.within), between: bytes(|sent| sent.between) },
        backward: many.backward,
        estimated: true,
    })
}

/// How many ranks have to do with one, on both sides, in whole units; none without a window.
fn reach(problem: &Problem, unit: usize) -> Option<usize> {
    let Problem { window, layout, q_len, .. } = *problem;
    let (left, right) = (window.left?, window.right?);
    let rows = match layout {
        Layout::Contiguous => q_len,
        Layout::Zigzag => q_len / 2,
        Layout::Striped => return None,
    };
    let one_side = left.max(right).div_ceil(rows.max(1)).div_ceil(unit);
    Some((2 * one_side + 1) * unit)
}

fn simulated(
    problem: &Problem,
    method: Method,
    backward: Option<Travels>,
    machine: &Machine,
) -> Result<Cost> {
    let passes = [(Pass::Forward, None), (Pass::Backward, backward)]
        .map(|(pass, travels)| predict(problem, method, pass, travels, machine, false));
    let [forward, backward] = passes;
    let (forward, backward) = (forward?, backward?);
    let sent = [forward.sent(), backward.sent()];
    Ok(Cost {
        seconds: forward.seconds + backward.seconds,
        exposed: forward.exposed() + backward.exposed(),
        sent: Bytes {
            within: sent[0].within + sent[1].within,
            between: sent[0].between + sent[1].between,
        },
        backward: backward.travels,
        estimated: false,
    })
}

/// Of one group, whose ranks all do the same: four exchanges and the work of both passes between.
fn all_to_all(problem: &Problem, machine: &Machine) -> Result<Cost> {
    let (inner, network) = (problem.world_size, &machine.network);
    let local = between_groups(problem, inner)?;
    let costs = Costs { problem: &local, kernels: &machine.kernels };
    let node = network.ranks_per_node.min(inner);
    let sharing = if network.shared { node } else { 1 };
    let mut all = Cost {
        seconds: 0.0,
        exposed: 0.0,
        sent: Bytes::default(),
        backward: None,
        estimated: true,
    };
    for pass in [Pass::Forward, Pass::Backward] {
        for schedule in ring(&local, pass, Travels::Keys) {
            let halves = schedule.steps.iter().map(|step| costs.step(pass, step));
            all.seconds += halves.map(|halves| halves.before + halves.after).sum::<f64>();
        }
        let Volume { there, back } = volume(problem, inner, pass);
        for bytes in [there, back] {
            let each = bytes / inner as u64;
            let peers = [(node - 1) as u64, (inner - node) as u64];
            let seconds = |peers: u64, sharing: usize, Link { latency, bandwidth }: Link| {
                let bytes = (peers * each) as f64 * sharing as f64;
                if peers > 0 { latency + bytes / bandwidth } else { 0.0 }
            };
            let within = seconds(peers[0], 1, network.within);
            let waits = within.max(seconds(peers[1], sharing, network.between));
            all.seconds += waits;
            all.exposed += waits;
            all.sent.within += peers[0] * each * inner as u64;
            all.sent.between += peers[1] * each * inner as u64;
        }
    }
    Ok(all)
}
