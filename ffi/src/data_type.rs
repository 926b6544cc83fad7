//! XLA's element types, as far as they are told apart here.

use std::fmt;

use burst_attention::Dtype;

use crate::sys;

/// An element type as XLA numbers it. Unknown numbers are kept: they appear in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DataType(pub sys::XLA_FFI_DataType);

impl DataType {
    /// float32.
    pub const F32: DataType = DataType(sys::XLA_FFI_DataType_F32);
    /// bfloat16.
    pub const BF16: DataType = DataType(sys::XLA_FFI_DataType_BF16);
    /// float16.
    pub const F16: DataType = DataType(sys::XLA_FFI_DataType_F16);
    /// int32.
    pub const S32: DataType = DataType(sys::XLA_FFI_DataType_S32);
    /// uint32
    pub const U32: DataType = DataType(sys::XLA_FFI_DataType_U32);

    /// Bytes per element, for the types that have whole bytes; 0 for tokens.
    pub fn bytes(self) -> Option<usize> {
        Some(match self.0 {
            sys::XLA_FFI_DataType_TOKEN => 0,
            sys::XLA_FFI_DataType_PRED
            | sys::XLA_FFI_DataType_S8
            | sys::XLA_FFI_DataType_U8
            | sys::XLA_FFI_DataType_F8E5M2
            | sys::XLA_FFI_DataType_F8E3M4
            | sys::XLA_FFI_DataType_F8E4M3
            | sys::XLA_FFI_DataType_F8E4M3FN
            | sys::XLA_FFI_DataType_F8E4M3B11FNUZ
            | sys::XLA_FFI_DataType_F8E5M2FNUZ
            | sys::XLA_FFI_DataType_F8E4M3FNUZ
            | sys::XLA_FFI_DataType_F8E8M0FNU => 1,
            sys::XLA_FFI_DataType_S16
            | sys::XLA_FFI_DataType_U16
            | sys::XLA_FFI_DataType_F16
            | sys::XLA_FFI_DataType_BF16 => 2,
            sys::XLA_FFI_DataType_S32 | sys::XLA_FFI_DataType_U32 | sys::XLA_FFI_DataType_F32 => 4,
            sys::XLA_FFI_DataType_S64
            | sys::XLA_FFI_DataType_U64
            | sys::XLA_FFI_DataType_F64
            | sys::XLA_FFI_DataType_C64 => 8,
            sys::XLA_FFI_DataType_C128 => 16,
            _ => return None,
        })
    }

    /// The core's name for it, if attention is computed on it.
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
        let name = match self.0 {
            sys::XLA_FFI_DataType_PRED => "bool",
            sys::XLA_FFI_DataType_S8 => "int8",
            sys::XLA_FFI_DataType_S16 => "int16",
            sys::XLA_FFI_DataType_S32 => "int32",
            sys::XLA_FFI_DataType_S64 => "int64",
            sys::XLA_FFI_DataType_U8 => "uint8",
            sys::XLA_FFI_DataType_U16 => "uint16",
            sys::XLA_FFI_DataType_U32 => "uint32",
            sys::XLA_FFI_DataType_U64 => "uint64",
            sys::XLA_FFI_DataType_F16 => "float16",
            sys::XLA_FFI_DataType_F32 => "float32",
            sys::XLA_FFI_DataType_F64 => "float64",
            sys::XLA_FFI_DataType_BF16 => "bfloat16",
            sys::XLA_FFI_DataType_C64 => "complex64",
            sys::XLA_FFI_DataType_C128 => "complex128",
            sys::XLA_FFI_DataType_TOKEN => "a token",
            other => return write!(f, "XLA data type {other}"),
        };
        f.write_str(name)
    }
}
