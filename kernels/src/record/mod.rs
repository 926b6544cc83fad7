//! Launch records: the arguments of each kernel, in order. The compiler, the launches, the
//! interpreter and the descriptions for other programs all follow these records.

mod meaning;

use std::fmt;

pub use meaning::{Meaning, Operand, Size};

use serde::Serialize;

use crate::element::Element;
use crate::variant::{Decays, FeatureSet, Variant};

/// Type of a kernel's argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Pointer to 16-bit activations.
    Activations,
    /// Pointer to float32.
    Float32s,
    /// Pointer to 32-bit integers.
    Int32s,
    /// A 32-bit integer.
    I32,
    /// A float32.
    F32,
}

impl Kind {
    /// Returns the bytes that the argument takes in the parameter block, which is also its
    /// alignment.
    pub const fn bytes(self) -> usize {
        if self.is_pointer() { 8 } else { 4 }
    }

    /// Whether the argument is a pointer.
    pub const fn is_pointer(self) -> bool {
        matches!(self, Kind::Activations | Kind::Float32s | Kind::Int32s)
    }

    /// Returns the bytes of an element of the array behind a pointer, with activations of
    /// `element`.
    pub const fn element_bytes(self, element: Element) -> usize {
        match self {
            Kind::Activations => element.bytes(),
            _ => 4,
        }
    }
}

/// A kernel's access to the array of an argument. If the argument has a flag that is 0, the
/// kernel leaves the array alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The kernel reads the array.
    In,
    /// The kernel writes the array, each element once.
    Out,
    /// The kernel reads and writes the array, each element once.
    Update,
    /// A fused image adds to the array, several blocks to an element, in any order. Other images
    /// leave it alone.
    FusedAdd,
    /// An image for decays of heads reads the array. Other images leave it alone.
    HeadsIn,
    /// An image for decays of columns of keys reads the array. Other images leave it alone.
    KeyChannelsIn,
    /// An image for decays of columns of values reads the array. Other images leave it alone.
    ValueChannelsIn,
    /// The kernel writes the array if `last` is 1, and otherwise leaves it alone.
    LastOut,
    /// The kernel reads the array unless `first` is 1, and writes it unless `last` is 1; with both
    /// it leaves the array alone. A kernel without `first` always reads it.
    Carry,
}

/// A kernel's view of the array that a pointer leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// The dimensions within a batch entry, outermost first. They are contiguous, except that heads
    /// with a stride of their own may be further apart.
    pub dims: &'static [Size],
    /// The array whose batch stride this array has; often the array itself.
    pub batch_stride: Operand,
    /// The array whose head stride this array has, if its outermost dimension is heads with a
    /// stride of their own.
    pub head_stride: Option<Operand>,
}

impl View {
    /// Returns the dimension that counts rows, if the array has rows.
    pub fn rows(&self) -> Option<Size> {
        let is_rows = |dim: &Size| {
            use Size::{KvLen, PaddedRows, Pages, Parts, QLen, RangeBlocks, RunBlocks};
            use Size::{Slots, Sources, Units};
            matches!(dim, QLen | KvLen | PaddedRows | Parts | RangeBlocks | RunBlocks)
                || matches!(dim, Units | Sources | Pages | Slots)
        };
        self.dims.iter().copied().find(is_rows)
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// Its name in the kernel.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// The meaning of its value.
    pub meaning: Meaning,
    /// The kernel's view of a pointer's array; `None` for a number.
    pub view: Option<View>,
    /// The kernel's access to the array.
    pub access: Access,
    /// The array whose [`Meaning::Has`] says whether the launch uses this array.
    pub flag: Option<Operand>,
    /// A divisor that the compiler relies on: of the address in bytes, or of the integer.
    pub divisor: i32,
    /// Description for readers.
    pub doc: &'static str,
}

impl Argument {
    /// Returns the kernel's view of a pointer's array in an image of a variant. Where masks are
    /// data, packed rows and runs take the place of segments and ranges. Where channels have decays,
    /// sums of log decays and products are those of channels.
    pub fn view_of(&self, variant: Variant) -> Option<View> {
        if let Some(dims) = self.of_channels(variant.decays) {
            return self.view.map(|view| View { dims, head_stride: None, ..view });
        }
        let dims: &[Size] = match self.meaning {
            _ if !variant.has(FeatureSet::VISIBLE) => return self.view,
            Meaning::Address(Operand::QSegments) => &[Size::QLen, Size::Six],
            Meaning::Address(Operand::KvSegments) => &[Size::KvLen, Size::Six],
            Meaning::Address(Operand::Ranges) => &[Size::RunBlocks, Size::Ten],
            _ => return self.view,
        };
        self.view.map(|view| View { dims, ..view })
    }
}

impl Argument {
    /// Returns the dimensions of an array of channels in an image for decays of channels.
    fn of_channels(&self, decays: Decays) -> Option<&'static [Size]> {
        use Size::{HeadDim, Heads, PaddedRows, ValueDim};
        let Meaning::Address(operand) = self.meaning else { return None };
        Some(match (decays, operand) {
            (Decays::KeyChannels, Operand::Sums | Operand::KeyDots) => {
                &[PaddedRows, Heads, HeadDim]
            }
            (Decays::ValueChannels, Operand::Sums | Operand::Dots) => {
                &[PaddedRows, Heads, ValueDim]
            }
            _ => return None,
        })
    }
}

/// The value of an argument. In JSON `{"pointer": 4096}`, `{"i32": 7}` or `{"f32": 0.5}`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Value {
    /// A device address, never 0: where the launch does not use an array, the address of another
    /// one.
    Pointer(u64),
    /// A 32-bit integer.
    I32(i32),
    /// A float32.
    F32(f32),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Pointer(address) => write!(f, "{address:#x}"),
            Value::I32(value) => write!(f, "{value}"),
            Value::F32(value) => write!(f, "{value}"),
        }
    }
}

/// The place of an argument in the parameter block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Position in the declaration, from zero.
    pub ordinal: u16,
    /// Bytes from the first parameter.
    pub offset: u16,
    /// Bytes it takes.
    pub size: u16,
}

/// Returns the places of a kernel's arguments: one after the other, each aligned to its own size.
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

/// Declares arguments. A pointer names its array, its dimensions and, where it lies like other
/// arrays, the arrays whose batch stride and head stride it has: `name: Kind(Operand)[Size, …;
/// Operand, Operand] Access(flag's Operand) / divisor, "description"`. A number names its meaning:
/// `name: Kind(Meaning) / divisor, "description"`.
macro_rules! arguments {
    ($($name:ident: $kind:ident($($meaning:tt)+) $([$($view:tt)+])? $($access:ident)?
       $(($flag:ident))? $(/ $divisor:literal)?, $doc:literal;)*) => {
        [$(Argument {
            name: stringify!($name),
            kind: Kind::$kind,
            meaning: arguments!(@meaning $([$($view)+])? $($meaning)+),
            view: arguments!(@view ($($meaning)+) $($($view)+)?),
            access: arguments!(@or Access::In $(, Access::$access)?),
            flag: arguments!(@or None $(, Some(Operand::$flag))?),
            divisor: arguments!(@or 1 $(, $divisor)?),
            doc: $doc,
        }),*]
    };
    (@meaning [$($view:tt)+] $operand:ident) => { Meaning::Address(Operand::$operand) };
    (@meaning $variant:ident) => { Meaning::$variant };
    (@meaning Size($size:ident)) => { Meaning::Size(Size::$size) };
    (@meaning $variant:ident($operand:ident)) => { Meaning::$variant(Operand::$operand) };
    (@view ($($meaning:tt)+)) => { None };
    (@view ($own:ident) $($dim:ident),+ $(; $batch:ident $(, $heads:ident)?)?) => {
        Some(View {
            dims: &[$(Size::$dim),+],
            batch_stride: arguments!(@or Operand::$own $(, Operand::$batch)?),
            head_stride: arguments!(@or None $($(, Some(Operand::$heads))?)?),
        })
    };
    (@or $default:expr) => { $default };
    (@or $default:expr, $given:expr) => { $given };
}

/// Joins the parts of a record.
macro_rules! record {
    ($($part:expr),*) => {{
        const PARTS: &[&[Argument]] = &[$($part),*];
        const COUNT: usize = count(PARTS);
        const RECORD: [Argument; COUNT] = joined(PARTS);
        &RECORD
    }};
}

mod attention;
mod decode;
mod linear;
mod rows;

pub use attention::*;
pub use decode::*;
pub use linear::*;
pub use rows::*;

const fn count(parts: &[&[Argument]]) -> usize {
    let (mut count, mut part) = (0, 0);
    while part < parts.len() {
        count += parts[part].len();
        part += 1;
    }
    count
}

const fn joined<const COUNT: usize>(parts: &[&[Argument]]) -> [Argument; COUNT] {
    let mut record = [parts[0][0]; COUNT];
    let (mut end, mut part) = (0, 0);
    while part < parts.len() {
        let mut index = 0;
        while index < parts[part].len() {
            record[end] = parts[part][index];
            end += 1;
            index += 1;
        }
        part += 1;
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_aligned_to_their_own_size() {
        let argument = |kind| Argument {
            name: "",
            kind,
            meaning: Meaning::Scale,
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
}
