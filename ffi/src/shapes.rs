//! Checks that operands and results have the shapes that query, key and value give them.

use std::ptr::NonNull;

use burst_attention::operands::{DeviceKind, ElementType, Operand};
use burst_attention::{Dtype, Problem};

use crate::buffer::Buffer;
use crate::data_type::DataType;
use crate::error::{Error, Result};

/// Shapes that all operands of a call must have.
pub(crate) struct Shapes {
    /// The problem that query, key and value pose together.
    pub problem: Problem,
    /// Leading dimensions, of which the last is the batch and all before it come from vmap.
    pub outer: Vec<usize>,
}

/// Memory of an operand or result with the shape and type that the problem gives it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked {
    /// Address of the first element.
    pub data: NonNull<u8>,
    /// Element type; float32 for whole numbers of 32 bits.
    pub dtype: Dtype,
}

impl Shapes {
    /// Checks the shape and type of an operand or a result.
    pub fn check(&self, operand: Operand, kind: DeviceKind, buffer: &Buffer) -> Result<Checked> {
        let name = operand.name();
        let dtype = match operand.element(kind) {
            ElementType::ActivationOrFloat32 if buffer.dtype == DataType::F32 => DataType::F32,
            element => DataType::of(element, self.problem.dtype.into()),
        };
        let inner = operand.dims(kind).iter().map(|dim| self.problem.length(*dim));
        let dims: Vec<usize> = self.outer.iter().copied().chain(inner).collect();
        let data = buffer.memory(name, dtype, &dims)?;
        Ok(Checked { data, dtype: dtype.activation().unwrap_or(Dtype::F32) })
    }
}

/// Leading dimensions, and length, heads and head_dim.
pub(crate) fn split<'a>(name: &str, buffer: &'a Buffer) -> Result<(&'a [usize], [usize; 3])> {
    match buffer.dims.split_last_chunk::<3>() {
        Some((outer, inner)) if !outer.is_empty() => Ok((outer, *inner)),
        _ => {
            let expected = "[batch, length, heads, head_dim]";
            Err(Error::mismatch(format!("shape of {name}"), expected, format!("{:?}", buffer.dims)))
        }
    }
}
