//! Virtual memory of the program's own: memory and addresses apart. Here the memory comes with the
//! addresses, so a piece of memory can be mapped at one place.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUmemAllocationProp, CUmemLocationType};

use crate::call::{c_functions, put, take};
use crate::code;
use crate::device::device;
use crate::handles::Handles;
use crate::memory::{Owner, find, free, map, reserve};
use crate::report::{complain, lock};

/// A piece of memory, and the address at which it is mapped.
#[derive(Debug)]
struct Piece {
    owner: Owner,
    properties: CUmemAllocationProp,
    place: Mutex<Option<u64>>,
    /// How often the program holds the handle.
    holds: AtomicUsize,
}

// SAFETY: the pointer among the properties is null, or the program's.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

static PIECES: Handles<Piece> = Handles::new("piece of memory");

/// Small, so that allocations have nearly the bounds that the program asked for.
const GRANULARITY: usize = 256;

c_functions! {
    fn cuMemGetAllocationGranularity(
        bytes: *mut usize, _properties: *const CUmemAllocationProp, _which: c_int
    ) {
        put(bytes, GRANULARITY);
    }

    fn cuMemCreate(
        handle: *mut usize, bytes: usize, properties: *const CUmemAllocationProp,
        _flags: c_ulonglong
    ) ["{bytes} bytes"] {
        let properties = take(properties)?;
        let owner = match properties.location.type_ {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => {
                Owner::Device(device(location_id(&properties))?.index)
            }
            _ => Owner::Host,
        };
        let (place, holds) = (Mutex::default(), AtomicUsize::new(1));
        put(handle, PIECES.add(Arc::new(Piece { owner, properties, place, holds })));
    }

    fn cuMemRelease(handle: usize) {
        let piece = PIECES.get(handle as *mut c_void)?;
        let is_last = piece.holds.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && lock(&piece.place).is_none() {
            PIECES.remove(handle as *mut c_void)?;
        }
    }

    fn cuMemAddressReserve(
        address: *mut u64, bytes: usize, _alignment: usize, _wish: u64, _flags: c_ulonglong
    ) {
        put(address, reserve(bytes)?);
    }

    fn cuMemAddressFree(_address: u64, _bytes: usize) {}

    fn cuMemMap(address: u64, bytes: usize, _offset: usize, handle: usize, _flags: c_ulonglong)
        ["{bytes} bytes"]
    {
        let piece = PIECES.get(handle as *mut c_void)?;
        let mut place = lock(&piece.place);
        if let Some(other) = *place {
            complain(format!("memory mapped at {other:#x} is mapped at {address:#x}, too"));
            return Err(code::NOT_SUPPORTED);
        }
        map(address, bytes, piece.owner)?;
        *place = Some(address);
    }

    fn cuMemUnmap(address: u64, _bytes: usize) {
        free(address)?;
        if let Some(handle) = PIECES.find(|piece| *lock(&piece.place) == Some(address)) {
            let piece = PIECES.get(handle as *mut c_void)?;
            *lock(&piece.place) = None;
            if piece.holds.load(Ordering::SeqCst) == 0 {
                PIECES.remove(handle as *mut c_void)?;
            }
        }
    }

    fn cuMemSetAccess(_address: u64, _bytes: usize, _accesses: *const c_void, _count: usize) {}

    fn cuMemGetAccess(flags: *mut c_ulonglong, _location: *const c_void, _address: u64) {
        // CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
        put(flags, 3);
    }

    fn cuMemRetainAllocationHandle(handle: *mut usize, address: u64) {
        let (start, ..) = find(address).ok_or(code::INVALID_VALUE)?;
        let found = PIECES.find(|piece| *lock(&piece.place) == Some(start));
        let found = found.ok_or(code::INVALID_VALUE)?;
        PIECES.get(found as *mut c_void)?.holds.fetch_add(1, Ordering::SeqCst);
        put(handle, found);
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut CUmemAllocationProp, handle: usize
    ) {
        put(properties, PIECES.get(handle as *mut c_void)?.properties);
    }
}

fn location_id(properties: &CUmemAllocationProp) -> c_int {
    properties.location.id
}
