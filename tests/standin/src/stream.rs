//! Streams: threads that carry operations out in order. Events: points in streams.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::call::Outcome;
use crate::code;
use crate::device::{Device, current, current_or_none, device, push_current};
use crate::handles::Handles;
use crate::memory::{self, Touch};
use crate::order::{Clock, Stamp, join_seen, see};
use crate::report::{complain, fault, lock};
use crate::settings::settings;

/// The streams that programs made.
pub static STREAMS: Handles<Stream> = Handles::new("stream");
/// The events that programs made.
pub static EVENTS: Handles<Event> = Handles::new("event");

type Work = Box<dyn FnOnce(&Stamp) + Send>;

/// A stream of a device.
pub struct Stream {
    pub device: usize,
    pub number: u32,
    pub priority: c_int,
    /// The handle of the graph that launches go into, while the stream is captured.
    pub graph: Mutex<Option<usize>>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    operations: VecDeque<(Arc<str>, Stamp, Work)>,
    given: u64,
    done: u64,
    clock: Clock,
    /// The stamp of the operation that was given last.
    last: Option<Stamp>,
    has_thread: bool,
    is_closed: bool,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} of device {}", self.number, self.device)
    }
}

impl Stream {
    /// Returns a stream without operations. Its thread starts with the first one.
    pub fn new(device: usize, priority: c_int) -> Stream {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (graph, queue, changed) = (Mutex::default(), Mutex::default(), Condvar::new());
        Stream { device, number, priority, graph, queue, changed }
    }

    /// Returns the stream of a handle, 0 being the null stream of the current context. Complains if
    /// the current context is not the stream's.
    ///
    /// # Errors
    /// If there is no such stream.
    pub fn of(call: &str, handle: *mut c_void) -> Outcome<Arc<Stream>> {
        let stream = match handle as usize {
            // 1 and 2 are the legacy stream and that of the thread.
            0..=2 => return Ok(current()?.null_stream().clone()),
            _ => STREAMS.get(handle)?,
        };
        if current_or_none() != Some(stream.device) {
            let context = current_or_none();
            complain(format!("{call}: {stream:?}, but the current context is that of {context:?}"));
        }
        Ok(stream)
    }

    /// Enqueues an operation that touches no memory of a device.
    pub fn push(self: &Arc<Self>, what: &str, work: impl FnOnce(&Stamp) + Send + 'static) -> Stamp {
        if lock(&self.graph).is_some() {
            complain(format!("{what}: {self:?} is captured, and takes launches of kernels alone"));
        }
        let mut queue = lock(&self.queue);
        queue.given += 1;
        join_seen(&mut queue.clock);
        let before = Arc::new(queue.clock.clone());
        let stamp = Stamp { stream: self.number, number: queue.given, before };
        let given = queue.given;
        queue.clock.advance(self.number, given);
        queue.last = Some(stamp.clone());
        queue.operations.push_back((what.into(), stamp.clone(), Box::new(work)));
        if !queue.has_thread {
            queue.has_thread = true;
            let stream = self.clone();
            thread::spawn(move || stream.work());
        }
        self.changed.notify_all();
        stamp
    }

    /// Enqueues an operation on memory.
    pub fn touch(
        self: &Arc<Self>,
        what: &str,
        touches: Vec<Touch>,
        work: impl FnOnce(&Stamp) + Send + 'static,
    ) {
        let (name, device): (Arc<str>, _) = (what.into(), self.device());
        self.push(what, move |stamp| perform(device, &name, stamp, &touches, work));
    }

    /// Lets later operations start after the operation of a mark and all before it.
    fn follow(self: &Arc<Self>, event: Arc<Event>, mark: Arc<Mark>) {
        let mut clock = Clock::clone(&mark.stamp.before);
        clock.advance(mark.stamp.stream, mark.stamp.number);
        lock(&self.queue).clock.join(&clock);
        self.push("wait for an event", move |_| {
            mark.wait();
            drop(event);
        });
    }

    fn work(self: Arc<Self>) {
        push_current(self.device);
        let mut random = RandomState::new().hash_one(self.number) | 1;
        loop {
            let mut queue = lock(&self.queue);
            let (_, stamp, work) = loop {
                match queue.operations.pop_front() {
                    Some(operation) => break operation,
                    None if queue.is_closed => return,
                    None => {
                        queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(queue);
            // Xorshift, since the delays need no better numbers.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let longest = settings().jitter.as_micros() as u64;
            if longest > 0 {
                thread::sleep(Duration::from_micros(random % longest));
            }
            work(&stamp);
            lock(&self.queue).done += 1;
            self.changed.notify_all();
        }
    }

    /// Waits until the operations given so far are done.
    pub fn synchronize(&self) {
        let mut queue = lock(&self.queue);
        let (target, last) = (queue.given, queue.last.clone());
        while queue.done < target {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        drop(queue);
        last.iter().for_each(see);
    }

    /// Whether all operations are done.
    pub fn is_idle(&self) -> bool {
        let queue = lock(&self.queue);
        let is_idle = queue.done == queue.given;
        if is_idle {
            queue.last.iter().for_each(see);
        }
        is_idle
    }

    /// Lets the thread end after the operations that it has.
    pub fn close(&self) {
        lock(&self.queue).is_closed = true;
        self.changed.notify_all();
    }

    /// Returns the device.
    pub fn device(&self) -> &'static Device {
        device(self.device as c_int).expect("a stream belongs to a device")
    }
}

/// Carries out an operation on memory, unless the memory is not there or the device is lost.
pub fn perform(
    device: &Device,
    what: &Arc<str>,
    stamp: &Stamp,
    touches: &[Touch],
    work: impl FnOnce(&Stamp),
) {
    if let Some(code) = fault("execute", device.index, what) {
        device.lose(code);
    }
    if device.works().is_err() {
        return;
    }
    match memory::enter(what, stamp, touches) {
        true => work(stamp),
        false => device.lose(code::ILLEGAL_ADDRESS),
    }
}

/// The point in a stream at which an event was recorded.
#[derive(Debug)]
pub struct Mark {
    stamp: Stamp,
    ended: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Mark {
    fn wait(&self) -> Instant {
        let mut ended = lock(&self.ended);
        loop {
            match *ended {
                Some(at) => return at,
                None => ended = self.changed.wait(ended).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// An event.
#[derive(Debug)]
pub struct Event {
    device: usize,
    mark: Mutex<Option<Arc<Mark>>>,
}

impl Event {
    /// Returns an event that was not recorded.
    pub fn new(device: usize) -> Event {
        Event { device, mark: Mutex::default() }
    }

    /// Records the event behind all operations that the stream has so far.
    ///
    /// # Errors
    /// If they belong to different devices.
    pub fn record(&self, stream: &Arc<Stream>) -> Outcome {
        if self.device != stream.device {
            complain(format!("an event of device {} is recorded on {stream:?}", self.device));
            return Err(code::INVALID_HANDLE);
        }
        let mut own = lock(&self.mark);
        // The mark needs the stamp of its own operation, which reaches it through this cell.
        let cell: Arc<Mutex<Option<Arc<Mark>>>> = Arc::default();
        let shared = cell.clone();
        let mut hold = lock(&cell);
        let stamp = stream.push("record of an event", move |_| {
            let mark = lock(&shared).clone();
            if let Some(mark) = mark {
                *lock(&mark.ended) = Some(Instant::now());
                mark.changed.notify_all();
            }
        });
        let mark = Arc::new(Mark { stamp, ended: Mutex::default(), changed: Condvar::new() });
        *hold = Some(mark.clone());
        *own = Some(mark);
        Ok(())
    }

    /// Lets later operations of the stream start after the operations before the event.
    pub fn hold(self: Arc<Self>, stream: &Arc<Stream>) {
        let mark = lock(&self.mark).clone();
        if let Some(mark) = mark {
            stream.follow(self, mark);
        }
    }

    /// Waits for the operations before the event.
    pub fn synchronize(&self) {
        let mark = lock(&self.mark).clone();
        if let Some(mark) = mark {
            mark.wait();
            see(&mark.stamp);
        }
    }

    /// Whether the operations before the event are done.
    pub fn is_done(&self) -> bool {
        let Some(mark) = lock(&self.mark).clone() else { return true };
        let is_done = lock(&mark.ended).is_some();
        if is_done {
            see(&mark.stamp);
        }
        is_done
    }

    /// Returns the milliseconds from another event to this one.
    pub fn since(&self, other: &Event) -> f32 {
        let at = |event: &Event| lock(&event.mark).clone().map(|mark| mark.wait());
        match (at(other), at(self)) {
            (Some(from), Some(to)) => to.saturating_duration_since(from).as_secs_f32() * 1e3,
            _ => 0.0,
        }
        .max(1e-3)
    }

    /// Whether the device works.
    ///
    /// # Errors
    /// The error after which it was lost.
    pub fn works(&self) -> Outcome {
        device(self.device as c_int)?.works()
    }
}
