//! NCCL's functions over recorders, found by their communicators.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use super::recorder::{Member, Shared, State};
use super::{Call, Exchange, What};
use crate::cuda::driver::Stream;
use crate::cuda::nccl::{Comm, Group, Message, Nccl};

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;
/// What `ncclGetVersion` answers: 2.30.7.
const VERSION: c_int = 23_007;
/// `ncclInt8` and `ncclUint8`: counts are bytes.
const BYTES: [c_int; 2] = [0, 1];

/// A code of NCCL and the reason for it.
type Refused = (c_int, String);

/// NCCL's functions, for communicators of [`Recorder::add_comm`]. They record what they are asked
/// for, where NCCL would enqueue it:
///
/// - A group belongs to the thread that began it, and to a communicator's messages on one stream.
///   Where a call in it fails, its end drops it and fails too. Messages outside of a group are
///   groups of one.
/// - Stricter than NCCL: groups are not nested, and while one is open nothing else is asked; so
///   one that was forgotten shows at the thread's next call. Messages have bytes.
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

/// Has this thread begun a group and not ended it?
pub fn group_is_open() -> bool {
    THREAD.with_borrow(|thread| thread.open.is_some())
}

/// A group that was begun.
#[derive(Default)]
struct Open {
    /// The first call in it that failed.
    failed: Option<c_int>,
    messages: Vec<(Comm, Stream, Way, Message)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Out,
    In,
}

#[derive(Default)]
struct Thread {
    /// The recorder that this thread called last: that of calls which name no communicator.
    recorder: Weak<Shared>,
    open: Option<Open>,
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

/// A communicator begins.
pub(super) fn remember(comm: Comm, recorder: &Arc<Shared>) {
    owners().insert(comm, Arc::downgrade(recorder));
}

/// Communicators end.
pub(super) fn forget<'a>(comms: impl Iterator<Item = &'a Comm>) {
    let mut owners = owners();
    comms.for_each(|comm| drop(owners.remove(comm)));
}

/// This thread calls a recorder.
pub(super) fn called(recorder: &Arc<Shared>) {
    THREAD.with_borrow_mut(|thread| thread.recorder = Arc::downgrade(recorder));
}

/// The recorder of a communicator; this thread calls it.
fn owner(comm: Comm) -> Result<Arc<Shared>, Refused> {
    // Upgraded without the lock: the last one to drop a recorder takes it.
    let found = owners().get(&comm).cloned();
    let found = found.and_then(|recorder| recorder.upgrade());
    let found = found.ok_or_else(|| refuse(INVALID_ARGUMENT, "no such communicator"))?;
    called(&found);
    Ok(found)
}

fn refuse(code: c_int, reason: impl Into<String>) -> Refused {
    (code, reason.into())
}

/// Counts a call of a recorder and, unless it must fail, makes it.
fn counted(
    recorder: &Arc<Shared>,
    name: &'static str,
    act: impl FnOnce(&mut State) -> Result<c_int, Refused>,
) -> Result<c_int, Refused> {
    let mut state = recorder.state();
    if state.fails(name) {
        return Err(refuse(SYSTEM_ERROR, "it was made to fail"));
    }
    act(&mut state).inspect_err(|(_, reason)| state.violate(name, reason))
}

/// The code to return; the reason stays with the thread.
fn answer(outcome: Result<c_int, Refused>) -> c_int {
    outcome.unwrap_or_else(|(code, reason)| {
        let reason = CString::new(reason).unwrap_or_default();
        THREAD.with_borrow_mut(|thread| thread.reason = reason);
        code
    })
}

unsafe extern "C" fn version(to: *mut c_int) -> c_int {
    // SAFETY: the caller gives a place for an integer.
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

/// Good until this thread's next call that fails.
unsafe extern "C" fn last_error(_: *mut c_void) -> *const c_char {
    THREAD.with_borrow(|thread| thread.reason.as_ptr())
}

/// A call that asks a communicator for a number.
///
/// # Safety
/// There is room for an integer at `to`.
unsafe fn ask(
    name: &'static str,
    comm: *mut c_void,
    to: *mut c_int,
    value: impl FnOnce(&mut State, Comm) -> c_int,
) -> c_int {
    let comm = Comm(comm as usize);
    answer(owner(comm).and_then(|recorder| {
        counted(&recorder, name, |state| {
            closed()?;
            // SAFETY: passed on.
            unsafe { to.write(value(state, comm)) };
            Ok(SUCCESS)
        })
    }))
}

fn member(state: &mut State, comm: Comm) -> &mut Member {
    state.comms.get_mut(&comm).expect("a communicator stays for as long as its recorder")
}

fn closed() -> Result<(), Refused> {
    if !group_is_open() {
        return Ok(());
    }
    Err(refuse(INVALID_USAGE, "this thread has begun a group and not ended it"))
}

unsafe extern "C" fn count(comm: *mut c_void, to: *mut c_int) -> c_int {
    let size = |state: &mut State, comm| member(state, comm).size as c_int;
    // SAFETY: passed on from the caller.
    unsafe { ask("ncclCommCount", comm, to, size) }
}

unsafe extern "C" fn rank(comm: *mut c_void, to: *mut c_int) -> c_int {
    let rank = |state: &mut State, comm| member(state, comm).rank as c_int;
    // SAFETY: passed on from the caller.
    unsafe { ask("ncclCommUserRank", comm, to, rank) }
}

unsafe extern "C" fn async_error(comm: *mut c_void, to: *mut c_int) -> c_int {
    // SAFETY: passed on from the caller.
    unsafe { ask("ncclCommGetAsyncError", comm, to, settle) }
}

/// What a communicator is in: its pending group is enqueued when it is not in progress any more.
fn settle(state: &mut State, comm: Comm) -> c_int {
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

/// Counts a call that names no communicator, with the recorder that this thread called last.
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
        THREAD.with_borrow_mut(|thread| thread.open = Some(Open::default()));
        Ok(SUCCESS)
    }))
}

unsafe extern "C" fn group_end() -> c_int {
    let open = THREAD.with_borrow_mut(|thread| thread.open.take());
    let outcome = counted_here("ncclGroupEnd", || match open {
        Some(_) => Ok(SUCCESS),
        None => Err(refuse(INVALID_USAGE, "this thread has begun no group")),
    });
    let Open { failed, messages } = open.unwrap_or_default();
    answer(outcome.and_then(|_| match failed {
        None => enqueue(messages),
        Some(code) => Err(refuse(code, "a call in the group failed, so it is dropped")),
    }))
}

/// Enqueues a group: on each communicator's stream what is its.
fn enqueue(messages: Vec<(Comm, Stream, Way, Message)>) -> Result<c_int, Refused> {
    let mut groups: Vec<(Comm, Stream, Group)> = vec![];
    for (comm, stream, way, message) in messages {
        let index = groups.iter().position(|group| group.0 == comm).unwrap_or_else(|| {
            groups.push((comm, stream, Group::default()));
            groups.len() - 1
        });
        let (_, first, group) = &mut groups[index];
        if *first != stream {
            let reason = "a communicator's messages in a group must go to one stream";
            return Err(refuse(INVALID_USAGE, reason));
        }
        if way == Way::Out { group.sends.push(message) } else { group.receives.push(message) }
    }
    let mut outcome = SUCCESS;
    for (comm, stream, group) in groups {
        let recorder = owner(comm)?;
        let state = &mut *recorder.state();
        let member = member(state, comm);
        let Member { device, ring, rank, settling: (times, code), .. } = *member;
        let what = What::Exchange(Exchange { comm, ring, rank, group });
        let call = Call { stream, what };
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
    from: *const c_void,
    count: usize,
    kind: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    message("ncclSend", Way::Out, (from as u64, count, kind), peer, (comm, stream))
}

unsafe extern "C" fn receive(
    to: *mut c_void,
    count: usize,
    kind: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    message("ncclRecv", Way::In, (to as u64, count, kind), peer, (comm, stream))
}

fn message(
    name: &'static str,
    way: Way,
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
                    open.messages.push((comm, stream, way, message));
                    Ok(code)
                }
                None => Err(()),
            })
            .or_else(|()| enqueue(vec![(comm, stream, way, message)]))
    });
    if let Err((code, _)) = &outcome {
        let fail = |open: &mut Open| open.failed = open.failed.or(Some(*code));
        THREAD.with_borrow_mut(|thread| thread.open.as_mut().map(fail));
    }
    answer(outcome)
}

fn check(
    state: &mut State,
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
