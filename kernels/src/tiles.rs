//! The tile shape of each image.

use crate::features::FeatureSet;
use crate::instances::{Instance, Target, TileShape};
use crate::kernel::Kernel;

impl Instance {
    /// Its tile shape, chosen by what the compiler makes of it: no spills first, then, on sm_90, the
    /// cycles that the model gives its main loops. `quality.tsv` and `loops.tsv` have the outcome.
    pub fn tile(&self) -> TileShape {
        let tile = |rows, keys, warps| TileShape { rows, keys, warps };
        if self.features != FeatureSet::ALL {
            return self.special_tile().unwrap_or_else(|| self.plain_tile());
        }
        // With all features more tiles of pairs are kept at once.
        match (self.kernel, self.target, self.width) {
            (Kernel::KeyGrads, Target::Sm80 | Target::Sm120, 64) => tile(32, 64, 8),
            (Kernel::KeyGrads, Target::Sm80 | Target::Sm120, 128) => tile(16, 64, 8),
            (Kernel::QueryGrads, Target::Sm80, 64) => tile(64, 32, 8),
            (Kernel::QueryGrads, Target::Sm80, 128) => tile(64, 16, 8),
            (Kernel::KeyGrads, Target::Sm90, 128) => tile(64, 64, 8),
            (Kernel::QueryGrads, Target::Sm90, 64) => tile(128, 64, 8),
            (Kernel::QueryGrads, Target::Sm90, 128) => tile(128, 32, 8),
            (Kernel::QueryGrads, Target::Sm90, 256) => tile(64, 64, 8),
            (Kernel::KeyGrads, Target::Sm100 | Target::Sm103, 256) => tile(32, 32, 8),
            (Kernel::QueryGrads, Target::Sm120, 128) => tile(64, 32, 8),
            (Kernel::Forward, Target::Sm100 | Target::Sm103, 64) => tile(128, 64, 8),
            (Kernel::Forward, Target::Sm100 | Target::Sm103, 128) => tile(128, 32, 8),
            (Kernel::QueryGrads, Target::Sm100 | Target::Sm103, 64) => tile(128, 64, 8),
            _ => self.plain_tile(),
        }
    }

    /// Tiles of images with some features where they differ from those without.
    fn special_tile(&self) -> Option<TileShape> {
        let tile = |rows, keys, warps| Some(TileShape { rows, keys, warps });
        match (self.kernel, self.target, self.width) {
            (Kernel::KeyGrads, _, 128) if self.features.has(FeatureSet::FUSED) => tile(64, 128, 8),
            (Kernel::KeyGrads, Target::Sm90, 64) if self.features.has(FeatureSet::FUSED) => {
                tile(128, 128, 8)
            }
            (Kernel::KeyGrads, Target::Sm90, 128) if self.features.has(FeatureSet::SLOPES) => {
                tile(32, 128, 8)
            }
            (Kernel::KeyGrads, Target::Sm100 | Target::Sm103, 128)
                if self.features.has(FeatureSet::SOFT_CAP) =>
            {
                tile(128, 64, 8)
            }
            (Kernel::KeyGrads, Target::Sm103, 64) if self.features.has(FeatureSet::SOFT_CAP) => {
                tile(128, 128, 8)
            }
            (Kernel::KeyGrads, Target::Sm100, 64) if self.features.has(FeatureSet::SEGMENTS) => {
                tile(64, 64, 8)
            }
            _ => None,
        }
    }

    fn plain_tile(&self) -> TileShape {
        let tile = |rows, keys, warps| TileShape { rows, keys, warps };
        let blackwell = matches!(self.target, Target::Sm100 | Target::Sm103);
        match (self.kernel, self.target, self.width) {
            (Kernel::SegmentRanges, ..) => tile(64, 0, 4),
            (kernel, target, width) if kernel.is_linear() => linear_tile(target, width),
            (kernel, _, width) if !kernel.has_products() => {
                tile(if width == 256 { 32 } else { 64 }, 0, 4)
            }
            (Kernel::Forward, Target::Sm80, 64) => tile(64, 128, 4),
            (Kernel::Forward, _, 64) => tile(128, 128, 8),
            (Kernel::Forward, Target::Sm80, 128) => tile(64, 64, 4),
            (Kernel::Forward, Target::Sm80, _) => tile(64, 32, 4),
            (Kernel::Forward, Target::Sm120, 256) => tile(64, 32, 8),
            (Kernel::Forward, _, 128) if blackwell => tile(128, 128, 8),
            (Kernel::Forward, _, 256) if blackwell => tile(64, 64, 8),
            (Kernel::Forward, _, _) => tile(128, 64, 8),
            (Kernel::KeyGrads, Target::Sm80, 64) => tile(64, 64, 8),
            (Kernel::KeyGrads, Target::Sm80, 128) => tile(64, 32, 8),
            (Kernel::KeyGrads, Target::Sm80, _) => tile(32, 32, 8),
            (Kernel::KeyGrads, Target::Sm120, 64) => tile(16, 128, 8),
            (Kernel::KeyGrads, Target::Sm120, 128) => tile(32, 32, 4),
            (Kernel::KeyGrads, Target::Sm120, _) => tile(16, 32, 4),
            (Kernel::KeyGrads, Target::Sm90, 128) => tile(128, 64, 8),
            (Kernel::KeyGrads, _, 256) if blackwell => tile(64, 32, 8),
            (Kernel::KeyGrads, _, 64 | 128) => tile(64, 128, 8),
            (Kernel::KeyGrads, _, _) => tile(32, 64, 8),
            (Kernel::QueryGrads, Target::Sm80, 64) => tile(128, 64, 8),
            (Kernel::QueryGrads, Target::Sm80, 128) => tile(64, 32, 8),
            (Kernel::QueryGrads, Target::Sm80, _) => tile(64, 16, 8),
            (Kernel::QueryGrads, Target::Sm120, 64) => tile(128, 64, 8),
            (Kernel::QueryGrads, Target::Sm120, 128) => tile(128, 32, 8),
            (Kernel::QueryGrads, Target::Sm120, _) => tile(32, 32, 4),
            (Kernel::QueryGrads, Target::Sm90, 64) => tile(128, 64, 8),
            (Kernel::QueryGrads, _, 64) => tile(128, 128, 8),
            (Kernel::QueryGrads, _, 128) => tile(128, 64, 8),
            (_, _, _) => tile(64, 64, 4),
        }
    }

    /// Whether one loop masks all tiles of an image that could do with less: where a second loop makes
    /// the compiler spill.
    pub(crate) fn has_one_loop(&self) -> bool {
        let spills = match self.target {
            Target::Sm80 => true,
            Target::Sm90 => false,
            Target::Sm100 | Target::Sm103 => self.width == 256,
            Target::Sm120 => self.width != 128,
        };
        self.kernel == Kernel::KeyGrads && spills
    }

    /// Parts in which the forward pass sums up a row of weights: the columns that a thread has are
    /// the same modulo 8.
    ///
    /// Modelled cycles of a tile on sm_90 with sums over rows, 8 and 16 parts: 1337, 1269, 1241
    /// (128 columns); 1786, 1739, 2100 (64 columns).
    pub(crate) fn lanes(&self) -> i32 {
        if self.width == 64 { 8 } else { 16 }
    }
}

/// Linear attention keeps a state of `width` rows and a tile's columns, which are the same on all
/// targets: callers make room for a row of products of each. Four warps do up to the width where the
/// compiler begins to spill.
fn linear_tile(target: Target, width: i32) -> TileShape {
    let most = match target {
        Target::Sm80 => 0,
        Target::Sm120 => 64,
        _ => 128,
    };
    TileShape { rows: 64, keys: 64, warps: if width > most { 8 } else { 4 } }
}
