//! Devices and their properties.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint};

use crate::call::{c_functions, put};
use crate::code;
use crate::device::device;
use crate::settings::settings;

/// Returns an attribute, by its number in `cuda.h`. What is not here is 0, which means for most
/// attributes that the device lacks something: memory to share with processes, multicast.
fn attribute(number: c_int, index: usize) -> c_int {
    let kind = settings().kind;
    match number {
        // The most threads of a block, and its dimensions.
        1..=3 => 1024,
        4 => 64,
        // The dimensions of a grid.
        5 => c_int::MAX,
        6 | 7 => 65_535,
        // Shared memory of a block, constant memory, threads of a warp, pitch, registers.
        8 => 49_152,
        9 => 65_536,
        10 => 32,
        11 => c_int::MAX,
        12 => 65_536,
        13 => kind.clock_rates[0],
        // Alignment of textures, overlap of copies, mapped host memory, concurrent kernels.
        14 => 512,
        15 | 19 | 31 => 1,
        16 => kind.multiprocessors,
        // Error correction. The bus number tells the devices apart.
        32 => 1,
        33 => index as c_int + 1,
        36 => kind.clock_rates[1],
        // Bits of the memory's bus.
        37 => 5120,
        38 => kind.l2_cache,
        39 => 2048,
        40 => 3,
        // Unified addresses, priorities of streams, caches, managed memory.
        41 | 78 | 79 | 80 | 83 => 1,
        75 => kind.capability.0,
        76 => kind.capability.1,
        81 => kind.shared_memory + 1024,
        82 => 65_536,
        // Operations on values in memory, cooperative launches, host memory of the program.
        92..=95 | 99 => 1,
        97 => kind.shared_memory,
        // Virtual memory of the program's own.
        102 => 1,
        // Blocks of a multiprocessor, stream-ordered pools.
        106 => 32,
        115 => 1,
        134 => -1,
        _ => 0,
    }
}

c_functions! {
    fn cuInit(_flags: c_uint) {}

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, 13_000);
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, settings().devices as c_int);
    }

    fn cuDeviceGet(found: *mut c_int, index: c_int) {
        device(index)?;
        put(found, index);
    }

    fn cuDeviceGetName(text: *mut c_char, room: c_int, index: c_int) {
        device(index)?;
        copy_text(settings().kind.name, text, room);
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], index: c_int) {
        put(uuid, uuid_of(index)?);
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], index: c_int) {
        put(uuid, uuid_of(index)?);
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, index: c_int) {
        device(index)?;
        put(bytes, settings().kind.memory as usize);
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, room: c_int, index: c_int) {
        device(index)?;
        copy_text(&bus_id(index), text, room);
    }

    fn cuDeviceGetByPCIBusId(found: *mut c_int, text: *const c_char) {
        // SAFETY: the caller passes a C string.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().to_lowercase();
        let index = (0..settings().devices as c_int).find(|index| bus_id(*index) == text);
        put(found, index.ok_or(code::INVALID_VALUE)?);
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, a: c_int, b: c_int) {
        put(can, (a != b).into());
    }

    fn cuDeviceGetP2PAttribute(value: *mut c_int, _attribute: c_int, _a: c_int, _b: c_int) {
        put(value, 1);
    }

    fn cuDeviceGetAttribute(value: *mut c_int, number: c_int, index: c_int) {
        put(value, attribute(number, device(index)?.index));
    }
}

fn uuid_of(index: c_int) -> crate::call::Outcome<[u8; 16]> {
    let mut uuid = [0; 16];
    uuid[15] = device(index)?.index as u8 + 1;
    Ok(uuid)
}

/// Returns the name of a device on the bus, in small letters.
pub fn bus_id(index: c_int) -> String {
    format!("0000:{:02x}:00.0", index + 1)
}

/// Writes a C string, cut to the room that there is.
pub fn copy_text(text: &str, place: *mut c_char, room: c_int) {
    let length = text.len().min((room as usize).saturating_sub(1));
    // SAFETY: the caller has this much room.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, length);
        place.add(length).write(0);
    }
}
