//! The host side of launching, without CUDA: from a description of what to compute to the launches
//! that compute it, each checked.
//!
//! A description, such as [`Forward`], says in 64 bits what to compute and where its arrays lie.
//! [`TileOperation`] lists all descriptions. The kernels count in 32 bits, so a description may
//! become several [`Launch`]es, to be run in their order on one stream:
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
mod delta_rule;
mod fill;
mod footprint;
mod job;
mod linear;
mod lower;
mod masks;
mod order;
mod per_row;
mod rectangle;

use std::fmt;

use serde::Deserialize;
use serde::ser::{Serialize, SerializeStruct, Serializer};

pub use attention::*;
pub use decode::*;
pub use delta_rule::*;
pub use footprint::Footprint;
pub use linear::*;
pub use per_row::*;
pub use rectangle::Rectangle;

pub use crate::error::LaunchError;
pub use crate::features::{Dropout, EvenPositions, Features, Segments, Visible};
use crate::instances::Instance;
pub use crate::place::{Rows, Statistics};
use crate::record::{Access, Argument, Kind, Meaning, Value};
use crate::target::Target;

/// The bytes that a kernel's view of an array must stay below: offsets are 32-bit on the device.
pub const MAX_VIEW_BYTES: u64 = 1 << 31;

/// Declares the operations. Each is a description, which has `launches`.
macro_rules! operations {
    ($($(#[$doc:meta])* $operation:ident = $name:literal),* $(,)?) => {
        /// One operation with its memory.
        #[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum TileOperation {
            $($(#[$doc])* $operation($operation)),*
        }

        impl TileOperation {
            /// Returns the name of the computation.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(TileOperation::$operation(_) => $name),*
                }
            }

            /// Returns the launches of this library's kernels that compute it, to be run in order
            /// on a device of `target`.
            ///
            /// # Errors
            /// [`LaunchError`], with the expected value and the value that came.
            pub fn launches(&self, target: Target) -> Result<Vec<Launch>, LaunchError> {
                match self {
                    $(TileOperation::$operation(operation) => operation.launches(target)),*
                }
            }
        }

        $(impl From<$operation> for TileOperation {
            fn from(operation: $operation) -> TileOperation {
                TileOperation::$operation(operation)
            }
        })*
    };
}

operations! {
    /// Softmax attention, forward.
    Forward = "forward",
    /// The gradients of keys and values, and of queries where a kernel is fused.
    KeyGrads = "key_grads",
    /// The gradient of queries.
    QueryGrads = "query_grads",
    /// What the backward pass needs of each row.
    Delta = "delta",
    /// Results of float32 sums.
    Cast = "cast",
    /// A sum of two float32 arrays.
    Accumulate = "accumulate",
    /// A sum of a float32 array and a rounded one.
    AddGradient = "add_gradient",
    /// Log-sum-exp, head by head.
    PackLse = "pack_lse",
    /// One softmax state of two.
    CombineSoftmax = "combine_softmax",
    /// A softmax state and a result.
    FoldResult = "fold_result",
    /// The states of linear attention.
    LinearState = "linear_state",
    /// The outputs of linear attention.
    LinearAttend = "linear_attend",
    /// The pairs of tiles under decays of channels.
    ChannelPairs = "channel_pairs",
    /// The inverses of the delta rule.
    DeltaInverse = "delta_inverse",
    /// The states or the corrected values of the delta rule.
    DeltaState = "delta_state",
    /// The gradients of states, or of the products with inverses, of the delta rule.
    DeltaGrad = "delta_grad",
    /// The gradient of keys in the delta rule.
    DeltaKeys = "delta_keys",
    /// Attention of few queries over pages of keys.
    Decode = "decode",
}

/// The code of a kernel, one kind of which each backend with kernels has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// An image that the tile compiler made.
    Tile(Instance),
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Code::Tile(instance) => instance.fmt(f),
        }
    }
}

impl Code {
    /// Returns the name of the function in the image.
    pub fn entry(&self) -> String {
        match self {
            Code::Tile(instance) => instance.entry(),
        }
    }
}

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The code to launch.
    pub code: Code,
    /// Numbers of blocks.
    pub grid: [u32; 3],
    /// Numbers of threads of a block, as the driver is told.
    pub block: [u32; 3],
    /// Bytes of shared memory that the driver gives each block.
    pub shared_bytes: u32,
    /// The arguments in the order of the kernel's record.
    pub values: Vec<Value>,
}

/// Writes the names of the image and of the function in it, as the loader wants them.
impl Serialize for Launch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut launch = serializer.serialize_struct("Launch", 6)?;
        launch.serialize_field("image", &self.code.to_string())?;
        launch.serialize_field("entry", &self.code.entry())?;
        launch.serialize_field("grid", &self.grid)?;
        launch.serialize_field("block", &self.block)?;
        launch.serialize_field("shared_bytes", &self.shared_bytes)?;
        launch.serialize_field("values", &self.values)?;
        launch.end()
    }
}

impl Launch {
    /// Returns a launch of an image that the tile compiler made. The driver is told of one thread
    /// and no shared memory, since such an image sets both itself.
    pub const fn of_image(instance: Instance, grid: [u32; 3], values: Vec<Value>) -> Launch {
        Launch { code: Code::Tile(instance), grid, block: [1; 3], shared_bytes: 0, values }
    }

    /// Returns the image of the launch.
    pub const fn instance(&self) -> Instance {
        let Code::Tile(instance) = self.code;
        instance
    }

    /// Returns the value of the argument `name`, if the kernel has an argument of that name.
    pub fn value(&self, name: &str) -> Option<Value> {
        let arguments = self.instance().kernel.arguments();
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
        let arguments = self.instance().kernel.arguments();
        if arguments.len() != self.values.len() {
            let expected = format!("{} for {}", arguments.len(), self.code);
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
                let kernel = self.instance().kernel.name();
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
            Access::In | Access::HeadsIn | Access::KeyChannelsIn | Access::ValueChannelsIn => {
                "it is read".to_owned()
            }
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
