//! Messages from when one end has posted them to when they are through.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use super::machine::Class;
use super::script::{Parcel, What};

/// Which end of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Send,
    Receive,
}

/// One end of a message that was posted.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub rank: usize,
    /// Index of the step that posted it.
    pub step: usize,
    /// Number of the exchange that it belongs to, of this rank's.
    pub exchange: u64,
    /// Its turn in the rank's queue.
    turn: u64,
}

/// A message.
#[derive(Debug)]
pub(super) struct Message {
    pub what: What,
    pub class: Class,
    pub bytes: u64,
    /// Of the sender and of the receiver, as far as they have posted it.
    ends: [Option<End>; 2],
    /// When both had.
    pub posted: f64,
    /// When its turn came.
    pub started: Option<f64>,
}

/// Exchanges of one rank over one class of links, which take turns.
#[derive(Debug, Default)]
struct Queue {
    /// How many are through.
    through: u64,
    waiting: VecDeque<Group>,
}

/// Messages of one exchange.
#[derive(Debug)]
struct Group {
    exchange: u64,
    left: usize,
    messages: Vec<usize>,
}

/// All messages that are not through, under numbers that are used again.
pub(super) struct Messages {
    all: Vec<Option<Message>>,
    free: Vec<usize>,
    /// Messages between two ranks that only one of them has posted, in order.
    routes: HashMap<(u32, u32), VecDeque<usize>, BuildHasherDefault<Mixed>>,
    queues: Vec<[Queue; 2]>,
}

impl Message {
    /// The ends, once both are there.
    pub fn ends(&self) -> Option<[End; 2]> {
        Some([self.ends[0]?, self.ends[1]?])
    }
}

/// Who posts an end of a message.
pub(super) struct From {
    pub rank: usize,
    pub step: usize,
    pub exchange: u64,
}

/// Hashes pairs of ranks, which nobody chooses to collide.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Messages {
    pub fn new(world_size: usize) -> Messages {
        let queues = std::iter::repeat_with(Default::default).take(world_size).collect();
        Messages { all: vec![], free: vec![], routes: HashMap::default(), queues }
    }

    pub fn get(&self, number: usize) -> Option<&Message> {
        self.all.get(number)?.as_ref()
    }

    /// One end posts a message: its number, or what the other end expects instead.
    pub fn post(&mut self, from: &From, parcel: &Parcel, now: f64) -> Result<usize, What> {
        let From { rank, step, exchange } = *from;
        let Parcel { side, bytes, class, what, .. } = *parcel;
        let peer = parcel.peer as usize;
        let (from, to) = if side == Side::Send { (rank, peer) } else { (peer, rank) };
        let route = self.routes.entry((from as u32, to as u32)).or_default();
        let all = &self.all;
        let lacks_side = |&&number: &&usize| {
            all[number].as_ref().is_some_and(|message| message.ends[side as usize].is_none())
        };
        let known = route.front().filter(lacks_side).copied();
        let number = match known {
            Some(number) => {
                route.pop_front();
                number
            }
            None => {
                let message =
                    Message { what, class, bytes, ends: [None; 2], posted: now, started: None };
                let number = self.free.pop().unwrap_or(self.all.len());
                if number == self.all.len() {
                    self.all.push(None);
                }
                self.all[number] = Some(message);
                route.push_back(number);
                number
            }
        };
        let turn = self.queues[rank][class as usize].take_turn(exchange, number);
        if let Some(message) = &mut self.all[number] {
            if message.what != what {
                return Err(message.what);
            }
            message.ends[side as usize] = Some(End { rank, step, exchange, turn });
            message.posted = now;
        }
        Ok(number)
    }

    /// Starts a message if both ends have posted it and it is its turn at both.
    pub fn try_start(&mut self, number: usize, now: f64) -> bool {
        let Some(message) = &mut self.all[number] else { return false };
        let its_turn =
            |end: &End| self.queues[end.rank][message.class as usize].through == end.turn;
        let starts = message.started.is_none()
            && message.ends().is_some_and(|ends| ends.iter().all(its_turn));
        if starts {
            message.started = Some(now);
        }
        starts
    }

    /// A message is through: it, and the messages whose turn may have come.
    pub fn finish(&mut self, number: usize, next: &mut Vec<usize>) -> Option<Message> {
        let message = self.all[number].take()?;
        self.free.push(number);
        for end in message.ends.into_iter().flatten() {
            self.queues[end.rank][message.class as usize].finish_one(next);
        }
        Some(message)
    }

    /// A message that only one end has posted, if there is one.
    pub fn lonely(&self) -> Option<(End, Side, What)> {
        self.all.iter().flatten().find_map(|message| match message.ends {
            [Some(end), None] => Some((end, Side::Send, message.what)),
            [None, Some(end)] => Some((end, Side::Receive, message.what)),
            _ => None,
        })
    }
}

impl Queue {
    /// The turn of a message of `exchange`, the newest one.
    fn take_turn(&mut self, exchange: u64, message: usize) -> u64 {
        match self.waiting.back_mut().filter(|group| group.exchange == exchange) {
            Some(group) => {
                group.left += 1;
                group.messages.push(message);
            }
            None => self.waiting.push_back(Group { exchange, left: 1, messages: vec![message] }),
        }
        self.through + self.waiting.len() as u64 - 1
    }

    /// A message of the exchange whose turn it is is through.
    fn finish_one(&mut self, next: &mut Vec<usize>) {
        let Some(group) = self.waiting.front_mut() else { return };
        group.left -= 1;
        if group.left == 0 {
            self.waiting.pop_front();
            self.through += 1;
            next.extend(self.waiting.front().iter().flat_map(|group| &group.messages));
        }
    }
}
