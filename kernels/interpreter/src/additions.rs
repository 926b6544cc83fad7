//! The blocks of a launch that add to a byte of memory, and the blocks that load or store it.
//!
//! Many blocks may add to the same element. Nothing orders their additions against a load or a
//! store of another block, so the result of such a mixture would depend on the order of blocks.

use super::memory::{Address, PAGE, by_page};
use std::collections::HashMap;

/// An access of a block to an element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Access {
    Load,
    Store,
    Addition,
}

impl Access {
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Store => "store",
            Self::Addition => "addition",
        }
    }

    /// Returns a phrase for the accesses of other blocks that this access conflicts with.
    pub fn conflicts(self) -> &'static str {
        if self == Self::Addition { "loads or stores" } else { "adds to" }
    }
}

/// The blocks that used each byte of a page: 0 for no block, [`SEVERAL`], or the number of the only
/// block.
type Blocks = Box<[u32]>;
const SEVERAL: u32 = u32::MAX;

struct Page {
    added: Blocks,
    plain: Blocks,
}

/// The accesses of one launch so far.
#[derive(Default)]
pub(super) struct Accesses {
    /// Number of the running block, from 1.
    block: u32,
    pages: HashMap<u64, Page>,
}

impl Accesses {
    pub fn begin_block(&mut self) {
        self.block += 1;
    }

    /// Records an access of the running block. The error is the first byte where the access
    /// conflicts with another block's access.
    pub fn record(&mut self, access: Access, at: Address, bytes: usize) -> Result<(), Address> {
        let new = || vec![0; PAGE as usize].into();
        for (address, range) in by_page(at, bytes) {
            let page = self.pages.entry(address / PAGE);
            let Page { added, plain } = page.or_insert_with(|| Page { added: new(), plain: new() });
            let (own, other) = match access {
                Access::Addition => (added, plain),
                Access::Load | Access::Store => (plain, added),
            };
            let start = (address % PAGE) as usize;
            let inside = start..start + range.len();
            let conflict = |&block: &u32| block != 0 && block != self.block;
            if let Some(byte) = other[inside.clone()].iter().position(conflict) {
                return Err(Address(address + byte as u64));
            }
            for block in &mut own[inside] {
                *block = if *block == 0 || *block == self.block { self.block } else { SEVERAL };
            }
        }
        Ok(())
    }
}
