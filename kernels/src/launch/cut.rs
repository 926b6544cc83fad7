//! Cuts a job into parts that fit the kernels' 32-bit offsets.

use std::ops::Range;

use super::job::Job;
use super::rectangle::Side;
use crate::error::LaunchError;
use crate::tiles::TileShape;

/// The largest limit of a band that a kernel takes: far beyond any row that fits a view, and small
/// enough that adding a row to it stays within 32 bits.
const FAR: i64 = 1 << 30;

/// The part of a job that one launch works on.
#[derive(Debug, Clone)]
pub(super) struct Cut {
    pub batch: Range<usize>,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    /// The band, counted from the cut's first query and first key.
    pub lower: i32,
    pub upper: i32,
    pub first: bool,
    pub last: bool,
}

impl Cut {
    /// Returns the rows of one side.
    pub fn rows(&self, side: Side) -> &Range<usize> {
        match side {
            Side::Queries => &self.queries,
            Side::Keys => &self.keys,
        }
    }
}

/// The largest numbers that one launch takes.
struct Most {
    entries: usize,
    queries: usize,
    keys: usize,
}

/// Returns the cuts of a job, in the order in which they must run.
pub(super) fn cuts(job: &Job, tile: TileShape, limit: u64) -> Result<Vec<Cut>, LaunchError> {
    if job.rectangle.batch == 0 || job.rows(job.resident) == 0 {
        return Ok(Vec::new());
    }
    let most = most(job, tile, limit)?;
    let queries = ranges(job.rectangle.q_len, most.queries, tile.rows as usize);
    let keys = ranges(job.rectangle.kv_len, most.keys, tile.keys as usize);
    let (resident, streamed) = sides(job, queries, keys);
    let mut cuts = Vec::new();
    for batch in ranges(job.rectangle.batch, most.entries, 1) {
        for rows in &resident {
            cuts.extend(chain(job, &batch, rows, &streamed));
        }
    }
    Ok(cuts)
}

fn most(job: &Job, tile: TileShape, limit: u64) -> Result<Most, LaunchError> {
    let rectangle = &job.rectangle;
    let entries = job
        .arrays
        .iter()
        .map(|array| array.entries_within(rectangle.batch, job.rows(array.side), limit));
    let entries = entries.min().unwrap_or(rectangle.batch);
    if entries > 0 {
        return Ok(Most { entries, queries: rectangle.q_len, keys: rectangle.kv_len });
    }
    let queries = most_rows(job, Side::Queries, tile.rows as usize, limit)?;
    let keys = most_rows(job, Side::Keys, tile.keys as usize, limit)?;
    Ok(Most { entries: 1, queries, keys })
}

/// Returns the most rows of a side that fit. Every array counts, used or not: a kernel makes a view
/// of it all the same.
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

/// Returns the cuts of the resident `rows`: one for every streamed range of which they see
/// something.
///
/// The first launch has the job's `first`, the last launch its `last`. Where the rows see nothing
/// but a state must start or a result must be written, one launch that streams nothing does it. A
/// kernel that goes through rows once streams nothing at all.
fn chain(
    job: &Job,
    batch: &Range<usize>,
    rows: &Range<usize>,
    streamed: &[Range<usize>],
) -> Vec<Cut> {
    let mut seen: Vec<_> = streamed.iter().filter(|streamed| sees(job, rows, streamed)).collect();
    let streams_nothing = seen.is_empty();
    if streams_nothing && (job.first || job.last || !job.kernel.has_pairs()) {
        seen.push(&(0..0));
    }
    let count = seen.len();
    let cut = |(n, streamed): (usize, &Range<usize>)| {
        let (queries, keys) = sides(job, rows, streamed);
        let (lower, upper) =
            if streams_nothing { (FAR, -FAR) } else { shifted(job, queries, keys) };
        Cut {
            batch: batch.clone(),
            queries: queries.clone(),
            keys: keys.clone(),
            lower: lower as i32,
            upper: upper as i32,
            first: job.first && n == 0,
            last: job.last && n + 1 == count,
        }
    };
    seen.into_iter().enumerate().map(cut).collect()
}

/// Turns (queries, keys) into (resident, streamed), and the other way round.
fn sides<T>(job: &Job, one: T, other: T) -> (T, T) {
    match job.resident {
        Side::Queries => (one, other),
        Side::Keys => (other, one),
    }
}

/// Whether the band allows any pair.
fn sees(job: &Job, resident: &Range<usize>, streamed: &Range<usize>) -> bool {
    let (queries, keys) = sides(job, resident, streamed);
    let smallest = keys.start as i64 - (queries.end as i64 - 1);
    let largest = keys.end as i64 - 1 - queries.start as i64;
    job.rectangle.lower.max(smallest) <= job.rectangle.upper.min(largest)
}

/// Returns the band counted from the first row of each range.
fn shifted(job: &Job, queries: &Range<usize>, keys: &Range<usize>) -> (i64, i64) {
    let shift = queries.start as i64 - keys.start as i64;
    let shifted = |limit: i64| limit.saturating_add(shift).clamp(-FAR, FAR);
    (shifted(job.rectangle.lower), shifted(job.rectangle.upper))
}
