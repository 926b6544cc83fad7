//! Modules, functions and launches.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cudarc::driver::sys::{CUfunction, CUgraph, CUlaunchConfig, CUmodule, CUstream};

use crate::call::{Outcome, c_functions, put, take};
use crate::code;
use crate::device::current;
use crate::graph::{GRAPHS, Work};
use crate::kernel::{FUNCTIONS, MODULES, Shape, load};
use crate::report::{fault, lock};
use crate::stream::Stream;

fn load_now(module: *mut CUmodule, image: *const c_void) -> Outcome {
    let device = current()?;
    device.works()?;
    // SAFETY: the caller passes an image.
    put(module, unsafe { load(device.index, image) }? as CUmodule);
    Ok(())
}

fn launch(
    function: CUfunction,
    shape: Shape,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> Outcome {
    let function = FUNCTIONS.get(function)?;
    let stream = Stream::of("cuLaunchKernel", stream.cast())?;
    stream.device().works()?;
    if let Some(code) = fault("cuLaunchKernel", stream.device, &function.describe()) {
        return if code == 0 { Ok(()) } else { Err(code) };
    }
    // SAFETY: the caller passes the arguments of the function.
    let bound = unsafe { function.bind(shape, parameters) }?;
    let graph = *lock(&stream.graph);
    match graph {
        Some(graph) => {
            GRAPHS.get(graph as CUgraph)?.add(0, Work::Launch(bound));
        }
        None => bound.launch(&stream),
    }
    Ok(())
}

fn attribute(number: c_int) -> c_int {
    match number {
        // The most threads of a block, registers, versions of PTX and of the binary.
        0 => 1024,
        4 => 64,
        5 | 6 => 90,
        _ => 0,
    }
}

c_functions! {
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        load_now(module, image)?;
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, _count: c_uint, _options: *mut c_int,
        _values: *mut *mut c_void
    ) {
        load_now(module, image)?;
    }

    fn cuModuleLoadFatBinary(module: *mut CUmodule, image: *const c_void) {
        load_now(module, image)?;
    }

    fn cuModuleUnload(module: CUmodule) {
        MODULES.remove(module)?;
    }

    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        // SAFETY: the caller passes a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        put(function, MODULES.get(module)?.function(&name)? as CUfunction);
    }

    fn cuModuleGetGlobal_v2(
        address: *mut u64, bytes: *mut usize, module: CUmodule, name: *const c_char
    ) {
        // SAFETY: the caller passes a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let (found, length) = MODULES.get(module)?.global(&name)?;
        put(address, found);
        put(bytes, length);
    }

    fn cuFuncGetAttribute(value: *mut c_int, number: c_int, function: CUfunction) {
        FUNCTIONS.get(function)?;
        put(value, attribute(number));
    }

    fn cuFuncSetAttribute(function: CUfunction, _number: c_int, _value: c_int) {
        FUNCTIONS.get(function)?;
    }

    fn cuFuncSetCacheConfig(function: CUfunction, _config: c_int) {
        FUNCTIONS.get(function)?;
    }

    fn cuFuncLoad(function: CUfunction) {
        FUNCTIONS.get(function)?;
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, _function: CUfunction, _threads: c_int, _shared: usize
    ) {
        put(blocks, 2);
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int, _function: CUfunction, _threads: c_int, _shared: usize, _flags: c_uint
    ) {
        put(blocks, 2);
    }

    fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream,
        parameters: *mut *mut c_void, extra: *mut *mut c_void
    ) {
        if !extra.is_null() {
            return Err(code::NOT_SUPPORTED);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch(function, Shape { grid, block, shared }, stream, parameters)?;
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    ) {
        if !extra.is_null() {
            return Err(code::NOT_SUPPORTED);
        }
        let config = take(config)?;
        let shape = Shape {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared: config.sharedMemBytes,
        };
        launch(function, shape, config.hStream, parameters)?;
    }
}
