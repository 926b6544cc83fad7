//! Processors of the machines that GPUs are in.

/// The processor of a GPU's host. An image holds machine code for one: the driver runs it to fill
/// the tensor maps of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// Intel, AMD.
    X86_64,
    /// Grace, in GH200 and GB200.
    Aarch64,
}

impl Host {
    /// All hosts.
    pub const ALL: [Host; 2] = [Host::X86_64, Host::Aarch64];

    /// Name as the assembler and [`std::env::consts::ARCH`] have it.
    pub const fn name(self) -> &'static str {
        match self {
            Host::X86_64 => "x86_64",
            Host::Aarch64 => "aarch64",
        }
    }

    /// ELF's number of the processor.
    pub const fn machine(self) -> u16 {
        match self {
            Host::X86_64 => 62,
            Host::Aarch64 => 183,
        }
    }

    /// The host of that name.
    ///
    /// # Errors
    /// If no host has it; the message lists the names.
    pub fn of_name(name: &str) -> Result<Host, String> {
        let found = Host::ALL.into_iter().find(|host| host.name() == name);
        found.ok_or_else(|| {
            let known = Host::ALL.map(Host::name).join(", ");
            format!("expected a host of {known}, got {name}")
        })
    }
}
