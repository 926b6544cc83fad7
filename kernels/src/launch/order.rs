//! The order in which the blocks of a launch work, and their number.

use super::cut::Cut;
use super::job::Job;
use super::rectangle::Side;
use crate::error::LaunchError;
use crate::target::Target;
use crate::tiles::TileShape;

/// The order of a launch's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockOrder {
    /// Heads, over all batch entries, that blocks work on together.
    pub section: u64,
    /// Whether the last tile comes first.
    pub reverse: bool,
    /// Number of blocks.
    pub blocks: u32,
}

/// Returns the bytes of streamed arrays that should stay in the L2 cache: about half of it (40 MB
/// on the A100, 50 on the H100, 126 on the B200, 32 to 128 on RTX Blackwell), or less where each
/// half of the cache serves one half of the chip. Loads of resident rows and all stores pass
/// through the cache too.
const fn l2_budget(target: Target) -> u64 {
    let megabytes = match target {
        Target::Sm80 => 16,
        Target::Sm90 => 24,
        Target::Sm100 | Target::Sm103 => 48,
        Target::Sm120 => 32,
    };
    megabytes * 1_000_000
}

/// Returns the order of a cut's blocks.
///
/// # Errors
/// [`LaunchError::Invalid`] if there are more blocks than a grid holds.
pub(super) fn order(
    job: &Job,
    cut: &Cut,
    tile: TileShape,
    target: Target,
) -> Result<BlockOrder, LaunchError> {
    let (heads, unit) = match job.resident {
        // A block adds the rows of a group.
        Side::Queries if !job.kernel.has_pairs() => (job.rectangle.kv_heads, tile.rows as usize),
        Side::Queries => (job.rectangle.heads, tile.rows as usize),
        Side::Keys => (job.rectangle.kv_heads, tile.keys as usize),
    };
    let tiles = cut.rows(job.resident).len().div_ceil(unit);
    let count = tiles as u128 * heads as u128 * cut.batch.len() as u128;
    let most = i32::MAX as u32;
    let Some(blocks) = u32::try_from(count).ok().filter(|&blocks| blocks <= most) else {
        let expected = format!("at most {most} (split the batch)");
        return Err(LaunchError::invalid("number of blocks", expected, count));
    };
    let section = section(job, cut, l2_budget(target));
    Ok(BlockOrder { section, reverse: reverse(job, cut, unit), blocks })
}

/// Returns the number of heads whose streamed arrays fit `budget` together: a divisor of all heads
/// of the cut, and where queries are resident a multiple of the group, which shares its keys and
/// values.
fn section(job: &Job, cut: &Cut, budget: u64) -> u64 {
    let rectangle = &job.rectangle;
    let group = (rectangle.heads / rectangle.kv_heads) as u64;
    let all = (cut.batch.len() * rectangle.kv_heads) as u64;
    // Rows of k and v, or of q and dout of the whole group.
    let (streamed, together) = match job.resident {
        Side::Queries => (cut.keys.len() as u64, group),
        Side::Keys => (group * cut.queries.len() as u64, 1),
    };
    let row = rectangle.element.bytes() * (rectangle.head_dim + rectangle.value_dim);
    let fitting = (budget / (streamed * row as u64).max(1)).clamp(1, all);
    largest_divisor(all, fitting) * together
}

/// Returns the largest divisor of `number` that is at most `most`, which is at least 1.
fn largest_divisor(number: u64, most: u64) -> u64 {
    let small = (1..).take_while(|d| d * d <= number).filter(|d| number.is_multiple_of(*d));
    small.flat_map(|d| [d, number / d]).filter(|&d| d <= most).max().unwrap_or(1)
}

/// Whether the last tile of resident rows sees more than the first tile. The longest starts first,
/// so that short ones fill the gaps at the end.
fn reverse(job: &Job, cut: &Cut, unit: usize) -> bool {
    let (lower, upper) = (i64::from(cut.lower), i64::from(cut.upper));
    let (low, high) = match job.resident {
        Side::Queries => (lower, upper),
        Side::Keys => (-upper, -lower),
    };
    let streamed = cut.rows(job.resident.other()).len() as i64;
    let len = cut.rows(job.resident).len();
    let seen = |start: usize| {
        let (start, end) = (start as i64, len.min(start + unit) as i64);
        let seen = (start + low).clamp(0, streamed)..(end + high).clamp(0, streamed);
        (seen.end - seen.start).max(0)
    };
    seen((len - 1) / unit * unit) > seen(0)
}

#[cfg(test)]
mod tests {
    use super::largest_divisor;

    #[test]
    fn the_largest_divisor_is_that_of_a_search() {
        for number in 1..200u64 {
            for most in 1..=number {
                let search = (1..=most).rev().find(|d| number.is_multiple_of(*d));
                assert_eq!(Some(largest_divisor(number, most)), search, "{number}, {most}");
            }
        }
    }
}
