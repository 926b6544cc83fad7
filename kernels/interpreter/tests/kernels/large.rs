//! Arrays beyond 2^31 elements. Memory holds only the surroundings of the last tile.

use burst_attention_interpreter::Memory;
use burst_attention_kernels::instances::{Kernel, Target};
use burst_attention_kernels::launch::{Features, Forward, KeyGrads, Launch, QueryGrads, Rectangle};
use burst_attention_kernels::record::Value;

use super::case::{CASE, CAUSAL, Case};
use super::problem::{Output, Problem};
use super::world::{Array, Change, Scalar, World, blocks_of};

const ROWS: usize = 300_000;
const HEADS: usize = 64;
/// The heads that the test compares.
const PICKED: [usize; 2] = [0, HEADS - 1];
const DIM: usize = 128;
const BATCH: usize = 2;
/// The end of the long sequence. Its last tile, of 64 or 128 rows, begins at its row 128.
const TAIL: Case =
    Case { q_len: 224, kv_len: 224, heads: 2, kv_heads: 2, head_dim: DIM, band: (-70, 0), ..CASE };
const START: usize = ROWS - TAIL.q_len;
const LAST_TILE: usize = 128;

/// Writes values `[rows of the tail, picked heads, width]` to the last batch entry of a long array.
fn put(
    array: &Array,
    memory: &mut Memory,
    rows: std::ops::Range<usize>,
    values: &[f32],
    width: usize,
) {
    for row in rows {
        for (n, head) in PICKED.into_iter().enumerate() {
            let at = (row * PICKED.len() + n) * width;
            array.put(memory, (BATCH - 1, START + row, head), &values[at..][..width]);
        }
    }
}

struct Long {
    world: World,
    problem: Problem,
}

impl Long {
    fn new(tail: Case) -> Long {
        assert_eq!(START % LAST_TILE, 0);
        const { assert!(ROWS * HEADS * DIM > 1 << 31) };
        Long { world: World::new(5, Change::None), problem: Problem::new(tail) }
    }

    fn array(&mut self, name: &'static str, scalar: Scalar) -> Array {
        self.world.rows(name, scalar, [BATCH, ROWS, HEADS, DIM], 0)
    }

    fn activations(&mut self, name: &'static str) -> Array {
        self.array(name, Scalar::Activation(TAIL.element))
    }

    fn statistics(&mut self, name: &'static str) -> Array {
        self.world.statistics(name, [BATCH, ROWS, HEADS], 0)
    }

    /// Places q, k and v with the rows that a block of the last tile reads.
    fn inputs(&mut self, queries: usize, keys: usize) -> [Array; 3] {
        let arrays = ["q", "k", "v"].map(|name| self.activations(name));
        let Problem { inputs, .. } = &self.problem;
        let rows = [queries, keys, keys];
        for ((array, values), first) in
            arrays.iter().zip([&inputs.q, &inputs.k, &inputs.v]).zip(rows)
        {
            put(array, &mut self.world.memory, first..TAIL.q_len, values, DIM);
        }
        arrays
    }

    /// Places dout, lse_log2 and delta.
    fn saved(&mut self) -> (Array, [Array; 2]) {
        let dout = self.activations("dout");
        let statistics = ["lse_log2", "delta"].map(|name| self.statistics(name));
        let (memory, rows) = (&mut self.world.memory, LAST_TILE..TAIL.q_len);
        put(&dout, memory, rows.clone(), &self.problem.inputs.dout, DIM);
        put(&statistics[0], memory, rows.clone(), &self.problem.saved.lse_log2, 1);
        put(&statistics[1], memory, rows, &self.problem.saved.delta, 1);
        (dout, statistics)
    }

    /// Returns the rectangle of all rows.
    fn rectangle(&self) -> Rectangle {
        Rectangle {
            batch: BATCH,
            heads: HEADS,
            kv_heads: HEADS,
            ..self.problem.case.rectangle(&(0..ROWS), &(0..ROWS))
        }
    }

    /// Runs the blocks from [`LAST_TILE`] on, in all launches of the rows that the last launch
    /// writes.
    fn run(&mut self, launches: Vec<Launch>, result: &str) {
        let last = launches.last().expect("there are launches").clone();
        let of_last = |launch: &Launch| launch.value(result) == last.value(result);
        assert!(launches.len() > 2 * BATCH, "{} launches", launches.len());
        let chain: Vec<_> = launches.into_iter().filter(of_last).collect();
        let shape = last.instance().tile();
        let (rows, unit) = match last.instance().kernel {
            Kernel::KeyGrads => ("kv_len", shape.keys),
            _ => ("q_len", shape.rows),
        };
        let Some(Value::I32(rows)) = last.value(rows) else { panic!("{rows} is an integer") };
        let tiles = (rows - (TAIL.q_len - LAST_TILE) as i32) / unit..(rows + unit - 1) / unit;
        let picked = PICKED.map(|head| head as i32);
        let blocks =
            |launch: &_| tiles.clone().flat_map(|t| blocks_of(launch, t, &picked)).collect();
        let outcome = self.world.run(chain, |launch| Some(blocks(launch)));
        outcome.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Compares the last tile's rows. Each must be stored once.
    fn compare(&self, array: &Array, exact: &[f64], plain: &[f64], floor: f64) {
        let start = LAST_TILE * PICKED.len() * DIM;
        let places = (LAST_TILE..TAIL.q_len)
            .flat_map(|row| PICKED.map(|head| (BATCH - 1, START + row, head)));
        let got: Vec<_> =
            places.clone().flat_map(|place| array.get(&self.world.memory, place)).collect();
        let (exact, plain) = (&exact[start..], &plain[start..]);
        let ratio =
            self.problem.ratio(&Output { name: array.name, got: &got, exact, plain, floor });
        println!("{} {:.2}", array.name, ratio.unwrap_or_else(|error| panic!("{error}")));
        for place in places {
            assert_eq!(array.stores_of(&self.world.memory, place), [1; DIM], "{place:?}");
        }
    }
}

#[test]
fn the_last_rows_of_a_huge_forward_pass() {
    let mut long = Long::new(TAIL);
    let [q, k, v] = long.inputs(LAST_TILE, 0);
    let (acc, o) = (long.array("acc", Scalar::F32), long.activations("o"));
    let [row_max, row_sum] = ["row_max", "row_sum"].map(|name| long.statistics(name));
    let lse = long.world.rows("lse", Scalar::F32, [BATCH, ROWS, HEADS, 1], 0);
    let description = Forward {
        rectangle: long.rectangle(),
        features: Features::default(),
        q: q.rows(0),
        k: k.rows(0),
        v: v.rows(0),
        acc: Some(acc.rows(0)),
        row_max: Some(row_max.statistics(0)),
        row_sum: Some(row_sum.statistics(0)),
        o: Some(o.rows(0)),
        lse: Some(lse.rows(0)),
        first: true,
        last: true,
    };
    long.run(description.launches(Target::Sm90).expect("it is launched"), "o");
    long.compare(&o, &long.problem.exact.o, &long.problem.plain.o, 0.0);
}

#[test]
fn the_last_rows_of_a_huge_dq() {
    let mut long = Long::new(TAIL);
    let [q, k, v] = long.inputs(LAST_TILE, 0);
    let (dout, [lse_log2, delta]) = long.saved();
    let (dq_acc, dq) = (long.array("dq_acc", Scalar::F32), long.activations("dq"));
    let description = QueryGrads {
        rectangle: long.rectangle(),
        features: Features::default(),
        q: q.rows(0),
        k: k.rows(0),
        v: v.rows(0),
        dout: dout.rows(0),
        lse_log2: lse_log2.statistics(0),
        delta: delta.statistics(0),
        dq_acc: Some(dq_acc.rows(0)),
        dq: Some(dq.rows(0)),
        dslopes: None,
        first: true,
        last: true,
    };
    long.run(description.launches(Target::Sm90).expect("it is launched"), "dq");
    let (exact, plain) = (&long.problem.exact.dq, &long.problem.plain.dq);
    long.compare(&dq, exact, plain, long.problem.gradient_floor(1.0));
}

#[test]
fn the_last_rows_of_a_huge_dk_and_dv() {
    huge_dk_and_dv(false);
}

#[test]
fn the_last_rows_of_a_huge_fused_backward_pass() {
    huge_dk_and_dv(true);
}

/// Checks dk and dv of the last keys. Without a window no key is too far before a query, but the
/// queries before the tail count in no sum of the last keys.
fn huge_dk_and_dv(is_fused: bool) {
    let mut long = Long::new(if is_fused { Case { band: CAUSAL, ..TAIL } } else { TAIL });
    let [q, k, v] = long.inputs(LAST_TILE, LAST_TILE);
    let (dout, [lse_log2, delta]) = long.saved();
    let [dk_acc, dv_acc] = ["dk_acc", "dv_acc"].map(|name| long.array(name, Scalar::F32));
    let [dk, dv] = ["dk", "dv"].map(|name| long.activations(name));
    let dq_acc = long.array("dq_acc", Scalar::F32);
    let count = TAIL.q_len * PICKED.len() * DIM;
    put(&dq_acc, &mut long.world.memory, LAST_TILE..TAIL.q_len, &vec![0.0; count], DIM);
    let description = KeyGrads {
        rectangle: long.rectangle(),
        features: Features::default(),
        q: q.rows(0),
        k: k.rows(0),
        v: v.rows(0),
        dout: dout.rows(0),
        lse_log2: lse_log2.statistics(0),
        delta: delta.statistics(0),
        dk_acc: Some(dk_acc.rows(0)),
        dv_acc: Some(dv_acc.rows(0)),
        dq_acc: is_fused.then(|| dq_acc.rows(0)),
        dk: Some(dk.rows(0)),
        dv: Some(dv.rows(0)),
        fixed_order: false,
        results: None,
        first: true,
        last: true,
    };
    long.run(description.launches(Target::Sm90).expect("it is launched"), "dk");
    let (Problem { exact, plain, .. }, floor) = (&long.problem, long.problem.gradient_floor(1.0));
    long.compare(&dk, &exact.dk, &plain.dk, floor);
    long.compare(&dv, &exact.dv, &plain.dv, floor);
    for row in LAST_TILE..TAIL.q_len {
        for head in PICKED {
            let place = (BATCH - 1, START + row, head);
            let stores = dq_acc.stores_of(&long.world.memory, place);
            // There are one or two tiles of keys, and a row of the first tile of queries sees each.
            let expected = if is_fused { 1..=2 } else { 0..=0 };
            assert!(stores.iter().all(|count| expected.contains(count)), "row {row}: {stores:?}");
        }
    }
}
