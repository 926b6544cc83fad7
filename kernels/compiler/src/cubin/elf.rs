//! The parts of ELF that a cubin needs: sections, symbols and the flags of the file's header.

use super::Error;

const SECTION_HEADER: u64 = 64;
const SYMBOL: usize = 24;
const NO_DATA: u32 = 8;
const SYMBOLS: u32 = 2;
const MACHINE_CUDA: u16 = 190;

/// A section; `data` is empty where the file holds none for it, as for shared memory.
pub(super) struct Section<'a> {
    pub(super) name: &'a str,
    pub(super) size: u64,
    pub(super) data: &'a [u8],
    kind: u32,
    link: u32,
}

/// An entry of the table of symbols.
pub(super) struct Symbol<'a> {
    pub(super) name: &'a str,
    /// The low half of `st_info`.
    pub(super) kind: u8,
    /// `st_other`.
    pub(super) other: u8,
}

/// A parsed file.
pub(super) struct Elf<'a> {
    pub(super) flags: u32,
    pub(super) sections: Vec<Section<'a>>,
}

impl<'a> Elf<'a> {
    /// Returns the file with all its sections.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let header = slice(bytes, "the file header", 0, 64)?;
        expect("the magic number", "0x464c457f (ELF)", u32_at(header, 0).into(), 0x464c_457f)?;
        expect("the class", "2 (64 bits)", header[4].into(), 2)?;
        expect("the byte order", "1 (little endian)", header[5].into(), 1)?;
        expect("the ABI", "0x41 (CUDA)", header[7].into(), 0x41)?;
        expect("the version of the ABI", "8", header[8].into(), 8)?;
        expect("the machine", "190 (CUDA)", u16_at(header, 18).into(), MACHINE_CUDA.into())?;
        let segment = u16_at(header, 54);
        expect("the size of a program header", "56", segment.into(), 56)?;
        let count = u64::from(u16_at(header, 56));
        // The file's last part. Nothing uses it, but the check refuses a file that was cut.
        slice(bytes, "the program headers", u64_at(header, 32), count * u64::from(segment))?;

        expect("the size of a section header", "64", u16_at(header, 58).into(), SECTION_HEADER)?;
        let count = u64::from(u16_at(header, 60));
        let offset = u64_at(header, 40);
        let table = slice(bytes, "the section headers", offset, count * SECTION_HEADER)?;
        let headers = || table.chunks_exact(SECTION_HEADER as usize);
        let names = headers()
            .nth(u16_at(header, 62).into())
            .ok_or_else(|| Error::Missing("table of section names".into()))?;
        let names = contents(bytes, names)?;
        let sections =
            headers().map(|header| section(bytes, header, names)).collect::<Result<_, _>>()?;
        Ok(Self { flags: u32_at(header, 48), sections })
    }

    /// Returns the section of a name.
    pub(super) fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// Returns the table of symbols, in the order that attributes refer to.
    pub(super) fn symbols(&self) -> Result<Vec<Symbol<'a>>, Error> {
        let table = self
            .sections
            .iter()
            .find(|section| section.kind == SYMBOLS)
            .ok_or_else(|| Error::Missing("table of symbols".into()))?;
        let names = self
            .sections
            .get(table.link as usize)
            .ok_or_else(|| Error::Missing("names of symbols".into()))?
            .data;
        let symbol = |entry: &[u8]| {
            let name = name_at(names, u32_at(entry, 0).into())?;
            Ok(Symbol { name, kind: entry[4] & 0xf, other: entry[5] })
        };
        table.data.chunks_exact(SYMBOL).map(symbol).collect()
    }
}

fn section<'a>(bytes: &'a [u8], header: &[u8], names: &'a [u8]) -> Result<Section<'a>, Error> {
    Ok(Section {
        name: name_at(names, u32_at(header, 0).into())?,
        size: u64_at(header, 32),
        data: contents(bytes, header)?,
        kind: u32_at(header, 4),
        link: u32_at(header, 40),
    })
}

fn contents<'a>(bytes: &'a [u8], header: &[u8]) -> Result<&'a [u8], Error> {
    match u32_at(header, 4) {
        0 | NO_DATA => Ok(&[]),
        _ => slice(bytes, "a section's contents", u64_at(header, 24), u64_at(header, 32)),
    }
}

fn name_at(names: &[u8], start: u64) -> Result<&str, Error> {
    let name = usize::try_from(start).ok().and_then(|start| names.get(start..));
    let name =
        name.and_then(|rest| rest.split(|&byte| byte == 0).next().filter(|n| n.len() < rest.len()));
    name.and_then(|name| std::str::from_utf8(name).ok()).ok_or(Error::Name(start))
}

fn slice<'a>(bytes: &'a [u8], what: &'static str, start: u64, len: u64) -> Result<&'a [u8], Error> {
    let end = start.saturating_add(len);
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    range.and_then(|(start, end)| bytes.get(start..end)).ok_or(Error::Truncated {
        what,
        start,
        end,
        len: bytes.len(),
    })
}

fn expect(what: &'static str, expected: &'static str, came: u64, want: u64) -> Result<(), Error> {
    if came == want { Ok(()) } else { Err(Error::Field { what, expected, came }) }
}

/// Returns the 16-bit number at `offset`. The caller makes sure that `bytes` reaches that far.
pub(super) fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

/// Returns the 32-bit number at `offset`. The caller makes sure that `bytes` reaches that far.
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from(u16_at(bytes, offset)) | u32::from(u16_at(bytes, offset + 2)) << 16
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from(u32_at(bytes, offset)) | u64::from(u32_at(bytes, offset + 4)) << 32
}
