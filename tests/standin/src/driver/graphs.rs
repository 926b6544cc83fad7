//! Graphs: what XLA's command buffers ask for.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
    CUgraphNodeParams, CUgraphNodeType, CUmemorytype, CUstream,
};

use super::copies::Lines;
use crate::call::{Outcome, c_functions, put, take};
use crate::code;
use crate::graph::{GRAPHS, Graph, NODES, READY, Work};
use crate::kernel::{FUNCTIONS, Shape};
use crate::report::{complain, lock};
use crate::stream::Stream;

fn launch(parameters: &CUDA_KERNEL_NODE_PARAMS) -> Outcome<Work> {
    let function: CUfunction = match parameters.func.is_null() {
        true => parameters.kern.cast(),
        false => parameters.func,
    };
    let shape = Shape {
        grid: [parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ],
        block: [parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ],
        shared: parameters.sharedMemBytes,
    };
    let function = FUNCTIONS.get(function)?;
    // SAFETY: the caller passes the arguments of the function.
    Ok(Work::Launch(unsafe { function.bind(shape, parameters.kernelParams) }?))
}

fn copy(what: &CUDA_MEMCPY3D) -> Outcome<Work> {
    if what.Depth > 1 {
        complain(format!("a node copies {} planes, which is not there", what.Depth));
        return Err(code::NOT_SUPPORTED);
    }
    let base = |kind, host: u64, device| match kind {
        CUmemorytype::CU_MEMORYTYPE_HOST => host,
        _ => device,
    };
    let to = base(what.dstMemoryType, what.dstHost as u64, what.dstDevice);
    let from = base(what.srcMemoryType, what.srcHost as u64, what.srcDevice);
    let lines = [
        Lines { start: to + what.dstXInBytes as u64, pitch: what.dstPitch as u64 },
        Lines { start: from + what.srcXInBytes as u64, pitch: what.srcPitch as u64 },
    ];
    let (width, height) = (what.WidthInBytes as u64, what.Height.max(1) as u64);
    Ok(Work::Copy { lines, width, height })
}

fn fill(address: u64, value: u32, element: usize, width: usize) -> Work {
    Work::Fill { address, pattern: value.to_le_bytes()[..element].to_vec(), count: width }
}

/// Reads what a node shall do.
fn work(parameters: *const CUgraphNodeParams) -> Outcome<(u32, Work)> {
    use CUgraphNodeType::*;
    let given = take(parameters)?;
    let kind = given.type_;
    let inner = given.__bindgen_anon_1;
    let work = match kind {
        CU_GRAPH_NODE_TYPE_KERNEL => {
            // SAFETY: the type says which field of the union the caller has set.
            let node = unsafe { inner.kernel };
            // SAFETY: zero is a value of each field.
            let mut older: CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
            older.func = node.func;
            older.kern = node.kern;
            [older.gridDimX, older.gridDimY, older.gridDimZ] =
                [node.gridDimX, node.gridDimY, node.gridDimZ];
            [older.blockDimX, older.blockDimY, older.blockDimZ] =
                [node.blockDimX, node.blockDimY, node.blockDimZ];
            older.sharedMemBytes = node.sharedMemBytes;
            older.kernelParams = node.kernelParams;
            launch(&older)?
        }
        // SAFETY: as above.
        CU_GRAPH_NODE_TYPE_MEMCPY => copy(unsafe { &inner.memcpy.copyParams })?,
        CU_GRAPH_NODE_TYPE_MEMSET => {
            // SAFETY: as above.
            let node = unsafe { inner.memset };
            fill(node.dst, node.value, node.elementSize as usize, node.width)
        }
        // SAFETY: as above.
        CU_GRAPH_NODE_TYPE_GRAPH => Work::Graph(GRAPHS.get(unsafe { inner.graph.graph })?),
        CU_GRAPH_NODE_TYPE_EMPTY => Work::Nothing,
        other => {
            complain(format!("a node of a graph of the kind {other:?} is not there"));
            return Err(code::NOT_SUPPORTED);
        }
    };
    Ok((kind as u32, work))
}

c_functions! {
    fn cuGraphCreate(graph: *mut CUgraph, _flags: c_uint) {
        put(graph, GRAPHS.add(Arc::new(Graph::default())) as CUgraph);
    }

    fn cuGraphDestroy(graph: CUgraph) {
        GRAPHS.remove(graph)?;
    }

    fn cuGraphAddNode_v2(
        node: *mut CUgraphNode, graph: CUgraph, _after: *const CUgraphNode,
        _edges: *const c_void, _count: usize, parameters: *mut CUgraphNodeParams
    ) {
        let (kind, work) = work(parameters)?;
        put(node, GRAPHS.get(graph)?.add(kind, work) as CUgraphNode);
    }

    fn cuGraphAddKernelNode_v2(
        node: *mut CUgraphNode, graph: CUgraph, _after: *const CUgraphNode, _count: usize,
        parameters: *const CUDA_KERNEL_NODE_PARAMS
    ) {
        put(node, GRAPHS.get(graph)?.add(0, launch(&take(parameters)?)?) as CUgraphNode);
    }

    fn cuGraphAddMemcpyNode(
        node: *mut CUgraphNode, graph: CUgraph, _after: *const CUgraphNode, _count: usize,
        parameters: *const CUDA_MEMCPY3D, _context: *mut c_void
    ) {
        put(node, GRAPHS.get(graph)?.add(1, copy(&take(parameters)?)?) as CUgraphNode);
    }

    fn cuGraphAddMemsetNode(
        node: *mut CUgraphNode, graph: CUgraph, _after: *const CUgraphNode, _count: usize,
        parameters: *const cudarc::driver::sys::CUDA_MEMSET_NODE_PARAMS, _context: *mut c_void
    ) {
        let what = take(parameters)?;
        let work = fill(what.dst, what.value, what.elementSize as usize, what.width);
        put(node, GRAPHS.get(graph)?.add(2, work) as CUgraphNode);
    }

    fn cuGraphAddEmptyNode(
        node: *mut CUgraphNode, graph: CUgraph, _after: *const CUgraphNode, _count: usize
    ) {
        put(node, GRAPHS.get(graph)?.add(5, Work::Nothing) as CUgraphNode);
    }

    fn cuGraphAddChildGraphNode(
        node: *mut CUgraphNode, graph: CUgraph, _after: *const CUgraphNode, _count: usize,
        child: CUgraph
    ) {
        let child = Work::Graph(GRAPHS.get(child)?);
        put(node, GRAPHS.get(graph)?.add(4, child) as CUgraphNode);
    }

    fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph) {
        let node = NODES.get(node)?;
        let Work::Graph(child) = &*lock(&node.work) else { return Err(code::INVALID_VALUE) };
        put(graph, GRAPHS.add(child.clone()) as CUgraph);
    }

    fn cuGraphNodeSetParams(node: CUgraphNode, parameters: *mut CUgraphNodeParams) {
        *lock(&NODES.get(node)?.work) = work(parameters)?.1;
    }

    fn cuGraphExecNodeSetParams(
        ready: CUgraphExec, node: CUgraphNode, parameters: *mut CUgraphNodeParams
    ) {
        READY.get(ready)?.update(node as usize, work(parameters)?.1);
    }

    fn cuGraphExecKernelNodeSetParams_v2(
        ready: CUgraphExec, node: CUgraphNode, parameters: *const CUDA_KERNEL_NODE_PARAMS
    ) {
        READY.get(ready)?.update(node as usize, launch(&take(parameters)?)?);
    }

    fn cuGraphExecMemcpyNodeSetParams(
        ready: CUgraphExec, node: CUgraphNode, parameters: *const CUDA_MEMCPY3D,
        _context: *mut c_void
    ) {
        READY.get(ready)?.update(node as usize, copy(&take(parameters)?)?);
    }

    fn cuGraphExecMemsetNodeSetParams(
        ready: CUgraphExec, node: CUgraphNode,
        parameters: *const cudarc::driver::sys::CUDA_MEMSET_NODE_PARAMS, _context: *mut c_void
    ) {
        let what = take(parameters)?;
        let work = fill(what.dst, what.value, what.elementSize as usize, what.width);
        READY.get(ready)?.update(node as usize, work);
    }

    fn cuGraphExecChildGraphNodeSetParams(
        ready: CUgraphExec, node: CUgraphNode, child: CUgraph
    ) {
        READY.get(ready)?.update(node as usize, Work::Graph(GRAPHS.get(child)?));
    }

    fn cuGraphKernelNodeSetAttribute(
        _node: CUgraphNode, _attribute: c_int, _value: *const c_void
    ) {}

    fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut c_uint) {
        put(kind, NODES.get(node)?.kind);
    }

    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        let graph = GRAPHS.get(graph)?;
        let all = lock(&graph.nodes);
        if !nodes.is_null() {
            for (at, (handle, _)) in all.iter().enumerate().take(take(count)?) {
                put(nodes.wrapping_add(at), *handle as CUgraphNode);
            }
        }
        put(count, all.len());
    }

    fn cuGraphGetRootNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        // Each node is carried out after those that were added before.
        let first = lock(&GRAPHS.get(graph)?.nodes).first().map(|(handle, _)| *handle);
        if let (Some(first), false) = (first, nodes.is_null()) {
            put(nodes, first as CUgraphNode);
        }
        put(count, first.iter().len());
    }

    fn cuGraphInstantiateWithFlags(ready: *mut CUgraphExec, graph: CUgraph, _flags: c_ulonglong) {
        put(ready, READY.add(Arc::new(GRAPHS.get(graph)?.instantiate())) as CUgraphExec);
    }

    fn cuGraphExecDestroy(ready: CUgraphExec) {
        READY.remove(ready)?;
    }

    fn cuGraphExecGetFlags(_ready: CUgraphExec, flags: *mut c_ulonglong) {
        put(flags, 0);
    }

    fn cuGraphUpload(_ready: CUgraphExec, _stream: CUstream) {}

    fn cuGraphLaunch(ready: CUgraphExec, stream: CUstream) {
        let stream = Stream::of("cuGraphLaunch", stream.cast())?;
        stream.device().works()?;
        READY.get(ready)?.launch(&stream);
    }

    fn cuGraphDebugDotPrint(_graph: CUgraph, _path: *const i8, _flags: c_uint) {}

    fn cuDeviceGetGraphMemAttribute(_index: c_int, _attribute: c_int, value: *mut u64) {
        put(value, 0);
    }

    fn cuDeviceGraphMemTrim(_index: c_int) {}
}
