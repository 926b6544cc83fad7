//! The simulator against calculations by hand.

mod common;

use std::time::{Duration, Instant};

use burst_attention::problem::{Dtype, Features, Pass, Problem, Travels};
use burst_attention::schedule::{
    Chunk, Due, Exchange, Family, Payload, Place, Schedule, Step, Transfer, check, ring,
    total_bytes,
};
use burst_attention::simulate::{
    Activity, Bytes, Class, Event, Kernels, Link, Machine, Method, Network, Report, Speed, named,
    predict, simulate,
};
use burst_attention::{Error, Layout, Window};
use burst_attention_kernels::cost::launch_gap;
use burst_attention_kernels::instances::Target;
use common::{passes_and_sides, problems};

/// One head whose vectors have 8 elements: 32 FLOPs for a pair, 32 bytes for a row of keys.
fn small(world_size: usize, n: usize) -> Problem {
    let problem = common::problem(world_size, n);
    let (batch, heads, kv_heads, dtype) = (1, 1, 1, Dtype::Bf16);
    let (head_dim, value_dim, window) = (8, 8, Window::FULL);
    Problem { batch, heads, kv_heads, head_dim, value_dim, dtype, window, ..problem }
}

/// Kernels of these rates and links of this bandwidth; nothing else takes time.
fn machine(rate: f64, bandwidth: f64) -> Machine {
    let link = Link { latency: 0.0, bandwidth };
    Machine {
        kernels: Kernels {
            forward: Speed::Rate(rate),
            backward: Speed::Rate(rate),
            launch: 0.0,
            one_backward: false,
            sum_bytes: 4,
            library: None,
        },
        network: Network { ranks_per_node: 1 << 20, within: link, between: link, shared: false },
    }
}

fn forward(problem: &Problem, machine: &Machine) -> Report {
    simulate(problem, &ring(problem, Pass::Forward, Travels::Keys), machine).unwrap()
}

fn seconds(layout: Layout, world_size: usize, machine: &Machine) -> f64 {
    let problem = Problem { layout, window: Window::CAUSAL, ..small(world_size, 4096) };
    forward(&problem, machine).seconds
}

/// There are two steps of 32·16² FLOPs, and 16 rows of keys travel once.
#[test]
fn a_message_is_hidden_up_to_the_length_of_a_step_and_what_is_longer_shows() {
    let problem = small(2, 16);
    let (step, bytes) = (32.0 * 256.0, 512.0);
    for (message, exposed) in
        [(step / 2.0, 0.0), (step, 0.0), (step + 3.0, 3.0), (3.0 * step, 2.0 * step)]
    {
        for latency in [0.0, 64.0] {
            let mut machine = machine(1.0, bytes / (message - latency));
            machine.network.within.latency = latency;
            let report = forward(&problem, &machine);
            assert!((report.seconds - (2.0 * step + exposed)).abs() < 1e-6, "{message}");
            for rank in &report.ranks {
                assert!((rank.exposed - exposed).abs() < 1e-6, "{message}: {rank:?}");
                assert_eq!((rank.compute, rank.late), (2.0 * step, 0.0));
                assert_eq!((rank.steps, rank.tiles, rank.flops), (2, 2, 2.0 * step));
                assert_eq!(rank.sent, Bytes { within: 512, between: 0 });
                // There is one chunk, so the other buffer is never used.
                assert_eq!(rank.buffer_bytes, 512);
            }
            assert!((report.exposed() - exposed).abs() < 1e-6);
            let idle = exposed / (2.0 * step + exposed);
            assert!((report.idle_share() - idle).abs() < 1e-9);
        }
    }
}

/// Queries travel forward, 256 bytes at a time, and their running states follow: 640 bytes with
/// sums of 4 bytes. Nothing hides the states, because the next tile needs them.
#[test]
fn states_are_awaited_where_they_are_folded() {
    let problem = small(3, 16);
    let step = 32.0 * 256.0;
    for (sum_bytes, state) in [(4, 640.0), (2, 384.0)] {
        let mut machine = machine(1.0, 1.0);
        machine.kernels.sum_bytes = sum_bytes;
        let schedules = ring(&problem, Pass::Forward, Travels::Queries);
        let report = simulate(&problem, &schedules, &machine).unwrap();
        assert_eq!(report.seconds, 3.0 * step + 2.0 * state);
        for rank in &report.ranks {
            assert_eq!((rank.exposed, rank.late), (2.0 * state, 0.0));
            assert_eq!(rank.sent.within as f64, 2.0 * (256.0 + state));
            // Queries and states have two buffers each, and a state that comes home has one.
            assert_eq!(rank.buffer_bytes as f64, 2.0 * 256.0 + 3.0 * state);
        }
    }
}

#[test]
fn buffers_are_as_large_as_the_largest_chunk_in_them() {
    for world_size in [3, 5, 8] {
        let report = forward(&small(world_size, 16), &machine(1.0, 1.0));
        assert!(report.ranks.iter().all(|rank| rank.buffer_bytes == 2 * 512));
    }
}

#[test]
fn launches_add_to_every_tile() {
    let mut machine = machine(f64::INFINITY, f64::INFINITY);
    machine.kernels.launch = 1.0;
    let problem = small(4, 16);
    let seconds = |pass, travels| {
        simulate(&problem, &ring(&problem, pass, travels), &machine).unwrap().seconds
    };
    assert_eq!(seconds(Pass::Forward, Travels::Keys), 4.0);
    // Each tile has two kernels, and the accumulator that comes home is merged.
    assert_eq!(seconds(Pass::Backward, Travels::Keys), 9.0);
    assert_eq!(seconds(Pass::Backward, Travels::Queries), 9.0);
}

/// The kernels of an H100, with cuDNN or without.
fn h100(library: Option<Target>) -> Machine {
    let mut machine = machine(1.0, f64::INFINITY);
    let speed = Speed::Blocks(Target::Sm90);
    let launch = launch_gap(Target::Sm90).unwrap();
    let (forward, backward) = (speed, speed);
    machine.kernels = Kernels { forward, backward, launch, library, ..machine.kernels };
    machine
}

/// One head of 64 columns, which cuDNN serves: 640 FLOPs backward for a pair.
fn wide(world_size: usize, n: usize) -> Problem {
    Problem { head_dim: 64, value_dim: 64, ..small(world_size, n) }
}

fn micros(machine: &Machine, problem: &Problem, pass: Pass, travels: Travels) -> f64 {
    1e6 * simulate(problem, &ring(problem, pass, travels), machine).unwrap().seconds
}

/// A tile is one block of one tile: 0.568 + 4 microseconds forward, 64 · 0.0227 + 7 backward. Bytes
/// take nanoseconds, and each launch 2.2 microseconds.
#[test]
fn sums_of_cudnn_add_launches_to_every_tile_it_computes() {
    let machine = h100(Some(Target::Sm90));
    let near = |problem: &Problem, pass, expected: f64| {
        let found = micros(&machine, problem, pass, Travels::Keys);
        assert!((found / expected - 1.0).abs() < 0.005, "{found}, not {expected}");
    };
    let (forward, backward) = (0.568 + 4.0 + 2.2, 64.0 * 0.0227 + 7.0 + 2.2);
    // cuDNN writes the results of a rank with one tile itself.
    near(&wide(1, 16), Pass::Forward, forward);
    near(&wide(4, 16), Pass::Forward, 4.0 * (forward + 2.2));
    // dq, dk and dv are added, and at last dk and dv that come home.
    near(&wide(4, 16), Pass::Backward, 4.0 * (backward + 3.0 * 2.2) + 2.0 * 2.2);
}

#[test]
fn own_kernels_compute_what_cudnn_refuses() {
    let same = |problem: &Problem, pass, travels| {
        let [with, without] =
            [Some(Target::Sm90), None].map(|it| micros(&h100(it), problem, pass, travels));
        assert_eq!(with, without, "{pass:?}");
        without
    };
    // Where queries travel they compute all tiles.
    same(&wide(4, 16), Pass::Backward, Travels::Queries);
    let fed = Features { soft_cap: Some(5.0), ..Features::default() };
    let capped = Problem { features: fed, ..wide(4, 16) };
    same(&capped, Pass::Backward, Travels::Keys);
    // Four tiles of one block, between which the state goes out and comes in three times. A block's
    // state has 128 rows of 64 columns.
    let expected = 4.0 * (1.162 + 3.4 + 2.2) + 6.0 * 2.9 / 2.0;
    let found = same(&small(4, 16), Pass::Forward, Travels::Keys);
    assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
}

/// Keys and their sums take 768 bytes a row, queries and theirs 520. A tile takes cuDNN a second, and
/// other kernels more by what they are slower on an H100.
#[test]
fn the_side_that_travels_where_cudnn_computes_takes_less_time() {
    let predicted = |problem: &Problem, travels, bandwidth| {
        let mut machine = machine(640.0 * 256.0, bandwidth);
        machine.kernels.library = Some(Target::Sm90);
        let method = Method::Travel(Family::Ring);
        predict(problem, method, Pass::Backward, travels, &machine, false).unwrap()
    };
    let chosen = |problem: &Problem, bandwidth| predicted(problem, None, bandwidth).travels;
    assert_eq!(chosen(&wide(4, 16), f64::INFINITY), Some(Travels::Keys));
    // A message of keys takes 12,288 seconds and one of queries 8,320.
    assert_eq!(chosen(&wide(4, 16), 1.0), Some(Travels::Queries));
    for bandwidth in [0.5, 1.0, 2.0, 4.0, 64.0] {
        for world_size in 1..=5 {
            let of = |side| predicted(&wide(world_size, 16), side, bandwidth).seconds;
            let least = of(Some(Travels::Keys)).min(of(Some(Travels::Queries)));
            assert_eq!(of(None), least, "{world_size} ranks, {bandwidth}");
        }
    }
    // Bytes decide where cuDNN computes nothing, whatever takes less time.
    assert_eq!(chosen(&small(4, 16), f64::INFINITY), Some(Travels::Queries));
    let striped = Problem { layout: Layout::Striped, window: Window::CAUSAL, ..wide(4, 16) };
    assert_eq!(chosen(&striped, f64::INFINITY), Some(Travels::Keys));
}

#[test]
fn causal_work_of_contiguous_shards_takes_2_minus_1_over_p_times_that_of_zigzag() {
    for world_size in [2, 4, 8, 32] {
        let machine = machine(1.0, f64::INFINITY);
        let times = [Layout::Contiguous, Layout::Zigzag].map(|l| seconds(l, world_size, &machine));
        let expected = 2.0 - 1.0 / world_size as f64;
        let ratio = times[0] / times[1];
        assert!((ratio / expected - 1.0).abs() < 1e-3, "{world_size}: {ratio}, not {expected}");
    }
}

/// Contiguous shards on two ranks: rank 0 has half a rectangle, rank 1 one and a half.
#[test]
fn ranks_without_work_are_idle() {
    let problem = Problem { window: Window::CAUSAL, ..small(2, 4096) };
    let report = forward(&problem, &machine(1.0, f64::INFINITY));
    assert!((report.idle_share() - 1.0 / 3.0).abs() < 1e-3);
    assert_eq!(report.exposed(), 0.0);
    assert!(report.ranks[0].end < 0.4 * report.seconds);
}

/// Schedules that have messages only. A message is a number of rows, a sender and a receiver. The
/// messages of one row of the table are one exchange.
fn messages(world_size: usize, table: &[&[(usize, usize, usize)]]) -> Vec<Schedule> {
    let schedule = |rank: usize| {
        let exchange = |(slot, row): (usize, &&[(usize, usize, usize)])| {
            let of = |mine: fn(&(usize, usize, usize)) -> [usize; 2], place| {
                let transfer = move |message: &(usize, usize, usize)| {
                    let [me, peer] = mine(message);
                    let chunk =
                        Chunk { payload: Payload::Keys, owner: message.1, rows: 0..message.0 };
                    (me == rank).then_some(Transfer { chunk, peer, place })
                };
                row.iter().filter_map(transfer).collect()
            };
            let sends = of(|&(_, from, to)| [from, to], Place::Home);
            let receives = of(|&(_, from, to)| [to, from], Place::Slot(slot));
            Exchange { sends, receives, due: Due::Begin(1) }
        };
        let exchanges = table.iter().enumerate().map(exchange).collect();
        let step = Step { index: 0, opens: vec![], exchanges, tiles: vec![], merges: vec![] };
        let (pass, travels) = (Pass::Forward, Travels::Keys);
        Schedule { rank, world_size, pass, travels, steps: vec![step] }
    };
    (0..world_size).map(schedule).collect()
}

/// The rank and the end of each send, in the order of the ends, on nodes of two ranks with 32 bytes
/// a second.
fn sends(table: &[&[(usize, usize, usize)]], shared: bool) -> Vec<(usize, f64)> {
    let mut machine = machine(1.0, 32.0);
    machine.network.shared = shared;
    machine.network.ranks_per_node = 2;
    machine.network.between.latency = 5.0;
    let report = simulate(&small(4, 16), &messages(4, table), &machine).unwrap();
    let sent = |event: &Event| match event.activity {
        Activity::Send { .. } => Some((event.rank, event.end)),
        _ => None,
    };
    report.timeline.iter().filter_map(sent).collect()
}

#[test]
fn messages_share_the_link_of_their_node_and_what_one_leaves_the_other_gets() {
    let both: &[_] = &[(4, 0, 2), (12, 1, 3)];
    assert_eq!(sends(&[both], false), [(0, 9.0), (1, 17.0)]);
    // Each has half of the bandwidth for 8 seconds. The last 8 rows then have all of it.
    assert_eq!(sends(&[both], true), [(0, 13.0), (1, 21.0)]);
    // Both directions move at once, and a node's own link does not slow the shared link.
    let back: &[_] = &[(4, 0, 2), (4, 2, 0), (4, 1, 0)];
    assert_eq!(sends(&[back], true), [(1, 4.0), (0, 9.0), (2, 9.0)]);
    // Two ranks send to one rank.
    let into: &[_] = &[(4, 0, 2), (4, 1, 2)];
    assert_eq!(sends(&[into], false), [(0, 13.0), (1, 13.0)]);
}

#[test]
fn exchanges_of_a_rank_take_turns_on_links_of_one_class() {
    let (first, second): (&[_], &[_]) = (&[(4, 0, 1)], &[(4, 0, 1)]);
    assert_eq!(sends(&[first, second], false), [(0, 4.0), (0, 8.0)]);
    let (slow, fast): (&[_], &[_]) = (&[(4, 0, 2)], &[(4, 0, 1)]);
    assert_eq!(sends(&[slow, fast], false), [(0, 4.0), (0, 9.0)]);
    // The second waits at rank 3 for a message that rank 0 neither sends nor receives.
    let (first, second): (&[_], &[_]) = (&[(4, 1, 3)], &[(4, 0, 3)]);
    assert_eq!(sends(&[first, second], false), [(1, 9.0), (0, 18.0)]);
}

#[test]
fn a_wait_is_late_until_the_peer_has_come_and_exposed_from_then_on() {
    // Rank 1 computes for 100 seconds before it comes to the exchange; then 4 rows travel.
    let mut schedules = messages(2, &[&[(4, 1, 0)]]);
    let tile = ring(&small(1, 16), Pass::Forward, Travels::Keys)[0].steps[0].tiles[0].clone();
    let mut after = schedules[1].steps[0].clone();
    schedules[1].steps[0].exchanges.clear();
    let at_home = |operand: &mut burst_attention::schedule::TileRows| operand.owner = 1;
    let mut own = tile;
    at_home(&mut own.queries);
    at_home(&mut own.keys);
    schedules[1].steps[0].tiles.push(own);
    after.index = 1;
    schedules[1].steps.push(after);
    let report = simulate(&small(2, 16), &schedules, &machine(81.92, 32.0)).unwrap();
    let [first, second] = report.ranks.as_slice() else { panic!("two ranks") };
    assert_eq!((first.late, first.exposed, first.end), (100.0, 4.0, 104.0));
    assert_eq!((second.late, second.exposed, second.compute), (0.0, 4.0, 100.0));
}

#[test]
fn every_second_and_byte_is_accounted_for() {
    let mut machine = machine(1e3, 77.0);
    machine.network.ranks_per_node = 3;
    machine.network.between = Link { latency: 0.5, bandwidth: 31.0 };
    for problem in problems([1, 2, 5, 8], &[2, 6]) {
        for (pass, travels) in passes_and_sides() {
            let schedules = ring(&problem, pass, travels);
            check(&problem, &schedules).unwrap();
            let report = simulate(&problem, &schedules, &machine).unwrap();
            let sent = report.sent();
            assert_eq!(sent.within + sent.between, total_bytes(&problem, &schedules));
            assert_eq!(sent.between > 0, problem.world_size > 3);
            let pairs: usize = schedules
                .iter()
                .flat_map(|s| &s.steps)
                .flat_map(|s| &s.tiles)
                .map(|tile| tile.band.pairs(&tile.queries.rows, &tile.keys.rows))
                .sum();
            let per_pair = if pass == Pass::Forward { 64 } else { 160 };
            assert_eq!(report.flops(), (pairs * 2 * 4 * per_pair) as f64);
            for (rank, found) in report.ranks.iter().enumerate() {
                let sum = found.compute + found.exposed + found.late;
                assert!((sum - found.end).abs() < 1e-9 * report.seconds.max(1.0), "{found:?}");
                let busy = |event: &&Event| {
                    event.rank == rank && !matches!(event.activity, Activity::Send { .. })
                };
                let shown: f64 = report.timeline.iter().filter(busy).map(|e| e.end - e.start).sum();
                assert!((shown - sum).abs() < 1e-9 * report.seconds.max(1.0), "{found:?}");
            }
        }
    }
}

#[test]
fn a_flat_ring_over_nodes_has_one_rank_of_each_send_all_its_hops_over_the_slow_link() {
    let mut machine = machine(1.0, 1.0);
    machine.network.ranks_per_node = 8;
    let report = forward(&small(32, 4), &machine);
    let hops: Vec<usize> = report.ranks.iter().map(|rank| rank.slow_hops).collect();
    assert!(hops.iter().enumerate().all(|(rank, n)| *n == if rank % 8 == 7 { 31 } else { 0 }));
    assert_eq!(report.slow_hops(), 31);
    let row_hops = 31 * 4 * 32;
    assert_eq!(report.sent(), Bytes { within: 28 * row_hops, between: 4 * row_hops });
    // In the zigzag layout, a window lets both ends of a shard travel: two messages, one hop.
    let window = Window { left: Some(5), right: Some(5) };
    let problem = Problem { layout: Layout::Zigzag, window, ..small(4, 16) };
    machine.network.ranks_per_node = 1;
    let schedules = ring(&problem, Pass::Forward, Travels::Keys);
    let report = simulate(&problem, &schedules, &machine).unwrap();
    let (mut messages, mut exchanges) = (0, 0);
    for (schedule, rank) in schedules.iter().zip(&report.ranks) {
        let sending = |exchange: &&Exchange| !exchange.sends.is_empty();
        let hops = schedule.steps.iter().flat_map(|step| &step.exchanges).filter(sending).count();
        assert_eq!(rank.slow_hops, hops);
        messages += schedule.sends().count();
        exchanges += hops;
    }
    assert!(messages > exchanges);
}

#[test]
fn schedules_that_do_not_meet_are_errors() {
    let problem = small(2, 16);
    let fails = |spoil: fn(&mut Vec<Schedule>)| {
        let mut schedules = ring(&problem, Pass::Forward, Travels::Keys);
        spoil(&mut schedules);
        match simulate(&problem, &schedules, &machine(1.0, 1.0)) {
            Err(Error::BrokenSchedule { what, .. }) => what,
            other => panic!("expected an error, got {other:?}"),
        }
    };
    let forgotten = fails(|schedules| {
        schedules[1].steps[0].exchanges[0].receives.clear();
    });
    assert!(
        forgotten.contains("Keys[0..16] of rank 0, sent by rank 0, is not received"),
        "{forgotten}"
    );
    let other = fails(|schedules| schedules[1].steps[0].exchanges[0].receives[0].chunk.rows = 0..8);
    assert!(other.contains("posts Keys[0..8] of rank 0 where rank 0 has Keys[0..16]"), "{other}");
    assert!(fails(|schedules| schedules.swap(0, 1)).contains("expected rank 0 of 2 here"));
}

#[test]
fn machines_that_cannot_be_are_errors() {
    let problem = small(2, 16);
    let schedules = ring(&problem, Pass::Forward, Travels::Keys);
    let error = |spoil: fn(&mut Machine)| {
        let mut machine = machine(1.0, 1.0);
        spoil(&mut machine);
        simulate(&problem, &schedules, &machine).unwrap_err().to_string()
    };
    let rate = error(|machine| machine.kernels.backward = Speed::Rate(0.0));
    assert_eq!(rate, "backward FLOP/s must be above 0, got 0");
    assert!(error(|machine| machine.network.within.bandwidth = f64::NAN).contains("got NaN"));
    assert!(error(|machine| machine.network.between.latency = -1.0).contains("at least 0, got -1"));
    assert!(error(|machine| machine.network.ranks_per_node = 0).contains("at least 1, got 0"));
    for known in named() {
        known.machine.validate().unwrap();
        let next_node = known.machine.network.ranks_per_node;
        assert_eq!(known.machine.network.class(0, next_node), Class::Between);
        assert!(known.ranks.is_none_or(|ranks| ranks <= known.machine.network.ranks_per_node));
    }
}

#[test]
fn a_report_without_a_timeline_is_otherwise_the_same() {
    let problem = Problem { window: Window::CAUSAL, ..small(5, 16) };
    let schedules = ring(&problem, Pass::Backward, Travels::Keys);
    let told = simulate(&problem, &schedules, &machine(1.0, 1.0)).unwrap();
    assert!(!told.timeline.is_empty());
    let method = Method::Travel(Family::Ring);
    let predicted = |tells| {
        predict(&problem, method, Pass::Backward, Some(Travels::Keys), &machine(1.0, 1.0), tells)
    };
    assert_eq!(predicted(true).unwrap(), told);
    assert_eq!(predicted(false).unwrap(), Report { timeline: vec![], ..told });
}

/// The pass has a million steps. Its time does not grow with the square of a rank's steps.
#[test]
#[ignore = "takes long: make test-full"]
fn a_thousand_ranks_take_seconds() {
    let problem = Problem { window: Window::CAUSAL, ..small(1024, 64) };
    let (method, machine) = (Method::Travel(Family::Ring), machine(1e6, 1e6));
    let begin = Instant::now();
    let report = predict(&problem, method, Pass::Forward, None, &machine, false).unwrap();
    assert_eq!(report.ranks.iter().map(|rank| rank.tiles).sum::<usize>(), 1024 * 1025 / 2);
    let taken = begin.elapsed();
    assert!(taken < Duration::from_secs(60), "{taken:?}");
}
