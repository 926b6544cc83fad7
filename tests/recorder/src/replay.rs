//! Replays the programs of all ranks together, as devices would, and finds deadlocks.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::{Exchange, Operation, Program};

/// A call of a program: the index of its device, and its own index.
type CallId = (usize, usize);

/// Runs all programs, one for each device.
///
/// The calls of a stream run in order. A wait ends after the record that was the latest of its
/// event when the wait was enqueued. A group starts when all earlier groups of its communicator are
/// over, and ends when the groups at the other ends of its messages have started too. The k-th
/// message that one rank sends to another is the k-th that the other receives from it.
///
/// Once a call can go on, nothing that another call does can keep it from that. So all orders that
/// devices may choose reach the same end, and one replay decides for all of them.
///
/// # Errors
/// If a message lacks an end, its ends differ in length, or streams wait for ever; in words.
pub fn replay(programs: &[Program]) -> Result<(), String> {
    let others = other_ends(programs)?;
    let awaited: Vec<_> = programs.iter().map(awaited).collect();
    let mut queues = queues(programs);
    let (mut started, mut over) = (HashSet::new(), HashSet::new());
    let awaits = |id: CallId, started: &HashSet<CallId>, over: &HashSet<CallId>| -> Vec<CallId> {
        let before = awaited[id.0][id.1].map(|call| (id.0, call));
        let before = before.into_iter().filter(|call| !over.contains(call));
        let others = others.get(&id).into_iter().flatten().copied();
        before.chain(others.filter(|other| !started.contains(other))).collect()
    };
    let mut has_moved = true;
    while has_moved {
        has_moved = false;
        for (device, queue) in &mut queues {
            while let Some(&call) = queue.front() {
                let id = (*device, call);
                if awaited[id.0][id.1].is_none_or(|before| over.contains(&(id.0, before))) {
                    has_moved |= started.insert(id);
                }
                if !awaits(id, &started, &over).is_empty() {
                    break;
                }
                over.insert(id);
                queue.pop_front();
                has_moved = true;
            }
        }
    }
    let describe =
        |(device, call): CallId| format!("device {device}, {}", programs[device].describe(call));
    let waiting = queues.iter().filter_map(|(device, queue)| Some((*device, *queue.front()?)));
    let explain = |id| {
        let awaited = awaits(id, &started, &over).into_iter().map(describe);
        format!("{}, waits for {}", describe(id), awaited.collect::<Vec<_>>().join("; "))
    };
    let waiting: Vec<_> = waiting.map(explain).collect();
    match waiting.is_empty() {
        true => Ok(()),
        false => Err(format!("nothing can go on:\n{}", waiting.join("\n"))),
    }
}

/// Returns, for each call, the call that it waits for: a wait for its record, an exchange for the
/// previous one of its communicator.
fn awaited(program: &Program) -> Vec<Option<usize>> {
    let (mut awaited, mut last) = (program.awaited(), HashMap::new());
    for (index, call) in program.calls.iter().enumerate() {
        if let Operation::Exchange(Exchange { comm, .. }) = call.operation {
            awaited[index] = last.insert(comm, index);
        }
    }
    awaited
}

/// Returns the streams of all devices with their calls, each with the index of its device.
fn queues(programs: &[Program]) -> Vec<(usize, VecDeque<usize>)> {
    let mut queues: BTreeMap<_, VecDeque<usize>> = BTreeMap::new();
    for (device, program) in programs.iter().enumerate() {
        for (index, call) in program.calls.iter().enumerate() {
            queues.entry((device, call.stream)).or_default().push_back(index);
        }
    }
    queues.into_iter().map(|((device, _), calls)| (device, calls)).collect()
}

/// Returns, for each exchange, the exchanges at the other ends of its messages.
fn other_ends(programs: &[Program]) -> Result<HashMap<CallId, Vec<CallId>>, String> {
    // For each ring and each pair of ranks, the messages with their lengths: those that one rank
    // sends, and those that the other receives.
    let mut routes: BTreeMap<_, [Vec<(CallId, u64)>; 2]> = BTreeMap::new();
    for (device, program) in programs.iter().enumerate() {
        for (call, enqueued) in program.calls.iter().enumerate() {
            let Operation::Exchange(Exchange { ring, rank, group, .. }) = &enqueued.operation
            else {
                continue;
            };
            for message in &group.sends {
                let route = routes.entry((*ring, *rank, message.peer)).or_default();
                route[0].push(((device, call), message.bytes));
            }
            for message in &group.receives {
                let route = routes.entry((*ring, message.peer, *rank)).or_default();
                route[1].push(((device, call), message.bytes));
            }
        }
    }
    let mut others: HashMap<CallId, Vec<CallId>> = HashMap::new();
    for ((ring, from, to), [sent, received]) in routes {
        let lengths = [&sent, &received].map(|all| all.iter().map(|one| one.1).collect::<Vec<_>>());
        if lengths[0] != lengths[1] {
            let [sent, received] = lengths;
            return Err(format!(
                "rank {from} of ring {ring} sends messages of {sent:?} bytes to rank {to}, which \
                 receives {received:?}"
            ));
        }
        for ((send, _), (receive, _)) in sent.into_iter().zip(received) {
            others.entry(send).or_default().push(receive);
            others.entry(receive).or_default().push(send);
        }
    }
    Ok(others)
}
