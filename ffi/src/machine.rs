//! The machine of a prediction: a named machine, with the numbers that the caller replaces.

use burst_attention::simulate::{Link, Machine, Named, named};
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
        let given = [forward, backward].map(|rate| rate.map(|rate| rate * 1e12));
        if let Some(library) = &mut kernels.library {
            // This library's own kernels keep their share of cuDNN's rates.
            library.forward *= given[0].map_or(1.0, |rate| rate / kernels.forward);
            library.backward *= given[1].map_or(1.0, |rate| rate / kernels.backward);
        }
        kernels.forward = given[0].unwrap_or(kernels.forward);
        kernels.backward = given[1].unwrap_or(kernels.backward);
        let which = match (forward, backward) {
            (Some(_), Some(_)) => Some("as given"),
            (Some(_), None) => Some("the first as given"),
            (None, Some(_)) => Some("the second as given"),
            (None, None) => None,
        };
        if let Some(which) = which {
            let [forward, backward] = [kernels.forward, kernels.backward].map(|rate| rate / 1e12);
            sources[0] = format!("{forward} TFLOP/s forward, {backward} backward, {which}");
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
            "flops": { "forward": kernels.forward, "backward": kernels.backward },
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
