//! NCCL's functions on recorders. A communicator leads to its recorder.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use burst_attention::cuda::driver::Stream;
use burst_attention::cuda::nccl::{Comm, Group, Message, Nccl};

use super::recorder::State;
use super::{Call, Exchange, Operation, Recorder};

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;
/// `ncclInt8`: counts are bytes.
const BYTES: c_int = 0;

/// The reason for the error of a call that was made to fail.
pub(super) const FAILURE: &str = "it was made to fail";

/// Returns NCCL's functions for communicators of [`Recorder::add_comm`]. The end of a group records
/// its messages, or drops all of them if a call in the group has failed. The functions are stricter
/// than NCCL: messages belong into a group of one communicator and one stream, groups do not nest,
/// and messages must have bytes.
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

/// A rank's communicator.
#[derive(Debug)]
pub(super) struct Member {
    ring: usize,
    rank: usize,
    size: usize,
    pub async_error: c_int,
    /// How often the communicator reports progress after each group.
    pub times: usize,
    /// How often it still reports progress.
    left: usize,
}

impl Member {
    pub fn new(ring: usize, rank: usize, size: usize) -> Member {
        Member { ring, rank, size, async_error: SUCCESS, times: 0, left: 0 }
    }
}

/// The messages of a group that was begun and not ended, or the code of a call in it that failed.
pub(super) type OpenGroup = Result<Vec<(Comm, Stream, Direction, Message)>, c_int>;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Direction {
    Out,
    In,
}

type Link = Weak<Mutex<State>>;

thread_local! {
    /// The recorder that this thread called last. It counts calls without a communicator.
    static LAST: RefCell<Link> = RefCell::default();
}

/// The recorders of communicators, whose handles are the indices after 0.
static OWNERS: Mutex<Vec<Link>> = Mutex::new(vec![]);

/// Returns a new communicator of a recorder.
pub(super) fn register(recorder: &Recorder) -> Comm {
    let mut owners = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
    owners.push(Arc::downgrade(&recorder.0));
    Comm(owners.len())
}

/// Notes that this thread calls a recorder.
pub(super) fn called(recorder: &Recorder) {
    LAST.set(Arc::downgrade(&recorder.0));
}

/// Returns the recorder of a communicator and notes that this thread calls it.
fn owner(comm: *mut c_void) -> Recorder {
    let owners = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = owners.get((comm as usize).wrapping_sub(1)).and_then(Weak::upgrade);
    let recorder = Recorder(found.expect("a communicator of a recorder"));
    called(&recorder);
    recorder
}

fn last_called() -> Recorder {
    Recorder(LAST.with_borrow(Weak::upgrade).expect("this thread has called a recorder"))
}

impl State {
    pub fn member(&mut self, comm: Comm) -> &mut Member {
        self.comms.get_mut(&comm).expect("a communicator of this recorder")
    }

    /// Records the messages of a group.
    fn exchange(
        &mut self,
        messages: &[(Comm, Stream, Direction, Message)],
    ) -> Result<c_int, String> {
        let Some(&(comm, stream, ..)) = messages.first() else { return Ok(SUCCESS) };
        if messages.iter().any(|message| (message.0, message.1) != (comm, stream)) {
            return Err("a group must be of one communicator and one stream".into());
        }
        let of = |direction| -> Vec<Message> {
            let found = messages.iter().filter(|message| message.2 == direction);
            found.map(|message| message.3).collect()
        };
        let group = Group { sends: of(Direction::Out), receives: of(Direction::In) };
        let member = self.member(comm);
        if member.left > 0 {
            return Err("the group before is still in progress".into());
        }
        member.left = member.times;
        let Member { ring, rank, left, .. } = *member;
        let operation = Operation::Exchange(Exchange { comm, ring, rank, group });
        self.program.push(Call { stream, operation });
        Ok(if left > 0 { IN_PROGRESS } else { SUCCESS })
    }
}

/// Counts a call and makes it, unless the call must fail. Returns its code. A reason that `act`
/// returns is a misuse.
fn answer(
    recorder: &Recorder,
    name: &'static str,
    act: impl FnOnce(&mut State) -> Result<c_int, String>,
) -> c_int {
    let state = &mut *recorder.state();
    let (code, reason) = if state.fails(name) {
        (SYSTEM_ERROR, FAILURE.to_owned())
    } else {
        match act(state) {
            Ok(code) => return code,
            Err(reason) => {
                state.violate(name, &reason);
                (INVALID_USAGE, reason)
            }
        }
    };
    if let Some(group) = &mut state.group {
        *group = Err(code);
    }
    state.reason = CString::new(reason).unwrap_or_default();
    code
}

unsafe extern "C" fn version(_: *mut c_int) -> c_int {
    SYSTEM_ERROR
}

unsafe extern "C" fn error_string(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_USAGE => c"invalid usage",
        _ => c"another error",
    };
    text.as_ptr()
}

/// Returns text that stays valid until a call of the recorder fails again.
unsafe extern "C" fn last_error(comm: *mut c_void) -> *const c_char {
    owner(comm).state().reason.as_ptr()
}

/// Writes a number of a communicator to `to`.
///
/// # Safety
/// The caller must pass a `to` that is valid for writing an integer.
unsafe fn ask(
    name: &'static str,
    comm: *mut c_void,
    to: *mut c_int,
    value: impl FnOnce(&mut Member) -> c_int,
) -> c_int {
    answer(&owner(comm), name, |state| {
        // SAFETY: the caller of `ask` guarantees that `to` is valid for writing an integer.
        unsafe { to.write(value(state.member(Comm(comm as usize)))) };
        Ok(SUCCESS)
    })
}

unsafe extern "C" fn count(comm: *mut c_void, to: *mut c_int) -> c_int {
    // SAFETY: NCCL's interface obliges the caller to pass a valid `to`.
    unsafe { ask("ncclCommCount", comm, to, |member| member.size as c_int) }
}

unsafe extern "C" fn rank(comm: *mut c_void, to: *mut c_int) -> c_int {
    // SAFETY: NCCL's interface obliges the caller to pass a valid `to`.
    unsafe { ask("ncclCommUserRank", comm, to, |member| member.rank as c_int) }
}

unsafe extern "C" fn async_error(comm: *mut c_void, to: *mut c_int) -> c_int {
    let state = |member: &mut Member| {
        if member.left == 0 {
            return member.async_error;
        }
        member.left -= 1;
        IN_PROGRESS
    };
    // SAFETY: NCCL's interface obliges the caller to pass a valid `to`.
    unsafe { ask("ncclCommGetAsyncError", comm, to, state) }
}

unsafe extern "C" fn group_start() -> c_int {
    answer(&last_called(), "ncclGroupStart", |state| match state.group.replace(Ok(vec![])) {
        None => Ok(SUCCESS),
        Some(_) => Err("the group before was not ended".into()),
    })
}

unsafe extern "C" fn group_end() -> c_int {
    let recorder = last_called();
    let group = recorder.state().group.take();
    answer(&recorder, "ncclGroupEnd", |state| match group {
        Some(Ok(messages)) => state.exchange(&messages),
        Some(Err(code)) => Ok(code),
        None => Err("no group was begun".into()),
    })
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
    answer(&owner(comm), name, |state| {
        let (comm, stream) = (Comm(comm as usize), Stream(stream as usize));
        let size = state.member(comm).size;
        let peer = usize::try_from(peer).ok().filter(|peer| *peer < size);
        let (Some(peer), true) = (peer, address != 0 && count != 0 && kind == BYTES) else {
            return Err(format!("{count} elements of type {kind} at {address:#x}, peer {peer:?}"));
        };
        let message = Message { address, bytes: count as u64, peer };
        match &mut state.group {
            Some(Ok(messages)) => messages.push((comm, stream, direction, message)),
            Some(Err(_)) => {}
            None => return Err("a message belongs into a group".into()),
        }
        Ok(SUCCESS)
    })
}
