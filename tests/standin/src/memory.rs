//! Device memory: host memory with an owner, bounds and a history.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::code;
use crate::order::{Access, History, Stamp};
use crate::report::{complain, lock};
use crate::settings::settings;

/// The value of bytes that were never written: a NaN in every float type.
pub const POISON: u8 = 0xff;
/// Larger allocations are not poisoned, because most of their pages are never used.
const MOST_POISONED: usize = 1 << 28;
const PAGE: usize = 4096;
/// The driver hands out memory in units of at least this many bytes.
const UNIT: u64 = 256;

/// The memory that an allocation belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// Memory of a device.
    Device(usize),
    /// Pinned memory of the host, which all devices reach.
    Host,
}

#[derive(Debug)]
struct Allocation {
    bytes: u64,
    owner: Owner,
    /// Whether the memory is the program's own, which it only registered.
    is_foreign: bool,
    history: History,
}

#[derive(Debug, Default)]
struct Space {
    live: BTreeMap<u64, Allocation>,
    /// Ends and owners of freed allocations. Their addresses are never used again.
    freed: BTreeMap<u64, (u64, Owner)>,
    used: BTreeMap<usize, u64>,
}

static SPACE: Mutex<Space> =
    Mutex::new(Space { live: BTreeMap::new(), freed: BTreeMap::new(), used: BTreeMap::new() });

/// Counts the times that memory was freed.
static FREES: AtomicU64 = AtomicU64::new(0);

/// Returns how often memory was freed. What [`check`] has found stays true until the next time.
pub fn frees() -> u64 {
    FREES.load(Ordering::Acquire)
}

/// Returns free bytes of a device.
pub fn free_bytes(device: usize) -> u64 {
    settings().kind.memory - lock(&SPACE).used.get(&device).copied().unwrap_or(0)
}

/// Allocates memory full of poison.
///
/// # Errors
/// If the device, or the host, has too little.
pub fn allocate(owner: Owner, bytes: usize) -> Result<u64, c_int> {
    let start = reserve(bytes)?;
    map(start, bytes, owner)?;
    Ok(start)
}

/// Reserves addresses without memory. The page after them stays out of reach.
///
/// # Errors
/// If there are too few.
pub fn reserve(bytes: usize) -> Result<u64, c_int> {
    let length = bytes.next_multiple_of(PAGE) + PAGE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping at an address of the system's choice touches no other memory.
    let start = unsafe { libc::mmap(ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(code::OUT_OF_MEMORY) } else { Ok(start as u64) }
}

/// Puts memory full of poison at reserved addresses.
///
/// # Errors
/// If the device has too little.
pub fn map(start: u64, bytes: usize, owner: Owner) -> Result<(), c_int> {
    if bytes == 0 {
        return Err(code::INVALID_VALUE);
    }
    if let Owner::Device(device) = owner
        && free_bytes(device) < bytes as u64
    {
        return Err(code::OUT_OF_MEMORY);
    }
    let length = bytes.next_multiple_of(PAGE);
    // SAFETY: the addresses were reserved, so no other memory lies there.
    let code =
        unsafe { libc::mprotect(start as *mut _, length, libc::PROT_READ | libc::PROT_WRITE) };
    if code != 0 {
        return Err(code::OUT_OF_MEMORY);
    }
    if bytes <= MOST_POISONED {
        // SAFETY: there is memory for this many bytes, and nothing else uses it yet.
        unsafe { ptr::write_bytes(start as *mut u8, POISON, bytes) };
    }
    let mut space = lock(&SPACE);
    let (bytes, is_foreign) = (bytes as u64, false);
    space.freed.retain(|from, (end, _)| *end <= start || start + bytes <= *from);
    let allocation = Allocation { bytes, owner, is_foreign, history: History::default() };
    space.live.insert(start, allocation);
    if let Owner::Device(device) = owner {
        *space.used.entry(device).or_default() += bytes;
    }
    Ok(())
}

/// Whether an address lies behind an allocation, in its last unit. XLA's compiler moves loads before
/// the checks that guard them, so its kernels load such bytes and use none of them.
pub fn is_slack(address: u64) -> bool {
    let space = lock(&SPACE);
    let Some((start, found)) = space.live.range(..=address).next_back() else { return false };
    let end = start + found.bytes;
    !found.is_foreign && end <= address && address < end.next_multiple_of(UNIT)
}

/// Notes that all devices reach the program's own memory from now on.
pub fn register(start: u64, bytes: usize) {
    let (bytes, owner, is_foreign) = (bytes as u64, Owner::Host, true);
    let allocation = Allocation { bytes, owner, is_foreign, history: History::default() };
    lock(&SPACE).live.insert(start, allocation);
}

/// Ends an allocation or a registration.
///
/// # Errors
/// If none starts there.
pub fn free(start: u64) -> Result<(), c_int> {
    let mut space = lock(&SPACE);
    FREES.fetch_add(1, Ordering::Release);
    let Some(gone) = space.live.remove(&start) else {
        let why = space.describe(start);
        complain(format!("memory at {start:#x} is freed, which is {why}"));
        return Err(code::INVALID_VALUE);
    };
    if gone.is_foreign {
        return Ok(());
    }
    space.freed.insert(start, (start + gone.bytes, gone.owner));
    if let Owner::Device(device) = gone.owner {
        *space.used.entry(device).or_default() -= gone.bytes;
    }
    let length = (gone.bytes as usize).next_multiple_of(PAGE);
    // SAFETY: the range is the mapping of this allocation, which no operation may touch any more.
    unsafe {
        libc::madvise(start as *mut _, length, libc::MADV_DONTNEED);
        libc::mprotect(start as *mut _, length, libc::PROT_NONE);
    }
    Ok(())
}

/// Returns the start, the bytes and the owner of the allocation that holds an address.
pub fn find(address: u64) -> Option<(u64, u64, Owner)> {
    let space = lock(&SPACE);
    space.find(address).map(|(start, found)| (start, found.bytes, found.owner))
}

/// What an operation does to a run of bytes.
#[derive(Debug, Clone)]
pub struct Touch {
    pub bytes: Range<u64>,
    pub writes: bool,
    pub by: By,
}

/// Who touches memory, which says whose memory it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// A kernel of a device: memory of the device, or pinned memory.
    Kernel(usize),
    /// A copy: anything, the program's own memory too.
    Copy,
}

impl Touch {
    /// Returns the reading of `bytes` bytes.
    pub fn read(by: By, start: u64, bytes: u64) -> Touch {
        Touch { bytes: start..start + bytes, writes: false, by }
    }

    /// Returns the writing of `bytes` bytes.
    pub fn write(by: By, start: u64, bytes: u64) -> Touch {
        Touch { bytes: start..start + bytes, writes: true, by }
    }
}

/// Checks that the bytes are there and may be touched. Returns the bytes of their allocation, or the
/// touched ones where a copy touches memory that the stand-in does not know.
///
/// # Errors
/// What is wrong.
pub fn check(touch: &Touch) -> Result<Range<u64>, String> {
    lock(&SPACE).check(touch)
}

/// Checks an operation's accesses: that the memory is there, and that no other operation races with
/// it. Returns whether all of the memory is there.
pub fn enter(what: &Arc<str>, stamp: &Stamp, touches: &[Touch]) -> bool {
    let mut space = lock(&SPACE);
    let mut is_there = true;
    for touch in touches.iter().filter(|touch| !touch.bytes.is_empty()) {
        if let Err(why) = space.check(touch) {
            complain(format!("{what}: {why}"));
            is_there = false;
            continue;
        }
        let Some((start, _)) = space.find(touch.bytes.start) else { continue };
        let Some(allocation) = space.live.get_mut(&start) else { continue };
        let Touch { bytes, writes, .. } = touch.clone();
        let access = Access { bytes, writes, stamp: stamp.clone(), what: what.clone() };
        for other in allocation.history.add(access) {
            let verb = |writes| if writes { "writes" } else { "reads" };
            let at = touch.bytes.start.max(other.bytes.start);
            complain(format!(
                "race: {what} on stream {} {}, and {} on stream {} {} the bytes at {at:#x}, and no \
                 event orders them",
                stamp.stream,
                verb(writes),
                other.what,
                other.stamp.stream,
                verb(other.writes),
            ));
        }
    }
    is_there
}

impl Space {
    fn find(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (start, found) = self.live.range(..=address).next_back()?;
        (address < start + found.bytes).then_some((*start, found))
    }

    fn check(&self, touch: &Touch) -> Result<Range<u64>, String> {
        let Range { start, end } = touch.bytes;
        let verb = if touch.writes { "writes" } else { "reads" };
        let fault = |why: String| {
            Err(format!("it {verb} {} bytes at {start:#x}, {why}", end.saturating_sub(start)))
        };
        let Some((base, found)) = self.find(start) else {
            let is_known = self.freed_at(start).is_some();
            return match touch.by {
                By::Copy if !is_known => Ok(start..end),
                _ => fault(format!("which is {}", self.describe(start))),
            };
        };
        if end > base + found.bytes {
            return fault(format!(
                "beyond the end of an allocation of {} bytes at {base:#x}",
                found.bytes
            ));
        }
        match (touch.by, found.owner) {
            (By::Kernel(device), Owner::Device(owner)) if owner != device => {
                fault(format!("memory of device {owner}, in a kernel of device {device}"))
            }
            _ => Ok(base..base + found.bytes),
        }
    }

    fn freed_at(&self, address: u64) -> Option<(u64, Owner)> {
        let (start, &(end, owner)) = self.freed.range(..=address).next_back()?;
        (address < end).then_some((*start, owner))
    }

    fn describe(&self, address: u64) -> String {
        match (self.find(address), self.freed_at(address)) {
            (Some((start, _)), _) => format!("inside of the allocation at {start:#x}"),
            (None, Some((start, owner))) => {
                format!("memory of {owner:?} at {start:#x} that was freed")
            }
            (None, None) => "nobody's memory".into(),
        }
    }
}
