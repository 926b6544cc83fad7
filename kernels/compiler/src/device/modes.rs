//! Modes of features: numbers that the compiler knows, so that an image has no code of an absent
//! feature. A generic of a kernel is the mode of a feature.

#[cutile::module]
pub mod modes {
    /// The image lacks the feature.
    pub const ABSENT: i32 = 0;
    /// Every launch of the image has the feature.
    pub const PRESENT: i32 = 1;
    /// An argument of the launch says whether the feature is on.
    pub const SWITCHED: i32 = 2;
    /// A mode of segments: masks are data, and arrays of segments hold packed numbers of rows.
    pub const PACKED: i32 = 3;
    /// A mode of the window: one loop visits all tiles and masks them.
    pub const ONE_LOOP: i32 = 2;
    /// A mode of decays: each head has a decay.
    pub const OF_HEADS: i32 = 0;
    /// A mode of decays: each channel of keys has a decay, and arrays bring what follows from it.
    pub const OF_KEYS: i32 = 1;
    /// A mode of decays: each column of values has a decay.
    pub const OF_VALUES: i32 = 2;
    /// How the band cuts a tile above: by its upper limit, and where the columns end.
    pub const LIMIT_AND_END: i32 = 2;

    /// Returns whether a feature is on. `switch` is the launch's argument for it.
    pub fn is_on(mode: i32, switch: i32) -> bool {
        mode == PRESENT || (mode == SWITCHED && switch == 1i32)
    }
}
