//! NCCL's functions on recorders. A communicator leads to its recorder.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use burst_attention::cuda::driver::Stream;
use burst_attention::cuda::nccl::{Comm, Group, Message, Nccl};

use super::recorder::{Member, RecorderState, Shared};
use super::{Call, Exchange, Operation};

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;
/// The version that `ncclGetVersion` reports: 2.30.7.
const VERSION: c_int = 23_007;
/// `ncclInt8` and `ncclUint8`: counts are bytes.
const BYTES: [c_int; 2] = [0, 1];

/// A code of NCCL and the reason for it.
type Refused = (c_int, String);

/// Returns NCCL's functions for communicators of [`Recorder::add_comm`]. They record messages at
/// the point where NCCL would enqueue them:
///
/// - A group belongs to the thread that began it. All messages of one communicator in a group go to
///   one stream. If a call in a group fails, the end of the group drops it and fails too. A message
///   outside of a group is a group of one.
/// - The functions are stricter than NCCL: groups do not nest, and a thread with an open group must
///   make no other call, so a forgotten group shows at the thread's next call. Messages must have
///   bytes.
///
/// [`Recorder::add_comm`]: super::Recorder::add_comm
pub fn nccl() -> &'static Nccl {
    const NCCL: &Nccl = &Nccl {
        version,
        error_string,
        last_error,
        count,
        rank,
        async_error,
        group_start,
        group_end,
        send,
        receive,
    };
    NCCL
}

/// Whether this thread has begun a group and not ended it.
pub fn group_is_open() -> bool {
    THREAD.with_borrow(|thread| thread.open.is_some())
}

/// A group that was begun and not ended.
#[derive(Default)]
struct OpenGroup {
    /// The code of the first call in it that failed.
    failed: Option<c_int>,
    messages: Vec<(Comm, Stream, Direction, Message)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Out,
    In,
}

#[derive(Default)]
struct Thread {
    /// The recorder that this thread called last. It counts calls without a communicator.
    recorder: Weak<Shared>,
    open: Option<OpenGroup>,
    reason: CString,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

type Owners = HashMap<Comm, Weak<Shared>>;

fn owners() -> MutexGuard<'static, Owners> {
    static OWNERS: LazyLock<Mutex<Owners>> = LazyLock::new(Mutex::default);
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers the recorder of a new communicator.
pub(super) fn remember(comm: Comm, recorder: &Arc<Shared>) {
    owners().insert(comm, Arc::downgrade(recorder));
}

/// Forgets communicators whose recorder ends.
pub(super) fn forget<'a>(comms: impl Iterator<Item = &'a Comm>) {
    let mut owners = owners();
    comms.for_each(|comm| drop(owners.remove(comm)));
}

/// Notes that this thread calls a recorder.
pub(super) fn called(recorder: &Arc<Shared>) {
    THREAD.with_borrow_mut(|thread| thread.recorder = Arc::downgrade(recorder));
}

/// Returns the recorder of a communicator and notes that this thread calls it.
fn owner(comm: Comm) -> Result<Arc<Shared>, Refused> {
    // Upgrade without the lock: dropping the last reference to a recorder takes the lock.
    let found = owners().get(&comm).cloned();
    let found = found.and_then(|recorder| recorder.upgrade());
    let found = found.ok_or_else(|| refuse(INVALID_ARGUMENT, "no such communicator"))?;
    called(&found);
    Ok(found)
}

fn refuse(code: c_int, reason: impl Into<String>) -> Refused {
    (code, reason.into())
}

/// Counts a call of a recorder, and makes it unless it was made to fail.
fn counted(
    recorder: &Arc<Shared>,
    name: &'static str,
    act: impl FnOnce(&mut RecorderState) -> Result<c_int, Refused>,
) -> Result<c_int, Refused> {
    let mut state = recorder.state();
    if state.fails(name) {
        return Err(refuse(SYSTEM_ERROR, "it was made to fail"));
    }
    act(&mut state).inspect_err(|(_, reason)| state.violate(name, reason))
}

/// Returns the code of an outcome and keeps the reason with the thread.
fn answer(outcome: Result<c_int, Refused>) -> c_int {
    outcome.unwrap_or_else(|(code, reason)| {
        let reason = CString::new(reason).unwrap_or_default();
        THREAD.with_borrow_mut(|thread| thread.reason = reason);
        code
    })
}

unsafe extern "C" fn version(to: *mut c_int) -> c_int {
    // SAFETY: the caller passes the address of an integer that it may write, as `ncclGetVersion`
    // asks.
    unsafe { to.write(VERSION) };
    SUCCESS
}

unsafe extern "C" fn error_string(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        SUCCESS => c"no error",
        1 => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        3 => c"internal error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        IN_PROGRESS => c"operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// Returns text that stays valid until a call of this thread fails again.
unsafe extern "C" fn last_error(_: *mut c_void) -> *const c_char {
    THREAD.with_borrow(|thread| thread.reason.as_ptr())
}

/// Writes a number of a communicator to `to`.
///
/// # Safety
/// The caller must pass a `to` that is valid for writing an integer.
unsafe fn ask(
    name: &'static str,
    comm: *mut c_void,
    to: *mut c_int,
    value: impl FnOnce(&mut RecorderState, Comm) -> c_int,
) -> c_int {
    let comm = Comm(comm as usize);
    answer(owner(comm).and_then(|recorder| {
        counted(&recorder, name, |state| {
            closed()?;
            // SAFETY: the caller of `ask` guarantees that `to` is valid for writing an integer.
            unsafe { to.write(value(state, comm)) };
            Ok(SUCCESS)
        })
    }))
}

fn member(state: &mut RecorderState, comm: Comm) -> &mut Member {
    state.comms.get_mut(&comm).expect("a communicator stays for as long as its recorder")
}

fn closed() -> Result<(), Refused> {
    if !group_is_open() {
        return Ok(());
    }
    Err(refuse(INVALID_USAGE, "this thread has begun a group and not ended it"))
}

unsafe extern "C" fn count(comm: *mut c_void, to: *mut c_int) -> c_int {
    let size = |state: &mut RecorderState, comm| member(state, comm).size as c_int;
    // SAFETY: NCCL's interface obliges the caller to pass a valid `to`.
    unsafe { ask("ncclCommCount", comm, to, size) }
}

unsafe extern "C" fn rank(comm: *mut c_void, to: *mut c_int) -> c_int {
    let rank = |state: &mut RecorderState, comm| member(state, comm).rank as c_int;
    // SAFETY: NCCL's interface obliges the caller to pass a valid `to`.
    unsafe { ask("ncclCommUserRank", comm, to, rank) }
}

unsafe extern "C" fn async_error(comm: *mut c_void, to: *mut c_int) -> c_int {
    // SAFETY: NCCL's interface obliges the caller to pass a valid `to`.
    unsafe { ask("ncclCommGetAsyncError", comm, to, settle) }
}

/// Returns the state of a communicator, and records its pending group once that is complete.
fn settle(state: &mut RecorderState, comm: Comm) -> c_int {
    let member = member(state, comm);
    let device = member.device;
    match member.pending.take() {
        Some((call, left)) if left > 0 => {
            member.pending = Some((call, left - 1));
            return IN_PROGRESS;
        }
        Some(_) if member.settling.1 != SUCCESS => member.async_error = member.settling.1,
        Some((call, _)) => state.devices[device].calls.push(call),
        None => {}
    }
    self::member(state, comm).async_error
}

/// Counts a call without a communicator, in the recorder that this thread called last.
fn counted_here(
    name: &'static str,
    act: impl FnOnce() -> Result<c_int, Refused>,
) -> Result<c_int, Refused> {
    match THREAD.with_borrow(|thread| thread.recorder.upgrade()) {
        Some(recorder) => counted(&recorder, name, |_| act()),
        None => act(),
    }
}

unsafe extern "C" fn group_start() -> c_int {
    answer(counted_here("ncclGroupStart", || {
        closed()?;
        THREAD.with_borrow_mut(|thread| thread.open = Some(OpenGroup::default()));
        Ok(SUCCESS)
    }))
}

unsafe extern "C" fn group_end() -> c_int {
    let open = THREAD.with_borrow_mut(|thread| thread.open.take());
    let outcome = counted_here("ncclGroupEnd", || match open {
        Some(_) => Ok(SUCCESS),
        None => Err(refuse(INVALID_USAGE, "this thread has begun no group")),
    });
    let OpenGroup { failed, messages } = open.unwrap_or_default();
    answer(outcome.and_then(|_| match failed {
        None => enqueue(messages),
        Some(code) => Err(refuse(code, "a call in the group failed, so it is dropped")),
    }))
}

/// Enqueues the messages of a group, each communicator's on its stream.
fn enqueue(messages: Vec<(Comm, Stream, Direction, Message)>) -> Result<c_int, Refused> {
    let mut groups: Vec<(Comm, Stream, Group)> = vec![];
    for (comm, stream, direction, message) in messages {
        let index = groups.iter().position(|group| group.0 == comm).unwrap_or_else(|| {
            groups.push((comm, stream, Group::default()));
            groups.len() - 1
        });
        let (_, first, group) = &mut groups[index];
        if *first != stream {
            let reason = "a communicator's messages in a group must go to one stream";
            return Err(refuse(INVALID_USAGE, reason));
        }
        match direction {
            Direction::Out => group.sends.push(message),
            Direction::In => group.receives.push(message),
        }
    }
    let mut outcome = SUCCESS;
    for (comm, stream, group) in groups {
        let recorder = owner(comm)?;
        let state = &mut *recorder.state();
        let member = member(state, comm);
        let Member { device, ring, rank, settling: (times, code), .. } = *member;
        let operation = Operation::Exchange(Exchange { comm, ring, rank, group });
        let call = Call { stream, operation };
        if member.pending.is_some() {
            let reason = "the group before is still in progress: ask ncclCommGetAsyncError first";
            state.violate("ncclGroupEnd", reason);
            return Err(refuse(INVALID_USAGE, reason));
        }
        if (times, code) == (0, SUCCESS) {
            state.devices[device].calls.push(call);
        } else {
            member.pending = Some((call, times));
            outcome = IN_PROGRESS;
        }
    }
    Ok(outcome)
}

unsafe extern "C" fn send(
    address: *mut c_void,
    count: usize,
    kind: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    message("ncclSend", Direction::Out, (address as u64, count, kind), peer, (comm, stream))
}

unsafe extern "C" fn receive(
    address: *mut c_void,
    count: usize,
    kind: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    message("ncclRecv", Direction::In, (address as u64, count, kind), peer, (comm, stream))
}

fn message(
    name: &'static str,
    direction: Direction,
    (address, count, kind): (u64, usize, c_int),
    peer: c_int,
    (comm, stream): (*mut c_void, *mut c_void),
) -> c_int {
    let (comm, stream) = (Comm(comm as usize), Stream(stream as usize));
    let checked = owner(comm).and_then(|recorder| {
        counted(&recorder, name, |state| {
            check(state, (comm, stream), (address, count, kind), peer).map(|()| SUCCESS)
        })
    });
    let message = Message { address, bytes: count as u64, peer: peer as usize };
    let outcome = checked.and_then(|code| {
        THREAD
            .with_borrow_mut(|thread| match &mut thread.open {
                Some(open) => {
                    open.messages.push((comm, stream, direction, message));
                    Ok(code)
                }
                None => Err(()),
            })
            .or_else(|()| enqueue(vec![(comm, stream, direction, message)]))
    });
    if let Err((code, _)) = &outcome {
        let fail = |open: &mut OpenGroup| open.failed = open.failed.or(Some(*code));
        THREAD.with_borrow_mut(|thread| thread.open.as_mut().map(fail));
    }
    answer(outcome)
}

fn check(
    state: &mut RecorderState,
    (comm, stream): (Comm, Stream),
    (address, count, kind): (u64, usize, c_int),
    peer: c_int,
) -> Result<(), Refused> {
    let on = state.streams.get(&stream).copied();
    let Member { device, size, .. } = *member(state, comm);
    let wrong = if on != Some(device) {
        format!("{:#x} must be a stream of the communicator's device", stream.0)
    } else if !BYTES.contains(&kind) {
        format!("messages must be bytes, got data type {kind}")
    } else if !(0..size as c_int).contains(&peer) {
        format!("peer must be one of {size} ranks, got {peer}")
    } else if address == 0 {
        "a message must lie at an address, got null".into()
    } else if count == 0 {
        "a message must have bytes, got 0".into()
    } else {
        return Ok(());
    };
    Err(refuse(INVALID_ARGUMENT, wrong))
}
