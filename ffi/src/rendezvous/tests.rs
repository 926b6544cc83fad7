use burst_attention::{Dtype, Features, Layout, Window};

use super::*;

const TIMEOUT: Duration = Duration::from_secs(20);
const KEY: Key = Key { site: 1, run: 7, ring: 0 };

fn call(world_size: usize) -> Call {
    let work = Work {
        problem: Problem {
            batch: 1,
            q_len: 4,
            kv_len: 4,
            heads: 2,
            kv_heads: 1,
            head_dim: 8,
            value_dim: 8,
            dtype: Dtype::F32,
            window: Window::CAUSAL,
            softmax_scale: 0.5,
            features: Features::default(),
            layout: Layout::Contiguous,
            world_size,
        },
        pass: Pass::Forward,
        travels: None,
        family: Family::Ring,
    };
    Call { work: Some(work), world_size, axis: "context".into() }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Lets `rank` arrive with `member`, on the device of the same number.
fn arrive<M>(meeting: &mut Rendezvous<M>, key: Key, rank: i32, member: M) -> Outcome<M> {
    meeting.arrive(key, RankDevice { rank, device: rank }, &call(3), Ok(member), seconds(0))
}

fn failure<M: fmt::Debug>(outcome: Outcome<M>) -> (String, Vec<M>) {
    match outcome {
        Outcome::Failed(Failure { error, members }) => (error.to_string(), members),
        other => panic!("expected a failure, got {other:?}"),
    }
}

#[test]
fn ranks_meet_in_any_order() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut meeting = Rendezvous::default();
        assert_eq!(arrive(&mut meeting, KEY, order[0], order[0]), Outcome::Waiting);
        assert_eq!(arrive(&mut meeting, KEY, order[1], order[1]), Outcome::Waiting);
        let complete = arrive(&mut meeting, KEY, order[2], order[2]);
        assert_eq!(complete, Outcome::Complete(vec![0, 1, 2]));
        assert!(meeting.queues.is_empty());
    }
}

#[test]
fn a_ring_of_one_is_complete_at_once() {
    let mut meeting = Rendezvous::default();
    let arriving = RankDevice { rank: 0, device: 5 };
    let outcome = meeting.arrive(KEY, arriving, &call(1), Ok('m'), seconds(0));
    assert_eq!(outcome, Outcome::Complete(vec!['m']));
}

#[test]
fn sites_runs_and_rings_do_not_mix() {
    let mut meeting = Rendezvous::default();
    let keys = [KEY, Key { site: 2, ..KEY }, Key { run: 8, ..KEY }, Key { ring: 1, ..KEY }];
    for rank in 0..2 {
        for (number, key) in keys.into_iter().enumerate() {
            assert_eq!(arrive(&mut meeting, key, rank, number), Outcome::Waiting);
        }
    }
    for (number, key) in keys.into_iter().enumerate() {
        let complete = arrive(&mut meeting, key, 2, number);
        assert_eq!(complete, Outcome::Complete(vec![number; 3]));
    }
}

#[test]
fn a_device_that_runs_ahead_waits_in_the_next_session() {
    let mut meeting = Rendezvous::default();
    for session in 0..3 {
        assert_eq!(arrive(&mut meeting, KEY, 0, session), Outcome::Waiting);
    }
    for session in 0..2 {
        assert_eq!(arrive(&mut meeting, KEY, 1, session), Outcome::Waiting);
    }
    assert_eq!(arrive(&mut meeting, KEY, 2, 0), Outcome::Complete(vec![0; 3]));
    assert_eq!(arrive(&mut meeting, KEY, 2, 1), Outcome::Complete(vec![1; 3]));
    assert_eq!(arrive(&mut meeting, KEY, 2, 2), Outcome::Waiting);
    assert_eq!(arrive(&mut meeting, KEY, 1, 2), Outcome::Complete(vec![2; 3]));
    assert!(meeting.queues.is_empty());
}

#[test]
fn two_devices_of_one_rank_are_refused() {
    let mut meeting = Rendezvous::default();
    assert_eq!(arrive(&mut meeting, KEY, 1, 'a'), Outcome::Waiting);
    let arriving = RankDevice { rank: 1, device: 2 };
    let outcome = meeting.arrive(KEY, arriving, &call(3), Ok('b'), seconds(0));
    let (message, members) = failure(outcome);
    assert!(message.contains("devices 1 and 2 both say they are rank 1"), "{message}");
    assert_eq!(members, ['a', 'b']);
    assert_eq!(failure(arrive(&mut meeting, KEY, 0, 'c')).1, ['c'], "it fails at once");
}

#[test]
fn a_rank_beyond_the_ring_is_refused() {
    for rank in [3, -1, i32::MIN, i32::MAX] {
        let mut meeting = Rendezvous::default();
        assert_eq!(arrive(&mut meeting, KEY, 0, 'a'), Outcome::Waiting);
        let (message, members) = failure(arrive(&mut meeting, KEY, rank, 'b'));
        assert!(message.contains(&format!("says it is rank {rank} of 3")), "{message}");
        assert_eq!(members, ['a', 'b']);
    }
}

#[test]
fn ranks_that_disagree_are_refused() {
    let mut meeting = Rendezvous::default();
    assert_eq!(arrive(&mut meeting, KEY, 0, 'a'), Outcome::Waiting);
    let mut other = call(3);
    other.work.as_mut().expect("a ring computes").problem.q_len = 6;
    let outcome =
        meeting.arrive(KEY, RankDevice { rank: 1, device: 1 }, &other, Ok('b'), seconds(0));
    let (message, members) = failure(outcome);
    assert!(message.contains("[1, 6, 2, 8]") && message.contains("[1, 4, 2, 8]"), "{message}");
    assert_eq!(members, ['a', 'b']);
}

#[test]
fn missing_ranks_are_named_when_time_is_up() {
    let mut meeting = Rendezvous::default();
    let arriving = |rank| RankDevice { rank, device: rank };
    let other = Key { ring: 1, ..KEY };
    assert_eq!(meeting.next_due(TIMEOUT), None);
    for (key, rank, at) in [(KEY, 4, 3), (KEY, 0, 5), (KEY, 1, 6), (KEY, 5, 7), (other, 2, 8)] {
        let outcome = meeting.arrive(key, arriving(rank), &call(6), Ok(rank), seconds(at));
        assert_eq!(outcome, Outcome::Waiting);
    }
    assert_eq!(meeting.next_due(TIMEOUT), Some(seconds(23)));
    assert_eq!(meeting.expire(seconds(22), TIMEOUT), []);
    let failures = meeting.expire(seconds(23), TIMEOUT);
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0].members, [0, 1, 4, 5]);
    let message = failures[0].error.to_string();
    for part in ["context", "ring 0", "ranks 2-3 of 6", "ranks 0-1, 4-5 did", "20s", "lax.cond"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert_eq!(meeting.expire(seconds(23), TIMEOUT), [], "once");
    assert_eq!(meeting.next_due(TIMEOUT), Some(seconds(28)), "the other ring still waits");
}

#[test]
fn late_ranks_get_the_error_and_the_next_session_works() {
    let mut meeting = Rendezvous::default();
    assert_eq!(arrive(&mut meeting, KEY, 0, 'a'), Outcome::Waiting);
    let [expired] = meeting.expire(TIMEOUT, TIMEOUT).try_into().expect("one session");
    for rank in [2, 1] {
        let (message, members) = failure(arrive(&mut meeting, KEY, rank, 'l'));
        assert_eq!((message, members), (expired.error.to_string(), vec!['l']));
    }
    assert!(meeting.queues.is_empty(), "all ranks have left");
    for rank in 0..2 {
        assert_eq!(arrive(&mut meeting, KEY, rank, 'n'), Outcome::Waiting);
    }
    assert_eq!(arrive(&mut meeting, KEY, 2, 'n'), Outcome::Complete(vec!['n'; 3]));
}

#[test]
fn a_rank_that_got_the_error_waits_for_the_next_session() {
    let mut meeting = Rendezvous::default();
    assert_eq!(arrive(&mut meeting, KEY, 0, 'a'), Outcome::Waiting);
    assert_eq!(meeting.expire(TIMEOUT, TIMEOUT).len(), 1);
    assert_eq!(arrive(&mut meeting, KEY, 0, 'b'), Outcome::Waiting);
    assert_eq!(failure(arrive(&mut meeting, KEY, 1, 'l')).1, ['l']);
    assert_eq!(arrive(&mut meeting, KEY, 1, 'b'), Outcome::Waiting);
}

#[test]
fn forgetting_a_call_site_removes_its_tombstones_only() {
    let mut meeting = Rendezvous::default();
    let other = Key { site: 2, ..KEY };
    for key in [KEY, other] {
        assert_eq!(arrive(&mut meeting, key, 0, 'a'), Outcome::Waiting);
    }
    assert_eq!(meeting.expire(TIMEOUT, TIMEOUT).len(), 2);
    meeting.forget(KEY.site);
    assert_eq!(meeting.queues.keys().collect::<Vec<_>>(), [&other]);
    assert_eq!(arrive(&mut meeting, KEY, 1, 'b'), Outcome::Waiting);
    meeting.forget(KEY.site);
    assert_eq!(arrive(&mut meeting, KEY, 0, 'b'), Outcome::Waiting, "open sessions stay");
}

#[test]
fn tombstones_do_not_pile_up() {
    let mut meeting = Rendezvous::default();
    for run in 0..3 * TOMBSTONES as i64 {
        let key = Key { run, ..KEY };
        assert_eq!(arrive(&mut meeting, key, 0, 'a'), Outcome::Waiting);
        assert_eq!(meeting.expire(TIMEOUT, TIMEOUT).len(), 1);
    }
    assert_eq!(meeting.queues.len(), TOMBSTONES);
    assert_eq!(meeting.tombstones.len(), TOMBSTONES);
}

#[test]
fn ranks_in_words() {
    assert_eq!(in_words(&[3]), "rank 3");
    assert_eq!(in_words(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
}

#[test]
fn a_rank_that_can_not_take_part_fails_the_ring() {
    let mut meeting = Rendezvous::default();
    assert_eq!(arrive(&mut meeting, KEY, 0, 'a'), Outcome::Waiting);
    let arriving = RankDevice { rank: 1, device: 1 };
    let refused = Err(Error::Abandoned);
    let outcome = meeting.arrive(KEY, arriving, &call(3), refused, seconds(0));
    assert_eq!(failure(outcome), (Error::Abandoned.to_string(), vec!['a']));
    let late = arrive(&mut meeting, KEY, 2, 'c');
    assert_eq!(failure(late), (Error::Abandoned.to_string(), vec!['c']));
    assert!(meeting.queues.is_empty());
    assert_eq!(arrive(&mut meeting, KEY, 1, 'b'), Outcome::Waiting);
}
