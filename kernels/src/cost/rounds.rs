//! When the last block of a launch ends.

use std::collections::VecDeque;

/// Returns when the last block ends, where each of `processors` takes the next block as it comes
/// free. Groups of equal blocks come in the order of their start, each with the duration of a block
/// and the number of blocks.
///
/// Processors that come free at the same time are one level. Whole turns of all processors are
/// added at once, so the work grows with the number of groups and levels, not of blocks.
pub(super) fn end(groups: impl Iterator<Item = (f64, usize)>, processors: usize) -> f64 {
    let mut levels = VecDeque::from([(0.0, processors)]);
    for (duration, mut left) in groups {
        while left > 0 {
            let ends = (levels[0].0, levels[levels.len() - 1].0);
            let turns = left / processors;
            // Each turn gives every processor one block, so differences between processors stay.
            if turns > 0 && ends.1 - ends.0 <= duration {
                levels.iter_mut().for_each(|(time, _)| *time += duration * turns as f64);
                left -= turns * processors;
                continue;
            }
            left -= take(&mut levels, duration, left);
        }
    }
    levels.back().map_or(0.0, |(time, _)| *time)
}

/// Gives the processors that come free first a block each, at most `most` blocks. Returns how many.
fn take(levels: &mut VecDeque<(f64, usize)>, duration: f64, most: usize) -> usize {
    let Some((time, free)) = levels.pop_front() else { return most };
    let taken = free.min(most);
    if taken < free {
        levels.push_front((time, free - taken));
    }
    let end = time + duration;
    let at = levels.iter().rposition(|(time, _)| *time <= end).map_or(0, |at| at + 1);
    match at.checked_sub(1).and_then(|at| levels.get_mut(at)) {
        Some((time, busy)) if *time == end => *busy += taken,
        _ => levels.insert(at, (end, taken)),
    }
    taken
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use super::end;

    /// The same with a heap of processors and one block after the other, in whole numbers.
    fn one_by_one(groups: &[(u32, usize)], processors: usize) -> u32 {
        let mut free: BinaryHeap<_> = (0..processors).map(|_| Reverse(0)).collect();
        for (duration, count) in groups {
            for _ in 0..*count {
                let Reverse(time) = free.pop().unwrap();
                free.push(Reverse(time + duration));
            }
        }
        free.into_iter().map(|Reverse(time)| time).max().unwrap()
    }

    #[test]
    fn levels_end_with_the_last_block_of_a_simulation() {
        let mut state = 1u32;
        let mut random = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for processors in [1, 2, 7, 132] {
            for _ in 0..200 {
                let count = random(9);
                let groups: Vec<_> =
                    (0..count).map(|_| (random(50) + 1, random(400) as usize)).collect();
                let levels = groups.iter().map(|(duration, count)| (f64::from(*duration), *count));
                let expected = f64::from(one_by_one(&groups, processors));
                assert_eq!(end(levels, processors), expected, "{groups:?} on {processors}");
            }
        }
    }
}
