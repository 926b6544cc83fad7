//! Messages from when one end has posted them until they are through.

use std::collections::{BTreeMap, VecDeque};

use super::machine::Class;
use super::script::{End, Label, MessageEnd};

/// An end of a message that its rank has posted.
#[derive(Clone, Copy)]
pub(super) struct Posted {
    pub rank: usize,
    /// Index of the step that posted it.
    pub step: usize,
    /// Number of its exchange, among the rank's exchanges.
    pub exchange: u64,
}

/// A message.
pub(super) struct Message {
    pub label: Label,
    pub class: Class,
    pub bytes: u64,
    /// The ends of the sender and of the receiver, once they have posted it.
    ends: [Option<Posted>; 2],
    /// When the last end posted it.
    pub posted: f64,
    /// When its turn came.
    pub started: Option<f64>,
}

/// The exchanges of one rank over one class of links, which take turns.
type Queue = VecDeque<Turn>;

/// An exchange that is not through.
struct Turn {
    exchange: u64,
    /// The number of its messages that are through.
    through: usize,
    messages: Vec<usize>,
}

/// All messages that are not through. Their numbers are used again.
pub(super) struct Messages {
    all: Vec<Option<Message>>,
    free: Vec<usize>,
    /// Messages from one rank to another that only one end has posted, in order.
    routes: BTreeMap<(usize, usize), VecDeque<usize>>,
    queues: Vec<[Queue; 2]>,
}

impl Message {
    /// The ends of the sender and of the receiver, once both have posted the message.
    pub fn ends(&self) -> Option<[Posted; 2]> {
        Some([self.ends[0]?, self.ends[1]?])
    }
}

impl Messages {
    pub fn new(world_size: usize) -> Messages {
        let queues = std::iter::repeat_with(Default::default).take(world_size).collect();
        Messages { all: vec![], free: vec![], routes: BTreeMap::new(), queues }
    }

    pub fn get(&self, number: usize) -> Option<&Message> {
        self.all.get(number)?.as_ref()
    }

    /// Posts one end of a message, and returns the message's number.
    ///
    /// # Errors
    /// What the other end has posted, if that is another message.
    pub fn post(
        &mut self,
        rank: usize,
        step: usize,
        exchange: u64,
        message: &MessageEnd,
        now: f64,
    ) -> Result<usize, Label> {
        let MessageEnd { end, bytes, class, label, .. } = *message;
        let peer = message.peer as usize;
        let route = if end == End::Send { (rank, peer) } else { (peer, rank) };
        let route = self.routes.entry(route).or_default();
        let lacks_end = |number: &usize| {
            let message = self.all[*number].as_ref();
            message.is_some_and(|message| message.ends[end as usize].is_none())
        };
        let number = match route.front().copied().filter(lacks_end) {
            Some(number) => {
                route.pop_front();
                number
            }
            None => {
                let number = self.free.pop().unwrap_or_else(|| {
                    self.all.push(None);
                    self.all.len() - 1
                });
                let ends = [None; 2];
                self.all[number] =
                    Some(Message { label, class, bytes, ends, posted: now, started: None });
                route.push_back(number);
                number
            }
        };
        let queue = &mut self.queues[rank][class as usize];
        match queue.back_mut().filter(|newest| newest.exchange == exchange) {
            Some(newest) => newest.messages.push(number),
            None => queue.push_back(Turn { exchange, through: 0, messages: vec![number] }),
        }
        if let Some(message) = &mut self.all[number] {
            if message.label != label {
                return Err(message.label);
            }
            message.ends[end as usize] = Some(Posted { rank, step, exchange });
            message.posted = now;
        }
        Ok(number)
    }

    /// Starts a message if both ends have posted it and both ranks have come to its turn. Returns
    /// the message if it starts.
    pub fn try_start(&mut self, number: usize, now: f64) -> Option<&Message> {
        let message = self.all[number].as_mut().filter(|message| message.started.is_none())?;
        let class = message.class as usize;
        let has_turn = |end: &Posted| {
            let first = self.queues[end.rank][class].front();
            first.is_some_and(|first| first.exchange == end.exchange)
        };
        let starts = message.ends()?.iter().all(has_turn);
        message.started = starts.then_some(now);
        starts.then_some(message)
    }

    /// Removes a message that is through. Adds to `next` the messages whose turn may have come.
    pub fn finish(&mut self, number: usize, next: &mut Vec<usize>) -> Option<Message> {
        let message = self.all[number].take()?;
        self.free.push(number);
        for end in message.ends.into_iter().flatten() {
            let queue = &mut self.queues[end.rank][message.class as usize];
            let Some(first) = queue.front_mut() else { continue };
            first.through += 1;
            if first.through == first.messages.len() {
                queue.pop_front();
                next.extend(queue.front().iter().flat_map(|next| &next.messages));
            }
        }
        Some(message)
    }

    /// A message that only one end has posted, if there is one.
    pub fn unmatched(&self) -> Option<(Posted, End, Label)> {
        self.all.iter().flatten().find_map(|message| match message.ends {
            [Some(end), None] => Some((end, End::Send, message.label)),
            [None, Some(end)] => Some((end, End::Receive, message.label)),
            _ => None,
        })
    }
}
