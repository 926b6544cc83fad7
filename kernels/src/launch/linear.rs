//! Linear attention over one device's tokens: what to compute, and the launches, which may run in
//! any order.

use std::ops::Range;

use serde::Deserialize;

use super::Launch;
use super::array::{self, Array};
use super::check::{check_columns, check_sharing};
use super::lower::launches;
use crate::element::Element;
use crate::error::LaunchError;
use crate::instances::{CHANNEL_WIDTH, Instance};
use crate::kernel::Kernel;
use crate::place::Statistics;
use crate::record::{Argument, Meaning, Operand, Size, Value};
use crate::target::Target;
use crate::tiles::width_of;
use crate::variant::{Decays, Variant};

/// Tokens of a tile; sums of log decays begin anew with each tile.
pub const LINEAR_TILE: usize = 64;

/// A cut of the tokens of all heads into parts, each of which has a state of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Tokens of a part, a multiple of [`LINEAR_TILE`]; the last part may have fewer.
    pub rows: usize,
    /// Whether the kernels go from the last token to the first.
    pub reverse: bool,
}

/// Computes the state that the tokens of each part leave, starting from zero. Arrays are row-major
/// without gaps.
///
/// ```text
/// Σ_j 2^(b_n − b_j) k_j v_jᵀ;   reverse: Σ_j 2^(b_j) k_j v_jᵀ
/// ```
///
/// The sums go over the tokens of a part; b_j is the sum of log decays, in base 2, since the start
/// of the part. With decays of columns of k, k has its decays to the end of each tile, in reverse
/// from its beginning.
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
    /// Columns of v, a multiple of 8 up to 256.
    pub value_dim: usize,
    /// Type of the activations.
    pub element: Element,
    /// The cut of the tokens into parts.
    pub part: Part,
    /// Keys `[batch, rows, kv_heads, head_dim]`.
    pub k: u64,
    /// Values `[batch, rows, kv_heads, value_dim]`.
    pub v: u64,
    /// What has a decay: heads, columns of k, or for outputs columns of v.
    #[serde(default)]
    pub decays: Decays,
    /// Float32 `[batch, heads, padded rows]`, of channels `[batch, padded rows, heads, columns]`:
    /// sums of log decays from each tile's first token on, in base 2. Behind the last token its sum
    /// is repeated.
    pub sums: u64,
    /// Result, float32 `[batch, parts, heads, head_dim, value_dim]`.
    pub state: u64,
}

/// Computes the outputs of tokens. Arrays are row-major without gaps.
///
/// ```text
/// o_i = Σ_(j≤i) 2^(b_i−b_j) (q_i·k_j) v_j + 2^(b_i) Sᵀ q_i
/// reverse: o_i = Σ_(j≥i) 2^(b_j−b_i) (q_i·k_j) v_j + 2^(b_n−b_i) Sᵀ q_i
/// ```
///
/// With decays of columns of k, q and k have their decays from the beginning and to the end of each
/// tile, in reverse to the end and from the beginning. With decays of columns of v, b is a vector
/// over these.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttend {
    /// Sizes, keys, values and sums, and the state at the beginning of each part, in reverse at its
    /// end.
    pub tokens: LinearState,
    /// Heads of q, a divisor of heads.
    pub q_heads: usize,
    /// Queries `[batch, rows, q_heads, head_dim]`.
    pub q: u64,
    /// Result `[batch, rows, heads, value_dim]`.
    pub o: u64,
    /// With decays of columns of k, float32 `[batch, padded rows, heads, 64]`: the result of
    /// [`ChannelPairs`], in reverse with each tile transposed.
    #[serde(default)]
    pub pairs: u64,
    /// With decays of columns of v, two arrays `[batch, rows, 6, heads, value_dim]`. The second holds
    /// decays in levels of blocks of m = 1, 2, 4 … 32 tokens: those between a token and the end of
    /// the even block of its pair of blocks. The first holds with these decays the rows of `dots`'
    /// first array in odd blocks and values in even blocks, in reverse the other way.
    #[serde(default)]
    pub levels: [u64; 2],
    /// An array `[batch, rows, q_heads, value_dim]`, and a float32 result `[batch, heads · tiles,
    /// padded rows]`: the products by row of this array with o, for each tile of columns. With decays
    /// of columns of v the result is `[batch, padded rows, heads, value_dim]`: the products of all
    /// elements, without what a token's own key and value give it.
    pub dots: Option<(u64, u64)>,
    /// Whether a token's own key and value give it nothing.
    pub strict: bool,
}

impl LinearState {
    /// Returns the number of parts.
    pub fn parts(&self) -> usize {
        self.rows.div_ceil(self.part.rows.max(1))
    }

    /// Returns the elements of the last dimension of `sums`.
    pub fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(LINEAR_TILE)
    }

    /// Returns the image of a kernel of linear attention for these sizes; `None` if the kernels do
    /// not take them.
    pub fn instance(&self, kernel: Kernel, target: Target) -> Option<Instance> {
        let width = width_of(self.head_dim.max(self.value_dim))?;
        let plain = Instance::plain(kernel, self.element, width, target);
        Some(Instance { variant: Variant::PLAIN.of_decays(self.decays), ..plain })
    }

    fn arrays(&self) -> [(Operand, u64); 4] {
        let LinearState { k, v, sums, state, .. } = *self;
        [(Operand::K, k), (Operand::V, v), (Operand::Sums, sums), (Operand::State, state)]
    }

    fn job(&self) -> LinearJob {
        let shape = (self.kv_heads, &[self.value_dim][..]);
        LinearJob::new(Kernel::LinearState, *self, shape, &self.arrays())
    }
}

impl LinearAttend {
    fn job(&self) -> LinearJob {
        let (other, dots) = self.dots.unwrap_or_default();
        let [k, v, sums, state] = self.tokens.arrays();
        let (q, o) = ((Operand::Q, self.q), (Operand::O, self.o));
        let (other, dots) = ((Operand::Other, other), (Operand::Dots, dots));
        let pairs = (Operand::Pairs, self.pairs);
        let [met, fades] = self.levels;
        let (met, fades) = ((Operand::Met, met), (Operand::Fades, fades));
        let arrays = [q, k, v, pairs, met, fades, sums, state, other, o, dots];
        let shape = (self.q_heads, &[self.tokens.value_dim][..]);
        let job = LinearJob::new(Kernel::LinearAttend, self.tokens, shape, &arrays);
        LinearJob { strict: self.strict, ..job }
    }
}

/// Computes the pairs of each tile under decays of channels.
///
/// ```text
/// pairs_ij = Σ_d q_id k_jd 2^(b_id − b_jd), j ≤ i
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelPairs {
    /// Sizes, and keys `[batch, rows, heads, head_dim]`. The other arrays are left alone.
    pub tokens: LinearState,
    /// Queries, laid out like keys.
    pub q: u64,
    /// Queries and keys with decays, as [`LinearAttend::levels`] has them.
    pub met: u64,
    /// Float32 result `[batch, padded rows, heads, 64]`: row i has the pairs of token i with the
    /// tokens of its tile.
    pub pairs: u64,
}

impl ChannelPairs {
    fn job(&self) -> LinearJob {
        let [k, ..] = self.tokens.arrays();
        let pairs = (Operand::Pairs, self.pairs);
        let arrays = [(Operand::Q, self.q), k, (Operand::Met, self.met), pairs];
        LinearJob::new(Kernel::ChannelPairs, self.tokens, (self.tokens.heads, &[]), &arrays)
    }
}

launches!(LinearState, LinearAttend, ChannelPairs);

/// Returns the tiles of `value_dim` columns on any target: `dots` has a row for each.
pub fn column_tiles(head_dim: usize, value_dim: usize) -> Option<usize> {
    let width = width_of(head_dim.max(value_dim))?;
    let (kernel, element, target) = (Kernel::LinearAttend, Element::Bf16, Target::Sm90);
    Some(value_dim.div_ceil(Instance::plain(kernel, element, width, target).tile().keys as usize))
}

/// A description of linear attention in terms of its kernel's arguments.
pub(super) struct LinearJob {
    kernel: Kernel,
    tokens: LinearState,
    q_heads: usize,
    strict: bool,
    /// Columns of arrays, whose tiles blocks share.
    columns: Vec<usize>,
    arrays: Vec<Array>,
}

/// The batch entries and parts that one launch works on.
#[derive(Debug, Clone)]
struct PartCut {
    batch: Range<usize>,
    parts: Range<usize>,
}

impl LinearJob {
    /// Returns a job with a number of heads of queries, and columns whose tiles blocks share.
    pub fn new(
        kernel: Kernel,
        tokens: LinearState,
        (q_heads, columns): (usize, &[usize]),
        arrays: &[(Operand, u64)],
    ) -> LinearJob {
        let (strict, of_arrays, columns) = (false, Vec::new(), columns.to_vec());
        let mut job = LinearJob { kernel, tokens, q_heads, strict, columns, arrays: of_arrays };
        job.arrays = arrays.iter().map(|&(operand, address)| job.array(operand, address)).collect();
        job
    }

    fn array(&self, operand: Operand, address: u64) -> Array {
        let head_stride = self.tokens.padded_rows() as u64;
        let at = Statistics { address, batch_stride: 0, head_stride };
        let size = |size| self.size(size);
        let image = (self.kernel, Variant::PLAIN.of_decays(self.tokens.decays));
        Array::new(image, operand, self.tokens.element, size, at).contiguous(size)
    }

    pub fn launches(&self, target: Target, limit: u64) -> Result<Vec<Launch>, LaunchError> {
        self.check()?;
        if self.tokens.batch == 0 || self.tokens.rows == 0 {
            return Ok(vec![]);
        }
        let Some(instance) = self.tokens.instance(self.kernel, target) else {
            unreachable!("a tile holds all columns that were accepted");
        };
        if !instance.is_made() {
            let expected = format!("at most {CHANNEL_WIDTH} columns where channels have decays");
            return Err(LaunchError::invalid("columns", expected, instance.width));
        }
        let launch = |cut: PartCut| {
            let value = |argument| self.value(argument, &cut);
            Launch::new(instance, self.blocks(&cut, instance) as u32, value)
        };
        self.cuts(limit, instance)?.into_iter().map(launch).collect()
    }

    fn check(&self) -> Result<(), LaunchError> {
        let LinearState { heads, kv_heads, head_dim, value_dim, part, .. } = self.tokens;
        check_sharing("kv_heads", kv_heads, heads)?;
        check_sharing("q_heads", self.q_heads, heads)?;
        check_columns(head_dim, value_dim)?;
        if part.rows == 0 || !part.rows.is_multiple_of(LINEAR_TILE) {
            let expected = format!("a multiple of {LINEAR_TILE}");
            return Err(LaunchError::invalid("rows of a part", expected, part.rows));
        }
        Ok(())
    }

    /// Returns one cut of all entries; or, where the limit is too small, cuts of one entry each
    /// with as many parts as are within the limit.
    fn cuts(&self, limit: u64, instance: Instance) -> Result<Vec<PartCut>, LaunchError> {
        let (batch, parts) = (self.tokens.batch, self.tokens.parts());
        let all = PartCut { batch: 0..batch, parts: 0..parts };
        if self.excess(&all, limit, instance).is_none() {
            return Ok(vec![all]);
        }
        let first = |parts| PartCut { batch: 0..1, parts: 0..parts };
        let fits = |&count: &usize| self.excess(&first(count), limit, instance).is_none();
        let Some(most) = (1..=parts).rev().find(fits) else {
            let (name, bytes) = self.excess(&first(1), limit, instance).unwrap_or_default();
            let rows = self.tokens.part.rows.min(self.tokens.rows);
            return Err(LaunchError::TooLarge { name, rows, bytes, limit });
        };
        let of_entry = |entry| {
            let starts = (0..parts).step_by(most);
            let end = move |start: usize| parts.min(start + most);
            starts.map(move |start| PartCut { batch: entry..entry + 1, parts: start..end(start) })
        };
        Ok((0..batch).flat_map(of_entry).collect())
    }

    /// Returns the name and bytes of an array that is too long, or the number of too many blocks.
    fn excess(
        &self,
        cut: &PartCut,
        limit: u64,
        instance: Instance,
    ) -> Option<(&'static str, u128)> {
        let mut given = self.arrays.iter().filter(|array| array.is_given());
        let too_long = given.find_map(|array| {
            let span = array.span(cut.batch.len(), self.rows(array.counts, cut).len());
            (span >= u128::from(limit)).then_some((array.name, span))
        });
        let blocks = self.blocks(cut, instance);
        too_long.or((blocks > i32::MAX as u128).then_some(("blocks", blocks)))
    }

    fn blocks(&self, cut: &PartCut, instance: Instance) -> u128 {
        let of_columns = |dim: &usize| dim.div_ceil(instance.tile().keys as usize);
        let columns: usize = self.columns.iter().map(of_columns).sum();
        let counts = [self.tokens.heads, cut.batch.len(), cut.parts.len(), columns.max(1)];
        counts.iter().map(|&count| count as u128).product()
    }

    /// Returns the rows of a cut in an array whose rows `counts` counts.
    fn rows(&self, counts: Option<Size>, cut: &PartCut) -> Range<usize> {
        let LinearState { rows, part, .. } = self.tokens;
        let (start, end) = (cut.parts.start * part.rows, rows.min(cut.parts.end * part.rows));
        match counts {
            Some(Size::Parts) => cut.parts.clone(),
            Some(Size::PaddedRows) => start..end.next_multiple_of(LINEAR_TILE),
            _ => start..end,
        }
    }

    /// Returns a size of the whole job.
    fn size(&self, size: Size) -> usize {
        let tokens = &self.tokens;
        match size {
            Size::Batch => tokens.batch,
            Size::QLen => tokens.rows,
            Size::PaddedRows => tokens.padded_rows(),
            Size::Parts => tokens.parts(),
            Size::Heads => tokens.heads,
            Size::KvHeads => tokens.kv_heads,
            Size::QHeads => self.q_heads,
            Size::DotHeads => {
                let tiles = |&dim: &usize| column_tiles(tokens.head_dim.max(dim), dim);
                // Sizes without tiles are refused before any launch.
                let tiles = self.columns.iter().map(|dim| tiles(dim).unwrap_or(1));
                tokens.heads * tiles.sum::<usize>()
            }
            Size::HeadDim => tokens.head_dim,
            Size::ValueDim => tokens.value_dim,
            other => unreachable!("linear attention has no {other:?}"),
        }
    }

    /// Returns the value of an argument in the launch of a cut.
    fn value(&self, argument: &'static Argument, cut: &PartCut) -> Result<Value, LaunchError> {
        let LinearState { head_dim, value_dim, part, element, .. } = self.tokens;
        let rows = |array: &Array| self.rows(array.counts, cut);
        let number = match argument.meaning {
            Meaning::Size(Size::Batch) => cut.batch.len(),
            Meaning::Size(size @ (Size::QLen | Size::PaddedRows | Size::Parts)) => {
                self.rows(Some(size), cut).len()
            }
            Meaning::Size(size) => self.size(size),
            Meaning::StateSize => head_dim * value_dim,
            Meaning::TransferSize => head_dim * head_dim,
            Meaning::Strict => self.strict.into(),
            Meaning::PartTiles => part.rows / LINEAR_TILE,
            Meaning::Reverse => part.reverse.into(),
            Meaning::Bounded => (element == Element::F16).into(),
            meaning => {
                let value = array::value(&self.arrays, meaning, &cut.batch, rows);
                let none = || unreachable!("{} has no {meaning:?}", self.kernel.name());
                return argument.value(value.unwrap_or_else(none));
            }
        };
        argument.value(number as u64)
    }
}
