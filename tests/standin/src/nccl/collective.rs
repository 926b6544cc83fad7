//! Collective operations: each rank gets the inputs of all and computes its own result.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use half::{bf16, f16};

use super::INVALID_ARGUMENT;
use super::comm::{COMMS, Comm, check_owner};
use super::exchange::{enqueue, width};
use crate::call::{Outcome, c_functions};
use crate::memory::{By, Touch};
use crate::stream::Stream;

/// What a rank computes of the inputs of all ranks.
#[derive(Debug, Clone, Copy)]
enum Kind {
    AllReduce { data_type: c_int, reduction: c_int },
    ReduceScatter { data_type: c_int, reduction: c_int },
    AllGather,
    AllToAll,
    Broadcast { root: usize },
}

/// Enqueues an operation. `input` and `output` are the bytes of one rank's arrays.
fn start(
    call: &str,
    kind: Kind,
    (from, input): (u64, u64),
    (to, output): (u64, u64),
    comm: *mut c_void,
    stream: *mut c_void,
) -> Outcome {
    let comm = COMMS.get(comm)?;
    let stream = Stream::of(call, stream)?;
    [from, to].iter().for_each(|address| check_owner(call, &comm, *address));
    let number = comm.next_collective.fetch_add(1, Ordering::SeqCst);
    let by = By::Kernel(comm.device);
    let touches = vec![Touch::read(by, from, input), Touch::write(by, to, output)];
    let owner: Arc<Comm> = comm.clone();
    enqueue(&comm, &stream, call, touches, move || {
        // SAFETY: the stream has checked both ranges.
        let own = unsafe { std::slice::from_raw_parts(from as *const u8, input as usize) };
        let Some(all) = owner.gather("collective", number, own) else { return };
        let result = compute(kind, &all, owner.rank, output as usize);
        // SAFETY: as above; the input has been copied.
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), to as *mut u8, result.len()) };
    });
    Ok(())
}

fn compute(kind: Kind, all: &[Vec<u8>], rank: usize, bytes: usize) -> Vec<u8> {
    match kind {
        Kind::AllGather => all.concat(),
        Kind::Broadcast { root } => all[root].clone(),
        Kind::AllToAll => {
            let part = bytes / all.len();
            all.iter().flat_map(|input| input[rank * part..][..part].to_vec()).collect()
        }
        Kind::AllReduce { data_type, reduction } => reduce(data_type, reduction, all, 0, bytes),
        Kind::ReduceScatter { data_type, reduction } => {
            reduce(data_type, reduction, all, rank * bytes, bytes)
        }
    }
}

/// Reduces `bytes` bytes of each input from `start` on, in the order of the ranks.
fn reduce(
    data_type: c_int,
    reduction: c_int,
    all: &[Vec<u8>],
    start: usize,
    bytes: usize,
) -> Vec<u8> {
    let parts: Vec<&[u8]> = all.iter().map(|input| &input[start..start + bytes]).collect();
    macro_rules! of {
        ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {{
            const WIDTH: usize = size_of::<$type>();
            let value = |part: &[u8], at: usize| -> $wide {
                let mut bytes = [0; WIDTH];
                bytes.copy_from_slice(&part[at..at + WIDTH]);
                $widen(<$type>::from_le_bytes(bytes))
            };
            let combine = |a: $wide, b: $wide| match reduction {
                1 => a * b,
                2 => {
                    if b > a {
                        b
                    } else {
                        a
                    }
                }
                3 => {
                    if b < a {
                        b
                    } else {
                        a
                    }
                }
                _ => a + b,
            };
            let element = |at: usize| {
                let values = parts.iter().map(|part| value(part, at));
                let sum = values.reduce(combine).unwrap_or_default();
                $narrow(if reduction == 4 { sum / parts.len() as $wide } else { sum }).to_le_bytes()
            };
            (0..bytes).step_by(WIDTH).flat_map(element).collect()
        }};
    }
    macro_rules! exact {
        ($type:ty) => {
            of!($type, $type, |value| value, |value| value)
        };
    }
    match data_type {
        0 => exact!(i8),
        1 => exact!(u8),
        2 => exact!(i32),
        3 => exact!(u32),
        4 => exact!(i64),
        5 => exact!(u64),
        6 => of!(f16, f32, f16::to_f32, f16::from_f32),
        7 => exact!(f32),
        8 => exact!(f64),
        _ => of!(bf16, f32, bf16::to_f32, bf16::from_f32),
    }
}

c_functions! {
    fn ncclAllReduce(
        from: u64, to: u64, count: usize, data_type: c_int, reduction: c_int, comm: *mut c_void,
        stream: *mut c_void
    ) {
        let bytes = count as u64 * width(data_type)?;
        let kind = Kind::AllReduce { data_type, reduction };
        start("ncclAllReduce", kind, (from, bytes), (to, bytes), comm, stream)?;
    }

    fn ncclReduceScatter(
        from: u64, to: u64, count: usize, data_type: c_int, reduction: c_int, comm: *mut c_void,
        stream: *mut c_void
    ) {
        let bytes = count as u64 * width(data_type)?;
        let all = bytes * COMMS.get(comm)?.size as u64;
        let kind = Kind::ReduceScatter { data_type, reduction };
        start("ncclReduceScatter", kind, (from, all), (to, bytes), comm, stream)?;
    }

    fn ncclAllGather(
        from: u64, to: u64, count: usize, data_type: c_int, comm: *mut c_void, stream: *mut c_void
    ) {
        let bytes = count as u64 * width(data_type)?;
        let all = bytes * COMMS.get(comm)?.size as u64;
        start("ncclAllGather", Kind::AllGather, (from, bytes), (to, all), comm, stream)?;
    }

    fn ncclAlltoAll(
        from: u64, to: u64, count: usize, data_type: c_int, comm: *mut c_void, stream: *mut c_void
    ) {
        let all = count as u64 * width(data_type)? * COMMS.get(comm)?.size as u64;
        start("ncclAlltoAll", Kind::AllToAll, (from, all), (to, all), comm, stream)?;
    }

    fn ncclBroadcast(
        from: u64, to: u64, count: usize, data_type: c_int, root: c_int, comm: *mut c_void,
        stream: *mut c_void
    ) {
        let bytes = count as u64 * width(data_type)?;
        let root = usize::try_from(root).map_err(|_| INVALID_ARGUMENT)?;
        let kind = Kind::Broadcast { root };
        start("ncclBroadcast", kind, (from, bytes), (to, bytes), comm, stream)?;
    }
}
