//! What schedules are timed on: the kernels of a rank and the links between ranks.

use std::fmt;

use burst_attention_kernels::rates;

use crate::error::{Error, Result};

/// How fast a rank computes, and how its kernels treat sums that travel.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernels {
    /// FLOP/s of the forward pass.
    pub forward: f64,
    /// FLOP/s of the backward pass.
    pub backward: f64,
    /// Seconds that each launch takes beside its arithmetic.
    pub launch: f64,
    /// One kernel computes all gradients of a tile, and they are added to sums that travel as it
    /// ends. Otherwise dq and (dk, dv) have a kernel each, as here: the one whose sums are at home
    /// runs while the others arrive.
    pub one_backward: bool,
    /// Bytes per element of sums that travel; 4 here.
    pub sum_bytes: usize,
}

/// What a message takes: `latency + bytes / bandwidth`, the bandwidth shared with the other messages
/// that use the link in the same direction at that time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Seconds until the first byte arrives.
    pub latency: f64,
    /// Bytes per second, in each direction.
    pub bandwidth: f64,
}

/// How ranks are connected: each by one link to a switch that is never the bottleneck, within its
/// node and between nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// Ranks r·n … (r+1)·n − 1 are a node.
    pub ranks_per_node: usize,
    /// Of each rank, to the others of its node.
    pub within: Link,
    /// To ranks of other nodes: of each rank, or of each node.
    pub between: Link,
    /// All ranks of a node share its one link to other nodes.
    pub shared: bool,
}

/// A machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// What its ranks compute with.
    pub kernels: Kernels,
    /// What connects them.
    pub network: Network,
}

/// Which link a message takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Both ranks are in one node.
    Within,
    /// They are not.
    Between,
}

/// A machine under a name, with where its numbers come from.
#[derive(Debug, Clone, PartialEq)]
pub struct Named {
    /// What it is asked for by.
    pub name: &'static str,
    /// What it is.
    pub title: &'static str,
    /// What its numbers rest on: those of compute, of launches, of links within a node and of links
    /// between nodes.
    pub sources: [&'static str; 4],
    /// How many ranks it has; no limit where nodes can be added.
    pub ranks: Option<usize>,
    /// Its numbers.
    pub machine: Machine,
}

impl Network {
    /// Which link connects two ranks.
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
    /// Checks that the numbers can be calculated with.
    ///
    /// # Errors
    /// [`Error::InvalidProblem`] that names the first that can't.
    pub fn validate(&self) -> Result<()> {
        let Machine { kernels, network } = self;
        let invalid = |name, expected: &str, got: &dyn fmt::Display| {
            Err(Error::InvalidProblem { name, expected: expected.into(), got: got.to_string() })
        };
        let rates = [
            ("forward FLOP/s", kernels.forward),
            ("backward FLOP/s", kernels.backward),
            ("bandwidth within a node", network.within.bandwidth),
            ("bandwidth between nodes", network.between.bandwidth),
        ];
        // Infinity is a rate: what has it takes no time.
        if let Some((name, rate)) =
            rates.into_iter().find(|(_, rate)| rate.is_nan() || *rate <= 0.0)
        {
            return invalid(name, "above 0", &rate);
        }
        let times = [
            ("seconds of a launch", kernels.launch),
            ("latency within a node", network.within.latency),
            ("latency between nodes", network.between.latency),
        ];
        let bad = |(_, time): &(_, f64)| !time.is_finite() || *time < 0.0;
        if let Some((name, time)) = times.into_iter().find(bad) {
            return invalid(name, "at least 0", &time);
        }
        if network.ranks_per_node == 0 {
            return invalid("ranks per node", "at least 1", &0);
        }
        Ok(())
    }
}

/// Of H200s in nodes of eight.
const SOURCES: [&str; 4] = [
    "predicted for this library's kernels at 8,192 tokens, causal, head_dim 128, bfloat16, by a model \
     of their machine code (docs/kernel-model.md), -10% to +20%; they have not been timed",
    "5 us each, an assumption",
    "NVLink 4, 450 GB/s each way per GPU, as specified, through switches that block nothing; latency \
     of a message 10 us, an assumption",
    "400 Gb/s, which is 50 GB/s, each way per GPU, as specified; latency of a message 20 us, an \
     assumption",
];

/// Predicted FLOP/s of the library's kernels.
fn predicted(case: &str) -> f64 {
    let rate = rates::predicted(case);
    1e12 * rate.unwrap_or_else(|| unreachable!("the table of rates has {case}"))
}

/// The machines that have a name.
pub fn named() -> [Named; 2] {
    let machine = Machine {
        kernels: Kernels {
            forward: predicted("forward_d128_causal_8k"),
            backward: predicted("backward_d128_causal_8k"),
            launch: 5e-6,
            one_backward: false,
            sum_bytes: 4,
        },
        network: Network {
            ranks_per_node: 8,
            within: Link { latency: 10e-6, bandwidth: 450e9 },
            between: Link { latency: 20e-6, bandwidth: 50e9 },
            shared: false,
        },
    };
    [
        Named {
            name: "h200-nvlink",
            title: "8 × H200, NVLink",
            sources: SOURCES,
            ranks: Some(8),
            machine: machine.clone(),
        },
        Named {
            name: "h200-400g",
            title: "nodes of 8 × H200, 400 Gb/s per GPU between them",
            sources: SOURCES,
            ranks: None,
            machine,
        },
    ]
}
