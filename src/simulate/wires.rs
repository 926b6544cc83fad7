//! Links that messages share: who moves how fast.
//!
//! A message takes two ports, out of one rank (or node) and into another. The messages on a port
//! have equal parts of its bandwidth, and each moves as fast as the slower of its ports lets it.

use super::machine::{Class, Machine};

/// Messages of which bytes are moving, and the ports that they take.
pub(super) struct Wires {
    bandwidth: Vec<f64>,
    on: Vec<Vec<usize>>,
    flows: Vec<Option<Flow>>,
    changed: Vec<usize>,
    versions: u64,
}

#[derive(Debug)]
struct Flow {
    ports: [usize; 2],
    left: f64,
    rate: f64,
    since: f64,
    version: u64,
}

/// When a message will be through, unless its version changes before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forecast {
    pub message: usize,
    pub version: u64,
    pub time: f64,
}

impl Wires {
    /// Two ports for each rank within its node; two for each rank, or node, to the others.
    pub fn new(machine: &Machine, world_size: usize) -> Wires {
        let network = &machine.network;
        let mut bandwidth = vec![network.within.bandwidth; 2 * world_size];
        bandwidth.resize(4 * world_size, network.between.bandwidth);
        let on = vec![Vec::new(); bandwidth.len()];
        Wires { bandwidth, on, flows: vec![], changed: vec![], versions: 0 }
    }

    /// The ports of a message.
    pub fn ports(machine: &Machine, world_size: usize, from: usize, to: usize) -> [usize; 2] {
        let network = &machine.network;
        match network.class(from, to) {
            Class::Within => [2 * from, 2 * to + 1],
            Class::Between => {
                let per = if network.shared { network.ranks_per_node } else { 1 };
                let first = 2 * world_size;
                [first + 2 * (from / per), first + 2 * (to / per) + 1]
            }
        }
    }

    /// The bytes of a message begin to move.
    pub fn join(&mut self, message: usize, ports: [usize; 2], bytes: u64, now: f64) {
        if self.flows.len() <= message {
            self.flows.resize_with(message + 1, || None);
        }
        let flow = Flow { ports, left: bytes as f64, rate: 0.0, since: now, version: 0 };
        self.flows[message] = Some(flow);
        for port in ports {
            self.on[port].push(message);
        }
        self.changed.extend(ports);
    }

    /// Is this still how fast the message moves?
    pub fn is_current(&self, message: usize, version: u64) -> bool {
        self.flows.get(message).and_then(Option::as_ref).is_some_and(|flow| flow.version == version)
    }

    /// A message is through.
    pub fn leave(&mut self, message: usize) {
        let Some(flow) = self.flows[message].take() else { return };
        for port in flow.ports {
            let on = &mut self.on[port];
            if let Some(at) = on.iter().position(|other| *other == message) {
                on.swap_remove(at);
            }
        }
        self.changed.extend(flow.ports);
    }

    /// Divides the bandwidth of the ports where messages came or went, and forecasts those that
    /// move faster or slower for it.
    pub fn settle(&mut self, now: f64, forecasts: &mut Vec<Forecast>) {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable();
        changed.dedup();
        for message in changed.drain(..).flat_map(|port| &self.on[port]) {
            let Some(flow) = self.flows[*message].as_mut() else { continue };
            let share = |port: usize| self.bandwidth[port] / self.on[port].len() as f64;
            let rate = share(flow.ports[0]).min(share(flow.ports[1]));
            if rate == flow.rate {
                continue;
            }
            // An infinite rate times no time would not be a number.
            if now > flow.since {
                flow.left = (flow.left - flow.rate * (now - flow.since)).max(0.0);
            }
            self.versions += 1;
            (flow.rate, flow.since, flow.version) = (rate, now, self.versions);
            let time = now + flow.left / rate;
            forecasts.push(Forecast { message: *message, version: flow.version, time });
        }
        self.changed = changed;
    }
}
