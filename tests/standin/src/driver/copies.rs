//! Copies and fills.

#![allow(non_snake_case)]

use std::ffi::{c_uchar, c_uint, c_ushort};
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUcontext, CUmemorytype, CUstream};

use crate::call::{Outcome, c_functions, take};
use crate::device::current;
use crate::memory::{By, Touch};
use crate::stream::Stream;

/// Lines of bytes, `pitch` bytes apart.
#[derive(Debug, Clone, Copy)]
pub struct Lines {
    pub start: u64,
    pub pitch: u64,
}

/// Enqueues a copy of `height` lines of `width` bytes.
pub fn copy_lines(
    stream: &Arc<Stream>,
    name: &str,
    [to, from]: [Lines; 2],
    width: u64,
    height: u64,
) {
    let extent = |lines: Lines| match height {
        0 => 0,
        _ => (height - 1) * lines.pitch + width,
    };
    let touches = vec![
        Touch::read(By::Copy, from.start, extent(from)),
        Touch::write(By::Copy, to.start, extent(to)),
    ];
    stream.touch(name, touches, move |_| {
        for line in 0..height {
            let (to, from) = (to.start + line * to.pitch, from.start + line * from.pitch);
            // SAFETY: the stream has checked both ranges, as far as they are a device's. What is
            // the program's own it keeps for the copy. They may overlap.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, width as usize) };
        }
    });
}

pub fn copy(name: &str, to: u64, from: u64, bytes: usize, stream: CUstream) -> Outcome {
    let stream = Stream::of(name, stream.cast())?;
    stream.device().works()?;
    let bytes = bytes as u64;
    let lines = [to, from].map(|start| Lines { start, pitch: bytes });
    copy_lines(&stream, name, lines, bytes, 1);
    Ok(())
}

/// Copies, and waits for the copy.
fn copy_now(name: &str, to: u64, from: u64, bytes: usize) -> Outcome {
    copy(name, to, from, bytes, std::ptr::null_mut())?;
    current()?.null_stream().synchronize();
    current()?.works()
}

fn copy_2d(name: &str, parameters: *const CUDA_MEMCPY2D, stream: CUstream) -> Outcome {
    let stream = Stream::of(name, stream.cast())?;
    stream.device().works()?;
    let what = take(parameters)?;
    let base = |kind, host: u64, device| match kind {
        CUmemorytype::CU_MEMORYTYPE_HOST => host,
        _ => device,
    };
    let to = base(what.dstMemoryType, what.dstHost as u64, what.dstDevice);
    let from = base(what.srcMemoryType, what.srcHost as u64, what.srcDevice);
    let lines = |start: u64, x: usize, y: usize, pitch: usize| Lines {
        start: start + (y * pitch + x) as u64,
        pitch: pitch as u64,
    };
    let lines = [
        lines(to, what.dstXInBytes, what.dstY, what.dstPitch),
        lines(from, what.srcXInBytes, what.srcY, what.srcPitch),
    ];
    copy_lines(&stream, name, lines, what.WidthInBytes as u64, what.Height as u64);
    Ok(())
}

/// Enqueues the writing of `count` copies of a pattern.
pub fn fill(stream: &Arc<Stream>, address: u64, pattern: Vec<u8>, count: usize) {
    let bytes = (pattern.len() * count) as u64;
    let touch = Touch::write(By::Kernel(stream.device), address, bytes);
    stream.touch("memset", vec![touch], move |_| {
        // SAFETY: the stream has checked the range.
        let all = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes as usize) };
        all.chunks_exact_mut(pattern.len()).for_each(|part| part.copy_from_slice(&pattern));
    });
}

fn memset(address: u64, pattern: &[u8], count: usize, stream: CUstream) -> Outcome {
    let stream = Stream::of("memset", stream.cast())?;
    stream.device().works()?;
    fill(&stream, address, pattern.to_vec(), count);
    Ok(())
}

/// Fills, and waits for it.
fn memset_now(address: u64, pattern: &[u8], count: usize) -> Outcome {
    memset(address, pattern, count, std::ptr::null_mut())?;
    current()?.null_stream().synchronize();
    current()?.works()
}

c_functions! {
    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        copy_now("cuMemcpy", to, from, bytes)?;
    }

    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now("cuMemcpyHtoD", to, from, bytes)?;
    }

    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) {
        copy_now("cuMemcpyDtoH", to, from, bytes)?;
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now("cuMemcpyDtoD", to, from, bytes)?;
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: CUstream) {
        copy("cuMemcpyAsync", to, from, bytes, stream)?;
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: CUstream) {
        copy("cuMemcpyHtoDAsync", to, from, bytes, stream)?;
    }

    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: CUstream) {
        copy("cuMemcpyDtoHAsync", to, from, bytes, stream)?;
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: CUstream) ["{bytes} bytes"] {
        copy("cuMemcpyDtoDAsync", to, from, bytes, stream)?;
    }

    fn cuMemcpyPeerAsync(
        to: u64, _to_context: CUcontext, from: u64, _from_context: CUcontext, bytes: usize,
        stream: CUstream
    ) {
        copy("cuMemcpyPeerAsync", to, from, bytes, stream)?;
    }

    fn cuMemcpy2DAsync_v2(parameters: *const CUDA_MEMCPY2D, stream: CUstream) {
        copy_2d("cuMemcpy2DAsync", parameters, stream)?;
    }

    fn cuMemsetD8_v2(address: u64, value: c_uchar, count: usize) {
        memset_now(address, &[value], count)?;
    }

    fn cuMemsetD32_v2(address: u64, value: c_uint, count: usize) {
        memset_now(address, &value.to_le_bytes(), count)?;
    }

    fn cuMemsetD8Async(address: u64, value: c_uchar, count: usize, stream: CUstream) {
        memset(address, &[value], count, stream)?;
    }

    fn cuMemsetD16Async(address: u64, value: c_ushort, count: usize, stream: CUstream) {
        memset(address, &value.to_le_bytes(), count, stream)?;
    }

    fn cuMemsetD32Async(address: u64, value: c_uint, count: usize, stream: CUstream) {
        memset(address, &value.to_le_bytes(), count, stream)?;
    }
}
