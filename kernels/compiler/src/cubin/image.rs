//! A cubin's kernel: its resources and the layout of its parameters.

use std::fmt;

use burst_attention_kernels::host::Host;
use burst_attention_kernels::record::Parameter;

use super::Error;
use super::attributes::{ACCELERATOR_TARGET, Attribute, attributes, info};
use super::elf::{Elf, Symbol, u16_at};

const FUNCTION: u8 = 2;
const ENTRY: u8 = 0x10;

/// The architecture that an image runs on, printed as `sm_90a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Architecture {
    /// Ten times the major and once the minor version of the compute capability.
    pub number: u8,
    /// Whether it uses instructions that no later architecture has.
    pub specific: bool,
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number, if self.specific { "a" } else { "" })
    }
}

/// The compiler's notes about a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelInfo {
    /// The name that finds the kernel in the loaded image.
    pub name: String,
    /// Registers of a thread at launch.
    pub registers: u32,
    /// Threads of a block; 0 where the launch decides.
    pub threads: u32,
    /// Bytes of a thread's stack that the kernel itself uses; spilled registers lie there.
    pub frame: u32,
    /// Bytes of static shared memory.
    pub shared: u64,
    /// The declared parameters, in order, without the parameters that the compiler adds behind them
    /// (tensor maps, which the driver fills by running the image's own host code).
    pub parameters: Vec<Parameter>,
    /// The host for which the image holds machine code, if it holds any.
    pub host: Option<Host>,
}

/// A CUDA image with one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The architecture that it runs on.
    pub architecture: Architecture,
    /// Its kernel.
    pub kernel: KernelInfo,
}

impl Cubin {
    /// Returns what is in an image of CUDA 13's compilers (64 bits, version 8 of the ABI).
    ///
    /// # Errors
    ///
    /// If the bytes are no such image, are cut, or hold more or fewer than one kernel.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let elf = Elf::parse(bytes)?;
        let symbols = elf.symbols()?;
        let entry = |s: &Symbol<'_>| s.kind == FUNCTION && s.other & ENTRY != 0;
        let mut entries = symbols.iter().enumerate().filter(|(_, symbol)| entry(symbol));
        let (index, name) = match (entries.next(), entries.count()) {
            (Some((index, symbol)), 0) => (index, symbol.name),
            (first, more) => return Err(Error::Kernels(first.iter().len() + more)),
        };
        Ok(Self { architecture: architecture(&elf)?, kernel: kernel(&elf, index, name)? })
    }
}

fn architecture(elf: &Elf<'_>) -> Result<Architecture, Error> {
    let compat = elf.section(".nv.compat").map_or(&[][..], |section| section.data);
    let marked = attributes(compat)?.iter().any(|a| a.code == ACCELERATOR_TARGET && a.short != 0);
    Ok(Architecture { number: elf.flags.to_le_bytes()[1], specific: marked })
}

fn kernel(elf: &Elf<'_>, index: usize, name: &str) -> Result<KernelInfo, Error> {
    let section = |name: String| elf.section(&name).ok_or(Error::Missing(name));
    section(format!(".text.{name}"))?;
    // A kernel without shared memory has no section for it.
    let shared = elf.section(&format!(".nv.shared.{name}")).map_or(0, |section| section.size);
    let functions = attributes(section(".nv.info".into())?.data)?;
    let of_function = |code, what: &str| of_function(&functions, code, index, what);
    let own = attributes(section(format!(".nv.info.{name}"))?.data)?;

    let bytes = own.iter().find(|a| a.code == info::CBANK_PARAM_SIZE);
    let bytes = bytes.ok_or_else(|| Error::Missing("EIATTR_CBANK_PARAM_SIZE".into()))?.short;
    let mut parameters: Vec<_> =
        own.iter().filter_map(|a| parameter(a).transpose()).collect::<Result<_, _>>()?;
    parameters.sort_unstable_by_key(|parameter: &Parameter| parameter.ordinal);
    check_parameters(&parameters, bytes)?;
    let threads = own.iter().find(|a| a.code == info::REQNTID).map(Attribute::words);
    let [x, y, z] = threads.transpose()?.unwrap_or_default();
    Ok(KernelInfo {
        name: name.into(),
        registers: of_function(info::REGCOUNT, "EIATTR_REGCOUNT")?,
        threads: x.saturating_mul(y).saturating_mul(z),
        frame: of_function(info::FRAME_SIZE, "EIATTR_FRAME_SIZE")?,
        shared,
        parameters,
        host: host(elf)?,
    })
}

/// Returns the host of the ELF objects in `.nv.host` and, from sm_100 on, in its copy
/// `.nv.merc.nv.host`.
fn host(elf: &Elf<'_>) -> Result<Option<Host>, Error> {
    let what = "the machine of the host's code";
    let mut found = None;
    for section in elf.sections.iter().filter(|section| section.name.ends_with(".nv.host")) {
        if section.data.len() < 20 {
            return Err(Error::Missing(format!("header of an ELF object in {}", section.name)));
        }
        let came = u16_at(section.data, 18);
        let host = Host::ALL.into_iter().find(|host| host.machine() == came);
        let came = came.into();
        let expected = "62 (x86-64) or 183 (AArch64)";
        let host = host.ok_or(Error::Field { what, expected, came })?;
        if found.is_some_and(|found| found != host) {
            return Err(Error::Field { what, expected: "the same in each section", came });
        }
        found = Some(host);
    }
    Ok(found)
}

/// Returns the value that a list keeps for the function of a symbol.
fn of_function(list: &[Attribute<'_>], code: u8, symbol: usize, what: &str) -> Result<u32, Error> {
    for attribute in list.iter().filter(|a| a.code == code) {
        let [function, value] = attribute.words()?;
        if function as usize == symbol {
            return Ok(value);
        }
    }
    Err(Error::Missing(format!("{what} of its kernel")))
}

fn parameter(attribute: &Attribute<'_>) -> Result<Option<Parameter>, Error> {
    // The first form packs the size above 18 bits of flags; the second gives it 16 bits.
    let size = match attribute.code {
        info::KPARAM_INFO => |word: u32| (word >> 18) as u16,
        info::KPARAM_INFO_V2 => |word: u32| word as u16,
        _ => return Ok(None),
    };
    let [_, place, word] = attribute.words()?;
    Ok(Some(Parameter { ordinal: place as u16, offset: (place >> 16) as u16, size: size(word) }))
}

/// Checks that ordinals count from zero and that each parameter lies behind the parameter before
/// it, within the `bytes` of the bank.
fn check_parameters(parameters: &[Parameter], bytes: u16) -> Result<(), Error> {
    let mut end = 0;
    for (expected, parameter) in parameters.iter().enumerate() {
        let ordinal = parameter.ordinal;
        if usize::from(ordinal) != expected {
            let (what, expected) = ("a parameter's ordinal", "one more than the last");
            return Err(Error::Field { what, expected, came: ordinal.into() });
        }
        if u32::from(parameter.offset) < end {
            let (what, expected) = ("a parameter's offset", "behind the parameter before it");
            return Err(Error::Field { what, expected, came: parameter.offset.into() });
        }
        end = u32::from(parameter.offset) + u32::from(parameter.size);
    }
    if end > u32::from(bytes) {
        let (what, expected) = ("the parameters' end", "within EIATTR_CBANK_PARAM_SIZE");
        return Err(Error::Field { what, expected, came: end.into() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{Synthetic, sample, short, sized};
    use super::*;

    fn error(change: impl FnOnce(&mut Synthetic)) -> Error {
        let mut changed = sample();
        change(&mut changed);
        Cubin::parse(&changed.bytes()).unwrap_err()
    }

    #[test]
    fn reads_what_the_compiler_noted() {
        let cubin = Cubin::parse(&sample().bytes()).unwrap();
        assert_eq!(cubin.architecture.to_string(), "sm_90a");
        let expected = KernelInfo {
            name: "forward_entry".into(),
            registers: 168,
            threads: 384,
            frame: 16,
            shared: 231_104,
            parameters: vec![
                Parameter { ordinal: 0, offset: 0, size: 8 },
                Parameter { ordinal: 1, offset: 8, size: 4 },
            ],
            host: Some(Host::X86_64),
        };
        assert_eq!(cubin.kernel, expected);
    }

    #[test]
    fn reads_the_first_form_of_parameters_and_plain_architectures() {
        let mut older = sample();
        older.number = 80;
        older.compat.clear();
        older.own = [
            sized(0x17, &[0, 0x0008_0001, 0x0011_f000]),
            sized(0x17, &[0, 0, 0x0021_f000]),
            sized(0x05, &[256, 1, 1]),
            short(0x19, 12),
            sized(0x0a, &[2, 0x000c_0160]),
        ]
        .concat();
        let Cubin { architecture, kernel } = Cubin::parse(&older.bytes()).unwrap();
        assert_eq!(architecture.to_string(), "sm_80");
        let places: Vec<_> = kernel.parameters.iter().map(|p| (p.offset, p.size)).collect();
        assert_eq!(places, [(0, 8), (8, 4)]);
    }

    #[test]
    fn a_cut_image_is_an_error_wherever_it_is_cut() {
        let bytes = sample().bytes();
        for len in 0..bytes.len() {
            let came = Cubin::parse(&bytes[..len]);
            assert!(matches!(came, Err(Error::Truncated { .. })), "{len} bytes: {came:?}");
        }
    }

    #[test]
    fn no_change_of_a_byte_makes_it_panic() {
        let bytes = sample().bytes();
        let whole = Cubin::parse(&bytes).unwrap();
        let mut noticed = 0;
        for at in 0..bytes.len() {
            for flip in [1, 2, 4, 8, 16, 32, 64, 128, 255] {
                let mut changed = bytes.clone();
                changed[at] ^= flip;
                noticed += u32::from(Cubin::parse(&changed).as_ref() != Ok(&whole));
            }
        }
        assert!(noticed > 1000, "only {noticed} changes made a difference");
    }

    #[test]
    fn other_files_are_refused_with_what_was_expected() {
        let field = |at: usize, value| {
            let mut bytes = sample().bytes();
            bytes[at] = value;
            Cubin::parse(&bytes).unwrap_err().to_string()
        };
        assert_eq!(field(18, 62), "expected the machine to be 190 (CUDA), but it is 62");
        assert_eq!(field(8, 7), "expected the version of the ABI to be 8, but it is 7");
        assert_eq!(field(4, 1), "expected the class to be 2 (64 bits), but it is 1");
    }

    #[test]
    fn needs_one_kernel_with_all_its_resources() {
        assert_eq!(error(|c| c.functions[0].1 = false), Error::Kernels(0));
        assert_eq!(error(|c| c.functions[1].1 = true), Error::Kernels(2));
        let named = |what: &str| Error::Missing(format!("{what} of its kernel"));
        assert_eq!(
            error(|c| c.info.retain(|record| record.0 != 0x2f || record.1 != 0)),
            named("EIATTR_REGCOUNT")
        );
        assert_eq!(error(|c| c.info.retain(|record| record.0 != 0x11)), named("EIATTR_FRAME_SIZE"));
        assert_eq!(error(|c| c.own.clear()), Error::Missing("EIATTR_CBANK_PARAM_SIZE".into()));
    }

    #[test]
    fn parameters_must_follow_each_other_within_the_bank() {
        let table = |own: Vec<Vec<u8>>| {
            let bank = [short(0x19, 60), sized(0x0a, &[2, 0x003c_0210])].concat();
            match error(|c| c.own = [own.concat(), bank].concat()) {
                Error::Field { what, came, .. } => (what, came),
                other => panic!("{other}"),
            }
        };
        let first = || sized(0x45, &[0, 0, 8]);
        let gap = table(vec![first(), sized(0x45, &[0, 0x0008_0002, 4])]);
        assert_eq!(gap, ("a parameter's ordinal", 2));
        let overlap = table(vec![first(), sized(0x45, &[0, 0x0004_0001, 4])]);
        assert_eq!(overlap, ("a parameter's offset", 4));
        let beyond = table(vec![first(), sized(0x45, &[0, 0x003c_0001, 4])]);
        assert_eq!(beyond, ("the parameters' end", 64));
    }

    #[test]
    fn the_host_of_an_image_is_in_its_code_for_the_host() {
        let host = |machine: u8| {
            let mut code = vec![0; 20];
            code[18] = machine;
            code
        };
        let parse = |hosts: &[Vec<u8>]| {
            let changed = Synthetic { hosts: hosts.to_vec(), ..sample() };
            let cubin = Cubin::parse(&changed.bytes());
            cubin.map(|cubin| cubin.kernel.host).map_err(|error| error.to_string())
        };
        assert_eq!(parse(&[]), Ok(None));
        assert_eq!(parse(&[host(183)]), Ok(Some(Host::Aarch64)));
        assert_eq!(parse(&[host(183), host(183)]), Ok(Some(Host::Aarch64)));
        let expected = |what: &str, came: u8| {
            format!("expected the machine of the host's code to be {what}, but it is {came}")
        };
        let error = expected("the same in each section", 183);
        assert_eq!(parse(&[host(62), host(183)]), Err(error));
        assert_eq!(parse(&[host(243)]), Err(expected("62 (x86-64) or 183 (AArch64)", 243)));
        let error = "the cubin has no header of an ELF object in .nv.host";
        assert_eq!(parse(&[vec![0; 19]]), Err(error.into()));
    }

    #[test]
    fn attributes_that_lack_their_value_are_refused() {
        let short_value = error(|c| c.own.extend(sized(0x45, &[0, 0])));
        let expected =
            "expected an attribute's value at bytes 0..12 of the cubin, but it has 8 bytes";
        assert_eq!(short_value.to_string(), expected);
        assert!(matches!(error(|c| c.own.extend([4, 0x45])), Error::Truncated { .. }));
        assert!(matches!(error(|c| c.own.extend([9, 0, 0, 0])), Error::Field { came: 9, .. }));
    }
}
