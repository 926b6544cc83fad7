//! The engine over real transports: right results, which do not depend on how chunks travel.

mod common;

use std::sync::Arc;

use burst_attention::host::isa::Isa;
use burst_attention::host::ring::{Executor, run};
use burst_attention::host::transport::{HostTransport, Mailboxes};
use burst_attention::problem::{Dtype, Features, Pass, Problem, Travels};
use burst_attention::schedule::{Family, Schedule, Step, ring, total_bytes};
use burst_attention::{Error, Layout, Window};
use common::adversary::{Adversary, Network};
use common::data::{Array, Shard, relative_error};
use common::needs::{families, made};
use common::runs::{assert_right, assert_same_bits, run_both, run_family_both, walk_all};
use common::{SIDES, problem, problems, reference, windowed};

#[test]
fn every_layout_and_side_agrees_with_the_dense_reference() {
    for problem in problems([1, 2, 3, 5, 8], &[1, 2, 7, 18]) {
        for travels in SIDES {
            let shards = Shard::random(&problem, 1);
            run_both(&problem, travels, &shards);
            assert_right(&problem, &shards, &format!("{travels:?} travel"));
        }
    }
}

#[test]
fn a_soft_cap_agrees_with_the_dense_reference() {
    let caps = [0.3, 1.0, 5.0, 40.0].into_iter().cycle();
    for (problem, cap) in problems([1, 3, 4], &[6, 18]).into_iter().zip(caps) {
        let features = Features { soft_cap: Some(cap), ..Features::default() };
        let problem = Problem { features, ..problem };
        for travels in SIDES {
            let shards = Shard::random(&problem, 6);
            run_both(&problem, travels, &shards);
            assert_right(&problem, &shards, &format!("{travels:?} travel, cap {cap}"));
        }
    }
}

/// Windows that end at home, at neighbours and far away, on one side and on both.
fn windows() -> [Window; 6] {
    let window = |left, right| Window { left, right };
    [
        window(Some(3), Some(0)),
        window(Some(2), Some(1)),
        window(None, Some(4)),
        window(Some(0), None),
        window(Some(7), Some(9)),
        window(Some(40), Some(0)),
    ]
}

#[test]
fn windows_and_more_keys_or_queries_agree_with_the_dense_reference() {
    let mut problems = windowed([1, 2, 3, 4], &[(6, 6), (14, 14)], &windows());
    let unlike = [Window::FULL, Window::CAUSAL, windows()[1]];
    problems.extend(windowed([1, 2, 4], &[(4, 6), (8, 2), (2, 10)], &unlike));
    let features = Features { segments: true, slopes: true, ..Features::default() };
    for (seed, problem) in problems.into_iter().enumerate() {
        let problem = if seed % 4 == 0 { Problem { features, ..problem } } else { problem };
        for travels in SIDES {
            let shards = Shard::random(&problem, seed as u64);
            run_both(&problem, travels, &shards);
            assert_right(&problem, &shards, &format!("{travels:?} travel"));
        }
    }
}

/// Every feature alone, all pairs of features, and all features together.
fn features() -> Vec<Features> {
    let none = Features::default();
    let alone = [
        Features { soft_cap: Some(0.8), ..none },
        Features { segments: true, ..none },
        Features { slopes: true, ..none },
        Features { dropout: Some(0.3), ..none },
    ];
    let both = |a: Features, b: Features| Features {
        soft_cap: a.soft_cap.or(b.soft_cap),
        segments: a.segments || b.segments,
        slopes: a.slopes || b.slopes,
        dropout: a.dropout.or(b.dropout),
        ..a
    };
    let pairs = (0..4).flat_map(|i| (i..4).map(move |j| both(alone[i], alone[j])));
    let all = alone.into_iter().reduce(both);
    pairs.chain(all).collect()
}

#[test]
fn every_feature_and_pair_of_features_agrees_with_the_dense_reference() {
    for (seed, features) in features().into_iter().enumerate() {
        for problem in problems([1, 3, 4], &[6, 14]) {
            let problem = Problem { features, value_dim: 24, ..problem };
            for travels in SIDES {
                let shards = Shard::random(&problem, seed as u64);
                run_both(&problem, travels, &shards);
                assert_right(&problem, &shards, &format!("{travels:?} travel"));
            }
        }
    }
}

#[test]
fn features_are_right_on_blocks_of_many_rows() {
    for (seed, features) in features().into_iter().enumerate() {
        let layout = Layout::ALL[seed % 3];
        let problem = Problem { features, layout, batch: 1, heads: 2, ..problem(2, 330) };
        let shards = Shard::random(&problem, seed as u64);
        run_both(&problem, Travels::Keys, &shards);
        assert_right(&problem, &shards, "large");
    }
}

/// Fills the rows whose segment is negative with NaN.
fn spoil_padding(array: &mut Array, segments: &Array) {
    let [batch, len, heads, dim] = array.shape;
    for row in (0..batch * len).filter(|row| (segments.word(*row) as i32) < 0) {
        (0..heads * dim).for_each(|i| array.set(row * heads * dim + i, f32::NAN));
    }
}

#[test]
fn padding_may_hold_anything() {
    let features = Features { segments: true, ..Features::default() };
    for problem in problems([1, 2, 3], &[14, 80]) {
        let problem = Problem { features, ..problem };
        for travels in SIDES {
            let mut shards = Shard::random(&problem, 9);
            for Shard { q, k, v, dout, extras, .. } in &mut shards {
                let (own, other) = (extras.q_segments.clone(), extras.k_segments.clone());
                let (Some(own), Some(other)) = (own, other) else { panic!("there are segments") };
                [q, dout].into_iter().for_each(|array| spoil_padding(array, &own));
                [k, v].into_iter().for_each(|array| spoil_padding(array, &other));
            }
            run_both(&problem, travels, &shards);
            assert_right(&problem, &shards, &format!("{travels:?} travel"));
        }
    }
}

#[test]
fn a_hostile_network_changes_no_bit() {
    let executor = Executor::new(Isa::best(), 2).expect("threads");
    let features = features().into_iter().cycle();
    let problems = problems([1, 2, 3, 5, 8], &[1, 2, 7, 18]).into_iter().zip(features);
    for (seed, (problem, features)) in problems.enumerate() {
        // Every second problem has no features.
        let problem = if seed % 2 == 0 { problem } else { Problem { features, ..problem } };
        let window = windows()[seed % 6];
        let problem = if seed % 3 == 0 { Problem { window, ..problem } } else { problem };
        for travels in SIDES {
            let kind = Shard::random(&problem, 2);
            let mut sent = run_both(&problem, travels, &kind).into_iter();
            let hostile = Shard::random(&problem, 2);
            for pass in [Pass::Forward, Pass::Backward] {
                let schedules = ring(&problem, pass, travels);
                let network = Arc::new(Network::default());
                let transport = |rank| Adversary::new(rank, network.clone(), seed as u64);
                let bytes = walk_all((&problem, &schedules), &executor, &hostile, transport);
                assert_eq!(bytes.ok(), sent.next(), "{pass:?} {travels:?} {problem:?}");
            }
            assert_same_bits(&kind, &hostile, &format!("{travels:?} {problem:?}"));
        }
    }
}

/// Families with the number of ranks that run their schedules.
fn sized_families() -> Vec<(usize, Family)> {
    let with_inner = [(8, 4), (8, 2), (6, 3)];
    let sizes = |family: Family| match family.inner() {
        Some(_) => with_inner.map(|(world, inner)| (world, family.with_inner(inner))).to_vec(),
        None => [2, 3, 4, 6, 8].map(|world_size| (world_size, family)).to_vec(),
    };
    let all = Family::ALL.into_iter().flat_map(sizes);
    all.filter(|(world_size, family)| family.validate(*world_size).is_ok()).collect()
}

/// How many chunks of each side the schedules of a family may hold, beyond the shard.
fn most_chunks(family: Family, world_size: usize) -> usize {
    let rings = family.inner().map(|inner| [inner, world_size / inner]);
    rings.map_or(2, |lengths| lengths.map(|length| (length - 1).min(2)).into_iter().sum())
}

#[test]
fn every_family_agrees_with_the_dense_reference_over_a_hostile_network() {
    let executor = Executor::new(Isa::best(), 2).expect("threads");
    let segments = Features { segments: true, ..Features::default() };
    let window = |left, right| Window { left, right };
    let masks = [
        (Window::FULL, Features::NONE),
        (Window::CAUSAL, Features::NONE),
        (window(Some(27), Some(0)), Features::NONE),
        (window(Some(7), Some(3)), segments),
        (Window::CAUSAL, segments),
    ];
    for (seed, (world_size, family)) in sized_families().into_iter().enumerate() {
        for (layout, (window, features)) in
            Layout::ALL.into_iter().flat_map(|l| masks.map(|m| (l, m)))
        {
            let problem = Problem { layout, window, features, ..problem(world_size, 6) };
            for travels in SIDES {
                let what = format!("{family}, {travels:?} travel");
                let shards = Shard::random(&problem, seed as u64);
                let mut sent = run_family_both((&problem, family, travels), &shards).into_iter();
                assert_right(&problem, &shards, &what);
                let hostile = Shard::random(&problem, seed as u64);
                for pass in [Pass::Forward, Pass::Backward] {
                    let schedules = made(&problem, family, pass, travels);
                    let network = Arc::new(Network::default());
                    let transport = |rank| Adversary::new(rank, network.clone(), seed as u64);
                    let bytes = walk_all((&problem, &schedules), &executor, &hostile, transport);
                    assert_eq!(bytes.as_ref().ok(), Some(&total_bytes(&problem, &schedules)));
                    assert_eq!(bytes.ok(), sent.next(), "{what}: {pass:?} {problem:?}");
                    if window.left.is_none() {
                        let (held, most) = (network.held(), most_chunks(family, world_size));
                        assert!(held <= most, "{what}: {held} chunks, not {most}: {problem:?}");
                    }
                }
                assert_same_bits(&shards, &hostile, &format!("{what}: {problem:?}"));
            }
        }
    }
}

#[test]
fn every_family_agrees_with_the_dense_reference_with_more_keys_or_queries() {
    let unlike = [(4, 6), (8, 2)];
    for (seed, problem) in
        windowed([4, 6], &unlike, &[Window::CAUSAL, windows()[1]]).into_iter().enumerate()
    {
        for family in families(problem.world_size) {
            for travels in SIDES {
                let shards = Shard::random(&problem, seed as u64);
                run_family_both((&problem, family, travels), &shards);
                assert_right(&problem, &shards, &format!("{family}, {travels:?} travel"));
            }
        }
    }
}

#[test]
fn bytes_are_counted_where_they_are_sent() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for layout in Layout::ALL {
            for travels in SIDES {
                let problem = Problem { dtype, layout, ..problem(4, 6) };
                let counted = run_both(&problem, travels, &Shard::random(&problem, 3));
                let formula = [Pass::Forward, Pass::Backward]
                    .map(|pass| total_bytes(&problem, &ring(&problem, pass, travels)));
                assert_eq!(counted, formula, "{dtype} {layout} {travels:?}");
            }
        }
    }
}

#[test]
fn twenty_runs_give_the_same_bits() {
    for travels in SIDES {
        let problem = Problem { layout: Layout::Zigzag, ..problem(8, 18) };
        let first = Shard::random(&problem, 4);
        run_both(&problem, travels, &first);
        for _ in 1..20 {
            let again = Shard::random(&problem, 4);
            run_both(&problem, travels, &again);
            assert_same_bits(&first, &again, "repeated");
        }
    }
}

#[test]
fn the_error_does_not_grow_with_the_ring() {
    // The same global problem on 1 and 8 ranks, with enough keys that accumulation matters.
    let error = |world_size: usize| {
        let base = problem(world_size, 512 / world_size);
        let problem = Problem { heads: 2, kv_heads: 2, batch: 1, ..base };
        let errors = (0..4).map(|seed| {
            let shards = Shard::random(&problem, seed);
            run_both(&problem, Travels::Keys, &shards);
            let truth = reference::dense(&problem, &shards);
            let gradients = (2..5).map(|output| {
                let got: Vec<f64> =
                    shards.iter().flat_map(|shard| shard.outputs()[output].1.values()).collect();
                relative_error(&got, &truth[output].concat())
            });
            gradients.sum::<f64>()
        });
        errors.sum::<f64>()
    };
    let (alone, ring) = (error(1), error(8));
    assert!(ring <= 1.1 * alone, "world 8: {ring:.2e}, world 1: {alone:.2e}");
}

type Spoiler = fn(&mut Vec<Schedule>);

/// A spoiled set of schedules must stop with an error or give a wrong result.
#[test]
fn spoiled_schedules_do_not_give_right_results() {
    let spoilers: [(&str, Spoiler); 3] = [
        ("tile dropped", |schedules| schedules[1].steps[1].tiles.clear()),
        ("mask shifted", |schedules| {
            let tile = &mut schedules[2].steps[0].tiles[0];
            tile.band.upper -= 1;
        }),
        ("source swapped", |schedules| {
            let (a, b) = (schedules[1].steps[1].tiles.clone(), schedules[2].steps[1].tiles.clone());
            if a == b {
                schedules[1].steps[1].tiles[0].keys.rows.end -= 1;
            } else {
                schedules[1].steps[1].tiles[0].keys.rows.start += 1;
            }
        }),
    ];
    let executor = Executor::new(Isa::best(), 2).expect("threads");
    let problem = Problem { layout: Layout::Striped, ..problem(4, 6) };
    for (name, spoil) in spoilers {
        let shards = Shard::random(&problem, 5);
        run_both(&problem, Travels::Keys, &shards);
        let mut schedules = ring(&problem, Pass::Backward, Travels::Keys);
        spoil(&mut schedules);
        let mailboxes = Arc::new(Mailboxes::default());
        let transport = |rank| HostTransport::new(rank, 4, mailboxes.clone());
        let ran = walk_all((&problem, &schedules), &executor, &shards, transport);
        let truth = reference::dense(&problem, &shards);
        let wrong = (2..5).any(|output| {
            let got: Vec<f64> =
                shards.iter().flat_map(|shard| shard.outputs()[output].1.values()).collect();
            // NaN compares false, so it counts as wrong.
            let fine = relative_error(&got, &truth[output].concat()) <= 1.5e-6;
            !fine
        });
        assert!(ran.is_err() || wrong, "{name} went unnoticed");
    }
}

#[test]
fn a_swapped_peer_is_noticed() {
    let executor = Executor::new(Isa::best(), 2).expect("threads");
    let problem = Problem { layout: Layout::Zigzag, ..problem(3, 4) };
    let mut schedules = ring(&problem, Pass::Forward, Travels::Keys);
    let swap = |step: &mut Step| {
        step.exchanges.iter_mut().flat_map(|e| &mut e.sends).for_each(|send| send.peer = 2);
    };
    schedules[1].steps.iter_mut().for_each(swap);
    let shards = Shard::random(&problem, 6);
    let mailboxes = Arc::new(Mailboxes::default());
    // Like the executor's watchdog, this thread releases a rank that waits in vain.
    let watchdog = mailboxes.clone();
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let guard = std::thread::spawn(move || {
        if end.recv_timeout(std::time::Duration::from_millis(500)).is_err() {
            watchdog.break_ring(0, "no message came".into());
        }
    });
    let transport = |rank| HostTransport::new(rank, 3, mailboxes.clone());
    let ran = walk_all((&problem, &schedules), &executor, &shards, transport);
    // The thread no longer listens if it has broken the ring.
    let _ = ended.send(());
    guard.join().expect("no panic");
    let truth = reference::dense(&problem, &shards);
    let got: Vec<f64> = shards.iter().flat_map(|shard| shard.o.values()).collect();
    let right = relative_error(&got, &truth[0].concat()) <= 1e-6;
    assert!(ran.is_err() || !right);
}

#[test]
fn an_array_of_the_wrong_shape_is_refused() {
    let problem = problem(2, 4);
    let shards = Shard::random(&Problem { head_dim: 24, ..problem.clone() }, 7);
    let buffers = shards.iter().map(|shard| shard.views(Pass::Forward)).collect();
    let error = run(&problem, Family::Ring, None, buffers).expect_err("head_dim 24 is not 16");
    assert_eq!(error.to_string(), "query must be [2, 4, 4, 16], got [2, 4, 4, 24]");
    assert!(matches!(error, Error::InvalidProblem { name: "query", .. }));
}
