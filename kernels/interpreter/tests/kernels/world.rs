//! Arrays in simulated memory, each a slice of a longer array, and launches over them.

use std::path::Path;
use std::sync::LazyLock;

use burst_attention_interpreter::execute::{Kernels, run_module};
use burst_attention_interpreter::{Address, GridRun, Memory};
use burst_attention_kernels::instances::{Element, Kernel};
use burst_attention_kernels::launch::{Launch, Rows, Statistics};
use cutile_ir::Module;
use half::{bf16, f16};
use std::ops::Range;

use super::coverage::reach_of;

/// All kernels, compiled once for all tests.
pub static KERNELS: LazyLock<Kernels> = LazyLock::new(|| {
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    Kernels::keeping_in(temporary.with_file_name("tile-ir"))
});

/// Whether a kernel says what masks let the blocks of another kernel see.
pub fn prepares(kernel: Kernel) -> bool {
    matches!(kernel, Kernel::SegmentRanges | Kernel::MaskRows | Kernel::MaskRuns)
}

/// A change of a kernel or a launch, which a check must find, or a look at each launch.
#[derive(Clone, Copy)]
pub enum Change {
    None,
    /// Looks at each launch before it runs, with its memory, and changes nothing.
    Before(fn(&Launch, &GridRun, &Memory) -> Result<(), String>),
    /// Changes every kernel that does not [prepare](prepares) others.
    Module(fn(&mut Module)),
    /// Changes every kernel that prepares others.
    Ranges(fn(&mut Module)),
    /// Changes the arguments of every launch of a kernel that does not prepare others.
    Launch(fn(&mut Launch)),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    Activation(Element),
    F32,
    I32,
}

impl Scalar {
    fn bytes(self) -> usize {
        if matches!(self, Scalar::Activation(_)) { 2 } else { 4 }
    }

    fn write(self, memory: &mut Memory, at: Address, values: &[f32]) {
        match self {
            Scalar::F32 => memory.write_f32(at, values),
            Scalar::I32 => {
                let values: Vec<_> = values.iter().map(|&x| x as i32).collect();
                memory.write_i32(at, &values);
            }
            Scalar::Activation(Element::Bf16) => {
                let values: Vec<_> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                memory.write_bf16(at, &values);
            }
            Scalar::Activation(Element::F16) => {
                let values: Vec<_> = values.iter().map(|&x| f16::from_f32(x)).collect();
                memory.write_f16(at, &values);
            }
        }
    }

    fn read(self, memory: &Memory, at: Address, count: usize) -> Vec<f32> {
        match self {
            Scalar::F32 => memory.read_f32(at, count),
            Scalar::I32 => memory.read_i32(at, count).into_iter().map(|x| x as f32).collect(),
            Scalar::Activation(Element::Bf16) => {
                memory.read_bf16(at, count).into_iter().map(bf16::to_f32).collect()
            }
            Scalar::Activation(Element::F16) => {
                memory.read_f16(at, count).into_iter().map(f16::to_f32).collect()
            }
        }
    }
}

/// A number of stores that each element of an array must have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stores {
    Never,
    Exactly(u32),
    /// At most as often as launches of its rows carry a state on.
    AtMost(u32),
}

/// `rows` rows within a longer array `[batch, …, heads, dim]`, or `[batch, heads, …]`.
#[derive(Debug, Clone)]
pub struct Array {
    pub name: &'static str,
    base: Address,
    scalar: Scalar,
    batch: usize,
    rows: usize,
    heads: usize,
    dim: usize,
    margin: usize,
    /// Elements between entries, between rows and between heads.
    strides: [usize; 3],
    total: usize,
}

impl Array {
    fn index(&self, b: usize, row: usize, h: usize) -> usize {
        let [batch, rows, heads] = self.strides;
        b * batch + (self.margin + row) * rows + h * heads
    }

    fn at(&self, b: usize, row: usize, h: usize) -> Address {
        self.base.offset((self.index(b, row, h) * self.scalar.bytes()) as u64)
    }

    /// Returns where the array lies from row `start` on, for a description.
    pub fn rows(&self, start: usize) -> Rows {
        Rows { address: self.at(0, start, 0).0, batch_stride: self.strides[0] as u64 }
    }

    /// Returns where statistics lie from row `start` on, for a description.
    pub fn statistics(&self, start: usize) -> Statistics {
        let Rows { address, batch_stride } = self.rows(start);
        Statistics { address, batch_stride, head_stride: self.strides[2] as u64 }
    }

    /// Writes the rows of `range`, from values of all rows `[batch, rows, heads, dim]`.
    pub fn fill(&self, memory: &mut Memory, range: Range<usize>, values: &[f32]) {
        for b in 0..self.batch {
            for row in range.clone() {
                for h in 0..self.heads {
                    let start = ((b * self.rows + row) * self.heads + h) * self.dim;
                    self.scalar.write(memory, self.at(b, row, h), &values[start..][..self.dim]);
                }
            }
        }
    }

    /// Writes one row of one head.
    pub fn put(&self, memory: &mut Memory, (b, row, h): (usize, usize, usize), values: &[f32]) {
        self.scalar.write(memory, self.at(b, row, h), values);
    }

    /// Writes the only integer of a row.
    pub fn put_word(&self, memory: &mut Memory, (b, row): (usize, usize), word: i32) {
        memory.write_i32(self.at(b, row, 0), &[word]);
    }

    /// Writes the integers of a row.
    pub fn put_integers(&self, memory: &mut Memory, (b, row): (usize, usize), words: &[i32]) {
        memory.write_i32(self.at(b, row, 0), words);
    }

    /// Returns the four integers of a row.
    pub fn words(&self, memory: &Memory, (b, row): (usize, usize)) -> [i32; 4] {
        memory.read_i32(self.at(b, row, 0), 4).try_into().expect("four numbers")
    }

    /// Writes the first row of an entry as unsigned numbers.
    pub fn put_words(&self, memory: &mut Memory, b: usize, words: &[u32]) {
        let words: Vec<_> = words.iter().map(|&word| word as i32).collect();
        memory.write_i32(self.at(b, 0, 0), &words);
    }

    /// Returns one row of one head.
    pub fn get(&self, memory: &Memory, (b, row, h): (usize, usize, usize)) -> Vec<f32> {
        self.scalar.read(memory, self.at(b, row, h), self.dim)
    }

    /// Returns how often kernels stored each element of one row of one head.
    pub fn stores_of(&self, memory: &Memory, (b, row, h): (usize, usize, usize)) -> Vec<u32> {
        memory.stores(self.at(b, row, h), self.dim, self.scalar.bytes())
    }

    /// Returns all rows, `[batch, rows, heads, dim]`.
    pub fn read(&self, memory: &Memory) -> Vec<f32> {
        let place =
            |at: usize| (at / self.heads / self.rows, at / self.heads % self.rows, at % self.heads);
        (0..self.batch * self.rows * self.heads)
            .flat_map(|at| self.get(memory, place(at)))
            .collect()
    }

    fn audit(&self, memory: &Memory, expected: Stores) -> Result<(), String> {
        let stores = memory.stores(self.base, self.total, self.scalar.bytes());
        let mut inside = vec![false; self.total];
        for b in 0..self.batch {
            for row in 0..self.rows {
                for h in 0..self.heads {
                    inside[self.index(b, row, h)..][..self.dim].fill(true);
                }
            }
        }
        let wrong = |(&count, &inside): (&u32, &bool)| match expected {
            _ if !inside => count != 0,
            Stores::Never => count != 0,
            Stores::Exactly(times) => count != times,
            Stores::AtMost(times) => count > times,
        };
        match stores.iter().zip(&inside).position(wrong) {
            None => Ok(()),
            Some(at) => Err(format!(
                "element {at} of {} (in use: {}) stored {} times, expected {expected:?}",
                self.name, inside[at], stores[at]
            )),
        }
    }
}

/// Memory, its arrays and the launches that ran.
pub struct World {
    pub memory: Memory,
    seed: u64,
    pub change: Change,
    /// Number of launches of each description, without launches that prepare others.
    launched: Vec<usize>,
    /// Number of launches of each description that prepare others.
    ranged: Vec<usize>,
}

impl World {
    pub fn new(seed: u64, change: Change) -> World {
        let mut memory = Memory::new();
        memory.set_audit(true);
        World { memory, seed, change, launched: Vec::new(), ranged: Vec::new() }
    }

    fn array(
        &mut self,
        name: &'static str,
        scalar: Scalar,
        [batch, rows, heads, dim]: [usize; 4],
        margin: usize,
        rows_inside: bool,
    ) -> Array {
        let long =
            if rows_inside { (rows + 2 * margin).next_multiple_of(4) } else { rows + 2 * margin };
        let total = batch * long * heads * dim;
        let strides = if rows_inside {
            [heads * long, 1, long]
        } else {
            [long * heads * dim, heads * dim, dim]
        };
        let base = self.memory.allocate(name, (total * scalar.bytes()) as u64);
        Array { name, base, scalar, batch, rows, heads, dim, margin, strides, total }
    }

    /// Allocates an array `[batch, rows, heads, dim]`.
    pub fn rows(
        &mut self,
        name: &'static str,
        scalar: Scalar,
        sizes: [usize; 4],
        margin: usize,
    ) -> Array {
        self.array(name, scalar, sizes, margin, false)
    }

    /// Allocates statistics `[batch, heads, rows]`.
    pub fn statistics(
        &mut self,
        name: &'static str,
        [batch, rows, heads]: [usize; 3],
        margin: usize,
    ) -> Array {
        self.array(name, Scalar::F32, [batch, rows, heads, 1], margin, true)
    }

    /// Runs the launches of one description: all blocks, or the blocks that `blocks` picks of each.
    pub fn run(
        &mut self,
        launches: Vec<Launch>,
        blocks: impl Fn(&Launch) -> Option<Vec<[u32; 3]>>,
    ) -> Result<(), String> {
        let is_ranges = |launch: &Launch| prepares(launch.instance().kernel);
        let ranged = launches.iter().filter(|launch| is_ranges(launch)).count();
        self.ranged.push(ranged);
        self.launched.push(launches.len() - ranged);
        for mut launch in launches {
            let order = GridRun {
                seed: self.seed,
                blocks: blocks(&launch),
                operation_limit: 1 << 24,
                reach: reach_of(&launch.instance()),
                ..GridRun::default()
            };
            let change = match self.change {
                Change::Module(_) | Change::Launch(_) if is_ranges(&launch) => Change::None,
                Change::Ranges(change) if is_ranges(&launch) => Change::Module(change),
                Change::Ranges(_) => Change::None,
                change => change,
            };
            let outcome = match change {
                Change::None | Change::Ranges(_) => KERNELS.run(&launch, &order, &mut self.memory),
                Change::Before(look) => {
                    look(&launch, &order, &self.memory)?;
                    KERNELS.run(&launch, &order, &mut self.memory)
                }
                Change::Launch(change) => {
                    change(&mut launch);
                    KERNELS.run(&launch, &order, &mut self.memory)
                }
                Change::Module(change) => KERNELS.module(&launch.instance()).and_then(|module| {
                    let mut module = Module::clone(&module);
                    change(&mut module);
                    run_module(&module, &launch, &order, &mut self.memory)
                }),
            };
            outcome.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Returns the number of launches of all descriptions that do not prepare others.
    pub fn launches(&self) -> usize {
        self.launched.iter().sum()
    }

    /// Returns how often kernels store each number of the ranges.
    pub fn ranges(&self) -> Stores {
        let count = self.ranged.iter().sum::<usize>() as u32;
        match self.launched.iter().all(|&launches| launches == 1) {
            true => Stores::Exactly(count),
            false => Stores::AtMost(count),
        }
    }

    /// Returns how often steps store a running state. The last step writes results if `finished`.
    pub fn carries(&self, finished: bool) -> Stores {
        let count = (self.launches() as u32).saturating_sub(finished.into());
        match self.launched.iter().all(|&launches| launches == 1) {
            true => Stores::Exactly(count),
            false => Stores::AtMost(count),
        }
    }

    pub fn audit(&self, arrays: &[(&Array, Stores)]) -> Result<(), String> {
        arrays.iter().try_for_each(|(array, expected)| array.audit(&self.memory, *expected))
    }
}

/// Returns the blocks of tile `tile` of the `picked` heads (counted over all entries), numbered
/// like `block_of` in the kernels' source.
pub fn blocks_of(launch: &Launch, tile: i32, picked: &[i32]) -> Vec<[u32; 3]> {
    use burst_attention_kernels::record::Value::I32;
    let integer = |name| match launch.value(name) {
        Some(I32(value)) => value,
        other => panic!("{name} is {other:?}"),
    };
    let (rows, unit) = match launch.instance().kernel {
        Kernel::KeyGrads => ("kv_len", launch.instance().tile().keys),
        _ => ("q_len", launch.instance().tile().rows),
    };
    let tiles = (integer(rows) + unit - 1) / unit;
    let (section, reverse) = (integer("section"), integer("reverse"));
    let block = |&head: &i32| {
        let turned = if reverse == 1 { tiles - 1 - tile } else { tile };
        let pid = head / section * section * tiles + turned * section + head % section;
        [pid as u32, 0, 0]
    };
    picked.iter().map(block).collect()
}
