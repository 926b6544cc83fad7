//! Simulated device memory: sparse, checked byte by byte, with a record of stores.

use super::additions::{Access, Accesses};
use super::error::{Fault, Outcome};
use std::collections::{BTreeMap, HashMap};
use std::fmt;

pub(super) const PAGE: u64 = 1 << 14;
/// Bytes between allocations. They keep an access just beyond an allocation out of the next one.
const GAP: u64 = 1 << 20;
const ALIGNMENT: u64 = 256;
/// The value of bytes that were never written: a NaN in every float type, -1 in every integer type.
const POISON: u8 = 0xff;

/// A device address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// Returns the address `bytes` bytes after this one.
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

struct Allocation {
    name: String,
    bytes: u64,
}

struct Page {
    bytes: Box<[u8]>,
    written: Box<[bool]>,
    /// Numbers of stores by kernels to each byte, while the audit is on.
    stores: Option<Box<[u32]>>,
}

impl Page {
    fn new() -> Self {
        let size = PAGE as usize;
        Self { bytes: vec![POISON; size].into(), written: vec![false; size].into(), stores: None }
    }
}

/// All device memory of a simulated launch.
///
/// Only written pages take room, so an allocation may be far larger than the machine's memory. The
/// host's [`write`](Self::write) and [`read`](Self::read) panic outside of allocations, because
/// such an access is the test's error, not the kernel's.
pub struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    pages: HashMap<u64, Page>,
    next: u64,
    audit: bool,
    allow_uninitialised: bool,
    /// Accesses of the running launch, if its blocks may add to memory.
    pub(super) accesses: Option<Accesses>,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl Memory {
    /// Returns a memory without allocations, with the audit off. Loads of bytes never written are
    /// errors.
    pub fn new() -> Self {
        Self {
            allocations: BTreeMap::new(),
            pages: HashMap::new(),
            next: 0x7f00_0000_0000,
            audit: false,
            allow_uninitialised: false,
            accesses: None,
        }
    }

    /// Allocates `bytes` bytes at an address of the memory's choice, 256-byte aligned, with
    /// unmapped room on both sides.
    pub fn allocate(&mut self, name: &str, bytes: u64) -> Address {
        let at = self.next;
        self.next = (at + bytes + GAP).next_multiple_of(ALIGNMENT);
        self.allocate_at(name, Address(at), bytes)
    }

    /// Allocates `bytes` bytes at a given address.
    ///
    /// # Panics
    /// If the range overlaps another allocation, or wraps around.
    pub fn allocate_at(&mut self, name: &str, at: Address, bytes: u64) -> Address {
        let end = at.0.checked_add(bytes).expect("an allocation ends below 2^64");
        let before = self.allocations.range(..end.max(at.0 + 1)).next_back();
        if let Some((&base, other)) = before {
            assert!(
                base != at.0 && base + other.bytes <= at.0,
                "'{name}' would overlap '{}'",
                other.name
            );
        }
        self.next = self.next.max((end + GAP).next_multiple_of(ALIGNMENT));
        self.allocations.insert(at.0, Allocation { name: name.into(), bytes });
        at
    }

    /// Ends an allocation. Later accesses to it are errors.
    ///
    /// # Panics
    /// If no allocation starts at `at`.
    pub fn free(&mut self, at: Address) {
        let gone = self.allocations.remove(&at.0).expect("free takes the start of an allocation");
        let (first, end) = (at.0, at.0 + gone.bytes);
        self.pages.retain(|&page, contents| {
            let (start, stop) = (page * PAGE, (page + 1) * PAGE);
            let (from, to) = (first.max(start), end.min(stop));
            if from < to {
                let range = (from - start) as usize..(to - start) as usize;
                contents.bytes[range.clone()].fill(POISON);
                contents.written[range.clone()].fill(false);
                if let Some(stores) = &mut contents.stores {
                    stores[range].fill(0);
                }
            }
            !(first <= start && stop <= end)
        });
    }

    /// Whether all `bytes` bytes from `at` on lie in one allocation.
    pub fn contains(&self, at: Address, bytes: u64) -> bool {
        self.allocations.range(..=at.0).next_back().is_some_and(|(base, allocation)| {
            at.0 - base <= allocation.bytes && bytes <= allocation.bytes - (at.0 - base)
        })
    }

    /// Sets whether kernels may load bytes that were never written, which are poison then. At first
    /// they may not.
    pub fn allow_uninitialised(&mut self, allow: bool) {
        self.allow_uninitialised = allow;
    }

    /// Writes bytes from the host.
    ///
    /// # Panics
    /// If a byte is outside of allocations.
    pub fn write(&mut self, at: Address, bytes: &[u8]) {
        let audit = std::mem::replace(&mut self.audit, false);
        let outcome = self.put(at, bytes);
        self.audit = audit;
        outcome.unwrap_or_else(|fault| panic!("host {fault}"));
    }

    /// Returns bytes to the host, poison where a byte was never written.
    ///
    /// # Panics
    /// If a byte is outside of allocations.
    pub fn read(&self, at: Address, bytes: usize) -> Vec<u8> {
        let mut out = vec![POISON; bytes];
        self.copy_out(at, &mut out, true).unwrap_or_else(|fault| panic!("host {fault}"));
        out
    }

    /// Starts or stops the audit, which records kernels' stores.
    pub fn set_audit(&mut self, on: bool) {
        self.audit = on;
    }

    /// Forgets the recorded stores.
    pub fn clear_audit(&mut self) {
        self.pages.values_mut().for_each(|page| page.stores = None);
    }

    /// Returns how often kernels stored or added to each of `elements` elements of `width` bytes
    /// while the audit was on; `u32::MAX` for an element whose bytes were stored unequally often.
    pub fn stores(&self, at: Address, elements: usize, width: usize) -> Vec<u32> {
        let count = |byte: u64| {
            let stores = self.pages.get(&(byte / PAGE)).and_then(|page| page.stores.as_ref());
            stores.map_or(0, |stores| stores[(byte % PAGE) as usize])
        };
        let element = |index: usize| {
            let start = at.0 + (index * width) as u64;
            let first = count(start);
            let even = (1..width as u64).all(|byte| count(start + byte) == first);
            if even { first } else { u32::MAX }
        };
        (0..elements).map(element).collect()
    }

    /// Loads bytes for a kernel.
    pub(super) fn load(&mut self, at: Address, out: &mut [u8]) -> Outcome<()> {
        self.copy_out(at, out, self.allow_uninitialised)?;
        self.record(Access::Load, at, out.len())
    }

    /// Stores bytes for a kernel.
    pub(super) fn store(&mut self, at: Address, bytes: &[u8]) -> Outcome<()> {
        self.record(Access::Store, at, bytes.len())?;
        self.put(at, bytes)
    }

    /// Carries out a kernel's atomic operation on one element of `width` bytes: `new` makes the
    /// bytes to store, if any, of the old bytes.
    pub(super) fn combine(
        &mut self,
        at: Address,
        width: usize,
        new: impl FnOnce(&[u8]) -> Outcome<Option<Vec<u8>>>,
    ) -> Outcome<()> {
        let mut old = vec![0; width];
        self.copy_out(at, &mut old, self.allow_uninitialised)?;
        new(&old)?.map_or(Ok(()), |new| self.put(at, &new))
    }

    /// Records an access of the running block.
    pub(super) fn record(&mut self, access: Access, at: Address, bytes: usize) -> Outcome<()> {
        let Some(accesses) = &mut self.accesses else { return Ok(()) };
        accesses.record(access, at, bytes).map_err(|address| Fault::Conflict {
            access: access.name(),
            other: access.conflicts(),
            address,
            nearest: self.describe(address),
        })
    }

    fn put(&mut self, at: Address, bytes: &[u8]) -> Outcome<()> {
        self.check("store", at, bytes.len())?;
        let audit = self.audit;
        for (address, range) in by_page(at, bytes.len()) {
            let page = self.pages.entry(address / PAGE).or_insert_with(Page::new);
            let start = (address % PAGE) as usize;
            let inside = start..start + range.len();
            page.bytes[inside.clone()].copy_from_slice(&bytes[range]);
            page.written[inside.clone()].fill(true);
            if audit {
                let stores = page.stores.get_or_insert_with(|| vec![0; PAGE as usize].into());
                stores[inside].iter_mut().for_each(|count| *count += 1);
            }
        }
        Ok(())
    }

    fn copy_out(&self, at: Address, out: &mut [u8], poison: bool) -> Outcome<()> {
        self.check("load", at, out.len())?;
        for (address, range) in by_page(at, out.len()) {
            let start = (address % PAGE) as usize;
            let page = self.pages.get(&(address / PAGE));
            let hole = match page {
                None => Some(0),
                Some(page) => page.written[start..start + range.len()].iter().position(|w| !w),
            };
            if let (Some(hole), false) = (hole, poison) {
                let address = Address(address + hole as u64);
                return Err(Fault::Uninitialised { address, nearest: self.describe(address) });
            }
            match page {
                None => out[range].fill(POISON),
                Some(page) => {
                    let length = range.len();
                    out[range].copy_from_slice(&page.bytes[start..start + length]);
                }
            }
        }
        Ok(())
    }

    fn check(&self, access: &'static str, address: Address, bytes: usize) -> Outcome<()> {
        if self.contains(address, bytes as u64) {
            return Ok(());
        }
        Err(Fault::OutOfBounds { access, address, bytes, nearest: self.describe(address) })
    }

    fn describe(&self, at: Address) -> String {
        let below = self.allocations.range(..=at.0).next_back();
        let above = self.allocations.range(at.0..).next();
        match (below, above) {
            (Some((base, allocation)), _) if at.0 - base < allocation.bytes + GAP => {
                let Allocation { name, bytes } = allocation;
                format!("byte {} of '{name}', which has {bytes}", at.0 - base)
            }
            (_, Some((base, next))) => format!("{} bytes before '{}'", base - at.0, next.name),
            (Some((base, last)), None) => {
                format!("{} bytes after the start of '{}'", at.0 - base, last.name)
            }
            (None, None) => "nothing is allocated".into(),
        }
    }
}

/// Cuts a range of addresses at the ends of pages. Returns the start of each part, and its range in
/// the whole.
pub(super) fn by_page(
    at: Address,
    bytes: usize,
) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let address = at.0 + done as u64;
        let length = (bytes - done).min((PAGE - address % PAGE) as usize);
        let range = done..done + length;
        done += length;
        (length > 0).then_some((address, range))
    })
}

/// Declares typed access from the host, little-endian like the device.
macro_rules! typed {
    ($($type:ty, $write:ident, $read:ident, $width:literal;)*) => {
        impl Memory {
            $(
                /// Writes elements from the host; see [`write`](Self::write).
                pub fn $write(&mut self, at: Address, elements: &[$type]) {
                    let bytes: Vec<u8> = elements.iter().flat_map(|x| x.to_le_bytes()).collect();
                    self.write(at, &bytes);
                }

                /// Reads elements to the host; see [`read`](Self::read).
                pub fn $read(&self, at: Address, elements: usize) -> Vec<$type> {
                    let bytes = self.read(at, elements * $width);
                    let (chunks, _) = bytes.as_chunks::<$width>();
                    chunks.iter().map(|x| <$type>::from_le_bytes(*x)).collect()
                }
            )*
        }
    };
}

typed! {
    f32, write_f32, read_f32, 4;
    f64, write_f64, read_f64, 8;
    half::f16, write_f16, read_f16, 2;
    half::bf16, write_bf16, read_bf16, 2;
    i32, write_i32, read_i32, 4;
    i64, write_i64, read_i64, 8;
}
