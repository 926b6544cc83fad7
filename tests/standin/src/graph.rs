//! Graphs of operations. A launch of a graph carries its nodes out on one stream, in the order in
//! which they were added, which every order of dependencies allows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::driver::{Lines, copy_lines, fill};
use crate::handles::Handles;
use crate::kernel::Bound;
use crate::report::lock;
use crate::stream::Stream;

/// Graphs that programs make.
pub static GRAPHS: Handles<Graph> = Handles::new("graph");
/// Nodes of graphs.
pub static NODES: Handles<Node> = Handles::new("node of a graph");
/// Graphs that are ready to be launched.
pub static READY: Handles<Ready> = Handles::new("executable graph");

/// What a node does.
#[derive(Clone)]
pub enum Work {
    Nothing,
    Launch(Bound),
    Copy { lines: [Lines; 2], width: u64, height: u64 },
    Fill { address: u64, pattern: Vec<u8>, count: usize },
    Graph(Arc<Graph>),
}

/// A node.
pub struct Node {
    /// The number of the node's kind in `cuda.h`.
    pub kind: u32,
    pub work: Mutex<Work>,
}

/// A graph.
#[derive(Default)]
pub struct Graph {
    pub nodes: Mutex<Vec<(usize, Arc<Node>)>>,
}

/// A graph that is ready: its nodes, with what was updated since.
#[derive(Default)]
pub struct Ready {
    nodes: Vec<(usize, Arc<Node>)>,
    updates: Mutex<HashMap<usize, Work>>,
}

impl Graph {
    /// Adds a node and returns its handle.
    pub fn add(&self, kind: u32, work: Work) -> usize {
        let node = Arc::new(Node { kind, work: Mutex::new(work) });
        let handle = NODES.add(node.clone());
        lock(&self.nodes).push((handle, node));
        handle
    }

    /// Returns the graph as it is now, ready to be launched.
    pub fn instantiate(&self) -> Ready {
        let nodes = lock(&self.nodes).clone();
        let works = nodes.iter().map(|(handle, node)| (*handle, lock(&node.work).clone()));
        let updates = Mutex::new(works.collect());
        Ready { nodes, updates }
    }
}

impl Ready {
    /// Replaces the work of a node.
    pub fn update(&self, node: usize, work: Work) {
        lock(&self.updates).insert(node, work);
    }

    /// Enqueues the nodes.
    pub fn launch(&self, stream: &Arc<Stream>) {
        let updates = lock(&self.updates);
        run(&self.nodes, &updates, stream);
    }
}

fn run(nodes: &[(usize, Arc<Node>)], updates: &HashMap<usize, Work>, stream: &Arc<Stream>) {
    for (handle, node) in nodes {
        let work = updates.get(handle).cloned().unwrap_or_else(|| lock(&node.work).clone());
        match work {
            Work::Nothing => {}
            Work::Launch(bound) => bound.launch(stream),
            Work::Copy { lines, width, height } => {
                copy_lines(stream, "copy of a graph", lines, width, height);
            }
            Work::Fill { address, pattern, count } => fill(stream, address, pattern, count),
            Work::Graph(graph) => run(&lock(&graph.nodes).clone(), updates, stream),
        }
    }
}
