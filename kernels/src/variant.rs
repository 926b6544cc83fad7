//! Variants of a kernel: the features that an image's code has, and the launches that it is made for.

use std::fmt;

use serde::Deserialize;

pub use crate::features::FeatureSet;

/// What has a decay of its own in linear attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decays {
    /// Each head.
    #[default]
    Heads,
    /// Each column of keys, and so each row of a state.
    KeyChannels,
    /// Each column of values, and so each column of a state.
    ValueChannels,
}

/// What an image of a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Variant {
    /// The features that the code has.
    pub features: FeatureSet,
    /// Whether the code has a limit to the keys before a query.
    pub window: bool,
    /// Whether one kernel computes dk, dv and dq. It adds to dq in any order.
    pub fused: bool,
    /// Whether decode takes tiles of many query rows instead of a few.
    pub many_rows: bool,
    /// Whether decode takes pages that are shorter than a tile of keys.
    pub short_pages: bool,
    /// What has a decay in linear attention.
    pub decays: Decays,
}

impl Variant {
    /// The variant without features.
    pub const PLAIN: Variant = Variant {
        features: FeatureSet::NONE,
        window: false,
        fused: false,
        many_rows: false,
        short_pages: false,
        decays: Decays::Heads,
    };
    /// A window.
    pub const WINDOW: Variant = Variant { window: true, ..Variant::PLAIN };
    /// One kernel for dk, dv and dq.
    pub const FUSED: Variant = Variant { fused: true, ..Variant::PLAIN };
    /// Decode with tiles of many query rows.
    pub const MANY_ROWS: Variant = Variant { many_rows: true, ..Variant::PLAIN };
    /// Decode with short pages.
    pub const SHORT_PAGES: Variant = Variant { short_pages: true, ..Variant::PLAIN };
    /// Linear attention with decays of columns of keys.
    pub const KEY_CHANNELS: Variant = Variant::PLAIN.of_decays(Decays::KeyChannels);
    /// Linear attention with decays of columns of values.
    pub const VALUE_CHANNELS: Variant = Variant::PLAIN.of_decays(Decays::ValueChannels);
    /// A window and all features. A launch says which of them are on, so these images serve every
    /// set that has no images of its own; they are the slowest.
    pub const GENERAL: Variant = Variant::WINDOW.with(FeatureSet::ALL);
    /// Masks as data with a window and segments, which launches switch on or off.
    pub const MASKS: Variant = Variant::WINDOW.with(FeatureSet::SEGMENTS).with(FeatureSet::VISIBLE);

    /// Returns the variant with more features.
    pub const fn with(self, features: FeatureSet) -> Variant {
        Variant { features: self.features.and(features), ..self }
    }

    /// Returns the variant with other decays.
    pub const fn of_decays(self, decays: Decays) -> Variant {
        Variant { decays, ..self }
    }

    /// Whether the code has all of `features`.
    pub const fn has(self, features: FeatureSet) -> bool {
        self.features.has(features)
    }

    /// Whether the code has all features, which launches switch on.
    pub const fn is_general(self) -> bool {
        self.has(FeatureSet::ALL)
    }

    /// Whether an image of this variant computes a launch that wants `wanted`. A launch can make
    /// the window endless. It can switch off every feature of [`Variant::GENERAL`]; where masks are
    /// data, all rows may have one segment.
    pub(crate) fn serves(self, wanted: Variant) -> bool {
        let optional = match (self.is_general(), self.has(FeatureSet::VISIBLE)) {
            (true, _) => FeatureSet::ALL,
            (false, true) => FeatureSet::SEGMENTS,
            (false, false) => FeatureSet::NONE,
        };
        let as_wanted = Variant { features: wanted.features, window: wanted.window, ..self };
        self.has(wanted.features)
            && wanted.features.and(optional).has(self.features)
            && self.window >= wanted.window
            && as_wanted == wanted
    }

    /// Returns the value of a kernel's generic for the window; see [`Variant::mode`].
    pub(crate) fn window_mode(self) -> i32 {
        i32::from(self.window) << i32::from(self.is_general())
    }

    /// Returns the value of a kernel's generic for `feature`: 0 without the feature, 1 with it, 2
    /// where the launch decides, 3 for segments where masks are data.
    pub(crate) fn mode(self, feature: FeatureSet) -> i32 {
        if feature == FeatureSet::SEGMENTS && self.has(FeatureSet::VISIBLE) {
            return 3;
        }
        i32::from(self.has(feature)) << i32::from(self.is_general())
    }
}

impl fmt::Display for Variant {
    /// Writes the part of an image's name: each feature behind a `_`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (general, visible) = (self.is_general(), self.has(FeatureSet::VISIBLE));
        let has = |feature| !general && !visible && self.has(feature);
        let names = [
            (self.fused, "_fused"),
            (general, "_general"),
            (visible, "_visible"),
            (self.window && !general && !visible, "_window"),
            (has(FeatureSet::SEGMENTS), "_segments"),
            (has(FeatureSet::SOFT_CAP), "_soft_cap"),
            (has(FeatureSet::SLOPES), "_slopes"),
            (self.many_rows, "_many_rows"),
            (self.short_pages, "_short_pages"),
            (self.decays == Decays::KeyChannels, "_key_channels"),
            (self.decays == Decays::ValueChannels, "_value_channels"),
        ];
        names.into_iter().filter(|(is_on, _)| *is_on).try_for_each(|(_, name)| f.write_str(name))
    }
}
