//! Which messages leave in which stretch of a pass, and which arrive.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::schedule::{Due, Schedule, Transfer};

/// Sizes of parcels are multiples of it, so that entries of a batch stay aligned.
const ALIGNMENT: usize = 64;

/// One collective permute: parcels of several ranks that are under way together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hop {
    /// The stretch whose call fills the parcels.
    pub from: usize,
    /// The stretch whose call needs what came.
    pub to: usize,
    /// Bytes of the largest parcel, for one batch entry; all have this size.
    pub bytes: usize,
    /// Sender and receiver of each parcel; no rank is twice one of them.
    pub pairs: Vec<(usize, usize)>,
}

/// Where a message lies: in the parcel of a hop, from a byte on, for one batch entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stowed {
    pub hop: usize,
    pub offset: usize,
}

/// How the walk of all ranks is cut into stretches between which messages travel.
///
/// A stretch ends where some rank needs what another one sent since it began. So stretches begin at
/// the deadlines of exchanges, the same for all ranks.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// All collective permutes, in the order in which their parcels are filled.
    pub hops: Vec<Hop>,
    /// Moments at which all stretches but the first begin.
    begins: Vec<usize>,
    /// For each rank its messages, in the order in which it starts to send them.
    sends: Vec<Vec<Stowed>>,
    /// Likewise in the order in which it starts to receive them.
    receives: Vec<Vec<Stowed>>,
}

/// A message on its way through planning.
struct Message {
    pair: (usize, usize),
    stretches: (usize, usize),
    bytes: usize,
    /// Number among all that the sender sends, and among all that the receiver gets.
    numbers: (usize, usize),
}

/// All messages of a pair in the same stretches.
struct Parcel {
    pair: (usize, usize),
    bytes: usize,
    messages: Vec<Message>,
}

impl Plan {
    /// For the schedules of all ranks; sizes are those of one batch entry.
    ///
    /// # Errors
    /// [`Error::BrokenSchedule`] if something is sent that nobody expects, or the other way round.
    pub fn new(problem: &Problem, schedules: &[Schedule]) -> Result<Plan> {
        let begins = begins(schedules);
        let mut groups: BTreeMap<(usize, usize), Vec<Message>> = BTreeMap::new();
        for message in messages(problem, schedules, &begins)? {
            groups.entry(message.stretches).or_default().push(message);
        }
        let ranks = |count: fn(&Schedule) -> usize| {
            let none = Stowed { hop: usize::MAX, offset: 0 };
            schedules.iter().map(|schedule| vec![none; count(schedule)]).collect::<Vec<_>>()
        };
        let sends = ranks(|schedule| schedule.sends().count());
        let receives = ranks(|schedule| receives(schedule).count());
        let mut plan = Plan { hops: vec![], begins, sends, receives };
        for (stretches, messages) in groups {
            plan.stow(stretches, parcels(messages));
        }
        Ok(plan)
    }

    /// How many stretches there are.
    pub fn stretches(&self) -> usize {
        self.begins.len() + 1
    }

    /// The stretch that a moment belongs to.
    pub(super) fn stretch_at(&self, moment: Due) -> usize {
        self.begins.partition_point(|&begin| begin <= moment.moment())
    }

    pub(super) fn send(&self, rank: usize, number: usize) -> Option<Stowed> {
        self.sends.get(rank)?.get(number).copied()
    }

    pub(super) fn receive(&self, rank: usize, number: usize) -> Option<Stowed> {
        self.receives.get(rank)?.get(number).copied()
    }

    /// Spreads parcels over as many hops as it takes, large ones together.
    fn stow(&mut self, (from, to): (usize, usize), mut parcels: Vec<Parcel>) {
        parcels.sort_by_key(|parcel| (std::cmp::Reverse(parcel.bytes), parcel.pair));
        let first = self.hops.len();
        for Parcel { pair, bytes, messages } in parcels {
            let meets = |hop: &Hop| hop.pairs.iter().any(|p| p.0 == pair.0 || p.1 == pair.1);
            let free = self.hops[first..].iter().position(|hop| !meets(hop));
            let hop = first + free.unwrap_or(self.hops.len() - first);
            if hop == self.hops.len() {
                let bytes = bytes.next_multiple_of(ALIGNMENT);
                self.hops.push(Hop { from, to, bytes, pairs: vec![] });
            }
            self.hops[hop].pairs.push(pair);
            let mut offset = 0;
            for message in messages {
                self.sends[pair.0][message.numbers.0] = Stowed { hop, offset };
                self.receives[pair.1][message.numbers.1] = Stowed { hop, offset };
                offset += message.bytes;
            }
        }
    }
}

fn receives(schedule: &Schedule) -> impl Iterator<Item = (&Transfer, Due)> {
    let exchanges = schedule.steps.iter().flat_map(|step| &step.exchanges);
    exchanges.flat_map(|exchange| exchange.receives.iter().map(|one| (one, exchange.due)))
}

/// The moments at which anything that comes is due.
fn begins(schedules: &[Schedule]) -> Vec<usize> {
    let dues = schedules.iter().flat_map(receives).map(|(_, due)| due.moment());
    dues.collect::<BTreeSet<_>>().into_iter().collect()
}

fn messages(problem: &Problem, schedules: &[Schedule], begins: &[usize]) -> Result<Vec<Message>> {
    let stretch = |moment: usize| begins.partition_point(|&begin| begin <= moment);
    // What each rank expects of each other one, in order: its number and when it is due.
    let mut expected: HashMap<(usize, usize), VecDeque<(usize, Due)>> = HashMap::new();
    for (rank, schedule) in schedules.iter().enumerate() {
        for (number, (receive, due)) in receives(schedule).enumerate() {
            expected.entry((receive.peer, rank)).or_default().push_back((number, due));
        }
    }
    let mut messages = Vec::new();
    for (rank, schedule) in schedules.iter().enumerate() {
        let mut number = 0;
        for step in &schedule.steps {
            for send in step.exchanges.iter().flat_map(|exchange| &exchange.sends) {
                let pair = (rank, send.peer);
                let met = expected.get_mut(&pair).and_then(VecDeque::pop_front);
                let Some((at_receiver, due)) = met else {
                    let what = format!("nobody expects {} at rank {}", send.chunk, send.peer);
                    return Err(Error::BrokenSchedule { rank, step: step.index, what });
                };
                let row = problem.row_bytes(send.chunk.payload, schedule.pass);
                messages.push(Message {
                    pair,
                    stretches: (stretch(Due::Begin(step.index).moment()), stretch(due.moment())),
                    bytes: row * send.chunk.rows.len(),
                    numbers: (number, at_receiver),
                });
                number += 1;
            }
        }
    }
    if let Some(((peer, rank), _)) = expected.into_iter().find(|(_, left)| !left.is_empty()) {
        let what = format!("what rank {peer} shall send is not sent");
        return Err(Error::BrokenSchedule { rank, step: 0, what });
    }
    Ok(messages)
}

fn parcels(messages: Vec<Message>) -> Vec<Parcel> {
    let mut parcels: BTreeMap<(usize, usize), Parcel> = BTreeMap::new();
    for message in messages {
        let pair = message.pair;
        let empty = || Parcel { pair, bytes: 0, messages: vec![] };
        let parcel = parcels.entry(pair).or_insert_with(empty);
        parcel.bytes += message.bytes;
        parcel.messages.push(message);
    }
    parcels.into_values().collect()
}
