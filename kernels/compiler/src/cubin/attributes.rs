//! The lists of attributes in the sections `.nv.info*` and `.nv.compat`.
//!
//! A record is a format byte, an attribute byte and two bytes: either the value itself or, in the
//! sized format, the length of the value that follows.

use super::Error;
use super::elf::{u16_at, u32_at};

const SIZED: u8 = 4;

/// Attributes of `.nv.info` and `.nv.info.<entry>` (`EIATTR_…` in the output of `cuobjdump -elf`).
pub(super) mod info {
    /// Threads of a block, where every launch has the same number.
    pub(in super::super) const REQNTID: u8 = 0x10;
    pub(in super::super) const FRAME_SIZE: u8 = 0x11;
    pub(in super::super) const KPARAM_INFO: u8 = 0x17;
    pub(in super::super) const CBANK_PARAM_SIZE: u8 = 0x19;
    pub(in super::super) const REGCOUNT: u8 = 0x2f;
    pub(in super::super) const KPARAM_INFO_V2: u8 = 0x45;
}

/// Attribute of `.nv.compat`: 1 where the code is for one architecture alone (the `a` of sm_90a).
pub(super) const ACCELERATOR_TARGET: u8 = 0x09;

/// A record: its attribute, the two bytes in the record, and the value that follows the record, if
/// any.
pub(super) struct Attribute<'a> {
    pub(super) code: u8,
    pub(super) short: u16,
    pub(super) bytes: &'a [u8],
}

impl Attribute<'_> {
    /// Returns the 32-bit words of the value, of which there must be at least `N`.
    pub(super) fn words<const N: usize>(&self) -> Result<[u32; N], Error> {
        if self.bytes.len() < N * 4 {
            let end = N as u64 * 4;
            let len = self.bytes.len();
            return Err(Error::Truncated { what: "an attribute's value", start: 0, end, len });
        }
        Ok(std::array::from_fn(|i| u32_at(self.bytes, i * 4)))
    }
}

/// Returns the records of a section's contents.
pub(super) fn attributes(bytes: &[u8]) -> Result<Vec<Attribute<'_>>, Error> {
    let mut records = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let start = (bytes.len() - rest.len()) as u64;
        let cut = |end| Error::Truncated { what: "an attribute", start, end, len: bytes.len() };
        let (head, tail) = rest.split_at_checked(4).ok_or_else(|| cut(start + 4))?;
        let [format, code] = [head[0], head[1]];
        if !(1..=SIZED).contains(&format) {
            let what = "an attribute's format";
            return Err(Error::Field { what, expected: "1 to 4", came: format.into() });
        }
        let short = u16_at(head, 2);
        let len = if format == SIZED { short } else { 0 };
        let (value, tail) =
            tail.split_at_checked(len.into()).ok_or_else(|| cut(start + 4 + u64::from(len)))?;
        records.push(Attribute { code, short, bytes: value });
        rest = tail;
    }
    Ok(records)
}
