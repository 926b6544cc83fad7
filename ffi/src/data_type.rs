//! XLA's element types.

use std::fmt;

use burst_attention::Dtype;
use burst_attention::operands::ElementType;

use crate::sys;

/// An element type with XLA's number. Unknown numbers are kept for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DataType(pub sys::XLA_FFI_DataType);

/// XLA's number, the name and the bytes of each type of whole bytes.
const KNOWN: [(sys::XLA_FFI_DataType, &str, usize); 24] = [
    (sys::XLA_FFI_DataType_TOKEN, "a token", 0),
    (sys::XLA_FFI_DataType_PRED, "bool", 1),
    (sys::XLA_FFI_DataType_S8, "int8", 1),
    (sys::XLA_FFI_DataType_S16, "int16", 2),
    (sys::XLA_FFI_DataType_S32, "int32", 4),
    (sys::XLA_FFI_DataType_S64, "int64", 8),
    (sys::XLA_FFI_DataType_U8, "uint8", 1),
    (sys::XLA_FFI_DataType_U16, "uint16", 2),
    (sys::XLA_FFI_DataType_U32, "uint32", 4),
    (sys::XLA_FFI_DataType_U64, "uint64", 8),
    (sys::XLA_FFI_DataType_F8E3M4, "float8_e3m4", 1),
    (sys::XLA_FFI_DataType_F8E4M3, "float8_e4m3", 1),
    (sys::XLA_FFI_DataType_F8E4M3B11FNUZ, "float8_e4m3b11fnuz", 1),
    (sys::XLA_FFI_DataType_F8E4M3FN, "float8_e4m3fn", 1),
    (sys::XLA_FFI_DataType_F8E4M3FNUZ, "float8_e4m3fnuz", 1),
    (sys::XLA_FFI_DataType_F8E5M2, "float8_e5m2", 1),
    (sys::XLA_FFI_DataType_F8E5M2FNUZ, "float8_e5m2fnuz", 1),
    (sys::XLA_FFI_DataType_F8E8M0FNU, "float8_e8m0fnu", 1),
    (sys::XLA_FFI_DataType_F16, "float16", 2),
    (sys::XLA_FFI_DataType_F32, "float32", 4),
    (sys::XLA_FFI_DataType_F64, "float64", 8),
    (sys::XLA_FFI_DataType_BF16, "bfloat16", 2),
    (sys::XLA_FFI_DataType_C64, "complex64", 8),
    (sys::XLA_FFI_DataType_C128, "complex128", 16),
];

impl DataType {
    /// float32.
    pub const F32: DataType = DataType(sys::XLA_FFI_DataType_F32);
    /// bfloat16.
    pub const BF16: DataType = DataType(sys::XLA_FFI_DataType_BF16);
    /// float16.
    pub const F16: DataType = DataType(sys::XLA_FFI_DataType_F16);
    /// int32.
    pub const S32: DataType = DataType(sys::XLA_FFI_DataType_S32);
    /// uint8.
    pub const U8: DataType = DataType(sys::XLA_FFI_DataType_U8);
    /// uint32.
    pub const U32: DataType = DataType(sys::XLA_FFI_DataType_U32);

    /// Returns the bytes of an element, for types of whole bytes; 0 for tokens.
    pub fn bytes(self) -> Option<usize> {
        self.known().map(|(.., bytes)| *bytes)
    }

    fn known(self) -> Option<&'static (sys::XLA_FFI_DataType, &'static str, usize)> {
        KNOWN.iter().find(|(number, ..)| *number == self.0)
    }

    /// Returns the type of an array's elements, in calls with activations of type `activation`.
    pub(crate) fn of(element: ElementType, activation: DataType) -> DataType {
        match element {
            ElementType::Activation | ElementType::ActivationOrFloat32 => activation,
            ElementType::Float32 => DataType::F32,
            ElementType::Int32 => DataType::S32,
            ElementType::Uint32 => DataType::U32,
        }
    }

    /// Returns the core's type, if the core computes on it.
    pub fn activation(self) -> Option<Dtype> {
        match self {
            DataType::F32 => Some(Dtype::F32),
            DataType::BF16 => Some(Dtype::Bf16),
            DataType::F16 => Some(Dtype::F16),
            _ => None,
        }
    }
}

impl From<Dtype> for DataType {
    fn from(dtype: Dtype) -> DataType {
        match dtype {
            Dtype::F32 => DataType::F32,
            Dtype::Bf16 => DataType::BF16,
            Dtype::F16 => DataType::F16,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some((_, name, _)) => f.write_str(name),
            None => write!(f, "XLA data type {}", self.0),
        }
    }
}
