//! Launch records: what each kernel takes, in order. The one place that compiling, launching,
//! interpreting and documenting go by.

use std::fmt;

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
    /// Bytes that the argument takes in the parameter block; it is aligned to as many.
    pub const fn bytes(self) -> usize {
        if self.is_pointer() { 8 } else { 4 }
    }

    /// Is it a pointer?
    pub const fn is_pointer(self) -> bool {
        matches!(self, Kind::Activations | Kind::Float32s | Kind::Int32s)
    }
}

/// What a kernel does with an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    In,
    /// The kernel reads the array if the argument's flag is 1, and otherwise leaves it alone.
    MaybeIn,
    /// The kernel reads and writes the array, each element once, if the argument's flag is 1, and
    /// otherwise leaves it alone.
    MaybeUpdate,
    /// A fused image adds to the array, several blocks to an element, in any order. Other images
    /// leave it alone.
    FusedAdd,
    /// Writes it, each element once.
    Out,
    /// Writes it if `last`; else nothing touches what it points to.
    MaybeOut,
    /// The kernel writes the array, each element once, if the argument's flag is 1, and otherwise
    /// leaves it alone.
    OptionalOut,
    /// Reads it and writes it, each element once.
    Update,
    /// Reads it unless `first`, writes it unless `last`; if both, nothing touches what it points to.
    /// A kernel without `first` always reads it.
    Carry,
}

/// What the elements of an array are of, outermost first; all but entries, and heads of
/// statistics, are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `[batch, q_len, heads, head_dim]`.
    Queries,
    /// `[batch, kv_len, kv_heads, head_dim]`.
    Keys,
    /// `[batch, q_len, heads, value_dim]`; where a kernel has no `value_dim` it is `head_dim`.
    Results,
    /// `[batch, kv_len, kv_heads, value_dim]`.
    Values,
    /// `[batch, q_len, heads]`.
    PerQuery,
    /// `[batch, heads, q_len]`, heads as far apart as the view says.
    Statistics,
    /// `[batch, q_len]`.
    QueryTokens,
    /// `[batch, kv_len]`.
    KeyTokens,
    /// `[batch, ⌈rows / 64⌉, 4]`, of the resident rows.
    Ranges,
    /// `[batch, heads]`.
    PerHead,
    /// `[batch, 4]`.
    PerEntry,
    /// `[batch, rows, q_heads, head_dim]`, of linear attention as those below.
    LinearQueries,
    /// `[batch, rows, kv_heads, head_dim]`.
    LinearKeys,
    /// `[batch, rows, kv_heads, value_dim]`.
    LinearValues,
    /// `[batch, rows, q_heads, value_dim]`.
    LinearOthers,
    /// `[batch, rows, heads, value_dim]`.
    LinearResults,
    /// `[batch, heads, padded_rows]`, heads as far apart as the view says.
    LinearSums,
    /// `[batch, dot_heads, padded_rows]`, likewise.
    LinearDots,
    /// `[batch · parts · heads, head_dim, value_dim]`.
    LinearStates,
}

impl Shape {
    /// Has a view of it a head stride?
    pub const fn has_head_stride(self) -> bool {
        matches!(self, Shape::Statistics | Shape::LinearSums | Shape::LinearDots)
    }
}

/// How a kernel views the array that a pointer leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Its elements.
    pub shape: Shape,
    /// The argument that says how many elements lie between batch entries.
    pub batch_stride: &'static str,
    /// Likewise between heads of statistics; nothing for other shapes.
    pub head_stride: Option<&'static str>,
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// Its name in the kernel.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// How a pointer's array is viewed; nothing for a number.
    pub view: Option<View>,
    /// What the kernel does with it.
    pub access: Access,
    /// The argument that says whether an array is used that may be left out.
    pub flag: Option<&'static str>,
    /// What the compiler was told divides it: bytes of an address, or the integer itself.
    pub divisor: i32,
    /// What it means.
    pub doc: &'static str,
}

/// The value of an argument.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// A device address, never 0: where the launch does not use an array, another one's.
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

/// Declares arguments:
/// `name: Kind[Shape, batch_stride, head_stride] Access(flag) / divisor, "meaning"`.
macro_rules! arguments {
    ($($name:ident: $kind:ident $([$shape:ident, $($stride:ident),+])? $($access:ident)?
       $(($flag:ident))? $(/ $divisor:literal)?, $doc:literal;)*) => {
        [$(Argument {
            name: stringify!($name),
            kind: Kind::$kind,
            view: arguments!(@view $($shape $($stride)+)?),
            access: arguments!(@access $($access)?),
            flag: arguments!(@name $($flag)?),
            divisor: arguments!(@divisor $($divisor)?),
            doc: $doc,
        }),*]
    };
    (@view) => { None };
    (@view $shape:ident $entry:ident $($head:ident)?) => {
        Some(View {
            shape: Shape::$shape,
            batch_stride: stringify!($entry),
            head_stride: arguments!(@name $($head)?),
        })
    };
    (@name) => { None };
    (@name $name:ident) => { Some(stringify!($name)) };
    (@access) => { Access::In };
    (@access $access:ident) => { Access::$access };
    (@divisor) => { 1 };
    (@divisor $divisor:literal) => { $divisor };
}

/// The parts of a record one after the other.
macro_rules! record {
    ($($part:expr),*) => {{
        const PARTS: &[&[Argument]] = &[$(&$part),*];
        const COUNT: usize = count(PARTS);
        const RECORD: [Argument; COUNT] = joined(PARTS);
        &RECORD
    }};
}

mod attention;
mod linear;
mod rows;

pub use attention::{FORWARD, KEY_GRADS, QUERY_GRADS};
pub use linear::{LINEAR_ATTEND, LINEAR_STATE};
pub use rows::{DELTA, FINISH, JOIN, MERGE, SEGMENT_RANGES};

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
