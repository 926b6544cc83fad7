//! Caches in pages, queries on them, and the reference's partial results.

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::decode::{DecodeIo, partial};
use burst_attention::host::isa::Isa;
use rayon::ThreadPool;

use super::data::{Array, Random};

/// Sizes and features of a call on one rank.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Entries, and queries of each.
    pub queries: [usize; 2],
    /// Heads of queries and of keys.
    pub heads: [usize; 2],
    /// Dims of keys and values.
    pub dims: [usize; 2],
    pub dtype: Dtype,
    /// Whether the values are the first columns of the keys.
    pub values_in_keys: bool,
    pub sources: usize,
    /// Rows of a page, and pages of a source.
    pub pages: [usize; 2],
    pub interleave: i64,
    pub rank: (i64, i64),
    pub soft_cap: f32,
    pub window: Option<u32>,
    pub slopes: bool,
}

pub const CASE: Case = Case {
    queries: [3, 2],
    heads: [4, 2],
    dims: [16, 32],
    dtype: Dtype::F32,
    values_in_keys: false,
    sources: 3,
    pages: [16, 5],
    interleave: 1,
    rank: (0, 1),
    soft_cap: 0.0,
    window: None,
    slopes: false,
};

const SCALE: f32 = 0.3;

/// The arrays of a call. Entry b reads source b, and its queries are the last ones of its length.
#[derive(Clone)]
pub struct Data {
    pub case: Case,
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub page_table: Vec<i32>,
    pub source: Vec<i32>,
    pub lengths: Vec<i32>,
    pub starts: Vec<i32>,
    pub query_lengths: Vec<i32>,
    pub slopes: Vec<f32>,
    pub o: Array,
    pub lse: Array,
}

impl Case {
    /// Returns the rows that a source has room for on one rank.
    pub fn capacity(&self) -> usize {
        self.pages[0] * self.pages[1]
    }

    /// Returns the position of a row.
    pub fn position(&self, row: usize) -> i64 {
        let ((rank, world_size), interleave, row) = (self.rank, self.interleave, row as i64);
        row / interleave * world_size * interleave + rank * interleave + row % interleave
    }
}

impl Data {
    /// Makes random queries and a random cache with pages in random order. Lengths differ, and the
    /// first one is that of a full cache.
    pub fn new(case: Case, seed: u64) -> Data {
        let Case { queries: [batch, len], heads: [heads, kv_heads], dims, dtype, .. } = case;
        let mut random = Random::new(seed);
        let pages = case.sources * case.pages[1];
        let mut order: Vec<i32> = (0..pages as i32).collect();
        (1..pages).for_each(|i| order.swap(i, random.below(i + 1)));
        let full = (case.capacity() as i64 * case.rank.1) as i32;
        let lengths: Vec<i32> = (0..batch)
            .map(|b| if b == 0 { full } else { random.below(full as usize + 1) as i32 })
            .collect();
        let cache = |dim| [pages, case.pages[0], kv_heads, dim];
        Data {
            q: Array::random(&mut random, dtype, [batch, len, heads, dims[0]]),
            k: Array::random(&mut random, dtype, cache(dims[0])),
            v: Array::random(&mut random, dtype, cache(dims[1])),
            page_table: order,
            source: (0..batch as i32).collect(),
            starts: lengths.iter().map(|length| length - len as i32).collect(),
            lengths,
            query_lengths: vec![len as i32; batch],
            slopes: (0..heads).map(|h| if case.slopes { 0.02 * h as f32 } else { 0.0 }).collect(),
            o: Array::random(&mut random, Dtype::F32, [batch, len, heads, dims[1]]),
            lse: Array::random(&mut random, Dtype::F32, [batch, len, heads, 1]),
            case,
        }
    }

    /// Computes the partial result.
    pub fn run(&self, isa: Isa, pool: &ThreadPool) {
        let Case { pages, interleave, rank, soft_cap, window, .. } = self.case;
        let [q, k, v, o, lse]: [HostArray; 5] =
            [&self.q, &self.k, &self.v, &self.o, &self.lse].map(Array::view);
        let v = if self.case.values_in_keys { k.first_columns(self.case.dims[1]) } else { v };
        let io = DecodeIo {
            q,
            k,
            v,
            page_table: &self.page_table,
            pages_per_source: pages[1],
            source: &self.source,
            lengths: &self.lengths,
            starts: &self.starts,
            query_lengths: &self.query_lengths,
            slopes: Some(&self.slopes),
            scale: SCALE,
            soft_cap,
            window,
            interleave,
            rank,
            o,
            lse,
        };
        partial((isa, pool), &io);
    }

    /// Returns the address of a row's page and its row there, if the row exists.
    fn row_of(&self, source: usize, row: usize) -> Option<[usize; 2]> {
        let [page, count] = self.case.pages;
        let id = usize::try_from(self.page_table[source * count + row / page]).ok()?;
        (id < self.k.shape[0]).then_some([id, row % page])
    }

    /// Returns the rows that a query sees, by the definition.
    pub fn seen(&self, entry: usize, t: usize) -> Vec<usize> {
        let Case { sources, window, .. } = self.case;
        let Some(source) = usize::try_from(self.source[entry]).ok().filter(|s| *s < sources) else {
            return Vec::new();
        };
        let query = i64::from(self.starts[entry]) + t as i64;
        if t as i64 >= i64::from(self.query_lengths[entry]) || query < 0 {
            return Vec::new();
        }
        let sees = |row: &usize| {
            let key = self.case.position(*row);
            key < i64::from(self.lengths[entry])
                && key <= query
                && window.is_none_or(|window| query - key <= i64::from(window))
                && self.row_of(source, *row).is_some()
        };
        (0..self.case.capacity()).filter(sees).collect()
    }

    /// Returns the outputs and lse of all queries, and for each output the mean distance of the values
    /// from it by the softmax's weights, in float64.
    pub fn reference(&self) -> [Vec<f64>; 3] {
        let Case { queries: [batch, len], heads: [heads, kv_heads], dims, soft_cap, .. } =
            self.case;
        let [mut outputs, mut sums, mut spreads] = [const { Vec::new() }; 3];
        let cap = f64::from(soft_cap);
        let values = if self.case.values_in_keys { &self.k } else { &self.v };
        for (entry, t) in (0..batch).flat_map(|entry| (0..len).map(move |t| (entry, t))) {
            let seen = self.seen(entry, t);
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let query = i64::from(self.starts[entry]) + t as i64;
                let at = |row: usize| {
                    let source = self.source[entry] as usize;
                    self.row_of(source, row).expect("a row that is seen exists")
                };
                let score = |row: &usize| {
                    let [page, at] = at(*row);
                    let dot: f64 = (0..dims[0])
                        .map(|d| self.q.at([entry, t, head, d]) * self.k.at([page, at, kv_head, d]))
                        .sum();
                    let s = f64::from(SCALE) * dot;
                    let s = if cap > 0.0 { cap * (s / cap).tanh() } else { s };
                    s + f64::from(self.slopes[head]) * (self.case.position(*row) - query) as f64
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
                sums.push(if seen.is_empty() { f64::NEG_INFINITY } else { most + sum.ln() });
                for d in 0..dims[1] {
                    let mean = |of: &dyn Fn(f64) -> f64| -> f64 {
                        let weighted = seen.iter().zip(&scores).map(|(row, s)| {
                            let [page, at] = at(*row);
                            (s - most).exp() / sum * of(values.at([page, at, kv_head, d]))
                        });
                        weighted.sum()
                    };
                    let output = mean(&|value| value);
                    outputs.push(output);
                    spreads.push(mean(&|value| (value - output).abs()));
                }
            }
        }
        [outputs, sums, spreads]
    }

    /// Returns the bits of an entry's results.
    pub fn result(&self, entry: usize) -> Vec<u64> {
        let of = |array: &Array| {
            let count = array.shape[1..].iter().product::<usize>();
            (entry * count..(entry + 1) * count).map(|i| array.get(i).to_bits()).collect::<Vec<_>>()
        };
        [&self.o, &self.lse].map(of).concat()
    }

    /// Leaves one entry with its source, now in slot `to` and in other pages; all other entries
    /// are empty.
    pub fn relocate(&mut self, entry: usize, to: usize) {
        let (old, [page, count]) = (self.clone(), self.case.pages);
        let pages = self.k.shape[0];
        self.lengths.fill(0);
        for (new, old) in [
            (&mut self.lengths, &old.lengths),
            (&mut self.starts, &old.starts),
            (&mut self.query_lengths, &old.query_lengths),
        ] {
            new[to] = old[entry];
        }
        let copy = |new: &mut Array, old: &Array, at: usize, from: usize, len: usize| {
            (0..len).for_each(|i| new.set(at * len + i, old.get(from * len + i) as f32));
        };
        let floats = self.q.shape[1..].iter().product();
        copy(&mut self.q, &old.q, to, entry, floats);
        for number in 0..count {
            let from = old.page_table[old.source[entry] as usize * count + number] as usize;
            let at = (from + 3) % pages;
            self.page_table[self.source[to] as usize * count + number] = at as i32;
            for (new, old) in [(&mut self.k, &old.k), (&mut self.v, &old.v)] {
                let floats = page * new.shape[2] * new.shape[3];
                copy(new, old, at, from, floats);
            }
        }
    }
}
