//! Which rows of a chunk are at a visit.

use std::ops::Range;

use super::Rows;
use super::visits::{Visit, continues};

/// Rows of a chunk that travel together; at every visit those left are one run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Part {
    /// The rows of the chunk that are this part's; together the parts are the whole chunk.
    pub rows: Range<usize>,
    /// Rows that come here because somebody here or from here on needs them.
    pub carried: Range<usize>,
    /// Rows whose sums are open after this visit: from the first rank of a strand that adds to any
    /// of them on, those to which that rank or a later one adds.
    pub summed: Range<usize>,
    /// Is this that first rank?
    pub opens: bool,
}

impl Part {
    /// Rows whose sums go on to the next visit of the strand; `next` is the same part there.
    pub fn summed_onward(&self, next: Option<&Part>) -> Range<usize> {
        let on = next.filter(|_| !self.summed.is_empty());
        on.map_or(0..0, |next| next.summed.clone())
    }

    /// Rows whose sums go home from here, where the last rank of the strand adds to them: those
    /// before what goes on, and those after it.
    pub fn summed_home(&self, next: Option<&Part>) -> impl Iterator<Item = Range<usize>> {
        let (all, on) = (self.summed.clone(), self.summed_onward(next));
        let on = if on.is_empty() { all.end..all.end } else { on };
        [all.start..on.start, on.end..all.end].into_iter().filter(|rows| !rows.is_empty())
    }
}

/// The visits that have the first step from home in common, for each such step.
pub(super) fn branches(visits: &[Visit]) -> Vec<Vec<usize>> {
    let (mut branches, mut of_visit): (Vec<Vec<usize>>, _) = (vec![], vec![0; visits.len()]);
    for (number, visit) in visits.iter().enumerate().skip(1) {
        of_visit[number] = match visit.source {
            0 => branches.len(),
            source => of_visit[source],
        };
        branches.resize(branches.len().max(of_visit[number] + 1), vec![]);
        branches[of_visit[number]].push(number);
    }
    branches
}

/// The parts of one owner's chunk at each visit, as few as possible; `needed` says which rows the
/// rank there computes with, `len` how many the chunk has. All visits of a branch have the same
/// parts.
pub(super) fn parts(
    visits: &[Visit],
    branches: &[Vec<usize>],
    needed: &[Rows],
    len: impl Fn(usize) -> usize,
) -> Vec<Vec<Part>> {
    let carried = with_later(needed, |number| visits[number].source);
    let summed = with_later(needed, |n| if continues(visits, n) { n - 1 } else { 0 });
    let mut parts: Vec<Vec<Part>> = vec![vec![]; visits.len()];
    for branch in branches {
        let gaps = branch.iter().flat_map(|n| carried[*n].gaps().chain(summed[*n].gaps()));
        let borders: Vec<usize> =
            [0].into_iter().chain(cuts(gaps.collect())).chain([len(branch[0])]).collect();
        for rows in borders.windows(2).map(|borders| borders[0]..borders[1]) {
            let run = |of: &Rows| of.common(&rows).next().unwrap_or(0..0);
            let mut is_open = false;
            for &number in branch {
                let was_open = is_open && continues(visits, number);
                is_open = was_open || needed[number].common(&rows).next().is_some();
                parts[number].push(Part {
                    rows: rows.clone(),
                    carried: run(&carried[number]),
                    summed: if is_open { run(&summed[number]) } else { 0..0 },
                    opens: is_open && !was_open,
                });
            }
        }
    }
    parts
}

/// What is needed at each visit or at those that come after it; `before` says after which one a
/// visit comes, 0 for none.
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

/// The fewest borders such that each gap holds one.
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
        let mut rows = Rows::default();
        ranges.iter().for_each(|(start, end)| rows.insert(*start..*end));
        rows
    }

    /// A single ring up.
    fn ring(hops: usize) -> Vec<Visit> {
        let ranks = |number| (0..=hops).map(|owner| (owner + number) % (hops + 1)).collect();
        let visit =
            |number: usize| Visit::new(number, ranks(number), Travels::Keys, number.max(1) - 1);
        (0..=hops).map(visit).collect()
    }

    #[test]
    fn a_chunk_is_cut_where_rows_between_two_others_stay_behind() {
        let needed = [&[][..], &[(0, 8)], &[(1, 3), (6, 8)], &[(2, 3)], &[(7, 8)]].map(rows);
        let parts = parts(&ring(4), &branches(&ring(4)), &needed, |_| 8);
        let carried = |part: usize| parts[1..].iter().map(move |of| of[part].carried.clone());
        assert_eq!(parts[1].len(), 2);
        assert_eq!(carried(0).collect::<Vec<_>>(), [0..6, 1..3, 2..3, 0..0]);
        assert_eq!(carried(1).collect::<Vec<_>>(), [6..8, 6..8, 7..8, 7..8]);
    }

    #[test]
    fn sums_are_open_from_the_first_rank_that_adds_to_them_to_the_last() {
        let needed = [&[][..], &[], &[(2, 4)], &[(3, 6)], &[]].map(rows);
        let parts = parts(&ring(4), &branches(&ring(4)), &needed, |_| 8);
        let nothing = 0..0;
        let expected = [
            (2..6, nothing.clone()),
            (2..6, 2..6),
            (3..6, 3..6),
            (nothing.clone(), nothing.clone()),
        ];
        for (part, (carried, summed)) in parts[1..].iter().zip(expected) {
            assert_eq!(part.len(), 1, "one run needs no cut");
            assert_eq!((&part[0].carried, &part[0].summed), (&carried, &summed));
        }
        let home = parts[2][0].summed_home(Some(&parts[3][0]));
        assert_eq!(home.collect::<Vec<_>>(), vec![Range { start: 2, end: 3 }]);
    }
}
