//! Sets of features that kernels have images for.

use std::fmt;

/// A set of features. A limit to the keys after a query, as causal masks have it, is no feature: every
/// kernel has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct FeatureSet(u8);

impl FeatureSet {
    /// None.
    pub const NONE: FeatureSet = FeatureSet(0);
    /// A limit to the keys before a query.
    pub const WINDOW: FeatureSet = FeatureSet(1);
    /// Rows see those of their own segment only.
    pub const SEGMENTS: FeatureSet = FeatureSet(2);
    /// A soft cap of scores.
    pub const SOFT_CAP: FeatureSet = FeatureSet(4);
    /// ALiBi.
    pub const SLOPES: FeatureSet = FeatureSet(8);
    /// Dropout of weights.
    pub const DROPOUT: FeatureSet = FeatureSet(16);
    /// All of those above. A launch says which of them are on, so that these images serve every set
    /// that has none of its own; they are the slowest.
    pub const ALL: FeatureSet = FeatureSet(31);
    /// One kernel computes dk, dv and dq. It adds to dq in any order.
    pub const FUSED: FeatureSet = FeatureSet(32);

    /// Those of both sets.
    pub const fn and(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 | other.0)
    }

    /// Whether all of `other` are in this set.
    pub const fn has(self, other: FeatureSet) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether an image of this set computes what has the features of `wanted`. One with features that
    /// a launch can't switch off does not, but for the window, which may be endless.
    pub(crate) fn serves(self, wanted: FeatureSet) -> bool {
        let more = FeatureSet(self.0 & !wanted.0);
        self.has(wanted) && (self == FeatureSet::ALL || FeatureSet::WINDOW.has(more))
    }

    /// `self` if `on`, otherwise none.
    pub const fn when(self, on: bool) -> FeatureSet {
        if on { self } else { FeatureSet::NONE }
    }

    /// How a kernel of this set has `feature`, as its generic says it: 0 not, 1 always, 2 if a launch
    /// says so.
    pub(crate) fn mode(self, feature: FeatureSet) -> &'static str {
        match (self.has(feature), self.has(FeatureSet::ALL)) {
            (false, _) => "0",
            (true, false) => "1",
            (true, true) => "2",
        }
    }
}

impl fmt::Display for FeatureSet {
    /// As in names of images: each feature behind a `_`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(FeatureSet, &str); 6] = [
            (FeatureSet::FUSED, "_fused"),
            (FeatureSet::ALL, "_general"),
            (FeatureSet::WINDOW, "_window"),
            (FeatureSet::SEGMENTS, "_segments"),
            (FeatureSet::SOFT_CAP, "_soft_cap"),
            (FeatureSet::SLOPES, "_slopes"),
        ];
        let mut left = *self;
        for (features, name) in NAMES {
            if left.has(features) {
                f.write_str(name)?;
                left = FeatureSet(left.0 & !features.0);
            }
        }
        Ok(())
    }
}
