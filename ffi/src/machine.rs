//! The machine of a prediction: a named machine, with the numbers that the caller replaces.

use burst_attention::Pass;
use burst_attention::simulate::{Kernels, Link, Machine, Named, Speed, named};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::Result;

/// A named machine, and numbers that replace its own. A list of two numbers holds those of the
/// forward and the backward pass, or of links within and between nodes. A list of one number holds
/// for both. The machine keeps its own number in the place of a null.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineRequest {
    /// The default is the first machine that has enough ranks.
    name: Option<String>,
    pub(crate) ranks_per_node: Option<usize>,
    /// Whether the ranks of a node share one link to other nodes.
    #[serde(default)]
    shared: bool,
    tflops: Option<Vec<Option<f64>>>,
    launch_us: Option<f64>,
    link_gbps: Option<Vec<Option<f64>>>,
    latency_us: Option<Vec<Option<f64>>>,
}

impl MachineRequest {
    /// Returns the machine for `world_size` ranks, and the source of each number.
    pub(crate) fn resolved(&self, world_size: usize) -> Result<Resolved> {
        let Named { name, title, sources, mut machine, .. } = self.chosen(world_size)?;
        let mut sources = sources.map(str::to_owned);
        let Machine { kernels, network } = &mut machine;
        network.ranks_per_node = self.ranks_per_node.unwrap_or(network.ranks_per_node);
        network.shared |= self.shared;
        let [forward, backward] = pair("tflops", &self.tflops)?;
        let rate = |tflops: f64| Speed::Rate(tflops * 1e12);
        kernels.forward = forward.map_or(kernels.forward, rate);
        kernels.backward = backward.map_or(kernels.backward, rate);
        if let Some(text) = given(kernels, [forward, backward].map(|rate| rate.is_some())) {
            // A pass with a rate takes no blocks, in which the time to begin and to end lies.
            kernels.launch = RATE_LAUNCH_US * 1e-6;
            sources[0] = text;
            sources[1] = format!("{RATE_LAUNCH_US} us each, an assumption");
        }
        if let Some(launch) = self.launch_us {
            kernels.launch = launch * 1e-6;
            sources[1] = format!("{launch} us each, as given");
        }
        let gbps = pair("link_gbps", &self.link_gbps)?;
        let latency = pair("latency_us", &self.latency_us)?;
        for (at, link) in [&mut network.within, &mut network.between].into_iter().enumerate() {
            link.bandwidth = gbps[at].map_or(link.bandwidth, |gbps| gbps * 1e9 / 8.0);
            link.latency = latency[at].map_or(link.latency, |latency| latency * 1e-6);
            if gbps[at].or(latency[at]).is_some() {
                let Link { latency: seconds, bandwidth } = *link;
                sources[2 + at] = format!(
                    "{} GB/s each way, {}; latency of a message {} us, {}",
                    bandwidth / 1e9,
                    source(gbps[at]),
                    seconds * 1e6,
                    source(latency[at])
                );
            }
        }
        if self.shared {
            sources[3] += "; all ranks of a node share one, as given";
        }
        Ok(Resolved { name, title, sources, machine })
    }

    /// Returns the named machine, which must have enough ranks.
    fn chosen(&self, world_size: usize) -> Result<Named> {
        let has_ranks = |known: &Named| {
            self.ranks_per_node.is_some() || known.ranks.is_none_or(|ranks| world_size <= ranks)
        };
        let Some(name) = &self.name else {
            let found = named().into_iter().find(has_ranks);
            return Ok(found.ok_or("no machine has enough ranks")?);
        };
        let Some(chosen) = named().into_iter().find(|known| known.name == name) else {
            let names = named().map(|known| known.name).join(" or ");
            return Err(format!("machine must be {names}, got {name}").into());
        };
        if has_ranks(&chosen) {
            return Ok(chosen);
        }
        let large = named().into_iter().filter(has_ranks).map(|known| known.name);
        let error = format!(
            "{name} has {} ranks, got {world_size}: take {}, or say how many ranks a node has",
            chosen.ranks.unwrap_or_default(),
            large.collect::<Vec<_>>().join(" or ")
        );
        Err(error.into())
    }
}

/// A machine with all its numbers.
pub(crate) struct Resolved {
    name: &'static str,
    title: &'static str,
    /// Where the numbers of compute, launches, links within and links between nodes come from.
    sources: [String; 4],
    pub(crate) machine: Machine,
}

/// Microseconds that a launch takes besides its arithmetic where a rate is given.
const RATE_LAUNCH_US: f64 = 5.0;

/// Returns the source of the rates if some are given, for the forward and for the backward pass.
fn given(kernels: &Kernels, [forward, backward]: [bool; 2]) -> Option<String> {
    let which = match (forward, backward) {
        (true, true) => "as given",
        (true, false) => "the first as given",
        (false, true) => "the second as given",
        (false, false) => return None,
    };
    let rate = |pass| (kernels.rate(pass) / 1e11).round() / 10.0;
    let [forward, backward] = [Pass::Forward, Pass::Backward].map(rate);
    Some(format!("{forward} TFLOP/s forward, {backward} backward, {which}"))
}

fn source(given: Option<f64>) -> &'static str {
    if given.is_some() { "as given" } else { "as this machine has it" }
}

/// Returns two numbers from a list of two numbers, or of one for both.
fn pair(name: &str, numbers: &Option<Vec<Option<f64>>>) -> Result<[Option<f64>; 2]> {
    match numbers.as_deref() {
        None => Ok([None; 2]),
        Some([both]) => Ok([*both; 2]),
        Some([first, second]) => Ok([*first, *second]),
        Some(more) => Err(format!("{name} takes one or two numbers, got {}", more.len()).into()),
    }
}

impl Resolved {
    /// Returns the machine as JSON; links between nodes are left out where `world_size` ranks fit
    /// one node.
    pub(crate) fn json(&self, world_size: usize) -> Value {
        let Resolved { name, title, sources, machine } = self;
        let Machine { kernels, network } = machine;
        let [compute, launch, within, between] = sources;
        let mut text = json!({
            "name": name,
            "title": title,
            "ranks_per_node": network.ranks_per_node,
            "flops": {
                "forward": kernels.rate(Pass::Forward),
                "backward": kernels.rate(Pass::Backward),
            },
            "launch": kernels.launch,
            "within": network.within,
            "shared": network.shared,
            "sources": { "compute": compute, "launch": launch, "within": within },
        });
        if world_size > network.ranks_per_node {
            text["between"] = json!(network.between);
            text["sources"]["between"] = between.as_str().into();
        }
        text
    }
}
