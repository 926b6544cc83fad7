//! Versions of cuDNN.

use std::fmt;

/// A version of cuDNN, as cuDNN counts: 92801 is 9.28.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub usize);

impl Version {
    /// The oldest version that is used.
    pub const OLDEST: Version = Version(91_900);
    /// The first version that is not used, since it has not been tested.
    pub const TOO_NEW: Version = Version(93_000);
    /// The first version with a fixed order of sums for 256 columns on Blackwell.
    pub const FIXED_256: Version = Version(92_300);
    /// The first version with a fixed order of sums on Hopper that takes little workspace.
    pub const FIXED_ON_HOPPER: Version = Version(92_500);

    /// Whether the version has been tested.
    pub fn is_tested(self) -> bool {
        (Version::OLDEST..Version::TOO_NEW).contains(&self)
    }
}

/// Writes a version as cuDNN's documentation does.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Version(number) = self;
        write!(f, "{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
    }
}
