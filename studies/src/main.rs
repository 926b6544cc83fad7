//! Answers a question about a baseline: JSON on stdin, and the forward and the backward pass as
//! JSON on stdout.

use std::error::Error;
use std::io::{stdin, stdout};

use burst_attention::simulate::{Machine, Report, named};
use burst_attention::{Pass, Problem};
use burst_attention_studies::{Baseline, predict};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    #[serde(flatten)]
    problem: Problem,
    schedule: Baseline,
    machine: MachineRequest,
    /// Bytes per second between a rank and its memory.
    memory: f64,
}

/// A machine of the simulator, with numbers that replace its own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MachineRequest {
    name: String,
    /// Gigabits per second within and between nodes.
    #[serde(default)]
    link_gbps: [Option<f64>; 2],
    /// Whether the ranks of a node share one link to other nodes.
    #[serde(default)]
    shared: bool,
}

impl MachineRequest {
    fn machine(self) -> Result<Machine, Box<dyn Error>> {
        let found = named().into_iter().find(|known| known.name == self.name);
        let mut machine = found.ok_or(format!("no machine {}", self.name))?.machine;
        let network = &mut machine.network;
        network.shared |= self.shared;
        for (link, gbps) in
            [&mut network.within, &mut network.between].into_iter().zip(self.link_gbps)
        {
            link.bandwidth = gbps.map_or(link.bandwidth, |gbps| gbps * 1e9 / 8.0);
        }
        Ok(machine)
    }
}

fn pass_json(report: &Report) -> Value {
    json!({
        "seconds": report.seconds,
        "exposed": report.exposed(),
        "sent": report.sent(),
        "ranks": report.ranks,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let Question { problem, schedule, machine, memory } = serde_json::from_reader(stdin())?;
    problem.validate()?;
    let machine = machine.machine()?;
    let pass = |pass| predict(&problem, schedule, pass, &machine, memory);
    let [forward, backward] = [pass(Pass::Forward)?, pass(Pass::Backward)?];
    serde_json::to_writer(stdout(), &[pass_json(&forward), pass_json(&backward)])?;
    Ok(())
}
