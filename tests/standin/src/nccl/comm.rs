//! Communicators.

#![allow(non_snake_case)]

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use super::{INVALID_ARGUMENT, mail};
use crate::call::{Outcome, c_functions, put, take};
use crate::device::current;
use crate::handles::Handles;
use crate::memory::{Owner, allocate, find, free};
use crate::report::{complain, lock};

/// A rank's end of a communicator.
#[derive(Debug)]
pub struct Comm {
    /// The name that all ranks know.
    pub name: String,
    pub rank: usize,
    pub size: usize,
    pub device: usize,
    /// The next number of a message to, and from, each peer.
    next_message: Mutex<HashMap<(bool, usize), u64>>,
    /// The peers to which, and from which, there is a connection.
    pub connected: Mutex<HashSet<(bool, usize)>>,
    /// The next number of a collective operation.
    pub next_collective: AtomicU64,
    next_split: AtomicU64,
    is_over: AtomicBool,
}

pub static COMMS: Handles<Comm> = Handles::new("communicator");

impl Comm {
    /// Whether the communicator was aborted.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Returns the number of the next message to or from a peer.
    pub fn number(&self, is_send: bool, peer: usize) -> u64 {
        let mut next = lock(&self.next_message);
        let next = next.entry((is_send, peer)).or_default();
        *next += 1;
        *next
    }

    /// Returns the key of a message.
    pub fn key(&self, kind: &str, from: usize, to: usize, number: u64) -> String {
        format!("{}-{kind}-{from}-{to}-{number}", self.name)
    }

    /// Sends bytes to every rank and returns those of all ranks, in their order.
    pub fn gather(&self, kind: &str, number: u64, bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
        for rank in (0..self.size).filter(|rank| *rank != self.rank) {
            mail::post(&self.key(kind, self.rank, rank, number), bytes.to_vec());
        }
        let from = |rank| match rank == self.rank {
            true => Some(bytes.to_vec()),
            false => mail::take(&self.key(kind, rank, self.rank, number), || self.is_over()),
        };
        (0..self.size).map(from).collect()
    }
}

/// What NCCL guarantees under `NCCL_LAUNCH_ORDER_IMPLICIT`: the operations of a device start in the
/// order in which the host issues them. Here each even waits for the end of the one before it.
#[derive(Debug)]
pub struct Line {
    next: AtomicU64,
    done: Mutex<u64>,
    changed: Condvar,
}

impl Line {
    /// Returns a line in which nothing waits.
    pub const fn new() -> Line {
        Line { next: AtomicU64::new(0), done: Mutex::new(0), changed: Condvar::new() }
    }

    /// Returns the next place in the line.
    pub fn place(&self) -> u64 {
        self.next.fetch_add(1, Ordering::SeqCst)
    }

    /// Runs an operation when its turn comes.
    pub fn take_turn(&self, place: u64, work: impl FnOnce()) {
        let mut done = lock(&self.done);
        while *done != place {
            done = self.changed.wait(done).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        drop(done);
        work();
        *lock(&self.done) += 1;
        self.changed.notify_all();
    }
}

/// The bytes of `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    fn name(&self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }
}

thread_local! {
    /// The communicators that this thread's open groups make.
    static JOINING: RefCell<Vec<Arc<Comm>>> = const { RefCell::new(vec![]) };
}

/// Makes a rank's end of a communicator. Outside of a group the host waits for all ranks.
fn join(comm: *mut *mut c_void, device: usize, name: String, rank: c_int, size: c_int) -> Outcome {
    let in_range = 0 <= rank && rank < size;
    if !in_range {
        return Err(INVALID_ARGUMENT);
    }
    let made = Arc::new(Comm {
        name,
        rank: rank as usize,
        size: size as usize,
        device,
        next_message: Mutex::default(),
        connected: Mutex::default(),
        next_collective: AtomicU64::new(0),
        next_split: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
    });
    put(comm, COMMS.add(made.clone()) as *mut c_void);
    JOINING.with_borrow_mut(|joining| joining.push(made));
    if !super::exchange::is_in_group() {
        meet();
    }
    Ok(())
}

/// Waits for the ranks of the communicators that this thread makes.
pub fn meet() {
    let joining = JOINING.take();
    let met: Vec<_> = joining.iter().map(|comm| (comm, comm.size)).collect();
    // All ranks of this thread announce themselves before one waits.
    for (comm, size) in &met {
        for rank in (0..*size).filter(|rank| *rank != comm.rank) {
            mail::post(&comm.key("join", comm.rank, rank, 0), vec![]);
        }
    }
    for (comm, size) in &met {
        for rank in (0..*size).filter(|rank| *rank != comm.rank) {
            mail::take(&comm.key("join", rank, comm.rank, 0), || comm.is_over());
        }
    }
}

/// Reads `blocking` of `ncclConfig_t`, for the log.
fn words(config: *const c_int) -> String {
    let blocking = (!config.is_null()).then(|| take(config.wrapping_add(4)).unwrap_or(-1));
    format!("blocking {blocking:?}")
}

c_functions! {
    fn ncclGetVersion(version: *mut c_int) {
        put(version, 23_007);
    }

    fn ncclGetUniqueId(id: *mut UniqueId) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let name = format!("comm-{}-{number}", std::process::id());
        let mut bytes = [0; 128];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        put(id, UniqueId(bytes));
    }

    fn ncclCommInitRank(comm: *mut *mut c_void, size: c_int, id: UniqueId, rank: c_int) {
        join(comm, current()?.index, id.name(), rank, size)?;
    }

    fn ncclCommInitRankConfig(
        comm: *mut *mut c_void, size: c_int, id: UniqueId, rank: c_int, config: *const c_int
    ) ["rank {rank} of {size}, {}", words(config)] {
        join(comm, current()?.index, id.name(), rank, size)?;
    }

    fn ncclCommInitRankScalable(
        comm: *mut *mut c_void, size: c_int, rank: c_int, _count: c_int, ids: *const UniqueId,
        config: *const c_int
    ) ["rank {rank} of {size}, {}", words(config)] {
        join(comm, current()?.index, take(ids)?.name(), rank, size)?;
    }

    fn ncclCommSplit(
        comm: *mut c_void, color: c_int, key: c_int, made: *mut *mut c_void, _config: *const c_int
    ) {
        let comm = COMMS.get(comm)?;
        let number = comm.next_split.fetch_add(1, Ordering::SeqCst);
        let mine = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let all = comm.gather("split", number, &mine).ok_or(INVALID_ARGUMENT)?;
        let number_at = |bytes: &[u8], at: usize| {
            let mut four = [0; 4];
            four.copy_from_slice(&bytes[at..at + 4]);
            c_int::from_le_bytes(four)
        };
        let mut members: Vec<_> = (0..).zip(&all)
            .filter(|(_, bytes)| number_at(bytes, 0) == color)
            .map(|(rank, bytes)| (number_at(bytes, 4), rank))
            .collect();
        members.sort_unstable();
        if color < 0 {
            put(made, std::ptr::null_mut());
        } else {
            let rank = members.iter().position(|(_, rank)| *rank == comm.rank);
            let name = format!("{}-split-{number}-{color}", comm.name);
            join(made, comm.device, name, rank.unwrap_or(0) as c_int, members.len() as c_int)?;
        }
    }

    fn ncclCommCount(comm: *mut c_void, count: *mut c_int) {
        put(count, COMMS.get(comm)?.size as c_int);
    }

    fn ncclCommUserRank(comm: *mut c_void, rank: *mut c_int) {
        put(rank, COMMS.get(comm)?.rank as c_int);
    }

    fn ncclCommCuDevice(comm: *mut c_void, index: *mut c_int) {
        put(index, COMMS.get(comm)?.device as c_int);
    }

    fn ncclCommGetAsyncError(comm: *mut c_void, error: *mut c_int) {
        COMMS.get(comm)?;
        put(error, 0);
    }

    fn ncclCommAbort(comm: *mut c_void) {
        COMMS.remove(comm)?.is_over.store(true, Ordering::SeqCst);
        mail::wake();
    }

    fn ncclCommDestroy(comm: *mut c_void) {
        COMMS.remove(comm)?;
    }

    fn ncclCommFinalize(comm: *mut c_void) {
        COMMS.get(comm)?;
    }

    fn ncclCommRegister(comm: *mut c_void, buffer: *mut c_void, _bytes: usize, handle: *mut *mut c_void) {
        COMMS.get(comm)?;
        put(handle, buffer);
    }

    fn ncclCommDeregister(comm: *mut c_void, _handle: *mut c_void) {
        COMMS.get(comm)?;
    }

    fn ncclCommQueryProperties(_comm: *mut c_void, _properties: *mut c_void) {
        return Err(super::INVALID_USAGE);
    }

    fn ncclMemAlloc(address: *mut u64, bytes: usize) {
        put(address, allocate(Owner::Device(current()?.index), bytes)?);
    }

    fn ncclMemFree(address: u64) {
        free(address)?;
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        _ => c"unknown result code",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    c"".as_ptr()
}

/// Complains if memory is not of the communicator's device.
pub fn check_owner(call: &str, comm: &Comm, address: u64) {
    match find(address) {
        Some((_, _, Owner::Device(owner))) if owner != comm.device => complain(format!(
            "{call}: {address:#x} is memory of device {owner}, the communicator is of device {}",
            comm.device
        )),
        _ => {}
    }
}
