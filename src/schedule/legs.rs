//! Ways round the ring: which hops chunks make, and which of their rows make each.
//!
//! What needs only few neighbours needs them on both sides. So chunks go one way first and then,
//! once more from home, the other way: at most two legs.

use std::ops::Range;

use super::Rows;

/// Which neighbour a rank sends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Rank r sends to r + 1.
    Up,
    /// Rank r sends to r − 1.
    Down,
}

/// Rows of each owner's chunk that each rank computes with, `[owner][rank]`.
pub(super) type Needs = Vec<Vec<Rows>>;

/// Hops in one direction, one at a step.
#[derive(Debug)]
pub(super) struct Leg {
    direction: Direction,
    world_size: usize,
    /// The step before its first hop.
    pub start: usize,
    /// Hops to the last rank that needs any chunk.
    pub hops: usize,
    /// What travels of each owner's chunk.
    parts: Vec<Vec<Part>>,
}

/// Rows of a chunk that travel together; at every hop those left are one run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Part {
    /// The rows of the chunk that are this part's; together the parts are the whole chunk.
    pub rows: Range<usize>,
    /// The rows that make hop 1, hop 2, …
    carried: Vec<Range<usize>>,
    /// The first hop to a rank that computes with any of them.
    first: usize,
}

impl Direction {
    /// The rank `hops` hops onward from `rank`.
    fn onward(self, rank: usize, hops: usize, world_size: usize) -> usize {
        match self {
            Direction::Up => (rank + hops) % world_size,
            Direction::Down => (rank + world_size - hops % world_size) % world_size,
        }
    }
}

impl Part {
    /// Rows that make hop `hop` because somebody from there on needs them.
    pub fn carried(&self, hop: usize) -> Range<usize> {
        self.carried.get(hop.wrapping_sub(1)).cloned().unwrap_or(0..0)
    }

    /// Rows whose sums are open after hop `hop`: from the first rank that adds to any of them on,
    /// those to which that rank or a later one adds.
    pub fn summed(&self, hop: usize) -> Range<usize> {
        if hop < self.first { 0..0 } else { self.carried(hop) }
    }

    /// Rows whose sums go on from the rank `hop` hops away.
    pub fn summed_onward(&self, hop: usize) -> Range<usize> {
        if self.summed(hop).is_empty() { 0..0 } else { self.carried(hop + 1) }
    }

    /// Rows whose sums go home from the rank `hop` hops away, which is the last to add to them.
    pub fn summed_home(&self, hop: usize) -> Vec<Range<usize>> {
        Rows::from(self.summed_onward(hop)).missing(&self.summed(hop))
    }

    /// Does the first rank that adds to sums of this part lie `hop` hops away?
    pub fn opens(&self, hop: usize) -> bool {
        hop == self.first && !self.carried(hop).is_empty()
    }
}

impl Leg {
    fn new(direction: Direction, start: usize, hops: usize, needs: &Needs, len: usize) -> Leg {
        let world_size = needs.len();
        let needed = |owner: usize| {
            (1..=hops).map(move |hop| &needs[owner][direction.onward(owner, hop, world_size)])
        };
        let parts = |owner| parts(&needed(owner).collect::<Vec<_>>(), len);
        let parts: Vec<Vec<Part>> = (0..world_size).map(parts).collect();
        let used = |hop: &usize| parts.iter().flatten().any(|part| !part.carried(*hop).is_empty());
        let hops = (1..=hops).rev().find(used).unwrap_or(0);
        Leg { direction, world_size, start, hops, parts }
    }

    /// The rank `hops` hops onward from `rank`.
    pub fn onward(&self, rank: usize, hops: usize) -> usize {
        self.direction.onward(rank, hops, self.world_size)
    }

    /// The rank `hops` hops back from `rank`.
    pub fn back(&self, rank: usize, hops: usize) -> usize {
        self.onward(rank, self.world_size - hops % self.world_size)
    }

    /// What travels of the chunk of `owner`.
    pub fn parts(&self, owner: usize) -> &[Part] {
        &self.parts[owner]
    }
}

/// The legs on which rows make the fewest hops altogether, each as far as the last rank that needs
/// it there: up all the way where nothing is better, else down all the way, else as few hops up as
/// possible and the others down. `len` is the number of rows of a chunk.
pub(super) fn legs(needs: &Needs, len: usize) -> Vec<Leg> {
    let (up, down) = (row_hops(Direction::Up, needs), row_hops(Direction::Down, needs));
    let all = needs.len() - 1;
    let splits = [(all, 0), (0, all)].into_iter().chain((1..all).map(|hops| (hops, all - hops)));
    let best = splits.min_by_key(|(ups, downs)| up[*ups] + down[*downs]);
    let (ups, downs) = best.unwrap_or((0, 0));
    let first = Leg::new(Direction::Up, 0, ups, needs, len);
    let second = Leg::new(Direction::Down, first.hops, downs, needs, len);
    [first, second].into_iter().filter(|leg| leg.hops > 0).collect()
}

/// How many hops the rows of all chunks make together on a leg of 0, 1, 2, … hops.
fn row_hops(direction: Direction, needs: &Needs) -> Vec<usize> {
    let world_size = needs.len();
    let mut all = vec![0; world_size];
    for (owner, needed) in needs.iter().enumerate() {
        let (mut carried, mut sum) = (Vec::new(), 0);
        for (hop, all) in all.iter_mut().enumerate().skip(1) {
            let rank = direction.onward(owner, hop, world_size);
            sum += carry_on(&mut carried, &needed[rank]);
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
        needed.ranges().for_each(|range| rows.insert(range.clone()));
        // Earlier hops carry all that later ones do.
        if rows.len() == before {
            break;
        }
        more += rows.len() - before;
    }
    more
}

/// Cuts a chunk of `len` rows into as few parts as possible of which each hop carries one run;
/// `needed` says which rows the rank after each hop computes with.
fn parts(needed: &[&Rows], len: usize) -> Vec<Part> {
    let mut carried = Vec::new();
    needed.iter().for_each(|rows| {
        carry_on(&mut carried, rows);
    });
    let borders: Vec<usize> = [0].into_iter().chain(cuts(&carried)).chain([len]).collect();
    let part = |borders: &[usize]| {
        let rows = borders[0]..borders[1];
        let run = |of: &Rows| of.common(&rows).next().unwrap_or(0..0);
        let first = needed.iter().position(|of| of.common(&rows).next().is_some());
        Part {
            carried: carried.iter().map(run).collect(),
            first: first.map_or(0, |index| index + 1),
            rows: rows.clone(),
        }
    };
    borders.windows(2).map(part).collect()
}

/// The fewest borders such that each gap within what a hop carries holds one.
fn cuts(carried: &[Rows]) -> Vec<usize> {
    let mut gaps: Vec<Range<usize>> = carried.iter().flat_map(Rows::gaps).collect();
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

    /// The rows from the first number of each pair up to the second.
    fn rows(ranges: &[(usize, usize)]) -> Rows {
        let mut rows = Rows::default();
        ranges.iter().for_each(|(start, end)| rows.insert(*start..*end));
        rows
    }

    #[test]
    fn a_chunk_is_cut_where_rows_between_two_others_stay_behind() {
        let needed = [rows(&[(0, 8)]), rows(&[(1, 3), (6, 8)]), rows(&[(2, 3)]), rows(&[(7, 8)])];
        let parts = parts(&needed.each_ref(), 8);
        let carried: Vec<Vec<Range<usize>>> =
            parts.iter().map(|part| (1..=4).map(|hop| part.carried(hop)).collect()).collect();
        assert_eq!(carried, [vec![0..6, 1..3, 2..3, 0..0], vec![6..8, 6..8, 7..8, 7..8]]);
    }

    #[test]
    fn sums_are_open_from_the_first_rank_that_adds_to_them_to_the_last() {
        let needed = [rows(&[]), rows(&[(2, 4)]), rows(&[(3, 6)]), rows(&[])];
        let parts = parts(&needed.each_ref(), 8);
        let [part] = parts.as_slice() else { panic!("one run needs no cut") };
        let hops: Vec<_> = (0..=5).map(|hop| (part.carried(hop), part.summed(hop))).collect();
        let nothing = 0..0;
        let expected = [
            (nothing.clone(), nothing.clone()),
            (2..6, nothing.clone()),
            (2..6, 2..6),
            (3..6, 3..6),
            (nothing.clone(), nothing.clone()),
            (nothing.clone(), nothing),
        ];
        assert_eq!(hops, expected);
    }
}
