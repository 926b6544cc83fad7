//! Ring directions: up from rank to rank, down, or first up and then down.
//!
//! A window needs a few neighbours on both sides. Chunks then go in one direction first and after
//! that, starting at home again, in the other.

use super::Rows;

/// Returns the ranks that chunks reach in each direction, hop by hop, counted upward from where a
/// chunk begins.
///
/// The directions are those with the fewest row hops, each as far as the last rank that needs any
/// row: all the way up if nothing is better, else all the way down, else as few hops up as possible
/// and the rest down. `needed[chunk][n]` has the rows that the n-th rank upward computes with, so
/// every entry is as long as the ring.
pub(super) fn hops_by_direction(needed: &[Vec<Rows>]) -> Vec<Vec<usize>> {
    let length = needed.first().map_or(1, Vec::len);
    let up: Vec<usize> = (1..length).collect();
    let down: Vec<usize> = up.iter().rev().copied().collect();
    let (up_hops, down_hops) = (row_hops(needed, &up), row_hops(needed, &down));
    let all = length - 1;
    let splits = [(all, 0), (0, all)].into_iter().chain((1..all).map(|hops| (hops, all - hops)));
    let best = splits.min_by_key(|(ups, downs)| up_hops[*ups] + down_hops[*downs]);
    let (ups, downs) = best.unwrap_or((0, 0));
    let is_used = |rank: &usize| needed.iter().any(|chunk| chunk[*rank].len() > 0);
    let used = |ranks: &[usize]| {
        let hops = ranks.iter().rposition(is_used).map_or(0, |last| last + 1);
        ranks[..hops].to_vec()
    };
    let directions = [used(&up[..ups]), used(&down[..downs])];
    directions.into_iter().filter(|hops| !hops.is_empty()).collect()
}

/// How many hops the rows of all chunks make together over the first 0, 1, 2, … of `ranks`.
fn row_hops(needed: &[Vec<Rows>], ranks: &[usize]) -> Vec<usize> {
    let mut all = vec![0; ranks.len() + 1];
    for chunk in needed {
        let (mut carried, mut sum) = (Vec::new(), 0);
        for (rank, all) in ranks.iter().zip(all.iter_mut().skip(1)) {
            sum += add_hop(&mut carried, &chunk[*rank]);
            *all += sum;
        }
    }
    all
}

/// Adds a hop to a rank that needs `needed`, which every hop up to it then carries. Returns how
/// many row hops that adds.
fn add_hop(carried: &mut Vec<Rows>, needed: &Rows) -> usize {
    let mut more = 0;
    carried.push(Rows::default());
    for rows in carried.iter_mut().rev() {
        let before = rows.len();
        rows.extend(needed);
        // An earlier hop carries all that a later hop carries.
        if rows.len() == before {
            break;
        }
        more += rows.len() - before;
    }
    more
}
