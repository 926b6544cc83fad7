//! GPU architectures.

use crate::names::named;

named! {
    /// A GPU architecture that images are made for, with the name that the assembler uses.
    Target, "a target" {
        /// A100.
        Sm80 = "sm_80",
        /// H100, H200.
        Sm90 = "sm_90",
        /// B200, GB200.
        Sm100 = "sm_100",
        /// B300, GB300.
        Sm103 = "sm_103",
        /// RTX Blackwell.
        Sm120 = "sm_120",
    }
}

impl Target {
    /// Returns the multiprocessors of the largest device.
    pub const fn multiprocessors(self) -> usize {
        match self {
            Target::Sm80 => 108,
            Target::Sm90 => 132,
            Target::Sm100 | Target::Sm103 => 148,
            Target::Sm120 => 188,
        }
    }

    /// Returns the target whose images run on a device of compute capability `major.minor`. Images
    /// of 8.0 run on every 8.x; any other image runs on its own capability alone.
    pub fn of_capability(major: i32, minor: i32) -> Option<Target> {
        match (major, minor) {
            (8, _) => Some(Target::Sm80),
            (9, 0) => Some(Target::Sm90),
            (10, 0) => Some(Target::Sm100),
            (10, 3) => Some(Target::Sm103),
            (12, 0) => Some(Target::Sm120),
            _ => None,
        }
    }
}
