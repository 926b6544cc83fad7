//! The vector instructions that host kernels use, chosen at run time.

use std::fmt;

use super::simd::{Portable, Simd, Task};
use crate::environment;
use crate::error::Result;

/// The environment variable that forces the instruction set of a name ([`Isa::name`]).
pub const ISA_VARIABLE: &str = "BURST_ATTENTION_ISA";

/// A set of vector instructions that host kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 (F, BW, DQ, VL): 16 float32 lanes. Where the CPU has BF16 too, decoding uses it.
    Avx512,
    /// AVX2, FMA and F16C: 8 float32 lanes.
    Avx2,
    /// The instructions that every CPU of the target has: 8 float32 lanes.
    Portable,
}

impl Isa {
    /// All instruction sets, the fastest first.
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// Returns the name of this set in the environment variable and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }

    /// Whether this CPU has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.is_available()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => false,
            Isa::Portable => true,
        }
    }

    /// Returns the sets that this CPU has, the fastest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Returns the fastest set that this CPU has.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }

    /// Returns the set that the environment variable `BURST_ATTENTION_ISA` names, or else the
    /// fastest set.
    ///
    /// # Errors
    /// If the variable holds anything but the name of a set that this CPU has.
    pub fn detect() -> Result<Isa> {
        let expected = || {
            let names: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
            format!("one of {}, which this CPU has", names.join(", "))
        };
        Ok(environment::read(ISA_VARIABLE, expected, Isa::named)?.unwrap_or_else(Isa::best))
    }

    /// Returns the set of a name, if this CPU has it.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::available().into_iter().find(|isa| isa.name() == name)
    }

    /// Runs a task in a function that is compiled for this instruction set.
    ///
    /// # Panics
    /// If this CPU lacks the instructions.
    pub(super) fn run<T: Task>(self, task: T) {
        assert!(self.is_available(), "this CPU lacks {self}; ask Isa::available first");
        match self {
            // SAFETY: the assertion makes sure that the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { super::simd::Avx512::new() }.vectorize(task),
            // SAFETY: the assertion makes sure that the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { super::simd::Avx2::new() }.vectorize(task),
            _ => Portable.vectorize(task),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
