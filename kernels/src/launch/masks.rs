//! Masks as data: the launches that pack them for a launch of attention.

use super::array::resident_side;
use super::cut::Cut;
use super::job::Job;
use super::rectangle::Side;
use crate::features::{EvenPositions, Visible};
use crate::kernel::Kernel;
use crate::place::Rows;
use crate::record::{Meaning, Operand, Value};

/// Bytes of the packed numbers of a row.
const ROW: u64 = 6 * 4;
/// Bytes of the runs of 128 rows.
const RUNS: u64 = 10 * 4;

/// Returns where packed queries, packed keys and runs lie in a workspace, and its end.
fn parts(batch: usize, q_len: usize, kv_len: usize, resident: usize) -> [u64; 4] {
    let rows = |rows: usize| (batch * rows) as u64 * ROW;
    let runs = (batch * resident.div_ceil(128)) as u64 * RUNS;
    let mut end = 0;
    let mut place = |bytes: u64| {
        let start = end;
        end = (start + bytes).next_multiple_of(256);
        start
    };
    [place(rows(q_len)), place(rows(kv_len)), place(runs), end]
}

impl Visible {
    /// Returns the bytes of the workspace of launches over rectangles of up to these sizes.
    pub fn workspace_bytes(batch: usize, q_len: usize, kv_len: usize) -> u64 {
        parts(batch, q_len, kv_len, q_len.max(kv_len))[3]
    }
}

impl Job {
    /// Whether an array holds packed masks.
    pub(super) fn is_packed(&self, operand: Operand) -> bool {
        let packs = matches!(operand, Operand::QSegments | Operand::KvSegments | Operand::Ranges);
        packs && self.features.visible.is_some()
    }

    /// Returns where the launches of a cut keep packed queries, packed keys and runs.
    fn packed_at(&self, visible: Visible, cut: &Cut) -> [Rows; 3] {
        let (batch, resident) = (cut.batch.len(), cut.rows(resident_side(self.kernel)).len());
        let sizes = [cut.queries.len(), cut.keys.len()];
        let [queries, keys, runs, _] = parts(batch, sizes[0], sizes[1], resident);
        let rows = |at, numbers: usize, rows: usize| Rows {
            address: visible.workspace + at,
            batch_stride: (numbers * rows) as u64,
        };
        [
            rows(queries, 6, sizes[0]),
            rows(keys, 6, sizes[1]),
            rows(runs, 10, resident.div_ceil(128)),
        ]
    }

    /// Returns the value of an argument that packed masks decide; `None` for any other argument.
    pub(super) fn packed_value(&self, meaning: Meaning, cut: &Cut) -> Option<Value> {
        let [queries, keys, runs] = self.packed_at(self.features.visible?, cut);
        let of = |operand| match operand {
            Operand::QSegments => Some(queries),
            Operand::KvSegments => Some(keys),
            Operand::Ranges => Some(runs),
            _ => None,
        };
        match meaning {
            Meaning::Address(operand) => Some(Value::Pointer(of(operand)?.address)),
            // No view may have 0 rows.
            Meaning::BatchStride(operand) => {
                Some(Value::I32(of(operand)?.batch_stride.max(1) as i32))
            }
            _ => None,
        }
    }

    /// Returns the jobs that pack masks for a cut, in order; none where masks are no data or
    /// nothing is streamed.
    pub(super) fn masks(&self, cut: &Cut) -> Vec<Job> {
        let Some(visible) = self.features.visible.filter(|_| cut.lower <= cut.upper) else {
            return Vec::new();
        };
        let [queries, keys, runs] = self.packed_at(visible, cut);
        let (own, others) = match self.resident {
            Side::Queries => (queries, keys),
            Side::Keys => (keys, queries),
        };
        let kernel = Kernel::MaskRuns;
        let sizes = (cut.batch.len(), cut.rows(self.resident).len(), 1, 8);
        let mut job = Job::per_row(kernel, sizes, kernel.elements()[0]);
        job.rectangle.kv_len = cut.rows(self.resident.other()).len();
        job.keys_stay = self.resident == Side::Keys;
        let job = job
            .array(Operand::MaskRows, Some(own))
            .array(Operand::OtherMaskRows, Some(others))
            .array(Operand::Runs, Some(runs));
        let of = |side, rows| self.mask_rows(visible, cut, side, rows);
        vec![of(Side::Queries, queries), of(Side::Keys, keys), job]
    }

    /// Returns the job that packs the rows of a side.
    fn mask_rows(&self, visible: Visible, cut: &Cut, side: Side, rows: Rows) -> Job {
        let range = cut.rows(side);
        let at = |array: Option<Rows>, width: usize| {
            let Rows { address, batch_stride } = array?;
            let row = (range.start * width) as u64;
            let elements = cut.batch.start as u64 * batch_stride + row;
            Some(Rows { address: address + 4 * elements, batch_stride })
        };
        let (segments, positions) = (self.features.segments, self.features.positions);
        let of_side = |[queries, keys]: [Rows; 2]| if side == Side::Keys { keys } else { queries };
        let segments = segments.map(|it| of_side([it.queries, it.keys]));
        let is_keys = side == Side::Keys;
        let first = if is_keys { positions.key } else { positions.query };
        let kernel = Kernel::MaskRows;
        let sizes = (cut.batch.len(), range.len(), 1, 8);
        let mut job = Job::per_row(kernel, sizes, kernel.elements()[0]);
        let query = first + positions.stride * range.start as i64;
        job.features.positions = EvenPositions { query, ..positions };
        job.array(Operand::Segments, at(segments, 1))
            .array(Operand::Visible, at(visible.intervals.filter(|_| is_keys), 2))
            .array(Operand::AlsoVisible, at(visible.also.filter(|_| is_keys), 2))
            .array(Operand::Positions, at(visible.positions.filter(|_| !is_keys), 1))
            .array(Operand::CountedPositions, at(visible.counted_positions.map(of_side), 1))
            .array(Operand::MaskRows, Some(rows))
    }
}
