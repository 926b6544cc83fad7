//! Linear attention over one device's tokens: what is computed, and its launches.

use serde::Deserialize;

use super::error::LaunchError;
use super::{Launch, MAX_VIEW_BYTES};
use crate::instances::{Element, Instance, Kernel, Target, width_of};
use crate::record::{Argument, Value};

/// Tokens of a tile; sums of log decays begin anew with each.
pub const LINEAR_TILE: usize = 64;

/// How the tokens of all heads are cut into parts, each of which has a state of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Tokens of a part, a multiple of [`LINEAR_TILE`]; the last may have fewer.
    pub rows: usize,
    /// From the last token to the first?
    pub reverse: bool,
}

/// The state that each part's tokens leave, from zero. Arrays are row-major without gaps.
///
/// ```text
/// Σ_j 2^(b_n − b_j) k_j v_jᵀ;   reverse: Σ_j 2^(b_j) k_j v_jᵀ
/// ```
///
/// over the tokens of a part, with b_j the sum of log decays, in base 2, since the part began.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearState {
    /// Batch entries.
    pub batch: usize,
    /// Tokens.
    pub rows: usize,
    /// Heads of states and decays.
    pub heads: usize,
    /// Heads of k and v, a divisor of heads.
    pub kv_heads: usize,
    /// Columns of k, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Columns of v, likewise.
    pub value_dim: usize,
    /// Type of the activations.
    pub element: Element,
    /// How tokens are cut.
    pub part: Part,
    /// `[batch, rows, kv_heads, head_dim]`
    pub k: u64,
    /// `[batch, rows, kv_heads, value_dim]`
    pub v: u64,
    /// Float32 `[batch, heads, padded rows]`: sums of log decays since each tile's first token, that
    /// included, in base 2; behind the last token as that.
    pub sums: u64,
    /// Result, float32 `[batch, parts, heads, head_dim, value_dim]`.
    pub state: u64,
}

/// What tokens get. Arrays are row-major without gaps; those of [`LinearState`] are as there.
///
/// ```text
/// o_i = Σ_(j≤i) 2^(b_i−b_j) (q_i·k_j) v_j + 2^(b_i) Sᵀ q_i
/// reverse: o_i = Σ_(j≥i) 2^(b_j−b_i) (q_i·k_j) v_j + 2^(b_n−b_i) Sᵀ q_i
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttend {
    /// Sizes, keys, values and sums, and the state where each part begins, in reverse where it
    /// ends.
    pub tokens: LinearState,
    /// Heads of q, a divisor of heads.
    pub q_heads: usize,
    /// `[batch, rows, q_heads, head_dim]`
    pub q: u64,
    /// `[batch, rows, heads, value_dim]`
    pub o: u64,
    /// `[batch, rows, q_heads, value_dim]` and, float32 `[batch, heads · tiles, padded rows]`, where
    /// the products by row of that with o go, of each tile of columns.
    pub dots: Option<(u64, u64)>,
}

impl LinearState {
    /// The launches that compute it, to be run in any order on a device of `target`.
    ///
    /// # Errors
    /// [`LaunchError`], with what was expected and what came.
    pub fn launches(&self, target: Target) -> Result<Vec<Launch>, LaunchError> {
        self.launches_within(target, MAX_VIEW_BYTES)
    }

    /// As [`launches`](Self::launches), with every view below `limit` bytes too.
    ///
    /// # Errors
    /// [`LaunchError`], with what was expected and what came.
    pub fn launches_within(&self, target: Target, limit: u64) -> Result<Vec<Launch>, LaunchError> {
        let LinearState { k, v, sums, state, .. } = *self;
        let arrays = [("k", k), ("v", v), ("sums", sums), ("state", state)];
        self.job(Kernel::LinearState, self.kv_heads, &arrays).launches(target, limit)
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        self.rows.div_ceil(self.part.rows.max(1))
    }

    /// Elements of the last dimension of `sums`.
    pub fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(LINEAR_TILE)
    }

    /// The image that a kernel of linear attention needs for these sizes, if they are any that it
    /// takes.
    pub fn instance(&self, kernel: Kernel, target: Target) -> Option<Instance> {
        let width = width_of(self.head_dim.max(self.value_dim))?;
        Some(Instance::plain(kernel, self.element, width, target))
    }

    fn job(&self, kernel: Kernel, q_heads: usize, arrays: &[(&'static str, u64)]) -> Job {
        Job { tokens: *self, kernel, q_heads, arrays: arrays.to_vec() }
    }
}

impl LinearAttend {
    /// The launches that compute it, to be run in any order on a device of `target`.
    ///
    /// # Errors
    /// [`LaunchError`], with what was expected and what came.
    pub fn launches(&self, target: Target) -> Result<Vec<Launch>, LaunchError> {
        self.launches_within(target, MAX_VIEW_BYTES)
    }

    /// As [`launches`](Self::launches), with every view below `limit` bytes too.
    ///
    /// # Errors
    /// [`LaunchError`], with what was expected and what came.
    pub fn launches_within(&self, target: Target, limit: u64) -> Result<Vec<Launch>, LaunchError> {
        let LinearState { k, v, sums, state, .. } = self.tokens;
        let (other, dots) = self.dots.unwrap_or_default();
        let arrays = [
            ("q", self.q),
            ("k", k),
            ("v", v),
            ("sums", sums),
            ("state", state),
            ("other", other),
            ("o", self.o),
            ("dots", dots),
        ];
        self.tokens.job(Kernel::LinearAttend, self.q_heads, &arrays).launches(target, limit)
    }
}

/// Tiles of `value_dim` columns on any target: `dots` has a row for each.
pub fn column_tiles(head_dim: usize, value_dim: usize) -> Option<usize> {
    let width = width_of(head_dim.max(value_dim))?;
    let (kernel, element, target) = (Kernel::LinearAttend, Element::Bf16, Target::Sm90);
    Some(value_dim.div_ceil(Instance::plain(kernel, element, width, target).tile().keys as usize))
}

/// Either description, in terms of the kernel's arguments.
struct Job {
    tokens: LinearState,
    kernel: Kernel,
    q_heads: usize,
    arrays: Vec<(&'static str, u64)>,
}

/// Batch entries and parts of a launch.
#[derive(Debug, Clone, Copy)]
struct Cut {
    entry: usize,
    entries: usize,
    part: usize,
    parts: usize,
}

/// How an array goes on, in elements.
struct Steps {
    bytes: usize,
    entry: usize,
    part: usize,
    /// From the first element to the end of what a launch uses of one entry.
    extent: usize,
}

impl Job {
    fn launches(&self, target: Target, limit: u64) -> Result<Vec<Launch>, LaunchError> {
        self.check()?;
        if self.tokens.batch == 0 || self.tokens.rows == 0 {
            return Ok(vec![]);
        }
        let Some(instance) = self.tokens.instance(self.kernel, target) else {
            unreachable!("a tile holds all columns that were accepted");
        };
        let cuts = self.cuts(instance, limit)?;
        cuts.into_iter().map(|cut| self.launch(instance, cut)).collect()
    }

    fn check(&self) -> Result<(), LaunchError> {
        let LinearState { heads, kv_heads, head_dim, value_dim, part, .. } = self.tokens;
        let whole = [("kv_heads", kv_heads), ("q_heads", self.q_heads)];
        for (name, count) in whole {
            if count == 0 || !heads.is_multiple_of(count) {
                let expected = format!("a divisor of heads ({heads})");
                return Err(LaunchError::invalid(name, expected, count));
            }
        }
        for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if !dim.is_multiple_of(8) || !(8..=256).contains(&dim) {
                let expected = "a multiple of 8 from 8 to 256 (pad the columns with zeros)";
                return Err(LaunchError::invalid(name, expected, dim));
            }
        }
        if part.rows == 0 || !part.rows.is_multiple_of(LINEAR_TILE) {
            let expected = format!("a multiple of {LINEAR_TILE}");
            return Err(LaunchError::invalid("rows of a part", expected, part.rows));
        }
        Ok(())
    }

    /// All entries at once, or one at a time, or as many parts of one as are within the limit.
    fn cuts(&self, instance: Instance, limit: u64) -> Result<Vec<Cut>, LaunchError> {
        let (batch, parts) = (self.tokens.batch, self.tokens.parts());
        let fits = |cut: &Cut| self.excess(instance, cut, limit).is_none();
        let all = Cut { entry: 0, entries: batch, part: 0, parts };
        if fits(&all) {
            return Ok(vec![all]);
        }
        let of_one = |parts| Cut { entry: 0, entries: 1, part: 0, parts };
        let Some(most) = (1..=parts).rev().find(|&count| fits(&of_one(count))) else {
            let (name, bytes) = self.excess(instance, &of_one(1), limit).unwrap_or_default();
            let rows = self.tokens.part.rows.min(self.tokens.rows);
            return Err(LaunchError::TooLarge { name, rows, bytes, limit });
        };
        let of_entry = |entry| {
            let starts = (0..parts).step_by(most);
            starts.map(move |part| Cut { entry, entries: 1, part, parts: most.min(parts - part) })
        };
        Ok((0..batch).flat_map(of_entry).collect())
    }

    /// An array that is too long, or the name and number of too many blocks.
    fn excess(&self, instance: Instance, cut: &Cut, limit: u64) -> Option<(&'static str, u128)> {
        let too_long = self.arrays.iter().find_map(|&(name, address)| {
            let Steps { bytes, entry, extent, .. } = self.steps(name, cut, instance);
            let elements = (cut.entries as u128 - 1) * entry as u128 + extent as u128;
            let span = elements * bytes as u128;
            (address != 0 && span >= u128::from(limit.min(MAX_VIEW_BYTES))).then_some((name, span))
        });
        let blocks = self.blocks(instance, cut);
        too_long.or((blocks > i32::MAX as u128).then_some(("blocks", blocks)))
    }

    fn blocks(&self, instance: Instance, cut: &Cut) -> u128 {
        let columns = self.columns(instance);
        [self.tokens.heads, cut.entries, cut.parts, columns].iter().map(|&n| n as u128).product()
    }

    /// Tiles of value columns.
    fn columns(&self, instance: Instance) -> usize {
        self.tokens.value_dim.div_ceil(instance.tile().keys as usize)
    }

    /// Tokens of a cut.
    fn rows(&self, cut: &Cut) -> usize {
        let first = cut.part * self.tokens.part.rows;
        (self.tokens.rows - first).min(cut.parts * self.tokens.part.rows)
    }

    fn steps(&self, name: &str, cut: &Cut, instance: Instance) -> Steps {
        let LinearState { rows, heads, kv_heads, head_dim, value_dim, part, .. } = self.tokens;
        let padded = self.tokens.padded_rows();
        let tokens = |heads: usize, dim: usize| {
            let row = heads * dim;
            Steps {
                bytes: 2,
                entry: rows * row,
                part: part.rows * row,
                extent: self.rows(cut) * row,
            }
        };
        let by_head = |heads: usize| Steps {
            bytes: 4,
            entry: heads * padded,
            part: part.rows,
            extent: (heads - 1) * padded + self.rows(cut).next_multiple_of(LINEAR_TILE),
        };
        match name {
            "q" => tokens(self.q_heads, head_dim),
            "k" => tokens(kv_heads, head_dim),
            "v" => tokens(kv_heads, value_dim),
            "other" => tokens(self.q_heads, value_dim),
            "o" => tokens(heads, value_dim),
            "sums" => by_head(heads),
            "dots" => by_head(heads * self.columns(instance)),
            _ => {
                let states = heads * head_dim * value_dim;
                let entry = self.tokens.parts() * states;
                Steps { bytes: 4, entry, part: states, extent: cut.parts * states }
            }
        }
    }

    fn launch(&self, instance: Instance, cut: Cut) -> Result<Launch, LaunchError> {
        let arguments = self.kernel.arguments().iter();
        let values = arguments.map(|argument| self.value(argument, instance, &cut));
        let values = values.collect::<Result<_, _>>()?;
        let grid = [self.blocks(instance, &cut) as u32, 1, 1];
        let mut launch = Launch { instance, grid, values };
        launch.stand_in();
        launch.check()?;
        Ok(launch)
    }

    fn value(
        &self,
        argument: &Argument,
        instance: Instance,
        cut: &Cut,
    ) -> Result<Value, LaunchError> {
        let LinearState { heads, kv_heads, head_dim, value_dim, part, element, .. } = self.tokens;
        let name = argument.name;
        let given = |name: &str| self.arrays.iter().find(|array| array.0 == name);
        if let Some(&(_, address)) = given(name) {
            let Steps { bytes, entry, part, .. } = self.steps(name, cut, instance);
            let offset = (cut.entry * entry + cut.part * part) * bytes;
            return Ok(Value::Pointer(if address == 0 { 0 } else { address + offset as u64 }));
        }
        let integer = match name {
            "batch" => cut.entries,
            "rows" => self.rows(cut),
            "padded_rows" => self.rows(cut).next_multiple_of(LINEAR_TILE),
            "heads" => heads,
            "q_heads" => self.q_heads,
            "kv_heads" => kv_heads,
            "dot_heads" => heads * self.columns(instance),
            "head_dim" => head_dim,
            "value_dim" => value_dim,
            "sums_head_stride" => self.tokens.padded_rows(),
            "state_stride" => head_dim * value_dim,
            "parts" => cut.parts,
            "part_tiles" => part.rows / LINEAR_TILE,
            "reverse" => part.reverse.into(),
            "bounded" => (element == Element::F16).into(),
            "has_other" | "has_dots" => given("dots").is_some_and(|array| array.1 != 0).into(),
            stride => {
                let Some(array) = stride.strip_suffix("_batch_stride") else {
                    unreachable!("{} has no argument {stride}", self.kernel.name())
                };
                self.stride(array, cut, instance)
            }
        };
        let too_large = |_| LaunchError::invalid(name, format!("at most {}", i32::MAX), integer);
        i32::try_from(integer).map(Value::I32).map_err(too_large)
    }

    /// Elements between entries; of a single entry, where it may be beyond 32 bits, any that fits.
    fn stride(&self, array: &str, cut: &Cut, instance: Instance) -> usize {
        let Steps { entry, extent, .. } = self.steps(array, cut, instance);
        if cut.entries > 1 { entry } else { extent.next_multiple_of(16) }
    }
}
