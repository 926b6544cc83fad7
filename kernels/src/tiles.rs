//! The tile shape of each image, chosen by what the compiler makes of it: no spills first, then, on
//! sm_90, the cycles that the model gives its main loops. `quality.tsv` and `loops.tsv` have the
//! outcome.

use crate::target::Target::{self, Sm80, Sm90, Sm100, Sm103, Sm120};
use crate::variant::{Decays, FeatureSet, Variant};

/// Columns that a tile can hold. A launch takes the narrowest tile that holds all columns of its
/// arrays.
pub const WIDTHS: [i32; 3] = [64, 128, 256];

/// Blocks of 64 rows that the kernels of segment ranges and of mask runs compare at once, and that
/// the kernel of mask rows packs at once.
pub(crate) const ROW_BLOCKS: i32 = 32;

/// Columns of keys that a tile of decode over latents can hold, of which the first
/// [`LATENT_VALUES`] are the values.
pub const LATENT_WIDTH: i32 = 576;
/// Columns of values that such a tile can hold, in two parts of [`LATENT_PART`].
pub const LATENT_VALUES: i32 = 2 * LATENT_PART;
/// Columns of values of a block in decode over latents.
pub(crate) const LATENT_PART: i32 = 256;

/// Returns the narrowest tile width that holds `columns` columns.
pub fn width_of(columns: usize) -> Option<i32> {
    WIDTHS.into_iter().find(|&width| columns <= width as usize)
}

/// Shape of a block's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Query rows; the rows of a kernel that has no keys; tokens.
    pub rows: i32,
    /// Key rows; 0 where a kernel has none. In linear attention columns of values.
    pub keys: i32,
    /// Warps that compute, besides the warps that load.
    pub warps: i32,
    /// Blocks that a multiprocessor should hold at once.
    pub blocks: i32,
}

const fn tile(rows: i32, keys: i32, warps: i32) -> TileShape {
    TileShape { rows, keys, warps, blocks: 1 }
}

/// Tiles of the forward pass.
pub(crate) fn forward(variant: Variant, target: Target, width: i32) -> TileShape {
    // With all features a block keeps more tiles of pairs at once.
    let all = variant.is_general();
    match (target, width) {
        (Sm100 | Sm103, 64) if all => tile(128, 64, 8),
        (Sm100 | Sm103, 128) if all => tile(128, 32, 8),
        (Sm100 | Sm103, 64 | 128) if variant.has(FeatureSet::VISIBLE) => tile(64, 128, 8),
        (Sm80, 64) => tile(64, 128, 4),
        (Sm80, 128) => tile(64, 64, 4),
        (Sm80, _) => tile(64, 32, 4),
        (_, 64) => tile(128, 128, 8),
        (Sm120, 256) => tile(64, 32, 8),
        (Sm100 | Sm103, 128) => tile(128, 128, 8),
        (Sm100 | Sm103, _) => tile(64, 64, 8),
        _ => tile(128, 64, 8),
    }
}

/// Tiles of dk and dv.
pub(crate) fn key_grads(variant: Variant, target: Target, width: i32) -> TileShape {
    let all = variant.is_general();
    let has = |feature| !all && variant.has(feature);
    let fused = !all && variant.fused;
    let visible = variant.has(FeatureSet::VISIBLE);
    match (target, width) {
        (Sm90, 64) if all && visible => tile(32, 128, 8),
        (Sm80, 256) if all && visible => tile(32, 32, 4),
        (Sm103, 64) if visible && !all => tile(64, 64, 8),
        (Sm80 | Sm120, 64) if all => tile(32, 64, 8),
        (Sm80 | Sm120, 128) if all => tile(16, 64, 8),
        (Sm90, 128) if all => tile(64, 64, 8),
        (Sm100 | Sm103, 256) if all => tile(32, 32, 8),
        (_, 128) if fused => tile(64, 128, 8),
        (Sm90, 64) if fused => tile(128, 128, 8),
        (Sm90, 128) if has(FeatureSet::SLOPES) => tile(32, 128, 8),
        (Sm100 | Sm103, 128) if has(FeatureSet::SOFT_CAP) => tile(128, 64, 8),
        (Sm103, 64) if has(FeatureSet::SOFT_CAP) => tile(128, 128, 8),
        (Sm100, 64) if has(FeatureSet::SEGMENTS) => tile(64, 64, 8),
        (Sm80, 64) => tile(64, 64, 8),
        (Sm80, 128) => tile(64, 32, 8),
        (Sm80, _) => tile(32, 32, 8),
        (Sm120, 64) => tile(16, 128, 8),
        (Sm120, 128) => tile(32, 32, 4),
        (Sm120, _) => tile(16, 32, 4),
        (Sm90, 128) => tile(128, 64, 8),
        (Sm100 | Sm103, 256) => tile(64, 32, 8),
        (_, 64 | 128) => tile(64, 128, 8),
        _ => tile(32, 64, 8),
    }
}

/// Tiles of dq.
pub(crate) fn query_grads(variant: Variant, target: Target, width: i32) -> TileShape {
    let all = variant.is_general();
    match (target, width) {
        (Sm80, 64) if all => tile(64, 32, 8),
        (Sm80, 128) if all => tile(64, 16, 8),
        (Sm90, 128) if all => tile(128, 32, 8),
        (Sm90, 256) if all => tile(64, 64, 8),
        (Sm120, 128) if all => tile(64, 32, 8),
        (Sm100 | Sm103, 64) if all => tile(128, 64, 8),
        (Sm80, 128) => tile(64, 32, 8),
        (Sm80, 256) => tile(64, 16, 8),
        (Sm120, 128) => tile(128, 32, 8),
        (Sm120, 256) => tile(32, 32, 4),
        (Sm100 | Sm103, 64) => tile(128, 128, 8),
        (_, 64 | 128) => tile(128, 64, 8),
        _ => tile(64, 64, 4),
    }
}

/// Tiles of linear attention. A block keeps a state of `width` rows and a tile's columns, which are
/// the same on all targets: callers make room for a row of products of each. Four warps do up to
/// the width where the compiler begins to spill.
pub(crate) fn linear(variant: Variant, target: Target, width: i32) -> TileShape {
    if variant.decays == Decays::ValueChannels {
        return match (target, width) {
            (Sm90 | Sm120, 64) => tile(64, 64, 8),
            (Sm90 | Sm120, _) => tile(64, 32, 4),
            (Sm80, _) => tile(64, 32, 8),
            (_, 64) => tile(64, 16, 4),
            _ => tile(64, 32, 8),
        };
    }
    let most = match target {
        Sm80 => 0,
        Sm120 => 64,
        _ => 128,
    };
    tile(64, 64, if width > most { 8 } else { 4 })
}

/// Tiles of pairs under decays of channels.
pub(crate) fn channel_pairs(_: Variant, target: Target, _: i32) -> TileShape {
    tile(64, 64, if target == Sm90 { 4 } else { 8 })
}

/// Tiles of the delta rule's inverses. Where that does not spill, two blocks share a multiprocessor:
/// one computes while the other waits.
pub(crate) fn delta_inverse(variant: Variant, target: Target, width: i32) -> TileShape {
    let of_channels = variant.decays == Decays::KeyChannels;
    let blocks = match (target, width) {
        (Sm120, _) | (Sm90, 256) => 1,
        (Sm80 | Sm90, _) if of_channels => 1,
        _ => 2,
    };
    let warps = if of_channels && target == Sm120 { 8 } else { 4 };
    TileShape { blocks, ..tile(64, 64, warps) }
}

/// Tiles of the delta rule's gradients of values. With decays of channels of 128 columns on sm_80,
/// tiles of 16 and of 32 columns spill 8 and 32 instructions in bfloat16, those of 64 none.
pub(crate) fn delta_grad(variant: Variant, target: Target, width: i32) -> TileShape {
    match (target, width) {
        (Sm120, 256) => tile(64, 16, 8),
        (Sm80, 128) if variant.decays == Decays::KeyChannels => tile(64, 64, 8),
        (Sm80, _) | (Sm120, 128) => tile(64, 32, 8),
        (Sm120, _) => tile(64, 64, 8),
        _ => linear(variant, target, width),
    }
}

/// Tiles of the delta rule's gradients of keys.
pub(crate) fn delta_keys(variant: Variant, target: Target, width: i32) -> TileShape {
    if variant.decays == Decays::KeyChannels {
        return match (target, width) {
            (Sm80, _) | (Sm120, 128) => tile(64, 16, 8),
            _ => linear(Variant::VALUE_CHANNELS, target, width),
        };
    }
    match (target, width) {
        (Sm80, 64) => tile(64, 64, 4),
        (Sm80, 256) => tile(64, 64, 16),
        (Sm90, _) => linear(variant, target, width),
        _ => tile(64, 64, 8),
    }
}

/// Tiles of decode: as few rows as a matrix product takes, unless a unit has many or tiles are wide.
/// With short pages a block takes four tiles of keys at once, but one where that spills. Two blocks
/// share a multiprocessor where neither spills: one computes while the other waits for keys. From
/// sm_90 on, where warps trade registers, the warps of two blocks would wait for more than there are.
pub(crate) fn decode(variant: Variant, target: Target, width: i32) -> TileShape {
    let many = variant.many_rows;
    let short = variant.short_pages;
    let warps = match (target, width) {
        _ if short => 2,
        (Sm80 | Sm120, 256) => 8,
        (Sm80, 64) if many => 8,
        (Sm100 | Sm103, 128) if !many => 2,
        _ => 4,
    };
    let blocks = match (target, width) {
        _ if many => 1,
        (Sm80, 64 | 128) => 2,
        _ => 1,
    };
    let keys = match (target, width) {
        (Sm80 | Sm120, 128) if short => 16,
        _ if short => 64,
        _ => page_tile(variant, width),
    };
    TileShape { blocks, ..tile(decode_rows(variant, target, width), keys, warps) }
}

/// Returns the query rows of decode's tiles. Wide tiles of 64 rows spill on two targets.
pub(crate) fn decode_rows(variant: Variant, target: Target, width: i32) -> i32 {
    match (target, width) {
        (Sm80 | Sm120, 256) => 32,
        _ if variant.many_rows || width == 256 => 64,
        _ => 16,
    }
}

/// Returns the keys of decode's tiles within a page, the same on all targets: units count in them.
pub(crate) fn page_tile(variant: Variant, width: i32) -> i32 {
    match width {
        _ if variant.short_pages => 16,
        256 => 32,
        _ => 64,
    }
}

/// Tiles of decode over latents. Tiles of 32 rows spill on two targets.
pub(crate) fn decode_latents(variant: Variant, target: Target, width: i32) -> TileShape {
    let rows = if matches!(target, Sm80 | Sm120) { 16 } else { 64 };
    tile(rows, page_tile(variant, width), 8)
}

/// Tiles of the weights of decode over latents. 8 warps spill on other targets than sm_80 and sm_90.
pub(crate) fn latent_weights(variant: Variant, target: Target, width: i32) -> TileShape {
    let warps = if matches!(target, Sm80 | Sm90) { 8 } else { 4 };
    TileShape { warps, ..decode_latents(variant, target, width) }
}

/// Tiles of the sums of decode over latents. The assembler refuses 8 warps on sm_90.
pub(crate) fn latent_values(variant: Variant, target: Target, _: i32) -> TileShape {
    let warps = if matches!(target, Sm80 | Sm120) { 8 } else { 4 };
    tile(64, page_tile(variant, LATENT_WIDTH), warps)
}

/// Tiles of the kernel that adds the pieces of decode: pieces that it adds at once.
pub(crate) fn decode_merge(_: Variant, _: Target, _: i32) -> TileShape {
    tile(16, 0, 4)
}

/// Tiles of kernels that compute something for each row.
pub(crate) fn rows(_: Variant, _: Target, width: i32) -> TileShape {
    tile(if width == 256 { 32 } else { 64 }, 0, 4)
}

/// Tiles of the kernel that writes lse head by head.
pub(crate) fn pack_lse(_: Variant, _: Target, _: i32) -> TileShape {
    tile(256, 0, 4)
}

/// Tiles of the kernel that compares segments.
pub(crate) fn segment_ranges(_: Variant, _: Target, _: i32) -> TileShape {
    tile(64, 0, 4)
}

/// Tiles of the kernel that packs masks as data.
pub(crate) fn mask_rows(_: Variant, _: Target, _: i32) -> TileShape {
    tile(ROW_BLOCKS * 64, 0, 4)
}

/// Tiles of the kernel that finds the runs of rows to visit.
pub(crate) fn mask_runs(_: Variant, _: Target, _: i32) -> TileShape {
    tile(128, 0, 4)
}

/// Whether one loop of the dk and dv kernel masks all tiles, even of images that need masks for few
/// tiles: where a second loop makes the compiler spill.
pub(crate) fn has_one_loop(target: Target, width: i32) -> bool {
    match target {
        Sm80 => true,
        Sm90 => false,
        Sm100 | Sm103 => width == 256,
        Sm120 => width != 128,
    }
}

/// Returns the number of parts in which the forward pass sums a row of weights: the columns of a
/// thread are the same modulo 8.
///
/// Modelled cycles of a tile on sm_90 with sums over rows, 8 and 16 parts: 1337, 1269, 1241
/// (128 columns); 1786, 1739, 2100 (64 columns).
pub(crate) fn sum_parts(width: i32) -> i32 {
    if width == 64 { 8 } else { 16 }
}
