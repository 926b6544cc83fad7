//! A pass in several calls, with messages carried by hand between them: the same bits as in one.

mod common;

use std::ptr::NonNull;

use burst_attention::host::kernel::RankBuffers;
use burst_attention::host::relay::{Hop, Memory, Relay, relay, run};
use burst_attention::problem::{Dtype, Features, Pass, Problem, Travels};
use burst_attention::schedule::{Family, total_bytes};
use burst_attention::{Layout, Window};
use common::data::Shard;
use common::needs::{families, made};
use common::runs::{assert_same_bits, backward_buffers, forward_buffers, run_family_both};
use common::{SIDES, problem, ways, windowed};

/// Memory as a program has it, full of what is no number.
fn memory(bytes: usize) -> Vec<u64> {
    vec![u64::MAX; bytes.div_ceil(8).max(1)]
}

fn first(memory: &mut [u64]) -> NonNull<u8> {
    NonNull::from(memory).cast()
}

/// What a collective permute does: zeros where nobody sends.
fn carried(hop: &Hop, parcels: &[Vec<u64>]) -> Vec<Vec<u64>> {
    let mut arrived = vec![vec![0; parcels[0].len()]; parcels.len()];
    for &(from, to) in &hop.pairs {
        arrived[to].clone_from(&parcels[from]);
    }
    arrived
}

/// All ranks' calls, and what is moved between them; returns the bytes that they sent.
fn walk(problem: &Problem, relay: &Relay, shards: &[Shard], pass: Pass) -> u64 {
    let Relay { plan, arena, .. } = relay;
    let mut arenas = vec![memory(problem.batch * arena.bytes); shards.len()];
    let mut parcels: Vec<Vec<Vec<u64>>> = vec![vec![]; plan.hops.len()];
    let mut sent = 0;
    for stretch in 0..plan.stretches() {
        for (index, hop) in plan.hops.iter().enumerate().filter(|(_, hop)| hop.from == stretch) {
            parcels[index] = vec![memory(problem.batch * hop.bytes); shards.len()];
        }
        for (rank, shard) in shards.iter().enumerate() {
            let mut at = |is_here: fn(&Hop, usize) -> bool| {
                let here =
                    plan.hops.iter().zip(&mut parcels).filter(|(hop, _)| is_here(hop, stretch));
                here.map(|(_, parcels)| first(&mut parcels[rank])).collect()
            };
            let memory = Memory {
                buffers: match pass {
                    Pass::Forward => RankBuffers::Forward(Box::new(forward_buffers(shard))),
                    Pass::Backward => RankBuffers::Backward(Box::new(backward_buffers(shard))),
                },
                arrivals: at(|hop, stretch| hop.to == stretch),
                departures: at(|hop, stretch| hop.from == stretch),
                arena: first(&mut arenas[rank]),
            };
            sent += run(relay, problem, rank, stretch, memory).expect("the stretch runs");
        }
        for (hop, parcels) in plan.hops.iter().zip(&mut parcels) {
            if hop.from == stretch {
                *parcels = carried(hop, parcels);
            }
        }
    }
    sent
}

fn assert_same(problem: &Problem, family: Family, travels: Travels) {
    let in_one = Shard::random(problem, 5);
    let in_many = in_one.clone();
    let expected = run_family_both((problem, family, travels), &in_one);
    let sent = [Pass::Forward, Pass::Backward].map(|pass| {
        let relay = relay(problem, family, pass, Some(travels)).expect("a plan");
        walk(problem, &relay, &in_many, pass)
    });
    let what = format!("{family}, {travels:?} travel, {problem:?}");
    assert_same_bits(&in_many, &in_one, &what);
    assert_eq!(sent, expected, "{what}");
}

#[test]
#[ignore = "takes long: make test-full"]
fn every_family_computes_the_same_bits() {
    let features =
        Features { segments: true, slopes: true, dropout: Some(0.2), ..Features::default() };
    let windows = [Window::FULL, Window::CAUSAL, Window { left: Some(9), right: Some(2) }];
    let all = windowed([1, 2, 3, 6], &[(6, 6), (4, 8)], &windows);
    for (number, problem) in all.into_iter().enumerate() {
        let dtype = [Dtype::F32, Dtype::Bf16, Dtype::F16][number % 3];
        let features = if number % 2 == 0 { features } else { Features::default() };
        let problem = Problem { dtype, features, value_dim: 8, ..problem };
        for family in families(problem.world_size).into_iter().chain([Family::Ring]) {
            SIDES.iter().for_each(|travels| assert_same(&problem, family, *travels));
        }
    }
}

#[test]
fn shards_of_many_rows_too() {
    let problem = Problem { dtype: Dtype::Bf16, layout: Layout::Zigzag, ..problem(4, 140) };
    for family in [Family::Ring, Family::DoubleRing { inner: 2 }] {
        SIDES.iter().for_each(|travels| assert_same(&problem, family, *travels));
    }
}

#[test]
fn a_rank_sends_and_gets_one_parcel_of_a_hop_at_most() {
    for problem in windowed([4, 6], &[(4, 4)], &[Window::FULL, Window::CAUSAL]) {
        for family in families(problem.world_size) {
            for (pass, travels) in ways() {
                let relay = relay(&problem, family, pass, Some(travels)).expect("a plan");
                for Hop { from, to, bytes, pairs } in &relay.plan.hops {
                    let mut sides = [pairs.clone(), pairs.iter().map(|p| (p.1, p.0)).collect()];
                    for side in &mut sides {
                        side.sort_unstable();
                        side.dedup_by_key(|pair| pair.0);
                        assert_eq!(side.len(), pairs.len(), "{family}, {pairs:?}");
                    }
                    assert!(from < to && *to < relay.plan.stretches() && *bytes > 0);
                }
            }
        }
    }
}

/// Parcels are as large as the largest of their hop, so unlike ones cost more than their bytes.
#[test]
fn parcels_of_a_full_ring_hold_nothing_else() {
    let problem = Problem { window: Window::FULL, batch: 1, ..problem(8, 16) };
    for (pass, travels) in ways() {
        let relay = relay(&problem, Family::Ring, pass, Some(travels)).expect("a plan");
        let moved: usize = relay.plan.hops.iter().map(|hop| hop.bytes * hop.pairs.len()).sum();
        let counted = total_bytes(&problem, &made(&problem, Family::Ring, pass, travels));
        assert_eq!(moved as u64, counted as u64, "{pass:?}, {travels:?} travel");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let problem = problem(2, 4);
    let relay = relay(&problem, Family::Ring, Pass::Forward, None).expect("a plan");
    let shards = Shard::random(&problem, 1);
    let mut arena = memory(problem.batch * relay.arena.bytes);
    let mut parcel = memory(problem.batch * relay.plan.hops[0].bytes);
    let mut call = |rank, stretch, given: usize| {
        let memory = Memory {
            buffers: RankBuffers::Forward(Box::new(forward_buffers(&shards[0]))),
            arena: first(&mut arena),
            arrivals: vec![],
            departures: vec![first(&mut parcel); given],
        };
        run(&relay, &problem, rank, stretch, memory).expect_err("refused").to_string()
    };
    let rank = call(2, 0, 1);
    assert!(rank.contains("rank must be below 2, got 2"), "{rank}");
    let stretch = call(0, 9, 1);
    assert!(stretch.contains("stretch must be below"), "{stretch}");
    let parcels = "parcels that leave must be one for each hop of the stretch, got";
    for (given, words) in [(0, "fewer"), (2, "1 more")] {
        let error = call(0, 0, given);
        assert!(error.contains(&format!("{parcels} {words}")), "{error}");
    }
}
