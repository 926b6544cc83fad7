//! In which order the blocks of a launch work, and how many there are.

use super::array::Side;
use super::error::LaunchError;
use super::job::Job;
use super::split::Piece;
use crate::instances::{Target, TileShape};

/// The order of a launch's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    /// Heads, over all batch entries, that are worked on together.
    pub section: u64,
    /// The last tile first.
    pub reverse: bool,
    /// Blocks.
    pub blocks: u32,
}

/// Bytes of streamed arrays that are to stay in the L2 cache: about half of it (40 MB on the A100,
/// 50 on the H100, 126 on the B200, 32 to 128 on RTX Blackwell), or less where its halves serve
/// one half of the chip each. What the blocks load once and what they write passes through it too.
const fn l2_budget(target: Target) -> u64 {
    let megabytes = match target {
        Target::Sm80 => 16,
        Target::Sm90 => 24,
        Target::Sm100 | Target::Sm103 => 48,
        Target::Sm120 => 32,
    };
    megabytes * 1_000_000
}

/// The order of a piece's blocks.
///
/// # Errors
/// [`LaunchError::Invalid`] if there are more blocks than a grid holds.
pub(super) fn order(
    job: &Job,
    piece: &Piece,
    tile: TileShape,
    target: Target,
) -> Result<Order, LaunchError> {
    let (heads, unit) = match job.resident {
        Side::Queries => (job.heads, tile.rows as usize),
        Side::Keys => (job.kv_heads, tile.keys as usize),
    };
    let tiles = piece.rows(job.resident).len().div_ceil(unit);
    let count = tiles as u128 * heads as u128 * piece.batch.len() as u128;
    let most = i32::MAX as u32;
    let Some(blocks) = u32::try_from(count).ok().filter(|&blocks| blocks <= most) else {
        let expected = format!("at most {most} (split the batch)");
        return Err(LaunchError::invalid("number of blocks", expected, count));
    };
    let section = section(job, piece, l2_budget(target));
    Ok(Order { section, reverse: reverse(job, piece, unit), blocks })
}

/// Heads whose streamed arrays fit `budget` together; a divisor of all heads of the piece, and
/// where queries are resident a multiple of the group, which shares its keys and values.
fn section(job: &Job, piece: &Piece, budget: u64) -> u64 {
    let group = (job.heads / job.kv_heads) as u64;
    let all = (piece.batch.len() * job.kv_heads) as u64;
    // Two bytes per element of k and v, or of q and dout of the whole group.
    let (streamed, together) = match job.resident {
        Side::Queries => (piece.keys.len() as u64, group),
        Side::Keys => (group * piece.queries.len() as u64, 1),
    };
    let bytes = 2 * streamed * (job.head_dim + job.value_dim) as u64;
    let fitting = (budget / bytes.max(1)).clamp(1, all);
    largest_divisor(all, fitting) * together
}

/// The largest divisor of `number` that is at most `most`, which is at least 1.
fn largest_divisor(number: u64, most: u64) -> u64 {
    let small = (1..).take_while(|d| d * d <= number).filter(|d| number.is_multiple_of(*d));
    small.flat_map(|d| [d, number / d]).filter(|&d| d <= most).max().unwrap_or(1)
}

/// Does the last tile of resident rows see more than the first? The longest starts first, so that
/// short ones fill the gaps at the end.
fn reverse(job: &Job, piece: &Piece, unit: usize) -> bool {
    let (lower, upper) = (i64::from(piece.lower), i64::from(piece.upper));
    let (low, high, streamed) = match job.resident {
        Side::Queries => (lower, upper, piece.keys.len() as i64),
        Side::Keys => (-upper, -lower, piece.queries.len() as i64),
    };
    let len = piece.rows(job.resident).len();
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
