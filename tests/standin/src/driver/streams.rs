//! Streams and events.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUevent, CUgraph, CUhostFn, CUstream, CUstreamCallback};

use crate::call::{Outcome, c_functions, put};
use crate::code;
use crate::device::current;
use crate::graph::GRAPHS;
use crate::order::see;
use crate::report::{complain, lock};
use crate::stream::{EVENTS, Event, STREAMS, Stream};

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the null stream.
const NON_BLOCKING: c_uint = 1;

fn of(call: &str, stream: CUstream) -> Outcome<Arc<Stream>> {
    Stream::of(call, stream.cast())
}

/// Waits for all operations of a stream.
pub fn synchronize(call: &str, stream: CUstream) -> Outcome {
    let stream = of(call, stream)?;
    stream.synchronize();
    stream.device().works()
}

fn create(stream: *mut CUstream, flags: c_uint, priority: c_int) -> Outcome {
    if flags != NON_BLOCKING {
        complain(format!("a stream of flags {flags} waits for the null stream, which can't be"));
        return Err(code::NOT_SUPPORTED);
    }
    let device = current()?;
    device.works()?;
    put(stream, STREAMS.add(device.add_stream(priority)) as CUstream);
    Ok(())
}

/// A pointer of the caller, for a callback on the stream's thread.
struct Shared(*mut c_void);

// SAFETY: the caller gives the pointer away for the callback, which runs on another thread.
unsafe impl Send for Shared {}

c_functions! {
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) {
        create(stream, flags, 0)?;
    }

    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int)
        ["flags {flags}, priority {priority}"]
    {
        create(stream, flags, priority)?;
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        let stream = STREAMS.remove(stream)?;
        stream.device().remove_stream(&stream);
        stream.close();
    }

    fn cuStreamQuery(stream: CUstream) {
        let stream = of("cuStreamQuery", stream)?;
        stream.device().works()?;
        if !stream.is_idle() {
            return Err(code::NOT_READY);
        }
    }

    fn cuStreamSynchronize(stream: CUstream) {
        synchronize("cuStreamSynchronize", stream)?;
    }

    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) {
        let device = match stream as usize {
            0..=2 => current()?,
            _ => STREAMS.get(stream)?.device(),
        };
        device.works()?;
        put(context, device.context());
    }

    fn cuStreamGetDevice(stream: CUstream, index: *mut c_int) {
        put(index, of("cuStreamGetDevice", stream)?.device as c_int);
    }

    fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int) {
        put(priority, of("cuStreamGetPriority", stream)?.priority);
    }

    fn cuStreamGetFlags(_stream: CUstream, flags: *mut c_uint) {
        put(flags, NON_BLOCKING);
    }

    fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong) {
        put(id, of("cuStreamGetId", stream)?.number.into());
    }

    fn cuStreamIsCapturing(stream: CUstream, status: *mut c_int) {
        put(status, lock(&of("cuStreamIsCapturing", stream)?.graph).is_some().into());
    }

    fn cuStreamBeginCaptureToGraph(
        stream: CUstream, graph: CUgraph, _after: *const c_void, _edges: *const c_void,
        _count: usize, _mode: c_int
    ) {
        GRAPHS.get(graph)?;
        *lock(&of("cuStreamBeginCaptureToGraph", stream)?.graph) = Some(graph as usize);
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        let captured = lock(&of("cuStreamEndCapture", stream)?.graph).take();
        put(graph, captured.ok_or(code::INVALID_VALUE)? as CUgraph);
    }

    fn cuEventCreate(event: *mut CUevent, flags: c_uint) ["flags {flags}"] {
        let device = current()?;
        device.works()?;
        put(event, EVENTS.add(Arc::new(Event::new(device.index))) as CUevent);
    }

    fn cuEventDestroy_v2(event: CUevent) {
        EVENTS.remove(event)?;
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        let stream = of("cuEventRecord", stream)?;
        stream.device().works()?;
        EVENTS.get(event)?.record(&stream)?;
    }

    fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, _flags: c_uint) {
        EVENTS.get(event)?.record(&of("cuEventRecordWithFlags", stream)?)?;
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        let stream = of("cuStreamWaitEvent", stream)?;
        stream.device().works()?;
        EVENTS.get(event)?.hold(&stream);
    }

    fn cuEventQuery(event: CUevent) {
        let event = EVENTS.get(event)?;
        event.works()?;
        if !event.is_done() {
            return Err(code::NOT_READY);
        }
    }

    fn cuEventSynchronize(event: CUevent) {
        let event = EVENTS.get(event)?;
        event.synchronize();
        event.works()?;
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, from: CUevent, to: CUevent) {
        put(milliseconds, EVENTS.get(to)?.since(&*EVENTS.get(from)?));
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, from: CUevent, to: CUevent) {
        put(milliseconds, EVENTS.get(to)?.since(&*EVENTS.get(from)?));
    }

    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) {
        let (function, data) = (function.ok_or(code::INVALID_VALUE)?, Shared(data));
        of("cuLaunchHostFunc", stream)?.push("host function", move |stamp| {
            see(stamp);
            let data = data;
            // SAFETY: the caller guarantees the function and its data until it has run.
            unsafe { function(data.0) };
        });
    }

    fn cuStreamAddCallback(
        stream: CUstream, function: CUstreamCallback, data: *mut c_void, _flags: c_uint
    ) {
        let (function, data) = (function.ok_or(code::INVALID_VALUE)?, Shared(data));
        let handle = Shared(stream.cast());
        of("cuStreamAddCallback", stream)?.push("host function", move |stamp| {
            see(stamp);
            let (handle, data) = (handle, data);
            let success = cudarc::driver::sys::CUresult::CUDA_SUCCESS;
            // SAFETY: as for `cuLaunchHostFunc`.
            unsafe { function(handle.0.cast(), success, data.0) };
        });
    }
}
