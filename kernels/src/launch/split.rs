//! Cuts a job into pieces that fit the kernels' 32-bit offsets.

use std::ops::Range;

use super::array::Side;
use super::error::LaunchError;
use super::job::Job;
use crate::instances::TileShape;

/// Limits of a band as the kernels take it stay within this: far beyond any row that fits a view,
/// and small enough that adding a row to it stays within 32 bits.
const FAR: i64 = 1 << 30;

/// What one launch works on.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub batch: Range<usize>,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    /// The band, counted from the piece's first query and first key.
    pub lower: i32,
    pub upper: i32,
    pub first: bool,
    pub last: bool,
}

impl Piece {
    pub fn rows(&self, side: Side) -> &Range<usize> {
        match side {
            Side::Queries => &self.queries,
            Side::Keys => &self.keys,
        }
    }
}

/// The most that one launch takes.
struct Most {
    entries: usize,
    queries: usize,
    keys: usize,
}

/// The pieces of a job, in the order in which they must run.
pub(super) fn pieces(job: &Job, tile: TileShape, limit: u64) -> Result<Vec<Piece>, LaunchError> {
    if job.batch == 0 || job.rows(job.resident) == 0 {
        return Ok(Vec::new());
    }
    let most = most(job, tile, limit)?;
    let queries = ranges(job.q_len, most.queries, tile.rows as usize);
    let keys = ranges(job.kv_len, most.keys, tile.keys as usize);
    let (resident, streamed) = sides(job, queries, keys);
    let mut pieces = Vec::new();
    for batch in ranges(job.batch, most.entries, 1) {
        for rows in &resident {
            pieces.extend(chain(job, &batch, rows, &streamed));
        }
    }
    Ok(pieces)
}

fn most(job: &Job, tile: TileShape, limit: u64) -> Result<Most, LaunchError> {
    let entries = job.arrays.iter().map(|array| {
        let rows = job.rows(array.side);
        array.entries_within(job.batch, rows, limit)
    });
    let entries = entries.min().unwrap_or(job.batch);
    if entries > 0 {
        return Ok(Most { entries, queries: job.q_len, keys: job.kv_len });
    }
    let queries = most_rows(job, Side::Queries, tile.rows as usize, limit)?;
    let keys = most_rows(job, Side::Keys, tile.keys as usize, limit)?;
    Ok(Most { entries: 1, queries, keys })
}

/// Every array counts, used or not: a kernel makes its view all the same.
fn most_rows(job: &Job, side: Side, unit: usize, limit: u64) -> Result<usize, LaunchError> {
    let rows = job.rows(side);
    let smallest = rows.min(unit);
    let mut most = rows;
    for array in job.arrays.iter().filter(|array| array.side == side) {
        let fitting = array.rows_within(rows, limit);
        if fitting < smallest {
            let (name, bytes) = (array.name, array.span(1, smallest));
            return Err(LaunchError::TooLarge { name, rows: smallest, bytes, limit });
        }
        most = most.min(fitting);
    }
    Ok(if most < rows { most - most % unit } else { rows })
}

/// Cuts `0..len` into as few ranges of at most `most` as possible, about equally long, at
/// multiples of `unit`, which divides `most` where anything is cut.
fn ranges(len: usize, most: usize, unit: usize) -> Vec<Range<usize>> {
    if len == 0 {
        return Vec::new();
    }
    let count = len.div_ceil(most);
    let size = if count == 1 { len } else { len.div_ceil(count).next_multiple_of(unit) };
    (0..len).step_by(size).map(|start| start..len.min(start + size)).collect()
}

/// What the resident `rows` go through: every streamed range that they see something of.
///
/// The first launch has the job's `first`, the last one its `last`. Where nothing is seen but
/// something must be started or written, one launch that streams nothing does it.
fn chain(
    job: &Job,
    batch: &Range<usize>,
    rows: &Range<usize>,
    streamed: &[Range<usize>],
) -> Vec<Piece> {
    let mut seen: Vec<_> = streamed.iter().filter(|streamed| sees(job, rows, streamed)).collect();
    let streams_nothing = seen.is_empty();
    if streams_nothing && (job.first || job.last) {
        seen.push(&(0..0));
    }
    let count = seen.len();
    let piece = |(n, streamed): (usize, &Range<usize>)| {
        let (queries, keys) = sides(job, rows, streamed);
        let (lower, upper) =
            if streams_nothing { (FAR, -FAR) } else { shifted(job, queries, keys) };
        Piece {
            batch: batch.clone(),
            queries: queries.clone(),
            keys: keys.clone(),
            lower: lower as i32,
            upper: upper as i32,
            first: job.first && n == 0,
            last: job.last && n + 1 == count,
        }
    };
    seen.into_iter().enumerate().map(piece).collect()
}

/// (resident, streamed) from (queries, keys), and the other way round.
fn sides<T>(job: &Job, one: T, other: T) -> (T, T) {
    match job.resident {
        Side::Queries => (one, other),
        Side::Keys => (other, one),
    }
}

/// Does the band allow any pair?
fn sees(job: &Job, resident: &Range<usize>, streamed: &Range<usize>) -> bool {
    let (queries, keys) = sides(job, resident, streamed);
    let smallest = keys.start as i64 - (queries.end as i64 - 1);
    let largest = keys.end as i64 - 1 - queries.start as i64;
    job.lower.max(smallest) <= job.upper.min(largest)
}

/// The band counted from the first row of each range.
fn shifted(job: &Job, queries: &Range<usize>, keys: &Range<usize>) -> (i64, i64) {
    let shift = queries.start as i64 - keys.start as i64;
    let shifted = |limit: i64| limit.saturating_add(shift).clamp(-FAR, FAR);
    (shifted(job.lower), shifted(job.upper))
}
