//! The machine of a prediction: one with a name, and what is different from it.

use burst_attention::simulate::{Link, Machine, Named, named};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::simulate::Result;

/// A named machine, and what is different from it. Of two numbers the first is of the forward pass
/// or within a node; one stands for both, and what is null is as the named machine has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineRequest {
    /// By default the first that has so many ranks.
    name: Option<String>,
    pub(crate) ranks_per_node: Option<usize>,
    /// The ranks of a node share one link to the others.
    #[serde(default)]
    shared: bool,
    tflops: Option<Vec<Option<f64>>>,
    launch_us: Option<f64>,
    link_gbps: Option<Vec<Option<f64>>>,
    latency_us: Option<Vec<Option<f64>>>,
}

impl MachineRequest {
    /// The machine with its numbers, and what each rests on.
    pub(crate) fn named(&self, world_size: usize) -> Result<NamedOrGiven> {
        let nodes = self.ranks_per_node;
        let has_ranks =
            |known: &Named| nodes.is_some() || known.ranks.is_none_or(|ranks| world_size <= ranks);
        let chosen = match &self.name {
            Some(name) => {
                let known = named().into_iter().find(|known| known.name == name);
                let names = named().map(|known| known.name).join(" or ");
                known.ok_or_else(|| format!("machine must be {names}, got {name}"))?
            }
            None => named().into_iter().find(has_ranks).ok_or("no machine has so many ranks")?,
        };
        if !has_ranks(&chosen) {
            let Named { name, .. } = chosen;
            let others = named().into_iter().filter(has_ranks).map(|known| known.name);
            return Err(format!(
                "{name} has {} ranks, got {world_size}: take {}, or say how many ranks a node has",
                chosen.ranks.unwrap_or_default(),
                others.collect::<Vec<_>>().join(" or ")
            ));
        }
        let Named { name, title, sources, mut machine, .. } = chosen;
        let mut sources = sources.map(str::to_owned);
        let Machine { kernels, network } = &mut machine;
        network.ranks_per_node = nodes.unwrap_or(network.ranks_per_node);
        network.shared |= self.shared;
        let [forward, backward] = pair("tflops", &self.tflops)?;
        kernels.forward = forward.map_or(kernels.forward, |rate| rate * 1e12);
        kernels.backward = backward.map_or(kernels.backward, |rate| rate * 1e12);
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
                    says(gbps[at]),
                    seconds * 1e6,
                    says(latency[at])
                );
            }
        }
        if self.shared {
            sources[3] += "; all ranks of a node share one, as given";
        }
        Ok(NamedOrGiven { name, title, sources, machine })
    }
}

/// A machine of which some numbers may have been given.
pub(crate) struct NamedOrGiven {
    name: &'static str,
    title: &'static str,
    sources: [String; 4],
    pub(crate) machine: Machine,
}

fn says(given: Option<f64>) -> &'static str {
    if given.is_some() { "as given" } else { "as this machine has it" }
}

/// Two numbers, or one for both.
fn pair(name: &str, numbers: &Option<Vec<Option<f64>>>) -> Result<[Option<f64>; 2]> {
    match numbers.as_deref() {
        None => Ok([None; 2]),
        Some([both]) => Ok([*both; 2]),
        Some([first, second]) => Ok([*first, *second]),
        Some(more) => Err(format!("{name} takes one or two numbers, got {}", more.len())),
    }
}

impl NamedOrGiven {
    /// As JSON, for so many ranks.
    pub(crate) fn json(&self, world_size: usize) -> Value {
        let NamedOrGiven { name, title, sources, machine } = self;
        let Machine { kernels, network } = machine;
        let link = |link: &Link| json!({ "bandwidth": link.bandwidth, "latency": link.latency });
        let [compute, launch, within, between] = sources;
        let mut text = json!({
            "name": name,
            "title": title,
            "ranks_per_node": network.ranks_per_node,
            "flops": { "forward": kernels.forward, "backward": kernels.backward },
            "launch": kernels.launch,
            "within": link(&network.within),
            "shared": network.shared,
            "sources": { "compute": compute, "launch": launch, "within": within },
        });
        if world_size > network.ranks_per_node {
            text["between"] = link(&network.between);
            text["sources"]["between"] = between.as_str().into();
        }
        text
    }
}
