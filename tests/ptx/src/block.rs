//! Runs the blocks of a launch, and lets threads go on that wait for each other.

use std::ops::Range;

use crate::collective::{Collective, LANES};
use crate::error::{Fault, Outcome};
use crate::matrix::{Matrix, ROW};
use crate::memory::Spaces;
use crate::program::{Body, Op, Register, Source};
use crate::thread::{Context, State, Thread, dynamic_start};
use crate::{Error, Kernel, Launch, Memory};

/// A fault, and the number of the thread that it belongs to.
type Failed = (Fault, usize);

/// Runs all blocks one after the other.
pub(crate) fn run(
    kernel: &Kernel,
    launch: &Launch<'_>,
    parameters: Vec<u8>,
    memory: &mut dyn Memory,
) -> Result<(), Error> {
    let body = &kernel.body;
    let shared = match launch.dynamic_shared {
        0 => body.shared,
        more => dynamic_start(body) as usize + more as usize,
    };
    let spaces = Spaces { device: memory, shared: vec![0xff; shared], parameters };
    let mut context = Context { body, launch, spaces, block: [0; 3], steps: 0 };
    let count = launch.block.iter().product::<u32>() as usize;
    let mut threads: Vec<_> =
        (0..count).map(|number| Thread::new(body, number, launch.block)).collect();
    let [x, y, z] = launch.grid;
    for block in (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k]))) {
        context.block = block;
        context.spaces.shared.fill(0xff);
        threads.iter_mut().for_each(|thread| thread.restart(body));
        run_block(&mut context, &mut threads).map_err(|(fault, number)| {
            let thread = &threads[number];
            let (line, instruction) = body.places[body.code[thread.at].place as usize].clone();
            let (kernel, thread, fault) = (kernel.name.clone(), thread.index, Box::new(fault));
            Error::Run { kernel, line, instruction, block, thread, fault }
        })?;
    }
    Ok(())
}

fn run_block(context: &mut Context<'_>, threads: &mut [Thread]) -> Result<(), Failed> {
    let count = threads.len();
    let warps = || (0..count).step_by(LANES).map(|first| first..count.min(first + LANES));
    loop {
        for warp in warps() {
            loop {
                for thread in &mut threads[warp.clone()] {
                    if thread.state == State::Ready {
                        context.run(thread).map_err(|fault| (fault, thread.number))?;
                    }
                }
                if !advance_warp(context, threads, warp.clone())? {
                    break;
                }
            }
        }
        if threads.iter().all(|thread| thread.state == State::Ended) {
            return Ok(());
        }
        release_barrier(context, threads)?;
    }
}

/// Carries out the instructions that lanes of a warp wait at together. Returns whether there was
/// one.
fn advance_warp(
    context: &mut Context<'_>,
    threads: &mut [Thread],
    warp: Range<usize>,
) -> Result<bool, Failed> {
    let (first, mut advanced) = (warp.start, false);
    for number in warp.clone() {
        if threads[number].state != State::Waiting {
            continue;
        }
        let at = threads[number].at;
        let lanes = &mut threads[warp.clone()];
        let ready = match &context.body.code[at].op {
            Op::Collective(collective) => {
                let mask = context.read(&lanes[number - first], collective.mask);
                let mask = mask.map_err(|fault| (fault, number))?;
                let members = members(context, lanes, at, Some((mask, collective.mask)));
                let members = members.map_err(|fault| (fault, number))?;
                if mask >> (number - first) & 1 == 0 {
                    let text = format!("lane {} is not in its own mask {mask:#x}", number - first);
                    return Err((Fault::Deadlock(text), number));
                }
                members.map(|members| collect(context, lanes, &members, collective)).transpose()
            }
            Op::Matrix(matrix) => {
                let members = members(context, lanes, at, None);
                let members = members.map_err(|fault| (fault, number))?;
                members.map(|_| move_matrices(context, lanes, matrix)).transpose()
            }
            _ => continue,
        };
        advanced |= ready.map_err(|fault| (fault, number))?.is_some();
    }
    Ok(advanced)
}

/// Returns the lanes that carry out an instruction together, once all have come to it. Lanes that
/// have ended, or that the block does not have, are none of them.
fn members(
    context: &Context<'_>,
    lanes: &[Thread],
    at: usize,
    mask: Option<(u64, Source)>,
) -> Outcome<Option<Vec<usize>>> {
    let wanted = mask.map_or(u64::MAX, |(mask, _)| mask);
    let mut found = vec![];
    for (lane, thread) in lanes.iter().enumerate() {
        if wanted >> lane & 1 == 0 || thread.state == State::Ended {
            continue;
        }
        if thread.state != State::Waiting || thread.at != at {
            return Ok(None);
        }
        if let Some((mask, source)) = mask
            && context.read(thread, source)? != mask
        {
            return Err(Fault::Deadlock(format!("lane {lane} has another mask than {mask:#x}")));
        }
        found.push(lane);
    }
    Ok(Some(found))
}

fn collect(
    context: &Context<'_>,
    lanes: &mut [Thread],
    members: &[usize],
    collective: &Collective,
) -> Outcome<()> {
    let (mut values, mut lacking) = ([None; LANES], [None; LANES]);
    for &lane in members {
        let read = |source| context.read(&lanes[lane], source);
        let [from, b, c] = collective.from;
        let (b, c) = (read(b)?, read(c)?);
        let first = match collective.moves {
            true => context.partly(&lanes[lane], from),
            false => Register { value: read(from)?, lacking: 0 },
        };
        values[lane] = Some([first.value, b, c]);
        lacking[lane] = Some([first.lacking, b, c]);
    }
    for &lane in members {
        let thread = &mut lanes[lane];
        let (result, predicate) = (collective.function)(&values, lane);
        let [to, flag] = collective.to;
        // A result that PTX leaves open makes the register one that was never written.
        if let Some(to) = to.map(|to| to as usize) {
            let lacking = match collective.moves {
                true => (collective.function)(&lacking, lane).0.unwrap_or_default(),
                false => 0,
            };
            let written = result.map(|value| Register { value, lacking });
            thread.registers[to] = written.unwrap_or(context.body.blank[to]);
        }
        thread.set(flag, predicate.into());
        go_on(thread);
    }
    Ok(())
}

fn move_matrices(context: &mut Context<'_>, lanes: &mut [Thread], matrix: &Matrix) -> Outcome<()> {
    if lanes.len() < LANES {
        return Err(Fault::Deadlock("a matrix needs all lanes of a warp".into()));
    }
    // Registers are written last, because they may hold the addresses.
    let mut loaded = vec![];
    for number in 0..matrix.count() {
        let mut rows = [[0; ROW]; 8];
        if let Some(&from) = matrix.from.get(number) {
            let mut held = [0; LANES];
            for (held, thread) in held.iter_mut().zip(&*lanes) {
                *held = context.read(thread, from)?;
            }
            rows = matrix.gather(&held);
        }
        for (row, bytes) in rows.iter_mut().enumerate() {
            let thread = &mut lanes[8 * number + row];
            let place = context.place(thread, &matrix.access)?;
            if matrix.from.is_empty() {
                context.spaces.load(&mut thread.local, place, bytes)?;
            } else {
                context.spaces.store(&mut thread.local, place, bytes)?;
            }
        }
        if let Some(&Some(to)) = matrix.to.get(number) {
            loaded.push((to, matrix.spread(&rows)));
        }
    }
    for (to, held) in loaded {
        for (thread, held) in lanes.iter_mut().zip(held) {
            thread.set(Some(to), held);
        }
    }
    lanes.iter_mut().for_each(go_on);
    Ok(())
}

fn go_on(thread: &mut Thread) {
    thread.at += 1;
    thread.state = State::Ready;
}

/// Lets the threads go on that wait at a barrier which all have reached. If there is none, the
/// block would wait for ever.
fn release_barrier(context: &Context<'_>, threads: &mut [Thread]) -> Result<(), Failed> {
    let mut reason = None;
    for number in 0..threads.len() {
        let thread = &threads[number];
        let (id, count) = match barrier(context, thread).map_err(|fault| (fault, number))? {
            Some(found) => found,
            None => continue,
        };
        let mut reached = vec![];
        for other in threads.iter() {
            let found = barrier(context, other).map_err(|fault| (fault, other.number))?;
            if found.is_some_and(|found| found.0 == id) {
                reached.push(other.number);
            }
        }
        let expected = count.unwrap_or(threads.len() as u64);
        if reached.len() as u64 == expected {
            check_aligned(context.body, threads, &reached)?;
            reached.into_iter().for_each(|number| go_on(&mut threads[number]));
            return Ok(());
        }
        let text = format!("{} of {expected} threads have reached barrier {id}", reached.len());
        reason.get_or_insert((Fault::Deadlock(text), number));
    }
    let waiting = threads.iter().position(|thread| thread.state == State::Waiting);
    let lanes = Fault::Deadlock("not all lanes of the mask have reached the instruction".into());
    Err(reason.unwrap_or((lanes, waiting.unwrap_or(0))))
}

/// Returns number and threads of the barrier that a thread waits at.
fn barrier(context: &Context<'_>, thread: &Thread) -> Outcome<Option<(u64, Option<u64>)>> {
    if thread.state != State::Waiting {
        return Ok(None);
    }
    let Op::Barrier { id, threads, .. } = context.body.code[thread.at].op else {
        return Ok(None);
    };
    let threads = threads.map(|threads| context.read(thread, threads)).transpose()?;
    Ok(Some((context.read(thread, id)?, threads)))
}

/// The lanes of a warp must come to an aligned barrier at the same instruction.
fn check_aligned(body: &Body, threads: &[Thread], reached: &[usize]) -> Result<(), Failed> {
    for pair in reached.windows(2) {
        let (a, b) = (&threads[pair[0]], &threads[pair[1]]);
        let aligned = matches!(body.code[b.at].op, Op::Barrier { aligned: true, .. });
        if aligned && a.number / LANES == b.number / LANES && a.at != b.at {
            let text = "lanes of one warp are at different instructions of the barrier";
            return Err((Fault::Deadlock(text.into()), b.number));
        }
    }
    Ok(())
}
