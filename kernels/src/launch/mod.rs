//! The host side of launching, without CUDA: from a description of what to compute to the launches
//! that compute it, each checked.
//!
//! A description ([`Forward`], [`KeyGrads`], [`QueryGrads`], [`Delta`], [`Cast`], [`Accumulate`],
//! [`CombineSoftmax`], [`LinearState`], [`LinearAttend`], [`Decode`]) says in 64 bits what to compute and where
//! its arrays lie. The kernels count in 32 bits, so a description may become several [`Launch`]es,
//! to be run in their order on one stream:
//!
//! - Every view that a kernel makes spans less than [`MAX_VIEW_BYTES`]: batch entries are spread
//!   over launches, then rows, at multiples of a tile. A range of resident rows (the rows whose
//!   results a block keeps: queries, for dk and dv the keys) goes through the ranges of streamed
//!   rows one after the other. Each launch hands the state on in the float32 accumulators.
//! - Ranges that see nothing of each other are not launched, except to start or to write results.
//! - An array may be missing where no launch uses it; the address of another array stands in for
//!   it, see [`Launch::check`].
//!
//! The caller makes sure that arrays which a kernel writes overlap no other array of the launch;
//! [`Launch::footprint`] says what a launch touches.

mod array;
mod attention;
mod check;
mod cut;
mod decode;
mod fill;
mod footprint;
mod job;
mod linear;
mod lower;
mod masks;
mod order;
mod per_row;
mod rectangle;

use serde::ser::{Serialize, SerializeStruct, Serializer};

pub use attention::*;
pub use decode::*;
pub use footprint::Footprint;
pub use linear::*;
pub use per_row::*;
pub use rectangle::Rectangle;

pub use crate::error::LaunchError;
pub use crate::features::{Dropout, EvenPositions, Features, Segments, Visible};
use crate::instances::Instance;
pub use crate::place::{Rows, Statistics};
use crate::record::{Access, Argument, Kind, Meaning, Value};

/// The bytes that a kernel's view of an array must stay below: offsets are 32-bit on the device.
pub const MAX_VIEW_BYTES: u64 = 1 << 31;

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The image to launch.
    pub instance: Instance,
    /// Numbers of blocks.
    pub grid: [u32; 3],
    /// The arguments in the order of the kernel's record.
    pub values: Vec<Value>,
}

/// Writes the names of the image and of the function in it, as the loader wants them.
impl Serialize for Launch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut launch = serializer.serialize_struct("Launch", 4)?;
        launch.serialize_field("image", &self.instance.to_string())?;
        launch.serialize_field("entry", &self.instance.entry())?;
        launch.serialize_field("grid", &self.grid)?;
        launch.serialize_field("values", &self.values)?;
        launch.end()
    }
}

impl Launch {
    /// Returns the value of the argument `name`, if the kernel has an argument of that name.
    pub fn value(&self, name: &str) -> Option<Value> {
        let arguments = self.instance.kernel.arguments();
        arguments.iter().position(|argument| argument.name == name).map(|at| self.values[at])
    }

    /// Checks the values against the kernel's record: their number and types, that no address is
    /// null, and that the record's divisors divide addresses and integers.
    ///
    /// Null is refused for unused arrays too: the driver makes a tensor map of each view before the
    /// kernel runs, and need not accept null. The launches of a description have another array's
    /// address in such places.
    ///
    /// # Errors
    /// [`LaunchError`], with the argument's name, the expected value and the value that came.
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

    /// Returns the reason why a launch needs an array, for the error that the array is missing.
    fn why_used(&self, argument: &Argument) -> String {
        match argument.access {
            Access::In => "it is read".to_owned(),
            Access::Out => "it is written".to_owned(),
            Access::Update | Access::FusedAdd => "it is read and written".to_owned(),
            Access::LastOut => "the last launch of these rows writes it".to_owned(),
            Access::Carry => format!(
                "it carries the state from launch to launch (here first is {}, last {}); what is \
                 not both first and last, or too large for one launch, needs it",
                self.is_on(Meaning::First),
                self.is_on(Meaning::Last),
            ),
        }
    }
}
