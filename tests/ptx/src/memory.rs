//! The kinds of memory, and accesses to them.

use crate::Memory;
use crate::error::{Fault, Outcome};

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    /// Any kind; the address tells.
    Generic,
    /// Global and constant memory.
    Global,
    Shared,
    Local,
    Parameter,
}

/// The bits of a generic address below the number of its kind of memory. Addresses of global memory
/// must fit in them.
const WINDOW: u32 = 56;
const NUMBERED: [Space; 4] = [Space::Global, Space::Shared, Space::Local, Space::Parameter];

impl Space {
    /// The modifiers that name a kind of memory.
    pub const WINDOWS: [(&'static str, Self); 8] = [
        ("global", Self::Global),
        ("const", Self::Global),
        ("shared", Self::Shared),
        ("shared::cta", Self::Shared),
        ("local", Self::Local),
        ("param", Self::Parameter),
        ("param::entry", Self::Parameter),
        // The parameters of a call are local memory, because the call becomes part of its caller.
        ("param::func", Self::Local),
    ];

    /// Returns the kind of memory of a generic address, and the address within it.
    pub fn of(address: u64) -> (Self, u64) {
        match NUMBERED.get((address >> WINDOW) as usize) {
            Some(&space) => (space, address & ((1 << WINDOW) - 1)),
            None => (Self::Global, address),
        }
    }

    /// Returns the generic address of an address of this kind of memory.
    pub fn generic(self, address: u64) -> u64 {
        let number = NUMBERED.iter().position(|&space| space == self).unwrap_or(0);
        address | (number as u64) << WINDOW
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Generic => "generic",
            Self::Global => "global",
            Self::Shared => "shared",
            Self::Local => "local",
            Self::Parameter => "parameter",
        }
    }
}

/// All memory that a block sees, except the local memory of threads.
pub(crate) struct Spaces<'a> {
    pub device: &'a mut dyn Memory,
    pub shared: Vec<u8>,
    pub parameters: Vec<u8>,
}

impl Spaces<'_> {
    pub fn load(
        &mut self,
        local: &mut [u8],
        (space, address): (Space, u64),
        bytes: &mut [u8],
    ) -> Outcome<()> {
        match self.find(local, space, address, bytes.len())? {
            Ok(found) => bytes.copy_from_slice(found),
            Err(address) => {
                let size = bytes.len();
                let loaded = self.device.load(address, bytes);
                loaded.map_err(|reason| Fault::Memory { address, bytes: size, reason })?;
            }
        }
        Ok(())
    }

    pub fn store(
        &mut self,
        local: &mut [u8],
        (space, address): (Space, u64),
        bytes: &[u8],
    ) -> Outcome<()> {
        match self.find(local, space, address, bytes.len())? {
            Ok(_) if space == Space::Parameter || Space::of(address).0 == Space::Parameter => {
                Err(Fault::Space("parameter memory takes no stores".into()))
            }
            Ok(found) => {
                found.copy_from_slice(bytes);
                Ok(())
            }
            Err(address) => {
                let stored = self.device.store(address, bytes);
                stored.map_err(|reason| Fault::Memory { address, bytes: bytes.len(), reason })
            }
        }
    }

    /// Returns the bytes of memory that the interpreter holds, or an address of the caller's.
    fn find<'b>(
        &'b mut self,
        local: &'b mut [u8],
        space: Space,
        address: u64,
        bytes: usize,
    ) -> Outcome<Result<&'b mut [u8], u64>> {
        debug_assert!(bytes.is_power_of_two());
        if address & (bytes as u64 - 1) != 0 {
            return Err(Fault::Misaligned { address, bytes });
        }
        let (space, address) = match space {
            Space::Generic => Space::of(address),
            Space::Global if Space::of(address).0 != Space::Global => {
                let text = format!("{address:#x} is a generic address, not one of global memory");
                return Err(Fault::Space(text));
            }
            other => (other, address),
        };
        let memory = match space {
            Space::Shared => &mut self.shared[..],
            Space::Local => local,
            Space::Parameter => &mut self.parameters[..],
            _ => return Ok(Err(address)),
        };
        let size = memory.len();
        let start = usize::try_from(address).ok().filter(|start| *start <= size);
        let found = start.and_then(|start| memory[start..].get_mut(..bytes));
        found.map(Ok).ok_or(Fault::OutOfBounds { space: space.name(), address, bytes, size })
    }
}
