//! From a tile to launches.

use std::ops::Range;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    self, Dropout, KeyGrads, Launch, Positions, QueryGrads, Rectangle, Rows, Segments,
};

use super::kernel::{TapeKernel, element_of};
use super::memory::{Buffer, Region, pieces, runs};
use super::rank::Arrays;
use super::recording::{reads, writes};
use super::tape::{Queue, Use, Work};
use crate::error::Result;
use crate::mask::Band;
use crate::problem::{Features, Pass, Problem};
use crate::schedule::{Payload, Place, Schedule, Tile};

/// Whether one kernel can compute all gradients of each tile and add to dq. Where dq travels, it
/// can't: a travelling accumulator is not zeros when it sets out, and other ranks scale it.
pub(super) fn can_fuse(problem: &Problem, schedule: &Schedule, target: Target) -> Result<bool> {
    if schedule.pass == Pass::Forward || problem.head_dim != problem.value_dim {
        return Ok(false);
    }
    let element = element_of(problem.dtype)?;
    let Features { segments, soft_cap, slopes, dropout } = problem.features;
    let features = launch::Features {
        segments: segments.then(Segments::default),
        soft_cap: soft_cap.unwrap_or(0.0),
        slopes: slopes.then(Rows::default),
        dropout: dropout.map(|rate| Dropout { numbers: Rows::default(), rate }),
        positions: Positions::default(),
    };
    let mut merges = schedule.steps.iter().flat_map(|step| &step.merges);
    let mut tiles = schedule.steps.iter().flat_map(|step| &step.tiles);
    let at_home = merges.all(|merge| merge.chunk.payload != Payload::QueryGrads);
    Ok(at_home
        && tiles.all(|tile| {
            let (queries, keys) = (&tile.queries.rows, &tile.keys.rows);
            let rectangle = rectangle(problem, element, queries, keys, tile.band);
            tile.query_state.place == Place::Home
                && KeyGrads::can_fuse(&rectangle, &features, target)
        }))
}

/// Some rows of both sides.
fn rectangle(
    problem: &Problem,
    element: Element,
    queries: &Range<usize>,
    keys: &Range<usize>,
    band: Band,
) -> Rectangle {
    let Problem { batch, heads, kv_heads, head_dim, value_dim, softmax_scale, .. } = *problem;
    // The band counts from the owners' first rows, a rectangle's from its own.
    let shift = queries.start as i64 - keys.start as i64;
    let shifted = |limit: i64| match limit {
        i64::MIN | i64::MAX => limit,
        limit => limit + shift,
    };
    Rectangle {
        batch,
        q_len: queries.len(),
        kv_len: keys.len(),
        heads,
        kv_heads,
        head_dim,
        value_dim,
        element,
        lower: shifted(band.lower),
        upper: shifted(band.upper),
        softmax_scale,
    }
}

impl TapeKernel<'_> {
    pub(super) fn rectangle(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        band: Band,
    ) -> Rectangle {
        rectangle(self.memory.problem, self.element, queries, keys, band)
    }

    /// What a launch over some rows of both sides does beside the band; its blocks keep `resident`
    /// rows. Segments come last among the arrays of both sides.
    pub(super) fn features(
        &self,
        tile: &Tile,
        (queries, q_rows): (&Buffer, &Range<usize>),
        (keys, k_rows): (&Buffer, &Range<usize>),
        resident: usize,
    ) -> launch::Features {
        let Features { segments, soft_cap, slopes, dropout } = self.memory.problem.features;
        let extras = self.memory.arrays.extras();
        let batch_stride = self.memory.problem.heads as u64;
        let numbers = Rows { address: extras.dropout, batch_stride: 4 };
        launch::Features {
            segments: segments.then(|| Segments {
                queries: queries.rows_at(queries.arrays.len() - 1, q_rows),
                keys: keys.rows_at(keys.arrays.len() - 1, k_rows),
                ranges: self.memory.segment_ranges(resident),
            }),
            soft_cap: soft_cap.unwrap_or(0.0),
            slopes: slopes.then_some(Rows { address: extras.slopes, batch_stride }),
            dropout: dropout.map(|rate| Dropout { numbers, rate }),
            positions: match self.counts_positions() {
                true => self.positions(tile, q_rows.start, k_rows.start),
                false => Positions::default(),
            },
        }
    }

    /// Positions of rows of one piece of each side, from a query and a key on.
    fn positions(&self, tile: &Tile, query: usize, key: usize) -> Positions {
        let Problem { layout, world_size, q_len, kv_len, .. } = *self.memory.problem;
        let position = |owner, row, len| {
            let pieces = layout.pieces(owner, world_size, len);
            let piece = pieces.iter().find(|piece| piece.rows.contains(&row));
            piece.map_or((0, 1), |piece| (piece.position(row) as i64, piece.stride as i64))
        };
        let (query, stride) = position(tile.queries.owner, query, q_len);
        let (key, _) = position(tile.keys.owner, key, kv_len);
        Positions { query, key, stride }
    }

    /// As [`Self::push`], of launches that look at segments, if there are any.
    pub(super) fn push_tile(&self, launches: Vec<Launch>, uses: &[Use]) {
        let segments = self.memory.problem.features.segments;
        let ranges = segments.then_some(writes(Region::SegmentRanges));
        self.push(launches, &Vec::from_iter(uses.iter().copied().chain(ranges)));
    }

    pub(super) fn push(&self, launches: Vec<Launch>, uses: &[Use]) {
        for launch in launches {
            self.tape.push(Queue::Compute, Work::Launch(launch), uses.to_vec());
        }
    }

    /// Do kernels count positions? They do it within a piece of the layout.
    fn counts_positions(&self) -> bool {
        let Features { slopes, dropout, .. } = self.memory.problem.features;
        slopes || dropout.is_some()
    }

    /// The parts of a tile's queries that take launches of their own: their statistics lie in one
    /// array and, where positions count, they are evenly apart.
    pub(super) fn parts(&self, queries: &Range<usize>) -> Vec<Range<usize>> {
        let problem = self.memory.problem;
        if queries.is_empty() {
            // A tile without queries only defines the state of its keys.
            vec![queries.clone()]
        } else if self.counts_positions() {
            pieces(problem, problem.q_len, queries)
        } else {
            runs(problem, queries)
        }
    }

    /// Likewise of its keys.
    pub(super) fn key_parts(&self, keys: &Range<usize>) -> Vec<Range<usize>> {
        let problem = self.memory.problem;
        if keys.is_empty() || !self.counts_positions() {
            return vec![keys.clone()];
        }
        pieces(problem, problem.kv_len, keys)
    }

    pub(super) fn key_grads(
        &self,
        tile: &Tile,
        (queries, keys): (&Buffer, &Buffer),
        sums: &Buffer,
        is_last: bool,
    ) -> Result<()> {
        let rows = &tile.keys.rows;
        if rows.is_empty() {
            return Ok(());
        }
        let Arrays::Backward { dk, dv, .. } = self.memory.arrays else {
            return self.wrong_pass("key gradients");
        };
        let Problem { head_dim, value_dim, .. } = *self.memory.problem;
        let dk = self.memory.result(dk, Payload::KeyGrads, head_dim);
        let dv = self.memory.result(dv, Payload::KeyGrads, value_dim);
        let query_sums = self.fused.then(|| self.memory.home(Payload::QueryGrads));
        let parts = self.parts(&tile.queries.rows);
        for rows in &self.key_parts(rows) {
            for (n, part) in parts.iter().enumerate() {
                let launches = KeyGrads {
                    rectangle: self.rectangle(part, rows, tile.band),
                    features: self.features(tile, (queries, part), (keys, rows), rows.len()),
                    q: queries.rows_at(0, part),
                    k: keys.rows_at(0, rows),
                    v: keys.rows_at(1, rows),
                    dout: queries.rows_at(1, part),
                    lse_log2: queries.statistics_at(2, part),
                    delta: queries.statistics_at(3, part),
                    dq_acc: query_sums.as_ref().map(|sums| sums.rows_at(0, part)),
                    dk_acc: sums.given_rows_at(0, rows),
                    dv_acc: sums.given_rows_at(1, rows),
                    dk: is_last.then(|| dk.rows_at(0, rows)),
                    dv: is_last.then(|| dv.rows_at(0, rows)),
                    first: tile.key_state.first && n == 0,
                    last: is_last && n + 1 == parts.len(),
                };
                let uses = [reads(queries.region), reads(keys.region), writes(sums.region)];
                let of_queries = query_sums.iter().map(|sums| writes(sums.region));
                let uses = Vec::from_iter(uses.into_iter().chain(of_queries));
                self.push_tile(launches.launches(self.target)?, &uses);
            }
        }
        Ok(())
    }

    pub(super) fn query_grads(
        &self,
        tile: &Tile,
        (queries, keys): (&Buffer, &Buffer),
        sums: &Buffer,
        is_last: bool,
    ) -> Result<()> {
        if tile.queries.rows.is_empty() {
            return Ok(());
        }
        let Arrays::Backward { dq, .. } = self.memory.arrays else {
            return self.wrong_pass("query gradients");
        };
        let dq = self.memory.result(dq, Payload::QueryGrads, self.memory.problem.head_dim);
        let dslopes = self.memory.arrays.extras().dslopes;
        let dslopes = (dslopes != 0).then(|| self.memory.per_query(dslopes));
        let key_parts = self.key_parts(&tile.keys.rows);
        for part in &self.parts(&tile.queries.rows) {
            for (n, rows) in key_parts.iter().enumerate() {
                let launches = QueryGrads {
                    rectangle: self.rectangle(part, rows, tile.band),
                    features: self.features(tile, (queries, part), (keys, rows), part.len()),
                    q: queries.rows_at(0, part),
                    k: keys.rows_at(0, rows),
                    v: keys.rows_at(1, rows),
                    dout: queries.rows_at(1, part),
                    lse_log2: queries.statistics_at(2, part),
                    delta: queries.statistics_at(3, part),
                    dq_acc: sums.given_rows_at(0, part),
                    dq: is_last.then(|| dq.rows_at(0, part)),
                    dslopes: dslopes.as_ref().map(|rows| rows.rows_at(0, part)),
                    first: tile.query_state.first && n == 0,
                    last: is_last && n + 1 == key_parts.len(),
                };
                let uses = [reads(queries.region), reads(keys.region), writes(sums.region)];
                self.push_tile(launches.launches(self.target)?, &uses);
            }
        }
        Ok(())
    }
}
