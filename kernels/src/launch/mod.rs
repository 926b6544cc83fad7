//! The host side of launching, with no CUDA: from a description of what to compute to the launches
//! that compute it, each checked.
//!
//! A description ([`Forward`], [`KeyGrads`], [`QueryGrads`], [`Delta`], [`Finish`], [`Merge`],
//! [`Join`]) says in 64 bits
//! what is computed and where its arrays lie. The kernels count in 32 bits, so that a description
//! may become several [`Launch`]es, to be run in their order on one stream:
//!
//! - Every view that a kernel makes spans less than [`MAX_VIEW_BYTES`]: batch entries are spread
//!   over launches, then rows, at multiples of a tile. A piece of the resident rows (those whose
//!   results a block keeps: queries, for dk and dv the keys) goes through the pieces of the streamed
//!   rows one after the other and hands its state on in the float32 accumulators.
//! - Pieces that see nothing of each other are not launched, except to start or to write results.
//! - An array may be missing where no launch uses it; another's address stands in for it, see
//!   [`Launch::check`].
//!
//! Nobody checks here that arrays which a kernel writes overlap no others; what a launch touches
//! is its [`Launch::footprint`].

mod array;
mod check;
mod description;
mod error;
mod features;
mod fill;
mod footprint;
mod job;
mod linear;
mod names;
mod order;
mod per_row;
mod split;

pub use description::{Forward, KeyGrads, QueryGrads, Rectangle, Rows, Statistics};
pub use error::LaunchError;
pub use features::{Dropout, Features, Positions, Segments};
pub use footprint::Footprint;
pub use linear::{LINEAR_TILE, LinearAttend, LinearState, Part, column_tiles};
pub use per_row::{Delta, Finish, Join, Merge, State};

use crate::cubin::Parameter;
use crate::instances::Instance;
use crate::record::{Access, Argument, Kind, Value};

/// Bytes that a kernel's view of an array must stay below: offsets are 32-bit on the device.
pub const MAX_VIEW_BYTES: u64 = 1 << 31;

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The image to launch.
    pub instance: Instance,
    /// Blocks.
    pub grid: [u32; 3],
    /// The arguments in the order of the kernel's record.
    pub values: Vec<Value>,
}

/// The arguments of a launch as they lie in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameters {
    /// The packed block, without padding at its end.
    pub bytes: Vec<u8>,
    /// Where each argument lies in it; the image must declare the same.
    pub layout: Vec<Parameter>,
}

impl Launch {
    /// The value of the argument `name`, if the kernel has one of that name.
    pub fn value(&self, name: &str) -> Option<Value> {
        let arguments = self.instance.kernel.arguments();
        arguments.iter().position(|argument| argument.name == name).map(|at| self.values[at])
    }

    /// Checks the values against the kernel's record: their number and types, that no address is
    /// null, and that each address and integer is divided by what the compiler was told.
    ///
    /// Null is refused for arrays that are not used too: the driver makes a tensor map of each
    /// view before the kernel runs, and need not accept null. The launches of a description have
    /// another address in such places.
    ///
    /// # Errors
    /// [`LaunchError`], with the argument's name, what it must be and what it was.
    pub fn check(&self) -> Result<(), LaunchError> {
        let arguments = self.instance.kernel.arguments();
        if arguments.len() != self.values.len() {
            let expected = format!("{} for {}", arguments.len(), self.instance);
            return Err(LaunchError::invalid("number of values", expected, self.values.len()));
        }
        for (argument, &value) in arguments.iter().zip(&self.values) {
            self.check_value(argument, value)?;
        }
        Ok(())
    }

    fn check_value(&self, argument: &Argument, value: Value) -> Result<(), LaunchError> {
        let name = argument.name;
        let remainder = match (argument.kind, value) {
            (kind, Value::Pointer(0)) if kind.is_pointer() => {
                let kernel = self.instance.kernel.name();
                return Err(LaunchError::Null { name, kernel, why: self.why_used(argument) });
            }
            (kind, Value::Pointer(address)) if kind.is_pointer() => {
                address % argument.divisor as u64
            }
            (Kind::I32, Value::I32(integer)) => (integer % argument.divisor).unsigned_abs().into(),
            (Kind::F32, Value::F32(_)) => 0,
            (kind, value) => {
                return Err(LaunchError::invalid(name, format!("{kind:?}"), format!("{value:?}")));
            }
        };
        if remainder != 0 {
            let unit = if argument.kind.is_pointer() { " bytes" } else { "" };
            return Err(LaunchError::Misaligned { name, divisor: argument.divisor, unit, value });
        }
        Ok(())
    }

    /// Why a launch needs an array, to say so where it is missing.
    fn why_used(&self, argument: &Argument) -> String {
        match argument.access {
            Access::In | Access::MaybeIn => "it is read".to_owned(),
            Access::Out | Access::OptionalOut => "it is written".to_owned(),
            Access::Update | Access::MaybeUpdate | Access::FusedAdd => {
                "it is read and written".to_owned()
            }
            Access::MaybeOut => "the last launch of these rows writes it".to_owned(),
            Access::Carry => format!(
                "it carries the state from launch to launch (here first is {}, last {}); what is \
                 not both first and last, or too large for one launch, needs it",
                self.flag("first"),
                self.flag("last"),
            ),
        }
    }

    /// The values as a block of memory, each where the record has its argument.
    pub fn parameters(&self) -> Parameters {
        let layout = layout(self.instance.kernel.arguments());
        let mut bytes = Vec::new();
        for (place, value) in layout.iter().zip(&self.values) {
            bytes.resize(place.offset.into(), 0);
            match value {
                Value::Pointer(address) => bytes.extend(address.to_le_bytes()),
                Value::I32(integer) => bytes.extend(integer.to_le_bytes()),
                Value::F32(number) => bytes.extend(number.to_le_bytes()),
            }
        }
        Parameters { bytes, layout }
    }
}

/// Where the arguments of a kernel lie: one after the other, each aligned to its own size.
pub fn layout(arguments: &[Argument]) -> Vec<Parameter> {
    let mut end = 0;
    let place = |(ordinal, argument): (u16, &Argument)| {
        let size = argument.kind.bytes() as u16;
        let offset = u16::next_multiple_of(end, size);
        end = offset + size;
        Parameter { ordinal, offset, size }
    };
    (0..).zip(arguments).map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instances::{Element, Kernel, Target};

    #[test]
    fn arguments_are_aligned_to_their_own_size() {
        let argument = |kind| Argument {
            name: "",
            kind,
            view: None,
            access: Access::In,
            flag: None,
            divisor: 1,
            doc: "",
        };
        let places = layout(&[Kind::I32, Kind::Activations, Kind::F32, Kind::I32].map(argument));
        let places: Vec<_> = places.iter().map(|lies| (lies.offset, lies.size)).collect();
        assert_eq!(places, [(0, 4), (8, 8), (16, 4), (20, 4)]);
    }

    #[test]
    fn values_are_packed_in_the_order_of_the_record() {
        let (kernel, element) = (Kernel::Finish, Element::F16);
        let instance = Instance::plain(kernel, element, 64, Target::Sm80);
        let mut values = vec![Value::Pointer(0x0102); 3];
        values.extend([Value::I32(-2); 7]);
        values.extend([Value::F32(0.5), Value::I32(1)]);
        let packed = Launch { instance, grid: [1, 1, 1], values }.parameters().bytes;
        assert_eq!(packed.len(), 3 * 8 + 9 * 4);
        assert_eq!(packed[8..16], [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(packed[24..28], [0xfe, 255, 255, 255]);
        assert_eq!(packed[52..], [0, 0, 0, 0x3f, 1, 0, 0, 0]);
    }
}
