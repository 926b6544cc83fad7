//! Which global positions a rank holds.
//!
//! A layout divides each shard into *strided ranges*: consecutive local rows whose global positions
//! form an arithmetic progression. All code that depends on a layout uses its strided ranges.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::error::Error;
use crate::types::{deserialize_by_name, invalid};

/// Maps (rank, local row) to a global position and back, for `world_size` ranks of `n` tokens each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Rank r holds `[r·n, (r+1)·n)`.
    Contiguous,
    /// Rank r holds chunks r and 2·world_size−1−r of 2·world_size equal chunks.
    Zigzag,
    /// Rank r holds r, r + world_size, r + 2·world_size, …
    Striped,
}

impl Layout {
    /// All layouts, in the order of the documentation.
    pub const ALL: [Layout; 3] = [Layout::Contiguous, Layout::Zigzag, Layout::Striped];

    /// The name that users write.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Contiguous => "contiguous",
            Layout::Zigzag => "zigzag",
            Layout::Striped => "striped",
        }
    }

    /// The strided ranges of the shard of `rank`, in local order, with `n` tokens per rank.
    pub fn strided_ranges(self, rank: usize, world_size: usize, n: usize) -> Vec<StridedRange> {
        match self {
            Layout::Contiguous => vec![StridedRange { rows: 0..n, start: rank * n, stride: 1 }],
            Layout::Striped => vec![StridedRange { rows: 0..n, start: rank, stride: world_size }],
            Layout::Zigzag => {
                let half = n / 2;
                let late = 2 * world_size - 1 - rank;
                vec![
                    StridedRange { rows: 0..half, start: rank * half, stride: 1 },
                    StridedRange { rows: half..n, start: late * half, stride: 1 },
                ]
            }
        }
    }

    /// Global position of row `local` of `rank`, with `n` tokens per rank.
    pub fn position(self, rank: usize, local: usize, world_size: usize, n: usize) -> usize {
        let ranges = self.strided_ranges(rank, world_size, n);
        let range = ranges.iter().find(|range| range.rows.contains(&local));
        range.expect("a local row below n lies in one strided range").position(local)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Layout::ALL
            .into_iter()
            .find(|layout| layout.name() == name)
            .ok_or_else(|| invalid("layout", "contiguous, zigzag or striped", format!("{name:?}")))
    }
}

deserialize_by_name!(Layout);

/// Consecutive local rows whose global positions are `start + stride · (row − rows.start)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StridedRange {
    /// Local rows of the shard.
    pub rows: Range<usize>,
    /// Global position of the first row.
    pub start: usize,
    /// Distance between global positions of neighbouring rows.
    pub stride: usize,
}

impl StridedRange {
    /// Global position of local row `row`, which must lie in `rows`.
    pub fn position(&self, row: usize) -> usize {
        self.start + self.stride * (row - self.rows.start)
    }
}
