//! The machine of a simulation: the kernels of a rank and the links between ranks.

use burst_attention_kernels::cost;
use burst_attention_kernels::instances::Target;
use serde::Serialize;

use super::kernels::{Kernels, Speed};
use crate::error::Result;
use crate::problem::Pass;
use crate::types::invalid;

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
        let numbers = [
            ("forward FLOP/s", kernels.rate(Pass::Forward), rate),
            ("backward FLOP/s", kernels.rate(Pass::Backward), rate),
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

/// Where the time between launches comes from, where blocks are counted.
const GAPS: &str = "2.2 us between them, an assumption; what a block takes to begin and to end is \
                    in its own constants";

/// Sources of the numbers of H200s in nodes of eight.
const H200: [&str; 4] = [
    "rounds of this library's blocks on 132 multiprocessors, as measured on an H100, which \
     has the same multiprocessors and slower memory: its rings within 2%, its launches within 3% \
     forward and 9% backward",
    GAPS,
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
    "rounds of cuDNN 9.19's blocks on 132 multiprocessors, fitted to its launches on an H100 \
     within 6%; no ring with cuDNN was measured; its results are added to float32 sums at the \
     H100's 2.9 TB/s; where queries travel, and what cuDNN does not serve, the library's own kernels \
     compute, as on h200-nvlink",
    GAPS,
    H200[2],
    H200[3],
];

/// Sources of the numbers of GB200s in racks of 72, where cuDNN computes tiles.
const GB200_CUDNN: [&str; 4] = [
    "rounds of blocks on 148 multiprocessors, fitted to rates of cuDNN 9.27 on a GB200 that NVIDIA \
     published in August 2026 (1552 and 1297 TFLOP/s for 8,192 tokens, causal, head_dim 128, bfloat16), \
     within 10%; its results are added to float32 sums at 5 TB/s, an assumption; where queries travel, \
     and what cuDNN does not serve, the library's own kernels compute, assumed to be as fast as a kernel \
     of the same Tile IR on a B200, published in arXiv:2604.23466, 1007 TFLOP/s forward, and \
     backward by as much slower as cuDNN",
    GAPS,
    "NVLink 5, 900 GB/s each way per GPU, as specified, through switches that block nothing; \
     latency of a message 10 us, an assumption",
    H200[3],
];

/// Sources of the numbers of GB300s in racks of 72, where cuDNN computes tiles.
const GB300_CUDNN: [&str; 4] = [
    "rounds of blocks on 148 multiprocessors, fitted to rates of cuDNN 9.25 on a GB300 that NVIDIA \
     published in July 2026 (2024 and 1457 TFLOP/s for 8,192 tokens, causal, head_dim 128, bfloat16), \
     within 5%; its results are added to float32 sums at 5 TB/s, an assumption; where queries travel, \
     and what cuDNN does not serve, the library's own kernels compute, assumed to be as fast as on \
     gb200-nvlink-cudnn",
    GAPS,
    GB200_CUDNN[2],
    "800 Gb/s, which is 100 GB/s, each way per GPU, as specified; latency of a message 20 us, an \
     assumption",
];

/// Returns the machines that have a name. The first one with enough ranks is the default.
pub fn named() -> [Named; 10] {
    let nodes = |kernels: Kernels, ranks_per_node: usize, within: f64, between: f64| Machine {
        kernels,
        network: Network {
            ranks_per_node,
            within: Link { latency: 10e-6, bandwidth: within },
            between: Link { latency: 20e-6, bandwidth: between },
            shared: false,
        },
    };
    // Kernels whose blocks are counted.
    let counted = |target: Target, library: Option<Target>| Kernels {
        forward: Speed::Blocks(target),
        backward: Speed::Blocks(target),
        launch: cost::launch_gap(target).unwrap_or_default(),
        one_backward: false,
        sum_bytes: 4,
        library,
    };
    let cudnn = |target| counted(target, Some(target));
    let a100 = Kernels {
        forward: Speed::Rate(190e12),
        backward: Speed::Rate(190e12),
        launch: 5e-6,
        one_backward: true,
        sum_bytes: 2,
        library: None,
    };
    // A machine of one node, named after its links, and one of many nodes.
    let both = |names: [&'static str; 2], titles: [&'static str; 2], sources, machine: Machine| {
        let ranks = [Some(machine.network.ranks_per_node), None];
        std::array::from_fn::<Named, 2, _>(|at| Named {
            name: names[at],
            title: titles[at],
            sources,
            ranks: ranks[at],
            machine: machine.clone(),
        })
    };
    let all = [
        both(
            ["h200-nvlink", "h200-400g"],
            ["8 × H200, NVLink", "nodes of 8 × H200, 400 Gb/s per GPU between them"],
            H200,
            nodes(counted(Target::Sm90, None), 8, 450e9, 50e9),
        ),
        both(
            ["h200-nvlink-cudnn", "h200-400g-cudnn"],
            [
                "8 × H200, NVLink, with cuDNN",
                "nodes of 8 × H200 with cuDNN, 400 Gb/s per GPU between them",
            ],
            H200_CUDNN,
            nodes(cudnn(Target::Sm90), 8, 450e9, 50e9),
        ),
        both(
            ["gb200-nvlink-cudnn", "gb200-400g-cudnn"],
            [
                "72 × GB200, NVLink, with cuDNN",
                "racks of 72 × GB200 with cuDNN, 400 Gb/s per GPU between them",
            ],
            GB200_CUDNN,
            nodes(cudnn(Target::Sm100), 72, 900e9, 50e9),
        ),
        both(
            ["gb300-nvlink-cudnn", "gb300-800g-cudnn"],
            [
                "72 × GB300, NVLink, with cuDNN",
                "racks of 72 × GB300 with cuDNN, 800 Gb/s per GPU between them",
            ],
            GB300_CUDNN,
            nodes(cudnn(Target::Sm103), 72, 900e9, 100e9),
        ),
        both(
            ["a100-nvlink", "a100-200g"],
            ["8 × A100 80 GB, NVLink", "nodes of 8 × A100 80 GB, 200 Gb/s per GPU between them"],
            A100,
            nodes(a100, 8, 300e9, 25e9),
        ),
    ];
    let mut all = all.into_iter().flatten();
    std::array::from_fn(|_| all.next().expect("five pairs of machines"))
}
