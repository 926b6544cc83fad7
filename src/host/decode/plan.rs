//! The keys that each query sees, and the tasks of a call.

use std::ops::Range;

use super::{DecodeIo, MANY};

/// Most queries of a task, counted in rows: a query has a row for each head of its group. One query
/// alone may have more rows.
const MOST_ROWS: usize = 128;

/// A task takes no further head once its cache row has this many bytes. Longer reads of adjacent
/// bytes are no faster. Few heads leave room in the cache for the next tile.
const ROW_BYTES: usize = 4096;

/// Bytes of keys and values from which on all threads take part. Waking them costs the time to read
/// about as much.
const SHARED_BYTES: usize = 1 << 21;

/// Most floats of queries and outputs that a task keeps.
const MOST_FLOATS: usize = 1 << 16;

/// A query that sees keys of this rank.
#[derive(Debug)]
pub(super) struct Query {
    /// Batch entry, and index among its queries.
    pub at: (usize, usize),
    pub source: usize,
    pub position: i64,
    /// Rows of the source that the query sees.
    pub rows: Range<usize>,
    /// Chunks that hold these rows.
    pub chunks: Range<usize>,
    /// Index of the partial result of the first chunk. Other chunks follow. A query of one chunk
    /// has none.
    pub partial: usize,
}

/// The rows of a task: a chunk, some heads of keys, and queries that share the source.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub queries: Range<usize>,
    pub kv_heads: Range<usize>,
    pub chunk: usize,
}

/// The work of a call.
#[derive(Debug)]
pub(super) struct Plan {
    /// Queries by source, and by entry within a source.
    pub queries: Vec<Query>,
    /// Queries that see nothing.
    pub blind: Vec<(usize, usize)>,
    /// Tasks, in the order of memory within a source.
    pub tasks: Vec<Part>,
    /// Queries with several partial results.
    pub merges: Vec<usize>,
    /// Number of partial results.
    pub partials: usize,
    /// Rows of a chunk, a multiple of a tile's rows.
    pub chunk_rows: usize,
}

impl Plan {
    pub fn new(io: &DecodeIo<'_>, threads: usize) -> Plan {
        let chunk_rows = chunk_rows(io);
        let (mut queries, mut blind) = (Vec::with_capacity(io.source.len()), Vec::new());
        for at in (0..io.q.batch).flat_map(|entry| io.q.rows.clone().map(move |t| (entry, t))) {
            match visible(io, at) {
                Some((source, position, rows)) => {
                    let chunks = rows.start / chunk_rows..rows.end.div_ceil(chunk_rows);
                    queries.push(Query { at, source, position, rows, chunks, partial: 0 });
                }
                None => blind.push(at),
            }
        }
        queries.sort_unstable_by_key(|query| (query.source, query.at));
        let (mut merges, mut partials) = (Vec::new(), 0);
        for (index, query) in queries.iter_mut().enumerate() {
            if query.chunks.len() > 1 {
                merges.push(index);
                query.partial = partials;
                partials += query.chunks.len();
            }
        }
        let tasks = tasks(io, &queries, threads);
        Plan { queries, blind, tasks, merges, partials, chunk_rows }
    }
}

/// Returns the rows of a chunk. They depend on shapes alone, as the bits of results depend on them.
/// Chunks of a small cache are small, so that there are tasks for all workers. Many queries need
/// long chunks, because each chunk writes a partial result for each query. So do many heads that share
/// a key. (Latents of 128 heads, 32,768 keys: chunks of 1024 keys took a sixth of the time to write
/// and to merge, and chunks of 2048 half of that.)
fn chunk_rows(io: &DecodeIo<'_>) -> usize {
    let most = if io.group() < MANY { 1024 } else { 4096 };
    let least = (io.capacity() / 16).clamp(128, most).next_power_of_two();
    least * io.q.rows.len().div_ceil(4).next_power_of_two()
}

/// Returns the source and the position of a query, and the rows that it sees, if there are any.
pub(super) fn visible(
    io: &DecodeIo<'_>,
    (entry, t): (usize, usize),
) -> Option<(usize, i64, Range<usize>)> {
    let source = usize::try_from(io.source[entry]).ok()?;
    let position = i64::from(io.starts[entry]) + t as i64;
    let in_use = (t as i64) < i64::from(io.query_lengths[entry]) && position >= 0;
    if !in_use || source >= io.page_table.len().checked_div(io.pages_per_source)? {
        return None;
    }
    let start = io.window.map_or(0, |window| position - i64::from(window));
    let end = i64::from(io.lengths[entry]).min(position + 1);
    let rows = rows_before(io, start)..rows_before(io, end);
    (!rows.is_empty()).then_some((source, position, rows))
}

/// Returns the number of this rank's rows at positions before `position`.
fn rows_before(io: &DecodeIo<'_>, position: i64) -> usize {
    let (rank, world_size) = io.rank;
    let (whole, rest) = match io.interleave.checked_mul(world_size) {
        Some(cycle) => (position.max(0) / cycle, position.max(0) % cycle),
        None => (0, position.max(0)),
    };
    let before = io.interleave.saturating_mul(rank);
    let rows = whole * io.interleave + (rest - before.min(rest)).min(io.interleave);
    usize::try_from(rows).map_or(0, |rows| rows.min(io.capacity()))
}

/// Returns the position of one of this rank's rows.
pub(super) fn position(io: &DecodeIo<'_>, row: usize) -> i64 {
    let ((rank, world_size), interleave, row) = (io.rank, io.interleave, row as i64);
    let cycle = (row / interleave).wrapping_mul(world_size).wrapping_add(rank);
    cycle.wrapping_mul(interleave).wrapping_add(row % interleave)
}

/// Cuts the work on queries into tasks, a few for each thread if there are enough heads.
fn tasks(io: &DecodeIo<'_>, queries: &[Query], threads: usize) -> Vec<Part> {
    let row_bytes = io.k.dim.max(io.v.dim).max(1) * io.k.dtype.bytes();
    let most_queries = (MOST_ROWS / io.group().max(1)).max(1);
    // Queries that share a source, with the chunks that they read.
    let (mut readers, mut first) = (Vec::new(), 0);
    for of_source in queries.chunk_by(|a, b| a.source == b.source) {
        for few in of_source.chunks(most_queries) {
            let start = few.iter().map(|query| query.chunks.start).min().unwrap_or(0);
            let end = few.iter().map(|query| query.chunks.end).max().unwrap_or(0);
            readers.push((first..first + few.len(), start..end));
            first += few.len();
        }
    }
    let chunks: usize = readers.iter().map(|(_, chunks)| chunks.len()).sum();
    let rows = queries.iter().map(|query| query.rows.len()).max().unwrap_or(0) * readers.len();
    let few = if rows * io.k.heads * 2 * row_bytes < SHARED_BYTES { 1 } else { 2 * threads };
    let most_heads = (ROW_BYTES / row_bytes).min(io.k.heads * chunks / few.max(1));
    let mut tasks = Vec::new();
    for (queries, chunks) in readers {
        let floats = queries.len() * io.group() * (io.k.dim + io.v.dim);
        let heads = most_heads.min(MOST_FLOATS / floats.max(1)).max(1);
        for head in (0..io.k.heads).step_by(heads) {
            let kv_heads = head..io.k.heads.min(head + heads);
            tasks.extend(chunks.clone().map(|chunk| Part {
                queries: queries.clone(),
                kv_heads: kv_heads.clone(),
                chunk,
            }));
        }
    }
    tasks
}
