//! Replays the programs of all ranks together, as devices would: streams run side by side, and a
//! message moves when both of its ends are ready.

use std::collections::{BTreeMap, HashMap, VecDeque};

use burst_attention::cuda::driver::{Copy, Stream};
use burst_attention::cuda::nccl::Message;
use burst_attention_kernels::launch::Launch;

use super::{Exchange, Operation, Program};

/// An action on memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action<'a> {
    /// A device runs a kernel. The number is the index of the device's program.
    Launch(usize, &'a Launch),
    /// A device copies.
    Copy(usize, &'a Copy),
    /// A message arrives.
    Message(Delivery),
}

/// A message that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// The device that sends the message, and the address there.
    pub from: (usize, u64),
    /// The device that receives the message, and the address there.
    pub to: (usize, u64),
    /// The number of bytes.
    pub bytes: u64,
}

/// The reason why the programs did not reach their ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stuck {
    /// A rank waits for a message that its peer never sends, or sends one that is never received.
    #[error("message {number} from rank {from} to rank {to} of ring {ring}: {what}")]
    Unmatched {
        /// The ring.
        ring: usize,
        /// The rank that sends.
        from: usize,
        /// The rank that receives.
        to: usize,
        /// The number of the message, counted from 0 in the order of both programs.
        number: usize,
        /// The contradiction.
        what: String,
    },
    /// Every stream waits.
    #[error("nothing can go on:\n{}", .0.join("\n"))]
    Deadlock(
        /// The call that each stream waits for, in words.
        Vec<String>,
    ),
    /// The caller refused an action.
    #[error("device {device}, {call}: {reason}")]
    Failed {
        /// The device.
        device: usize,
        /// The call of the action.
        call: String,
        /// The reason that the caller gives.
        reason: String,
    },
}

/// Runs all programs, one for each device, and calls `act` for each action on memory in order. The
/// seed decides which of the possible actions comes next.
///
/// The calls of a stream run in order. A wait ends after the record that was the latest of its
/// event when the wait was enqueued. A group starts when all earlier groups of its communicator are
/// done. Its messages arrive one by one, each after the group at the other end has started too. The
/// k-th message that one rank sends to another is the k-th that the other receives from it. The
/// group is done when all its messages have arrived.
///
/// # Errors
/// [`Stuck`].
pub fn replay(
    programs: &[Program],
    seed: u64,
    mut act: impl FnMut(Action<'_>) -> Result<(), String>,
) -> Result<(), Stuck> {
    let mut replay = Replay::new(programs, seed)?;
    while let Some(Turn { device, queue, message }) = replay.pick()? {
        let index = replay.head(device, queue).expect("a queue that can go on has a call");
        let call = &programs[device].calls[index];
        let action = match (&call.operation, message) {
            (_, Some(message)) => Some(Action::Message(replay.messages[message].delivery)),
            (Operation::Launch(launch), _) => Some(Action::Launch(device, launch)),
            (Operation::Copy(copy), _) => Some(Action::Copy(device, copy)),
            _ => None,
        };
        action.map_or(Ok(()), &mut act).map_err(|reason| Stuck::Failed {
            device,
            call: programs[device].describe(index),
            reason,
        })?;
        match message {
            Some(message) => replay.deliver(message),
            None => replay.finish(device, index),
        }
    }
    Ok(())
}

/// A call of a program: its device and its index.
type CallId = (usize, usize);

/// One end of a message.
type End = (CallId, Message);

/// A ring, and the ranks that its messages come from and go to.
type Route = (usize, usize, usize);

/// A message with both of its ends.
struct Pair {
    from: CallId,
    to: CallId,
    delivery: Delivery,
    arrived: bool,
}

/// A stream, with its calls that are not over.
struct StreamQueue {
    stream: Stream,
    calls: VecDeque<usize>,
    /// How likely the stream is to go on next.
    weight: u64,
}

struct Device<'a> {
    program: &'a Program,
    /// The call that each call waits for: a wait for its record, an exchange for the previous one
    /// of its communicator.
    awaited: Vec<Option<usize>>,
    over: Vec<bool>,
    queues: Vec<StreamQueue>,
}

/// A possible next action: the first call of a queue, or one message of it if it is an exchange.
struct Turn {
    device: usize,
    queue: usize,
    message: Option<usize>,
}

struct Replay<'a> {
    devices: Vec<Device<'a>>,
    messages: Vec<Pair>,
    /// The messages that each exchange sends and receives.
    parts: HashMap<CallId, Vec<usize>>,
    random: Random,
}

impl<'a> Replay<'a> {
    fn new(programs: &'a [Program], seed: u64) -> Result<Replay<'a>, Stuck> {
        let devices = programs.iter().map(Device::new).collect();
        let messages = matched(programs)?;
        let mut parts: HashMap<CallId, Vec<usize>> = HashMap::new();
        for (index, pair) in messages.iter().enumerate() {
            parts.entry(pair.from).or_default().push(index);
            parts.entry(pair.to).or_default().push(index);
        }
        let mut replay = Replay { devices, messages, parts, random: Random(seed) };
        replay.weigh();
        Ok(replay)
    }

    fn head(&self, device: usize, queue: usize) -> Option<usize> {
        self.devices[device].queues[queue].calls.front().copied()
    }

    /// Whether the call is the first of its stream and the call that it waits for is over.
    fn has_started(&self, (device, call): CallId) -> bool {
        let device = &self.devices[device];
        let first = |queue: &StreamQueue| queue.calls.front() == Some(&call);
        device.queues.iter().any(first) && device.awaited[call].is_none_or(|to| device.over[to])
    }

    /// Returns the turns that a queue could take now.
    fn turns(&self, device: usize, queue: usize) -> Vec<Turn> {
        let turn = |message| Turn { device, queue, message };
        let Some(call) = self.head(device, queue) else { return vec![] };
        if !self.has_started((device, call)) {
            return vec![];
        }
        let Some(parts) = self.parts.get(&(device, call)) else { return vec![turn(None)] };
        let ready = |index: &&usize| {
            let pair = &self.messages[**index];
            pair.to == (device, call) && !pair.arrived && self.has_started(pair.from)
        };
        parts.iter().filter(ready).map(|index| turn(Some(*index))).collect()
    }

    /// Chooses the next turn; `None` when all programs are done.
    fn pick(&mut self) -> Result<Option<Turn>, Stuck> {
        if self.random.below(16) == 0 {
            self.weigh();
        }
        let all = || (0..self.devices.len()).flat_map(|n| self.devices[n].queue_ids(n));
        let mut able: Vec<(u64, Vec<Turn>)> = all()
            .map(|(device, queue)| {
                (self.devices[device].queues[queue].weight, self.turns(device, queue))
            })
            .filter(|(_, turns)| !turns.is_empty())
            .collect();
        let total: u64 = able.iter().map(|(weight, _)| weight).sum();
        if total == 0 {
            let waiting: Vec<_> = all().filter_map(|(n, queue)| self.explain(n, queue)).collect();
            return if waiting.is_empty() { Ok(None) } else { Err(Stuck::Deadlock(waiting)) };
        }
        let mut left = self.random.below(total);
        let picked = able.iter().position(|(weight, _)| match left.checked_sub(*weight) {
            Some(less) => {
                left = less;
                false
            }
            None => true,
        });
        let mut turns = able.swap_remove(picked.expect("below the sum of weights")).1;
        let index = self.random.below(turns.len() as u64) as usize;
        Ok(Some(turns.swap_remove(index)))
    }

    /// Makes some streams fast and others slow, so that orders far from lockstep occur too.
    fn weigh(&mut self) {
        for device in &mut self.devices {
            for queue in &mut device.queues {
                queue.weight = 1 << (2 * self.random.below(6));
            }
        }
    }

    fn deliver(&mut self, message: usize) {
        self.messages[message].arrived = true;
        let Pair { from, to, .. } = self.messages[message];
        for place in [from, to] {
            if self.parts[&place].iter().all(|part| self.messages[*part].arrived) {
                self.finish(place.0, place.1);
            }
        }
    }

    /// Ends the first call of a stream.
    fn finish(&mut self, device: usize, call: usize) {
        let device = &mut self.devices[device];
        device.over[call] = true;
        for queue in &mut device.queues {
            if queue.calls.front() == Some(&call) {
                queue.calls.pop_front();
            }
        }
    }

    /// Describes the calls that the first call of a queue waits for.
    fn explain(&self, device: usize, queue: usize) -> Option<String> {
        let (call, place) = (self.head(device, queue)?, &self.devices[device]);
        let awaited = place.awaited[call].filter(|to| !place.over[*to]);
        let what = match awaited {
            Some(to) => place.program.describe(to),
            None => {
                let parts = self.parts.get(&(device, call)).into_iter().flatten();
                let missing = parts.map(|part| &self.messages[*part]).filter(|part| !part.arrived);
                let other = |pair: &Pair| {
                    let (at, to) = if pair.to == (device, call) { pair.from } else { pair.to };
                    format!("device {at}, {}", self.devices[at].program.describe(to))
                };
                missing.map(other).collect::<Vec<_>>().join("; ")
            }
        };
        Some(format!("device {device}, {}, waits for {what}", place.program.describe(call)))
    }
}

impl<'a> Device<'a> {
    fn new(program: &'a Program) -> Device<'a> {
        let (mut awaited, over) = (program.awaited(), vec![false; program.calls.len()]);
        let (mut queues, mut last): (Vec<StreamQueue>, _) = (vec![], HashMap::new());
        for (index, call) in program.calls.iter().enumerate() {
            if let Operation::Exchange(Exchange { comm, .. }) = call.operation {
                awaited[index] = last.insert(comm, index);
            }
            let known = queues.iter().position(|queue| queue.stream == call.stream);
            let queue = known.unwrap_or_else(|| {
                let (stream, calls) = (call.stream, VecDeque::new());
                queues.push(StreamQueue { stream, calls, weight: 1 });
                queues.len() - 1
            });
            queues[queue].calls.push_back(index);
        }
        Device { program, awaited, over, queues }
    }

    /// Returns the index of the device with the index of each of its queues.
    fn queue_ids(&self, device: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..self.queues.len()).map(move |queue| (device, queue))
    }
}

/// Pairs the k-th send of each route with the k-th receive.
fn matched(programs: &[Program]) -> Result<Vec<Pair>, Stuck> {
    let mut routes: BTreeMap<Route, [Vec<End>; 2]> = BTreeMap::new();
    for (device, program) in programs.iter().enumerate() {
        for (call, enqueued) in program.calls.iter().enumerate() {
            let Operation::Exchange(Exchange { ring, rank, group, .. }) = &enqueued.operation
            else {
                continue;
            };
            for send in &group.sends {
                let route = routes.entry((*ring, *rank, send.peer)).or_default();
                route[0].push(((device, call), *send));
            }
            for receive in &group.receives {
                let route = routes.entry((*ring, receive.peer, *rank)).or_default();
                route[1].push(((device, call), *receive));
            }
        }
    }
    let mut pairs = Vec::new();
    for (route, [sends, receives]) in routes {
        for number in 0..sends.len().max(receives.len()) {
            let ends = (sends.get(number), receives.get(number));
            pairs.push(pair(programs, ends).map_err(|what| {
                let (ring, from, to) = route;
                Stuck::Unmatched { ring, from, to, number, what }
            })?);
        }
    }
    Ok(pairs)
}

fn pair(programs: &[Program], ends: (Option<&End>, Option<&End>)) -> Result<Pair, String> {
    let at = |&((device, call), _): &End| {
        format!("device {device}, {}", programs[device].describe(call))
    };
    let (send, receive) = match ends {
        (Some(send), Some(receive)) => (send, receive),
        (Some(send), None) => return Err(format!("sent by {}, never received", at(send))),
        (None, Some(receive)) => return Err(format!("expected by {}, never sent", at(receive))),
        (None, None) => unreachable!("one end is there"),
    };
    let (bytes, expected) = (send.1.bytes, receive.1.bytes);
    if bytes != expected {
        let (sender, receiver) = (at(send), at(receive));
        return Err(format!("{bytes} bytes of {sender} meet {expected} bytes of {receiver}"));
    }
    let (from, to) = ((send.0.0, send.1.address), (receive.0.0, receive.1.address));
    let delivery = Delivery { from, to, bytes };
    Ok(Pair { from: send.0, to: receive.0, delivery, arrived: false })
}

/// The random numbers of splitmix64, the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit
    }
}
