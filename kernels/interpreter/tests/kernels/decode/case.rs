//! A case of decode: caches in pages, the units of its queries, and the reference's results.

use std::ops::Range;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Decode, Split};

use crate::case::{Random, round};
use crate::world::{Array, Scalar, World};

/// A case, by global positions.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub element: Element,
    pub target: Target,
    /// Keys of the whole sequence that an entry sees at most.
    pub lengths: &'static [i32],
    /// Queries in use of each entry; without them all.
    pub query_lengths: &'static [i32],
    /// Position of each entry's first query; without them the queries are the sequence's last.
    pub starts: &'static [i32],
    /// Entries of a unit, which share a source.
    pub entries: usize,
    pub queries: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Whether the values are the first columns of the keys.
    pub values_in_keys: bool,
    pub weights_in_memory: bool,
    pub page_rows: usize,
    pub source_pages: usize,
    /// Pages that no source has.
    pub spare: usize,
    /// A page of a source whose id is out of range.
    pub missing: Option<(usize, usize, i32)>,
    pub rank: i32,
    pub world_size: i32,
    /// Consecutive positions of a device; 0 for as many as it holds.
    pub interleave: usize,
    pub window: Option<i32>,
    pub soft_cap: f32,
    pub slopes: bool,
    pub split: Split,
    /// Steps of a slice.
    pub slice: usize,
    /// Value of all that no query sees.
    pub hidden: f32,
}

pub const CASE: Case = Case {
    element: Element::Bf16,
    target: Target::Sm90,
    lengths: &[300, 0, 1, 129],
    query_lengths: &[],
    starts: &[],
    entries: 1,
    queries: 1,
    kv_heads: 2,
    group: 3,
    head_dim: 16,
    value_dim: 24,
    values_in_keys: false,
    weights_in_memory: false,
    page_rows: 320,
    source_pages: 1,
    spare: 0,
    missing: None,
    rank: 0,
    world_size: 1,
    interleave: 0,
    window: None,
    soft_cap: 0.0,
    slopes: false,
    split: Split::Runs(5),
    slice: 1,
    hidden: f32::NAN,
};

pub struct Inputs {
    /// `[units, kv_heads, rows, head_dim]`
    pub q: Vec<f32>,
    /// `[pages, page_rows, kv_heads, head_dim]`
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// `[kv_heads, group]`
    pub slopes: Vec<f32>,
}

impl Case {
    pub fn units(&self) -> usize {
        self.lengths.len() / self.entries
    }

    pub fn rows(&self) -> usize {
        self.entries * self.queries * self.group
    }

    pub fn capacity(&self) -> usize {
        self.page_rows * self.source_pages
    }

    pub fn pages(&self) -> usize {
        self.units() * self.source_pages + self.spare
    }

    fn interleave(&self) -> usize {
        if self.interleave == 0 { self.capacity() } else { self.interleave }
    }

    /// Returns the id of a source's page. Sources have their pages in a mixed order.
    pub fn page_id(&self, source: usize, page: usize) -> i32 {
        match self.missing {
            Some((of, at, id)) if (of, at) == (source, page) => id,
            _ => {
                let count = self.pages();
                let step = (count / 2..).find(|step| gcd(*step, count) == 1).expect("a step");
                (((source * self.source_pages + page) * step + 1) % count) as i32
            }
        }
    }

    /// Returns the global position of a row of a source.
    pub fn position(&self, row: usize) -> i64 {
        let stripe = self.interleave();
        let round = row / stripe * self.world_size as usize + self.rank as usize;
        (round * stripe + row % stripe) as i64
    }

    /// Returns the entry, query and head of the group of a unit's row.
    pub fn of_row(&self, unit: usize, row: usize) -> (usize, usize, usize) {
        let entry = unit * self.entries + row / (self.queries * self.group);
        (entry, row / self.group % self.queries, row % self.group)
    }

    /// Returns the position of a query.
    pub fn query_position(&self, entry: usize, query: usize) -> i64 {
        let used = *self.query_lengths.get(entry).unwrap_or(&(self.queries as i32));
        let start = self.starts.get(entry).copied().unwrap_or(self.lengths[entry] - used);
        i64::from(start) + query as i64
    }

    /// Whether a query sees a row of its source, whatever its page.
    fn sees(&self, entry: usize, query: usize, row: usize) -> bool {
        let used = *self.query_lengths.get(entry).unwrap_or(&(self.queries as i32));
        let (own, key) = (self.query_position(entry, query), self.position(row));
        let near = self.window.is_none_or(|window| own - key <= i64::from(window));
        let exists = (query as i32) < used && own >= 0;
        exists && near && key <= own && key < i64::from(self.lengths[entry])
    }

    /// Returns the rows of the source that a query sees, which are consecutive.
    pub fn interval(&self, entry: usize, query: usize) -> Range<usize> {
        let seen: Vec<_> =
            (0..self.capacity()).filter(|&row| self.sees(entry, query, row)).collect();
        let Some((&first, &last)) = seen.first().zip(seen.last()) else { return 0..0 };
        assert_eq!(seen.len(), last + 1 - first, "rows are consecutive");
        first..last + 1
    }

    /// Returns the four numbers of each unit.
    pub fn table(&self, description: &Decode) -> Vec<i32> {
        let (tile, slice) = (description.page_tile(), description.slice_tiles);
        let per_page = self.page_rows.div_ceil(tile);
        let tile_of = |row: usize| row / self.page_rows * per_page + row % self.page_rows / tile;
        let mut slices = 0;
        let of_unit = |unit: usize| {
            let rows = (0..self.rows()).map(|row| self.of_row(unit, row));
            let seen = rows.map(|(entry, query, _)| self.interval(entry, query));
            let seen: Vec<_> = seen.filter(|rows| !rows.is_empty()).collect();
            let first = seen.iter().map(|rows| tile_of(rows.start)).min().unwrap_or(0);
            let end = seen.iter().map(|rows| tile_of(rows.end - 1) + 1).max().unwrap_or(0);
            slices += end.div_ceil(slice).saturating_sub(first / slice);
            [slices as i32, first as i32, end as i32, unit as i32]
        };
        (0..self.units()).flat_map(of_unit).collect()
    }

    /// Returns the intervals of all rows `[units, 2, rows]`.
    pub fn intervals(&self) -> Vec<i32> {
        let of_unit = |unit: usize| {
            let rows = (0..self.rows()).map(|row| self.of_row(unit, row));
            let seen: Vec<_> = rows.map(|(entry, query, _)| self.interval(entry, query)).collect();
            let starts = seen.iter().map(|rows| rows.start as i32);
            starts.chain(seen.iter().map(|rows| rows.end as i32)).collect::<Vec<_>>()
        };
        (0..self.units()).flat_map(of_unit).collect()
    }

    pub fn scale(&self) -> f32 {
        (self.head_dim as f32).sqrt().recip()
    }

    /// Returns the page and the row in it of a source's row; `None` for a missing page.
    fn place_of(&self, source: usize, row: usize) -> Option<usize> {
        let id = usize::try_from(self.page_id(source, row / self.page_rows)).ok()?;
        (id < self.pages()).then_some(id * self.page_rows + row % self.page_rows)
    }

    pub fn inputs(&self) -> Inputs {
        let mut random = Random(7);
        let to = |x| round(self.element, x);
        let heads = self.units() * self.kv_heads;
        let rows = self.pages() * self.page_rows * self.kv_heads;
        let mut inputs = Inputs {
            q: random.tensor(heads * self.rows() * self.head_dim, to),
            k: random.tensor(rows * self.head_dim, to),
            v: random.tensor(rows * self.value_dim, to),
            slopes: random.tensor(self.kv_heads * self.group, |x| x / 16.0),
        };
        let mut seen = vec![false; self.pages() * self.page_rows];
        for unit in 0..self.units() {
            for (entry, query, _) in (0..self.rows()).map(|row| self.of_row(unit, row)) {
                for row in self.interval(entry, query) {
                    self.place_of(unit, row).into_iter().for_each(|at| seen[at] = true);
                }
            }
        }
        for at in (0..seen.len()).filter(|&at| !seen[at]) {
            for (x, dim) in [(&mut inputs.k, self.head_dim), (&mut inputs.v, self.value_dim)] {
                x[at * self.kv_heads * dim..][..self.kv_heads * dim].fill(self.hidden);
            }
        }
        if self.values_in_keys {
            let columns = |row: &[f32]| row[..self.value_dim].to_vec();
            inputs.v = inputs.k.chunks(self.head_dim).flat_map(columns).collect();
        }
        inputs
    }

    /// Returns the dense results: o `[units, kv_heads, rows, value_dim]`, and lse.
    pub fn exact(&self, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let (mut o, mut lse) = (vec![], vec![]);
        for (unit, head) in
            (0..self.units()).flat_map(|u| (0..self.kv_heads).map(move |head| (u, head)))
        {
            for row in 0..self.rows() {
                let at = (unit * self.kv_heads + head) * self.rows() + row;
                let q = &inputs.q[at * self.head_dim..][..self.head_dim];
                let (found, sum) = self.exact_row(inputs, (unit, head, row), q);
                o.extend(found);
                lse.push(sum);
            }
        }
        (o, lse)
    }

    fn exact_row(
        &self,
        inputs: &Inputs,
        (unit, head, row): (usize, usize, usize),
        q: &[f32],
    ) -> (Vec<f64>, f64) {
        let (entry, query, of_group) = self.of_row(unit, row);
        let of = |x: &'_ [f32], at: usize, dim: usize| -> Vec<f64> {
            let start = (at * self.kv_heads + head) * dim;
            x[start..][..dim].iter().map(|&x| f64::from(x)).collect()
        };
        let score = |key: usize, at: usize| {
            let k = of(&inputs.k, at, self.head_dim);
            let s: f64 = q.iter().zip(k).map(|(&q, k)| f64::from(q) * k).sum();
            let cap = f64::from(self.soft_cap);
            let s = s * f64::from(self.scale());
            let s = if cap > 0.0 { cap * (s / cap).tanh() } else { s };
            let slope = f64::from(inputs.slopes[head * self.group + of_group]);
            let away = (self.position(key) - self.query_position(entry, query)) as f64;
            if self.slopes { s + slope * away } else { s }
        };
        let keys = self.interval(entry, query);
        let placed = keys.filter_map(|key| Some((key, self.place_of(unit, key)?)));
        let scores: Vec<_> = placed.map(|(key, at)| (at, score(key, at))).collect();
        let most = scores.iter().map(|(_, s)| *s).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|(_, s)| (s - most).exp()).sum();
        let mut o = vec![0.0; self.value_dim];
        for (at, s) in &scores {
            let weight = (s - most).exp() / sum;
            o.iter_mut()
                .zip(of(&inputs.v, *at, self.value_dim))
                .for_each(|(o, v)| *o += weight * v);
        }
        (o, if scores.is_empty() { f64::NEG_INFINITY } else { most + sum.ln() })
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Inputs and results in memory.
pub struct Arrays {
    pub inputs: Vec<Array>,
    pub workspace: Array,
    pub o: Array,
    pub lse: Array,
}

/// Puts a case into memory, and returns its description.
pub fn place(case: &Case, inputs: &Inputs, world: &mut World) -> (Decode, Arrays) {
    let Case { kv_heads, head_dim, value_dim, page_rows, source_pages, element, .. } = *case;
    let (units, rows, pages) = (case.units(), case.rows(), case.pages());
    let activations = Scalar::Activation(element);
    let heads = units * kv_heads;
    let array = |world: &mut World, name, scalar, sizes: [usize; 4], values: &[f32]| {
        let array = world.rows(name, scalar, sizes, 0);
        array.fill(&mut world.memory, 0..sizes[1], values);
        array
    };
    let integers = |world: &mut World, name, sizes: [usize; 2], values: &[i32]| {
        let values: Vec<_> = values.iter().map(|&x| x as f32).collect();
        array(world, name, Scalar::I32, [1, sizes[0], 1, sizes[1]], &values)
    };
    let q = array(world, "q", activations, [1, heads * rows, 1, head_dim], &inputs.q);
    let k = array(world, "k", activations, [pages, page_rows, kv_heads, head_dim], &inputs.k);
    // No launch reads this array where the values are columns of the keys.
    let unread = vec![f32::NAN; if case.values_in_keys { inputs.v.len() } else { 0 }];
    let values = if case.values_in_keys { &unread } else { &inputs.v };
    let v = array(world, "v", activations, [pages, page_rows, kv_heads, value_dim], values);
    let mut description = Decode {
        units,
        rows,
        kv_heads,
        head_dim,
        value_dim,
        values_in_keys: case.values_in_keys,
        weights_in_memory: case.weights_in_memory,
        element,
        pages,
        page_rows,
        sources: units,
        source_pages,
        slice_tiles: 1,
        split: case.split,
        softmax_scale: case.scale(),
        soft_cap: case.soft_cap,
        interleave: case.interleave() as i64,
        world_size: case.world_size.into(),
        arrays: [0; Decode::ARRAYS.len()],
        workspace: 0,
    };
    description.slice_tiles = case.slice * description.step_tiles();
    let table = case.table(&description);
    let ends = |source: usize| {
        let tiles = table[4 * source + 2] as usize;
        (tiles * description.page_tile())
            .div_ceil(page_rows.next_multiple_of(description.page_tile()))
    };
    // Ids of pages that hold no tile of the unit must not be read.
    let ids = (0..units).flat_map(|source| {
        let used = ends(source);
        (0..source_pages).map(move |page| if page < used { case.page_id(source, page) } else { -1 })
    });
    let ids: Vec<_> = ids.collect();
    let page_table = integers(world, "page_table", [units, source_pages], &ids);
    let units_table = integers(world, "units", [units, 4], &table);
    let intervals = integers(world, "intervals", [2 * units, rows], &case.intervals());
    let rank = integers(world, "rank", [1, 1], &[case.rank]);
    let mut all = vec![q, k, v, page_table, units_table, intervals, rank];
    if case.slopes {
        let positions = (0..units * rows).map(|at| {
            let (entry, query, _) = case.of_row(at / rows, at % rows);
            case.query_position(entry, query) as i32
        });
        let positions: Vec<_> = positions.collect();
        let positions = integers(world, "places", [units, rows], &positions);
        let slopes = (0..heads * rows)
            .map(|at| inputs.slopes[at / rows % kv_heads * case.group + at % rows % case.group]);
        let slopes: Vec<_> = slopes.collect();
        let slopes = array(world, "slopes", Scalar::F32, [1, heads, 1, rows], &slopes);
        all.extend([positions, slopes]);
    }
    let floats = description.workspace_bytes(case.target) as usize / 4;
    let workspace = world.rows("workspace", Scalar::F32, [1, 1, 1, floats], 0);
    let o = world.rows("o", Scalar::F32, [1, heads * rows, 1, value_dim], 0);
    let lse = world.rows("lse", Scalar::F32, [1, heads * rows, 1, 1], 0);
    let at = |array: &Array| array.rows(0).address;
    let results = [at(&o), at(&lse)];
    for (to, array) in description.arrays.iter_mut().zip(&all) {
        *to = at(array);
    }
    description.arrays[9..].copy_from_slice(&results);
    description.workspace = at(&workspace);
    (description, Arrays { inputs: all, workspace, o, lse })
}
