//! Links that messages share: how fast each message moves.
//!
//! A message takes two ports, out of one rank (or node) and into another. The messages on a port
//! have equal parts of its bandwidth, and each message moves as fast as its slower port lets it.

use super::machine::{Class, Network};

/// Ports, and the messages whose bytes move through them.
pub(super) struct Wires<'a> {
    network: &'a Network,
    bandwidth: Vec<f64>,
    /// `[port]`: the messages on it.
    on: Vec<Vec<usize>>,
    /// `[message]`
    flows: Vec<Option<Flow>>,
    /// Ports on which messages began or ended.
    changed: Vec<usize>,
    versions: u64,
}

struct Flow {
    ports: [usize; 2],
    left: f64,
    rate: f64,
    since: f64,
    version: u64,
}

/// When a message will be through, unless its version changes before.
pub(super) struct Forecast {
    pub message: usize,
    pub version: u64,
    pub time: f64,
}

impl<'a> Wires<'a> {
    /// Two ports of each rank within its node, and two ports of each rank, or node, to other nodes.
    pub fn new(network: &'a Network, world_size: usize) -> Wires<'a> {
        let mut bandwidth = vec![network.within.bandwidth; 2 * world_size];
        bandwidth.resize(4 * world_size, network.between.bandwidth);
        let on = vec![Vec::new(); bandwidth.len()];
        Wires { network, bandwidth, on, flows: vec![], changed: vec![], versions: 0 }
    }

    /// Starts to move the bytes of a message between two ranks.
    pub fn join(&mut self, message: usize, [from, to]: [usize; 2], bytes: u64, now: f64) {
        if self.flows.len() <= message {
            self.flows.resize_with(message + 1, || None);
        }
        let ports = match self.network.class(from, to) {
            Class::Within => [2 * from, 2 * to + 1],
            Class::Between => {
                let per = if self.network.shared { self.network.ranks_per_node } else { 1 };
                let first = self.bandwidth.len() / 2;
                [first + 2 * (from / per), first + 2 * (to / per) + 1]
            }
        };
        let flow = Flow { ports, left: bytes as f64, rate: 0.0, since: now, version: 0 };
        self.flows[message] = Some(flow);
        for port in ports {
            self.on[port].push(message);
        }
        self.changed.extend(ports);
    }

    /// Whether the message still moves as fast as in this version.
    pub fn is_current(&self, message: usize, version: u64) -> bool {
        self.flows.get(message).and_then(Option::as_ref).is_some_and(|flow| flow.version == version)
    }

    /// Takes a message off its ports.
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

    /// Divides anew the bandwidth of ports on which messages began or ended, and forecasts the
    /// messages whose rate that changes.
    pub fn settle(&mut self, now: f64) -> Vec<Forecast> {
        let mut forecasts = Vec::new();
        self.changed.sort_unstable();
        self.changed.dedup();
        for message in self.changed.drain(..).flat_map(|port| &self.on[port]) {
            let Some(flow) = self.flows[*message].as_mut() else { continue };
            let share = |port: usize| self.bandwidth[port] / self.on[port].len() as f64;
            let rate = share(flow.ports[0]).min(share(flow.ports[1]));
            if rate == flow.rate {
                continue;
            }
            // An infinite rate times no time would be NaN.
            if now > flow.since {
                flow.left = (flow.left - flow.rate * (now - flow.since)).max(0.0);
            }
            self.versions += 1;
            (flow.rate, flow.since, flow.version) = (rate, now, self.versions);
            let time = now + flow.left / rate;
            forecasts.push(Forecast { message: *message, version: flow.version, time });
        }
        forecasts
    }
}
