//! Groups of messages.

#![allow(non_snake_case)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::comm::{COMMS, Comm, Line, check_owner, meet};
use super::{INVALID_ARGUMENT, mail};
use crate::call::{Outcome, c_functions};
use crate::device::Device;
use crate::memory::{By, Touch};
use crate::report::complain;
use crate::settings::{MOST_DEVICES, settings};
use crate::stream::{Stream, perform};

/// A message of a group.
#[derive(Debug, Clone)]
struct Message {
    is_send: bool,
    peer: usize,
    address: u64,
    bytes: u64,
    number: u64,
}

type Messages = Vec<(Arc<Comm>, Arc<Stream>, Message)>;

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static OPEN: RefCell<Messages> = const { RefCell::new(vec![]) };
    /// Whether a call in the open group failed.
    static IS_BROKEN: Cell<bool> = const { Cell::new(false) };
}

/// Does what a call leaves behind that a test let fail: NCCL drops a group with such a call.
pub fn refused(call: &str) {
    if call == "ncclGroupEnd" {
        DEPTH.set(0);
        OPEN.take();
        IS_BROKEN.set(false);
    } else if is_in_group() {
        IS_BROKEN.set(true);
    }
}

/// Whether this thread has an open group.
pub fn is_in_group() -> bool {
    DEPTH.get() > 0
}

static LINES: [Line; MOST_DEVICES] = [const { Line::new() }; MOST_DEVICES];

/// Enqueues an operation of a communicator.
pub fn enqueue(
    comm: &Arc<Comm>,
    stream: &Arc<Stream>,
    what: &str,
    touches: Vec<Touch>,
    work: impl FnOnce() + Send + 'static,
) {
    if !settings().ordered {
        stream.touch(what, touches, move |_| work());
        return;
    }
    let (line, device): (_, &Device) = (&LINES[comm.device], stream.device());
    let place = line.place();
    let name: Arc<str> = what.into();
    // A lost device takes its turn, too.
    stream.push(what, move |stamp| {
        line.take_turn(place, || perform(device, &name, stamp, &touches, |_| work()));
    });
}

/// Returns the bytes of an element of a type of `ncclDataType_t`.
pub fn width(data_type: c_int) -> Outcome<u64> {
    const WIDTHS: [u64; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];
    WIDTHS.get(data_type as usize).copied().ok_or(INVALID_ARGUMENT)
}

fn message(
    call: &str,
    is_send: bool,
    (address, count, data_type): (u64, usize, c_int),
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> Outcome {
    let comm = COMMS.get(comm)?;
    let stream = Stream::of(call, stream)?;
    if stream.device != comm.device {
        complain(format!("{call}: {stream:?}, the communicator is of device {}", comm.device));
    }
    let peer = usize::try_from(peer).ok().filter(|peer| *peer < comm.size);
    let (peer, bytes) = (peer.ok_or(INVALID_ARGUMENT)?, count as u64 * width(data_type)?);
    check_owner(call, &comm, address);
    let message = Message { is_send, peer, address, bytes, number: 0 };
    OPEN.with_borrow_mut(|open| open.push((comm, stream, message)));
    if !is_in_group() {
        flush();
    }
    Ok(())
}

/// Enqueues the messages of this thread: one operation for each communicator and stream.
fn flush() {
    let mut groups: BTreeMap<_, (Arc<Comm>, Arc<Stream>, Vec<Message>)> = BTreeMap::new();
    for (comm, stream, mut message) in OPEN.take() {
        // NCCL does not count the messages of a group that it drops.
        message.number = comm.number(message.is_send, message.peer);
        let key = (Arc::as_ptr(&comm) as usize, stream.number);
        let group = groups.entry(key).or_insert_with(|| (comm, stream, vec![]));
        group.2.push(message);
    }
    for (comm, _, messages) in groups.values() {
        connect(comm, messages);
    }
    for (comm, stream, messages) in groups.into_values() {
        let by = By::Kernel(comm.device);
        let touch = |message: &Message| match message.is_send {
            true => Touch::read(by, message.address, message.bytes),
            false => Touch::write(by, message.address, message.bytes),
        };
        let touches = messages.iter().map(touch).collect();
        let owner = comm.clone();
        enqueue(&comm, &stream, "exchange of NCCL", touches, move || run(&owner, &messages));
    }
}

/// At the first message to a peer, and from it, the host waits for the peer's host.
fn connect(comm: &Comm, messages: &[Message]) {
    let mut new = vec![];
    {
        let mut connected = crate::report::lock(&comm.connected);
        for message in messages {
            if connected.insert((message.is_send, message.peer)) {
                new.push((message.is_send, message.peer));
            }
        }
    }
    let kind = |is_send| if is_send { "connect-to" } else { "connect-from" };
    for &(is_send, peer) in &new {
        mail::post(&comm.key(kind(is_send), comm.rank, peer, 0), vec![]);
    }
    for &(is_send, peer) in &new {
        mail::take(&comm.key(kind(!is_send), peer, comm.rank, 0), || comm.is_over());
    }
}

fn run(comm: &Comm, messages: &[Message]) {
    let key = |message: &Message| {
        let (from, to) = match message.is_send {
            true => (comm.rank, message.peer),
            false => (message.peer, comm.rank),
        };
        comm.key("message", from, to, message.number)
    };
    let (sends, receives): (Vec<_>, Vec<_>) = messages.iter().partition(|message| message.is_send);
    for message in &sends {
        // SAFETY: the stream has checked the range.
        let bytes = unsafe {
            std::slice::from_raw_parts(message.address as *const u8, message.bytes as usize)
        };
        mail::post(&key(message), bytes.to_vec());
    }
    for message in &receives {
        let Some(came) = mail::take(&key(message), || comm.is_over()) else { return };
        if came.len() as u64 != message.bytes {
            complain(format!(
                "rank {} of {} sends {} bytes, and rank {} receives {}",
                message.peer,
                comm.name,
                came.len(),
                comm.rank,
                message.bytes
            ));
        }
        let length = came.len().min(message.bytes as usize);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(came.as_ptr(), message.address as *mut u8, length) };
    }
    for message in &sends {
        mail::wait_taken(&key(message), || comm.is_over());
    }
}

c_functions! {
    fn ncclGroupStart() {
        DEPTH.set(DEPTH.get() + 1);
    }

    fn ncclGroupEnd() {
        let depth = DEPTH.get().checked_sub(1).ok_or(super::INVALID_USAGE)?;
        DEPTH.set(depth);
        if depth == 0 {
            if IS_BROKEN.take() {
                OPEN.take();
                return Err(super::INVALID_USAGE);
            }
            meet();
            flush();
        }
    }

    fn ncclGroupSimulateEnd(_information: *mut c_void) {}

    fn ncclSend(
        from: u64, count: usize, data_type: c_int, peer: c_int, comm: *mut c_void,
        stream: *mut c_void
    ) ["{count} elements of type {data_type} to {peer}"] {
        message("ncclSend", true, (from, count, data_type), peer, comm, stream)?;
    }

    fn ncclRecv(
        to: u64, count: usize, data_type: c_int, peer: c_int, comm: *mut c_void,
        stream: *mut c_void
    ) ["{count} elements of type {data_type} from {peer}"] {
        message("ncclRecv", false, (to, count, data_type), peer, comm, stream)?;
    }
}
