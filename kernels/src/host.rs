//! Processors of the machines that hold GPUs.

use crate::names::named;

named! {
    /// The processor of a GPU's host, with the name that the assembler and
    /// [`std::env::consts::ARCH`] use. An image holds machine code for one host: the driver runs
    /// this code to fill the tensor maps of a launch.
    Host, "a host" {
        /// Intel, AMD.
        X86_64 = "x86_64",
        /// Grace, in GH200 and GB200.
        Aarch64 = "aarch64",
    }
}

impl Host {
    /// Returns ELF's number of the processor.
    pub const fn machine(self) -> u16 {
        match self {
            Host::X86_64 => 62,
            Host::Aarch64 => 183,
        }
    }
}
