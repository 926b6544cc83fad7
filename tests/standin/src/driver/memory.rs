//! Memory: allocations, pinned memory, stream-ordered pools, and questions about addresses.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUmemLocation, CUmemPoolProps, CUmemoryPool, CUpointer_attribute};

use crate::call::{Outcome, c_functions, put, take};
use crate::code;
use crate::device::{current, device};
use crate::memory::{By, Owner, Touch, allocate, find, free, free_bytes, register};
use crate::settings::settings;
use crate::stream::{STREAMS, Stream};

/// The handles of pools begin here; the next numbers are those of the devices.
const POOL: usize = 0xb000_0000;

fn pool(index: usize) -> CUmemoryPool {
    (POOL + 0x10 * index) as CUmemoryPool
}

fn device_of_pool(pool: CUmemoryPool) -> Outcome<usize> {
    let index = (pool as usize).checked_sub(POOL).ok_or(code::INVALID_HANDLE)? / 0x10;
    Ok(device(index as c_int)?.index)
}

c_functions! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let index = current()?.index;
        put(total, settings().kind.memory as usize);
        // The driver keeps half a gigabyte.
        put(free, (free_bytes(index) as usize).saturating_sub(1 << 29));
    }

    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) ["{bytes} bytes"] {
        current()?.works()?;
        put(address, allocate(Owner::Device(current()?.index), bytes)?);
    }

    fn cuMemFree_v2(address: u64) ["{address:#x}"] {
        if address != 0 {
            free(address)?;
        }
    }

    fn cuMemHostAlloc(address: *mut u64, bytes: usize, flags: c_uint)
        ["{bytes} bytes, flags {flags}"]
    {
        put(address, allocate(Owner::Host, bytes)?);
    }

    fn cuMemAllocHost_v2(address: *mut u64, bytes: usize) ["{bytes} bytes"] {
        put(address, allocate(Owner::Host, bytes)?);
    }

    fn cuMemFreeHost(address: u64) {
        if address != 0 {
            free(address)?;
        }
    }

    fn cuMemHostRegister_v2(address: u64, bytes: usize, _flags: c_uint) {
        register(address, bytes);
    }

    fn cuMemHostUnregister(address: u64) {
        free(address)?;
    }

    fn cuMemHostGetDevicePointer_v2(found: *mut u64, address: u64, _flags: c_uint) {
        put(found, address);
    }

    fn cuMemHostGetFlags(flags: *mut c_uint, _address: u64) {
        put(flags, 0);
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) {
        let (start, length, _) = find(address).ok_or(code::INVALID_VALUE)?;
        put(base, start);
        put(bytes, length as usize);
    }

    fn cuPointerGetAttribute(
        value: *mut c_void, attribute: CUpointer_attribute, address: u64
    ) {
        answer_about(attribute, address, value)?;
    }

    fn cuPointerGetAttributes(
        count: c_uint, attributes: *mut CUpointer_attribute, values: *mut *mut c_void, address: u64
    ) {
        for at in 0..count as usize {
            // Attributes of an unknown address are zero; the call succeeds all the same.
            let _ = answer_about(
                take(attributes.wrapping_add(at))?, address, take(values.wrapping_add(at))?
            );
        }
    }

    fn cuPointerSetAttribute(_value: *const c_void, _attribute: c_int, _address: u64) {}

    fn cuDeviceGetDefaultMemPool(found: *mut CUmemoryPool, index: c_int) {
        put(found, pool(device(index)?.index));
    }

    fn cuDeviceGetMemPool(found: *mut CUmemoryPool, index: c_int) {
        put(found, pool(device(index)?.index));
    }

    fn cuDeviceSetMemPool(index: c_int, _pool: CUmemoryPool) {
        device(index)?;
    }

    fn cuMemPoolCreate(found: *mut CUmemoryPool, properties: *const CUmemPoolProps) {
        let location: CUmemLocation = take(properties)?.location;
        // SAFETY: each field of the union is an integer.
        #[allow(unused_unsafe)]
        let index = unsafe { location.id };
        put(found, pool(device(index)?.index));
    }

    fn cuMemPoolDestroy(_pool: CUmemoryPool) {}

    fn cuMemPoolSetAttribute(_pool: CUmemoryPool, _attribute: c_int, _value: *mut c_void) {}

    fn cuMemPoolGetAttribute(_pool: CUmemoryPool, _attribute: c_int, value: *mut u64) {
        put(value, 0);
    }

    fn cuMemPoolSetAccess(_pool: CUmemoryPool, _accesses: *const c_void, _count: usize) {}

    fn cuMemPoolTrimTo(_pool: CUmemoryPool, _bytes: usize) {}

    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: *mut c_void) ["{bytes} bytes"] {
        let stream = Stream::of("cuMemAllocAsync", stream)?;
        put(address, allocate(Owner::Device(stream.device), bytes)?);
    }

    fn cuMemAllocFromPoolAsync(
        address: *mut u64, bytes: usize, pool: CUmemoryPool, _stream: *mut c_void
    ) ["{bytes} bytes"] {
        put(address, allocate(Owner::Device(device_of_pool(pool)?), bytes)?);
    }

    fn cuMemFreeAsync(address: u64, stream: *mut c_void) {
        // Any context may be current.
        let stream = match stream as usize {
            0..=2 => current()?.null_stream().clone(),
            _ => STREAMS.get(stream)?,
        };
        let (start, bytes, _) = find(address).ok_or(code::INVALID_VALUE)?;
        // To free memory is to write it, as far as the order of operations goes.
        let touch = Touch::write(By::Kernel(stream.device), start, bytes);
        stream.touch("cuMemFreeAsync", vec![touch], move |_| {
            // It was there, as the stream has found just now.
            let _ = free(start);
        });
    }
}

/// Answers a question about an address.
fn answer_about(attribute: CUpointer_attribute, address: u64, value: *mut c_void) -> Outcome {
    use CUpointer_attribute::*;
    let Some((start, bytes, owner)) = find(address) else {
        if attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE {
            put(value.cast::<c_uint>(), 0);
        }
        return Err(code::INVALID_VALUE);
    };
    let (index, memory_type) = match owner {
        Owner::Device(index) => (index, 2),
        Owner::Host => (0, 1),
    };
    match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => put(value.cast(), device(index as c_int)?.context::<()>()),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(value.cast::<c_uint>(), memory_type),
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER | CU_POINTER_ATTRIBUTE_HOST_POINTER => {
            put(value.cast::<u64>(), address);
        }
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(value.cast::<c_int>(), index as c_int),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR | CU_POINTER_ATTRIBUTE_BUFFER_ID => {
            put(value.cast::<u64>(), start);
        }
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(value.cast::<u64>(), bytes),
        CU_POINTER_ATTRIBUTE_MAPPED => put(value.cast::<c_uint>(), 1),
        _ => put(value.cast::<c_uint>(), 0),
    }
    Ok(())
}
