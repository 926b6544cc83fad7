//! Which rows of a chunk each placement has.

use std::ops::Range;

use super::Rows;
use super::placement::{Placement, continues};

/// Rows of a chunk that travel together. At every placement, the rows still needed are one range.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RowRange {
    /// The rows of the chunk that belong to this range. The ranges of a chunk make up all of it.
    pub rows: Range<usize>,
    /// Rows that come here, because this rank or a later rank needs them.
    pub carried: Range<usize>,
    /// Rows whose accumulator is live after this placement: rows that this or a later rank of the
    /// chain still adds to. Empty until a rank of the chain adds to any row of the range.
    pub live: Range<usize>,
    /// Whether the accumulator starts here.
    pub opens: bool,
}

impl RowRange {
    /// Where the accumulators of the live rows go from here: rows, and whether they go home. Those
    /// that are live at the next placement of the chain, where this range is `next`, go on. The
    /// live rows before and after them go home.
    pub fn moves(&self, next: Option<&RowRange>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let Range { start, end } = self.live;
        let next = next.filter(|next| !self.live.is_empty() && !next.live.is_empty());
        let on = next.map_or(end..end, |next| next.live.clone());
        let all = [(on.clone(), false), (start..on.start, true), (on.end..end, true)];
        all.into_iter().filter(|(rows, _)| !rows.is_empty())
    }
}

/// Groups the placements into branches. Two placements are in one branch if their chunks leave home
/// together.
pub(super) fn branches(placements: &[Placement]) -> Vec<Vec<usize>> {
    let mut branches: Vec<Vec<usize>> = vec![];
    for (number, Placement { source, .. }) in placements.iter().enumerate().skip(1) {
        match branches.iter_mut().find(|branch| branch.contains(source)) {
            Some(branch) => branch.push(number),
            None => branches.push(vec![number]),
        }
    }
    branches
}

/// Cuts one owner's chunk into as few row ranges as possible, and returns them for each placement.
///
/// `needed` has the rows that the rank at each placement computes with, and `len` the number of
/// rows of the chunk there. All placements of a branch have the same ranges.
pub(super) fn row_ranges(
    placements: &[Placement],
    branches: &[Vec<usize>],
    needed: &[Rows],
    len: impl Fn(usize) -> usize,
) -> Vec<Vec<RowRange>> {
    let carried = with_later(needed, |number| placements[number].source);
    let live = with_later(needed, |n| if continues(placements, n) { n - 1 } else { 0 });
    let mut ranges: Vec<Vec<RowRange>> = vec![vec![]; placements.len()];
    for branch in branches {
        let gaps = branch.iter().flat_map(|n| carried[*n].gaps().chain(live[*n].gaps()));
        let borders: Vec<usize> =
            [0].into_iter().chain(cuts(gaps.collect())).chain([len(branch[0])]).collect();
        for rows in borders.windows(2).map(|borders| borders[0]..borders[1]) {
            let within = |set: &Rows| set.common(&rows).next().unwrap_or(0..0);
            let mut is_open = false;
            for &number in branch {
                let was_open = is_open && continues(placements, number);
                is_open = was_open || needed[number].common(&rows).next().is_some();
                ranges[number].push(RowRange {
                    rows: rows.clone(),
                    carried: within(&carried[number]),
                    live: if is_open { within(&live[number]) } else { 0..0 },
                    opens: is_open && !was_open,
                });
            }
        }
    }
    ranges
}

/// Returns the rows that each placement or any placement after it needs. `before` returns the
/// placement that comes before a placement, or 0 for none.
fn with_later(needed: &[Rows], before: impl Fn(usize) -> usize) -> Vec<Rows> {
    let mut all = needed.to_vec();
    for number in (1..all.len()).rev() {
        let (earlier, later) = all.split_at_mut(number);
        match before(number) {
            0 => {}
            before => earlier[before].extend(&later[0]),
        }
    }
    all
}

/// Returns the fewest borders such that each gap holds one.
fn cuts(mut gaps: Vec<Range<usize>>) -> Vec<usize> {
    gaps.sort_by_key(|gap| gap.end);
    let mut cuts: Vec<usize> = Vec::new();
    for gap in gaps {
        if cuts.last().is_none_or(|cut| *cut < gap.start) {
            cuts.push(gap.end);
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Travels;

    /// The rows from the first number of each pair up to the second.
    fn rows(ranges: &[(usize, usize)]) -> Rows {
        ranges.iter().map(|(start, end)| *start..*end).collect()
    }

    /// The placements of a ring whose chunks go up.
    fn ring(hops: usize) -> Vec<Placement> {
        let ranks = |number| (0..=hops).map(|owner| (owner + number) % (hops + 1)).collect();
        let placement = |number: usize| {
            Placement::new(number, ranks(number), Travels::Keys, number.saturating_sub(1))
        };
        (0..=hops).map(placement).collect()
    }

    #[test]
    fn a_chunk_is_cut_where_rows_between_two_others_stay_behind() {
        let needed = [&[][..], &[(0, 8)], &[(1, 3), (6, 8)], &[(2, 3)], &[(7, 8)]].map(rows);
        let ranges = row_ranges(&ring(4), &branches(&ring(4)), &needed, |_| 8);
        let carried = |range: usize| ranges[1..].iter().map(move |of| of[range].carried.clone());
        assert_eq!(ranges[1].len(), 2);
        assert_eq!(carried(0).collect::<Vec<_>>(), [0..6, 1..3, 2..3, 0..0]);
        assert_eq!(carried(1).collect::<Vec<_>>(), [6..8, 6..8, 7..8, 7..8]);
    }

    #[test]
    fn accumulators_are_live_from_the_first_rank_that_adds_to_them_to_the_last() {
        let needed = [&[][..], &[], &[(2, 4)], &[(3, 6)], &[]].map(rows);
        let ranges = row_ranges(&ring(4), &branches(&ring(4)), &needed, |_| 8);
        let nothing = 0..0;
        let expected = [
            (2..6, nothing.clone()),
            (2..6, 2..6),
            (3..6, 3..6),
            (nothing.clone(), nothing.clone()),
        ];
        for (range, (carried, live)) in ranges[1..].iter().zip(expected) {
            assert_eq!(range.len(), 1, "one range needs no cut");
            assert_eq!((&range[0].carried, &range[0].live), (&carried, &live));
        }
        let moves = ranges[2][0].moves(Some(&ranges[3][0]));
        assert_eq!(moves.collect::<Vec<_>>(), [(3..6, false), (2..3, true)]);
    }
}
