//! Which way round a ring: up from rank to rank, or down, or first up and then down.
//!
//! What needs only few neighbours needs them on both sides. So chunks go one way first and then,
//! once more from where they began, the other way: at most two legs.

use super::Rows;

/// The legs on which rows make the fewest hops altogether, each as far as the last rank that needs
/// any: up all the way where nothing is better, else down all the way, else as few hops up as
/// possible and the others down. Returned are, hop by hop, the ranks reached on each leg, counted
/// upward from where a chunk begins.
///
/// `needed[chunk][n]` are the rows that the n-th rank upward computes with; so all entries are as
/// long as the ring.
pub(super) fn legs(needed: &[Vec<Rows>]) -> Vec<Vec<usize>> {
    let length = needed.first().map_or(1, Vec::len);
    let up: Vec<usize> = (1..length).collect();
    let down: Vec<usize> = up.iter().rev().copied().collect();
    let (up_hops, down_hops) = (row_hops(needed, &up), row_hops(needed, &down));
    let all = length - 1;
    let splits = [(all, 0), (0, all)].into_iter().chain((1..all).map(|hops| (hops, all - hops)));
    let best = splits.min_by_key(|(ups, downs)| up_hops[*ups] + down_hops[*downs]);
    let (ups, downs) = best.unwrap_or((0, 0));
    let is_used = |rank: &usize| needed.iter().any(|chunk| chunk[*rank].len() > 0);
    let leg = |ranks: &[usize]| {
        let hops = ranks.iter().rposition(is_used).map_or(0, |last| last + 1);
        ranks[..hops].to_vec()
    };
    let legs = [leg(&up[..ups]), leg(&down[..downs])];
    legs.into_iter().filter(|leg| !leg.is_empty()).collect()
}

/// How many hops the rows of all chunks make together on a leg over the first 0, 1, 2, … of `ranks`.
fn row_hops(needed: &[Vec<Rows>], ranks: &[usize]) -> Vec<usize> {
    let mut all = vec![0; ranks.len() + 1];
    for chunk in needed {
        let (mut carried, mut sum) = (Vec::new(), 0);
        for (rank, all) in ranks.iter().zip(all.iter_mut().skip(1)) {
            sum += carry_on(&mut carried, &chunk[*rank]);
            *all += sum;
        }
    }
    all
}

/// Adds a hop after which `needed` is needed: what each hop carries grows by it. Returns by how
/// much altogether.
fn carry_on(carried: &mut Vec<Rows>, needed: &Rows) -> usize {
    let mut more = 0;
    carried.push(Rows::default());
    for rows in carried.iter_mut().rev() {
        let before = rows.len();
        rows.extend(needed);
        // Earlier hops carry all that later ones do.
        if rows.len() == before {
            break;
        }
        more += rows.len() - before;
    }
    more
}
