//! Decode over pages: what to compute, and its launches, which must run in order.

mod values;

use serde::Deserialize;

use super::Launch;
use super::check::{check_columns, check_latents};
use crate::element::Element;
use crate::error::LaunchError;
use crate::instances::Instance;
use crate::kernel::Kernel;
use crate::record::Operand;
use crate::scores::ScoreNumbers;
use crate::target::Target;
use crate::tiles::{LATENT_PART, LATENT_WIDTH, page_tile, width_of};
use crate::variant::Variant;

/// Units with more rows than this take the tiles of many rows.
pub const FEW_ROWS: usize = 16;
/// The rows of these tiles, on any target at most.
pub const MANY_ROWS: usize = 64;
/// The most equal runs on a device of any target: each multiprocessor holds up to two blocks, and
/// blocks take up to two runs.
pub const MOST_RUNS: usize = {
    let (mut most, mut index) = (0, 0);
    while index < Target::ALL.len() {
        let runs = 4 * Target::ALL[index].multiprocessors();
        most = if runs > most { runs } else { most };
        index += 1;
    }
    most
};
/// What a page, and each other array, must have fewer elements than: offsets within it are 32-bit on
/// the device.
pub const PAGE_ELEMENTS: usize = 1 << 30;

/// How the keys of a unit and a key head are cut into pieces, whose states are then added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Pieces are cut so that all blocks of a device have about equally many keys, from this many
    /// equal runs of the slices of all units.
    Runs(usize),
    /// Every slice is a piece. A pair has at most this many.
    Slices(usize),
}

impl Split {
    /// Returns the number of slots of pieces.
    fn slots(self, pairs: usize) -> usize {
        match self {
            Split::Runs(runs) => runs + pairs,
            Split::Slices(most) => most * pairs,
        }
    }
}

/// Computes for units of query rows the softmax over keys in pages. Arrays are row-major without
/// gaps.
///
/// ```text
/// s_rj = cap(softmax_scale · q_r·k_j) + slope_r · (position of j − position_r),  begin_r ≤ j < end_r
/// o_r = Σ_j e^(s_rj − lse_r) v_j;   lse_r = log Σ_j e^(s_rj)
/// ```
///
/// Key j of a source is row j mod `page_rows` of the page whose id stands at j / `page_rows` in the
/// source's row of the page table. Its position is (j div I · P + rank) · I + j mod I, with I =
/// `interleave` and P = `world_size`. A row that sees nothing has o = 0 and lse = −∞.
///
/// A page holds ⌈`page_rows` / tile⌉ tiles of [`Decode::page_tile`] keys, the last of which may be
/// cut, so tile t of a source lies in its page t div that number. Slices are `slice_tiles`
/// consecutive tiles, counted from the source's first key. The slices of a unit are those that hold
/// its tiles.
///
/// Keys of a page id out of range are hidden. An id is read only where a tile of a unit lies in the
/// page. The keys that a row sees lie within the unit's tiles and the source.
///
/// With `values_in_keys` the values are the first `value_dim` columns of the keys, and there is no
/// array of values.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decode {
    /// Units.
    pub units: usize,
    /// Query rows of a unit and a key head.
    pub rows: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Columns of queries and keys, a multiple of 8 up to 256, with `values_in_keys` up to 576.
    pub head_dim: usize,
    /// Columns of values and results, a multiple of 8 up to 256, with `values_in_keys` up to 512.
    pub value_dim: usize,
    /// Whether the values are the first columns of the keys.
    pub values_in_keys: bool,
    /// With `values_in_keys`: whether all weights are in memory before they meet values, which takes
    /// fewer products, and room for an element for each row and key of its source.
    pub weights_in_memory: bool,
    /// Type of queries, keys and values.
    pub element: Element,
    /// Pages of all sources.
    pub pages: usize,
    /// Rows of a page: any number where a source is one page, otherwise a power of two.
    pub page_rows: usize,
    /// Sources.
    pub sources: usize,
    /// Pages of a source.
    pub source_pages: usize,
    /// Tiles of a slice; with [`Split::Runs`] as many as a block takes at once,
    /// [`Decode::step_tiles`].
    pub slice_tiles: usize,
    /// The cut into pieces.
    pub split: Split,
    /// Factor on q·k, positive.
    pub softmax_scale: f32,
    /// Soft cap of the scaled scores; 0 for none.
    pub soft_cap: f32,
    /// Consecutive positions that a device holds.
    pub interleave: i64,
    /// Devices that share the keys.
    pub world_size: i64,
    /// Addresses of [`Decode::ARRAYS`]; 0 for values, and for counted positions and slopes, where
    /// there are none.
    pub arrays: [u64; Decode::ARRAYS.len()],
    /// A workspace of [`Decode::workspace_bytes`] bytes, at a multiple of 16.
    pub workspace: u64,
}

impl Decode {
    /// The arrays of a call, as the launch records describe them.
    pub const ARRAYS: [Operand; 11] = {
        use Operand::{
            CountedPositions, Intervals, K, Lse, O, PageTable, Q, Rank, Slopes, Units, V,
        };
        [Q, K, V, PageTable, Units, Intervals, Rank, CountedPositions, Slopes, O, Lse]
    };

    /// Returns the number of equal runs for a device of `target`. If few pairs are cut, all pieces
    /// run at once; otherwise pieces are short, so that the last ones end together.
    pub fn runs(&self, target: Target) -> usize {
        let pairs = self.pairs(target);
        let of_one = self.pieces(target).tile().blocks as usize;
        let slots = of_one * target.multiprocessors() / self.blocks_of_slot();
        if 2 * pairs <= slots { slots - pairs } else { 2 * slots }
    }

    /// Returns the number of blocks that compute the piece in a slot, each for some columns of the
    /// values.
    fn blocks_of_slot(&self) -> usize {
        if self.values_in_keys { self.value_dim.div_ceil(LATENT_PART as usize) } else { 1 }
    }

    /// Returns the variant of the image.
    fn variant(&self) -> Variant {
        if self.values_in_keys {
            return Variant::PLAIN;
        }
        let plain = page_tile(Variant::PLAIN, self.width());
        let is_short = self.source_pages > 1 && self.page_rows < plain as usize;
        match self.width() {
            256 => Variant::PLAIN,
            _ if is_short => Variant::SHORT_PAGES,
            _ => Variant { many_rows: self.rows > FEW_ROWS, ..Variant::PLAIN },
        }
    }

    fn width(&self) -> i32 {
        if self.values_in_keys {
            return LATENT_WIDTH;
        }
        // Sizes without tiles are refused before any launch.
        width_of(self.head_dim.max(self.value_dim)).unwrap_or(256)
    }

    /// Returns the keys of a tile within a page.
    pub fn page_tile(&self) -> usize {
        page_tile(self.variant(), self.width()) as usize
    }

    /// Returns the tiles that a block takes at once.
    pub fn step_tiles(&self) -> usize {
        if self.variant().short_pages { 4 } else { 1 }
    }

    /// Returns the query rows of a tile.
    pub fn tile_rows(&self, target: Target) -> usize {
        self.pieces(target).tile().rows as usize
    }

    /// Returns the number of pairs of a unit, a key head and a tile of rows.
    pub fn pairs(&self, target: Target) -> usize {
        self.pairs_of(self.tile_rows(target))
    }

    fn pairs_of(&self, tile_rows: usize) -> usize {
        self.units * self.kv_heads * self.rows.div_ceil(tile_rows)
    }

    /// Returns the number of slots of pieces.
    pub fn slots(&self, target: Target) -> usize {
        self.split.slots(self.pairs(target))
    }

    /// Returns the keys of a source, with each page up to the end of its last tile.
    fn capacity(&self) -> usize {
        self.source_pages * self.page_rows.next_multiple_of(self.page_tile())
    }

    /// Returns the elements of the weights that go through memory, and of each of both arrays of
    /// their tiles.
    fn weights(&self) -> [usize; 2] {
        if !self.weights_in_memory {
            return [0, 0];
        }
        let heads = self.units * self.kv_heads;
        let tiles = self.capacity() / self.page_tile();
        [heads * self.rows * self.capacity(), heads * tiles * self.padded_rows()]
    }

    fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(MANY_ROWS)
    }

    /// Returns the bytes of the workspace.
    pub fn workspace_bytes(&self, target: Target) -> u64 {
        let pieces = self.slots(target) * self.tile_rows(target) * (self.value_dim + 2) * 4;
        let [weights, tiles] = self.weights();
        (pieces + 8 * tiles + weights * self.element.bytes()) as u64
    }

    /// Returns the bytes of a workspace that is large enough with the runs and tiles of any target.
    pub fn most_workspace_bytes(&self) -> u64 {
        let split = match self.split {
            Split::Runs(_) => Split::Runs(MOST_RUNS),
            slices => slices,
        };
        let bytes = Target::ALL.map(|target| Decode { split, ..*self }.workspace_bytes(target));
        bytes.into_iter().max().unwrap_or_default()
    }

    /// Returns the image that computes pieces.
    fn pieces(&self, target: Target) -> Instance {
        let Decode { element, .. } = *self;
        let (kernel, width) = match (self.values_in_keys, self.weights_in_memory) {
            (false, _) => (Kernel::Decode, self.width()),
            (true, false) => (Kernel::DecodeLatents, LATENT_WIDTH),
            (true, true) => (Kernel::LatentValues, LATENT_PART),
        };
        Instance { kernel, variant: self.variant(), element, width, target }
    }

    /// Returns the launches that compute it, to be run in order on a device of `target`.
    ///
    /// # Errors
    /// [`LaunchError`], with the expected value and the value that came.
    pub fn launches(&self, target: Target) -> Result<Vec<Launch>, LaunchError> {
        self.check()?;
        if self.units == 0 || self.rows == 0 {
            return Ok(vec![]);
        }
        let launch = |instance: Instance, blocks: usize, cut: Split| {
            let arrays = self.arrays(instance);
            let value = |argument| self.value(argument, &arrays, cut, target);
            Launch::new(instance, blocks as u32, value)
        };
        let mut launches = vec![];
        if self.weights_in_memory {
            let (kernel, width) = (Kernel::LatentWeights, LATENT_WIDTH);
            let weights = Instance { kernel, width, ..self.pieces(target) };
            let pairs = self.pairs_of(weights.tile().rows as usize);
            // As many blocks as compute pieces.
            let cut = match self.split {
                Split::Runs(runs) => Split::Runs(runs * self.blocks_of_slot()),
                slices => slices,
            };
            launches.push(launch(weights, cut.slots(pairs), cut)?);
        }
        let blocks = self.slots(target) * self.blocks_of_slot();
        launches.push(launch(self.pieces(target), blocks, self.split)?);
        let merge = Kernel::DecodeMerge;
        let mut widths = merge.spec().widths.iter().copied();
        let columns = widths.find(|&width| self.value_dim <= width as usize).unwrap_or(256);
        let merge = Instance::plain(merge, merge.elements()[0], columns, target);
        let rows = self.units * self.kv_heads * self.rows;
        launches.push(launch(merge, rows, self.split)?);
        Ok(launches)
    }

    /// Checks sizes and numbers.
    ///
    /// # Errors
    /// [`LaunchError`], with the expected value and the value that came.
    pub fn check(&self) -> Result<(), LaunchError> {
        let Decode { head_dim, value_dim, kv_heads, page_rows, source_pages, .. } = *self;
        if self.values_in_keys {
            check_latents(head_dim, value_dim)?;
        } else {
            check_columns(head_dim, value_dim)?;
        }
        let least_one = [
            ("kv_heads", kv_heads),
            ("pages", self.pages),
            ("page_rows", page_rows),
            ("sources", self.sources),
            ("source_pages", source_pages),
        ];
        for (name, count) in least_one {
            if count == 0 {
                return Err(LaunchError::invalid(name, "at least 1", count));
            }
        }
        if source_pages > 1 && !page_rows.is_power_of_two() {
            let expected = "a power of two where a source has several pages";
            return Err(LaunchError::invalid("page_rows", expected, page_rows));
        }
        let (split, unit) = match self.split {
            Split::Runs(runs) => (runs, self.slice_tiles == self.step_tiles()),
            Split::Slices(most) => (most, self.slice_tiles.is_multiple_of(self.step_tiles())),
        };
        if split == 0 {
            return Err(LaunchError::invalid("split", "at least 1", split));
        }
        if !unit || self.slice_tiles == 0 {
            let expected = format!("{}, or with slices a multiple", self.step_tiles());
            return Err(LaunchError::invalid("slice_tiles", expected, self.slice_tiles));
        }
        self.scores().check()?;
        let positive = self.interleave > 0 && self.world_size > 0;
        if !positive {
            let got = format!("{} and {}", self.interleave, self.world_size);
            return Err(LaunchError::invalid("interleave and world_size", "at least 1", got));
        }
        if self.weights_in_memory && !self.values_in_keys {
            let expected = "false without values_in_keys";
            return Err(LaunchError::invalid("weights_in_memory", expected, true));
        }
        let columns = head_dim.max(value_dim);
        let [weights, of_tiles] = self.weights();
        let counts = [
            ("elements of weights", weights as u128),
            ("elements of tiles", of_tiles as u128),
            ("elements of a page", page_rows as u128 * (kv_heads * columns) as u128),
            ("elements of q and o", (self.units * kv_heads * self.rows * columns) as u128),
            ("elements of pieces", u128::from(self.most_workspace_bytes() / 4)),
            ("ids of pages", self.sources as u128 * source_pages as u128),
            ("pages", self.pages as u128),
        ];
        for (name, count) in counts {
            if count >= PAGE_ELEMENTS as u128 {
                return Err(LaunchError::invalid(name, "fewer than 2^30", count));
            }
        }
        Ok(())
    }

    fn scores(&self) -> ScoreNumbers {
        ScoreNumbers { softmax_scale: self.softmax_scale, soft_cap: self.soft_cap }
    }
}
