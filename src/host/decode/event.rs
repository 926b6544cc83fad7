//! The event of a call on the timeline.

use super::DecodeIo;
use super::plan::visible;
use crate::host::trace::{DECODE, Event};

/// What the queries of a call see of this rank's keys.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    /// Entries of the batch with a query that sees a key.
    sequences: usize,
    /// Rows that queries see, each row of a source counted once. Rows of missing pages count.
    rows: usize,
    /// Pairs of a query and a row that it sees.
    pairs: usize,
}

impl Seen {
    fn of(io: &DecodeIo<'_>) -> Seen {
        let mut seen = Seen::default();
        let mut ranges = Vec::with_capacity(io.source.len());
        for entry in 0..io.q.batch {
            let before = ranges.len();
            ranges.extend(io.q.rows.clone().filter_map(|t| {
                let (source, _, rows) = visible(io, (entry, t))?;
                Some((source, rows))
            }));
            seen.sequences += usize::from(ranges.len() > before);
        }
        ranges.sort_unstable_by_key(|(source, rows)| (*source, rows.start));
        for of_source in ranges.chunk_by(|a, b| a.0 == b.0) {
            let mut end = 0;
            for (_, rows) in of_source {
                seen.pairs += rows.len();
                seen.rows += rows.end.saturating_sub(rows.start.max(end));
                end = end.max(rows.end);
            }
        }
        seen
    }
}

/// Begins the event of a call on `device`, which ends when it is dropped.
#[must_use]
pub fn event(io: &DecodeIo<'_>, device: i32) -> Event {
    let Seen { sequences, rows, pairs } = Seen::of(io);
    let counted = |count, what| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let name = format!("Decode {}, {}", counted(sequences, "sequence"), counted(rows, "position"));
    let columns = io.k.dim + if io.values_in_keys() { 0 } else { io.v.dim };
    let (heads, pairs) = (io.q.heads, pairs * io.q.heads);
    let bytes = rows * io.k.heads * columns * io.k.dtype.bytes();
    let args = format!(
        "\"pairs\":{pairs},\"sequences\":{sequences},\"heads\":{heads},\"rows\":{rows},\
         \"bytes\":{bytes},\"rank\":{}",
        io.rank.0
    );
    Event::begin((DECODE, device.into()), name, args)
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;
    use crate::host::array::HostArray;
    use crate::problem::Dtype;

    /// Two entries read source 0, the first one by the queries at positions 3 and 4, the second one
    /// by the query at 6. The third entry is empty.
    fn io() -> DecodeIo<'static> {
        let array = |dims| HostArray::jax(NonNull::dangling(), Dtype::F32, dims);
        DecodeIo {
            q: array([3, 2, 4, 8]),
            k: array([4, 4, 2, 8]),
            v: array([4, 4, 2, 8]),
            page_table: &[0, 1, 2, 3],
            pages_per_source: 2,
            source: &[0, 0, 1],
            lengths: &[5, 8, 0],
            starts: &[3, 6, -2],
            query_lengths: &[2, 1, 2],
            slopes: None,
            scale: 1.0,
            soft_cap: 0.0,
            window: None,
            interleave: 1,
            rank: (0, 1),
            o: array([3, 2, 4, 8]),
            lse: array([3, 2, 4, 1]),
        }
    }

    #[test]
    fn rows_that_several_queries_see_count_once() {
        let seen = |io| Seen::of(&io);
        assert_eq!(seen(io()), Seen { sequences: 2, rows: 7, pairs: 4 + 5 + 7 });
        let window = |window| DecodeIo { window: Some(window), ..io() };
        assert_eq!(seen(window(1)), Seen { sequences: 2, rows: 5, pairs: 6 });
        assert_eq!(seen(window(0)), Seen { sequences: 2, rows: 3, pairs: 3 });
        let second = DecodeIo { rank: (1, 2), ..io() };
        assert_eq!(seen(second), Seen { sequences: 2, rows: 3, pairs: 2 + 2 + 3 });
        let other = DecodeIo { lengths: &[5, 8, 2], starts: &[3, 6, 0], ..io() };
        assert_eq!(seen(other), Seen { sequences: 3, rows: 7 + 2, pairs: 16 + 1 + 2 });
        let empty = DecodeIo { source: &[-1, 2, 5], ..io() };
        assert_eq!(seen(empty), Seen::default());
    }
}
