//! The machine of a simulation: the kernels of a rank and the links between ranks.

use burst_attention_kernels::rates;
use serde::Serialize;

use crate::error::Result;
use crate::types::invalid;

/// How fast a rank computes, and how its kernels treat travelling accumulators.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernels {
    /// FLOP/s of the forward pass.
    pub forward: f64,
    /// FLOP/s of the backward pass.
    pub backward: f64,
    /// Seconds that each launch takes in addition to its arithmetic.
    pub launch: f64,
    /// Whether one kernel computes all gradients of a tile, and adds them to travelling
    /// accumulators as it ends. In this library dq and (dk, dv) have a kernel each: the kernel
    /// whose accumulator is at home runs while the other accumulator arrives.
    pub one_backward: bool,
    /// Bytes per element of travelling accumulators; 4 in this library.
    pub sum_bytes: usize,
    /// A library that computes tiles, whose rates then are `forward` and `backward`.
    pub library: Option<TileLibrary>,
}

/// A library that writes what a tile contributes to memory, o, dk and dv in 16 bits and dq in
/// float32. Kernels add it to sums in float32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TileLibrary {
    /// Bytes per second that kernels read and write as they add.
    pub memory: f64,
    /// FLOP/s of the backward pass of this library's own kernels, which compute where gradients of
    /// queries travel.
    pub backward: f64,
}

/// A connection. A message takes `latency + bytes / bandwidth`. It shares the bandwidth with the
/// other messages that use the link in the same direction at that time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Seconds until the first byte arrives.
    pub latency: f64,
    /// Bytes per second, in each direction.
    pub bandwidth: f64,
}

/// How ranks are connected: within nodes and between nodes, by links to a switch that is never the
/// bottleneck.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// Ranks of a node: r·n … (r+1)·n − 1.
    pub ranks_per_node: usize,
    /// The link of each rank to the other ranks of its node.
    pub within: Link,
    /// The link to other nodes, of each rank or of each node.
    pub between: Link,
    /// Whether all ranks of a node share one link to other nodes.
    pub shared: bool,
}

/// A machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// What its ranks compute with.
    pub kernels: Kernels,
    /// What connects its ranks.
    pub network: Network,
}

/// The link that a message takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// The link between two ranks of one node.
    Within,
    /// The link between ranks of different nodes.
    Between,
}

/// A machine with a name and the sources of its numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Named {
    /// The name that users write.
    pub name: &'static str,
    /// What the machine is.
    pub title: &'static str,
    /// Sources of the numbers of compute, of launches, of links within a node and of links between
    /// nodes.
    pub sources: [&'static str; 4],
    /// The number of ranks; `None` where there can be any number of nodes.
    pub ranks: Option<usize>,
    /// The numbers.
    pub machine: Machine,
}

impl Network {
    /// The class of the link between two ranks.
    pub fn class(&self, a: usize, b: usize) -> Class {
        let node = |rank: usize| rank / self.ranks_per_node;
        if node(a) == node(b) { Class::Within } else { Class::Between }
    }

    /// The link of a class.
    pub fn link(&self, class: Class) -> Link {
        match class {
            Class::Within => self.within,
            Class::Between => self.between,
        }
    }
}

impl Machine {
    /// Checks that the simulator can calculate with the numbers.
    ///
    /// # Errors
    /// [`crate::Error::InvalidProblem`] that names the first number with which it can't.
    pub fn validate(&self) -> Result<()> {
        let Machine { kernels, network: Network { ranks_per_node, within, between, .. } } = self;
        // An infinite rate is valid: what has it takes no time.
        let rate: (_, fn(f64) -> bool) = ("above 0", |rate| rate > 0.0);
        let time: (_, fn(f64) -> bool) = ("at least 0", |time| time.is_finite() && time >= 0.0);
        let count: (_, fn(f64) -> bool) = ("at least 1", |count| count >= 1.0);
        let library = kernels.library.unwrap_or(TileLibrary { memory: 1.0, backward: 1.0 });
        let numbers = [
            ("forward FLOP/s", kernels.forward, rate),
            ("backward FLOP/s", kernels.backward, rate),
            ("bytes per second of sums", library.memory, rate),
            ("backward FLOP/s without a library", library.backward, rate),
            ("bandwidth within a node", within.bandwidth, rate),
            ("bandwidth between nodes", between.bandwidth, rate),
            ("seconds of a launch", kernels.launch, time),
            ("latency within a node", within.latency, time),
            ("latency between nodes", between.latency, time),
            ("ranks per node", *ranks_per_node as f64, count),
        ];
        match numbers.into_iter().find(|(_, number, (_, is_valid))| !is_valid(*number)) {
            None => Ok(()),
            Some((name, number, (expected, _))) => Err(invalid(name, expected, number)),
        }
    }
}

/// Sources of the numbers of H200s in nodes of eight.
const H200: [&str; 4] = [
    "predicted for this library's kernels at 8,192 tokens, causal, head_dim 128, bfloat16, by a \
     model of their machine code (docs/kernel-model.md), -10% to +20%; they have not been timed",
    "5 us each, an assumption",
    "NVLink 4, 450 GB/s each way per GPU, as specified, through switches that block nothing; \
     latency of a message 10 us, an assumption",
    "400 Gb/s, which is 50 GB/s, each way per GPU, as specified; latency of a message 20 us, an \
     assumption",
];

/// Sources of the numbers of A100s with 80 GB in nodes of eight, the machines of many publications.
const A100: [&str; 4] = [
    "190 TFLOP/s in both passes, of one kernel for all gradients, whose sums travel in 16 bits; \
     FlashAttention-2's repository shows 189 for both passes together at 16,384 tokens, causal, \
     head_dim 128",
    "5 us each, an assumption",
    "NVLink 3, 300 GB/s each way per GPU, as specified, through switches that block nothing; \
     latency of a message 10 us, an assumption",
    "200 Gb/s, which is 25 GB/s, each way per GPU, as specified for a DGX A100; latency of a \
     message 20 us, an assumption",
];

/// Sources of the numbers of the same H200s where cuDNN computes tiles.
const H200_CUDNN: [&str; 4] = [
    "cuDNN 9.19.1 as NVIDIA publishes it for 8,192 tokens, causal, head_dim 128, bfloat16; its \
     results are added to float32 sums at 3 TB/s, an assumption; where queries travel the library's \
     own kernels compute, at the rates of h200-nvlink",
    H200[1],
    H200[2],
    H200[3],
];

/// Returns the predicted FLOP/s of the library's kernels.
fn predicted(case: &str) -> f64 {
    let rate = rates::predicted(case);
    1e12 * rate.unwrap_or_else(|| unreachable!("the table of rates has {case}"))
}

/// Returns the machines that have a name. The first one with enough ranks is the default.
pub fn named() -> [Named; 6] {
    let nodes = |kernels: Kernels, within: f64, between: f64| Machine {
        kernels,
        network: Network {
            ranks_per_node: 8,
            within: Link { latency: 10e-6, bandwidth: within },
            between: Link { latency: 20e-6, bandwidth: between },
            shared: false,
        },
    };
    let h200 = Kernels {
        forward: predicted("forward_d128_causal_8k"),
        backward: predicted("backward_d128_causal_8k"),
        launch: 5e-6,
        one_backward: false,
        sum_bytes: 4,
        library: None,
    };
    let cudnn = TileLibrary { memory: 3e12, backward: h200.backward };
    let h200_cudnn =
        Kernels { forward: 644e12, backward: 541e12, library: Some(cudnn), ..h200.clone() };
    let a100 = Kernels {
        forward: 190e12,
        backward: 190e12,
        launch: 5e-6,
        one_backward: true,
        sum_bytes: 2,
        library: None,
    };
    let [h200, h200_cudnn] = [h200, h200_cudnn].map(|kernels| nodes(kernels, 450e9, 50e9));
    let a100 = nodes(a100, 300e9, 25e9);
    let named = |name, title, sources, ranks, machine: &Machine| Named {
        name,
        title,
        sources,
        ranks,
        machine: machine.clone(),
    };
    let h200_nodes = "nodes of 8 × H200, 400 Gb/s per GPU between them";
    let h200_cudnn_nodes = "nodes of 8 × H200 with cuDNN, 400 Gb/s per GPU between them";
    let a100_nodes = "nodes of 8 × A100 80 GB, 200 Gb/s per GPU between them";
    [
        named("h200-nvlink", "8 × H200, NVLink", H200, Some(8), &h200),
        named("h200-400g", h200_nodes, H200, None, &h200),
        named(
            "h200-nvlink-cudnn",
            "8 × H200, NVLink, with cuDNN",
            H200_CUDNN,
            Some(8),
            &h200_cudnn,
        ),
        named("h200-400g-cudnn", h200_cudnn_nodes, H200_CUDNN, None, &h200_cudnn),
        named("a100-nvlink", "8 × A100 80 GB, NVLink", A100, Some(8), &a100),
        named("a100-200g", a100_nodes, A100, None, &a100),
    ]
}
