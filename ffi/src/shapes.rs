//! Do operands and results have the shapes that query, key and value give them?

use std::ptr::NonNull;

use burst_attention::host::array::HostArray;
use burst_attention::host::extras::Extras;
use burst_attention::{Dtype, Problem};

use crate::buffer::Buffer;
use crate::data_type::DataType;
use crate::error::{Error, Result};

/// Shapes that all operands of a call must have.
pub(crate) struct Shapes {
    /// What they pose together.
    pub problem: Problem,
    /// Leading dimensions, of which the last is the batch and the others come from vmap.
    pub outer: Vec<usize>,
}

/// Memory of an operand or result that is as it must be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked {
    data: NonNull<u8>,
    dtype: Dtype,
    dims: [usize; 4],
}

impl Checked {
    pub fn host(self) -> HostArray {
        HostArray::jax(self.data, self.dtype, self.dims)
    }

    /// Address of the first element.
    pub fn address(self) -> u64 {
        self.data.as_ptr() as u64
    }
}

impl Shapes {
    pub fn query(&self, name: &str, buffer: &Buffer) -> Result<Checked> {
        let Problem { q_len, heads, head_dim, dtype, .. } = self.problem;
        self.array(name, buffer, dtype, &[q_len, heads, head_dim])
    }

    /// The output of the forward pass may keep float32.
    pub fn output(&self, buffer: &Buffer) -> Result<Checked> {
        let Problem { q_len, heads, value_dim, dtype, .. } = self.problem;
        let kept = buffer.dtype.activation() == Some(Dtype::F32);
        let dtype = if kept { Dtype::F32 } else { dtype };
        self.array("out", buffer, dtype, &[q_len, heads, value_dim])
    }

    /// The output or its gradient.
    pub fn result(&self, name: &str, buffer: &Buffer) -> Result<Checked> {
        let Problem { q_len, heads, value_dim, dtype, .. } = self.problem;
        self.array(name, buffer, dtype, &[q_len, heads, value_dim])
    }

    pub fn value(&self, name: &str, buffer: &Buffer) -> Result<Checked> {
        let Problem { kv_len, kv_heads, value_dim, dtype, .. } = self.problem;
        self.array(name, buffer, dtype, &[kv_len, kv_heads, value_dim])
    }

    /// Operands of features, in their order.
    pub fn extras(&self, buffers: &[Buffer]) -> Result<Extras> {
        let Problem { q_len, kv_len, features, .. } = self.problem;
        let mut buffers = buffers.iter();
        let too_few = || Error::mismatch("number of operands", "one for each feature", "fewer");
        let mut next = || buffers.next().ok_or_else(too_few);
        let mut extras = Extras::default();
        if features.segments {
            let (q, k) =
                (("segments of query", [q_len, 1, 1]), ("segments of key", [kv_len, 1, 1]));
            extras.q_segments = Some(self.words(q.0, next()?, DataType::S32, q.1)?);
            extras.k_segments = Some(self.words(k.0, next()?, DataType::S32, k.1)?);
        }
        if features.slopes {
            extras.slopes = Some(self.slopes("slopes", next()?)?);
        }
        if features.dropout.is_some() {
            let numbers = self.words("numbers for dropout", next()?, DataType::U32, [1, 1, 4])?;
            extras.dropout = Some(numbers);
        }
        Ok(extras)
    }

    pub fn slopes(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        self.words(name, buffer, Dtype::F32.into(), [1, self.problem.heads, 1])
    }

    /// An array of 32-bit numbers with all dimensions of length 1 left out behind the batch.
    fn words(
        &self,
        name: &str,
        buffer: &Buffer,
        dtype: DataType,
        [len, heads, dim]: [usize; 3],
    ) -> Result<HostArray> {
        let data: NonNull<u8> = buffer.typed(name, dtype)?.data(name)?;
        let inner = len * heads * dim;
        let expected = [&self.outer, [inner].as_slice()].concat();
        if buffer.dims != expected {
            let (expected, got) = (format!("{expected:?}"), format!("{:?}", buffer.dims));
            return Err(Error::mismatch(format!("shape of {name}"), expected, got));
        }
        Ok(HostArray::jax(data, Dtype::F32, [self.problem.batch, len, heads, dim]))
    }

    pub fn key(&self, name: &str, buffer: &Buffer) -> Result<Checked> {
        let Problem { kv_len, kv_heads, head_dim, dtype, .. } = self.problem;
        self.array(name, buffer, dtype, &[kv_len, kv_heads, head_dim])
    }

    pub fn rows(&self, name: &str, buffer: &Buffer) -> Result<Checked> {
        self.array(name, buffer, Dtype::F32, &[self.problem.q_len, self.problem.heads])
    }

    fn array(&self, name: &str, buffer: &Buffer, dtype: Dtype, inner: &[usize]) -> Result<Checked> {
        let data: NonNull<u8> = buffer.typed(name, dtype.into())?.data(name)?;
        let expected = [&self.outer, inner].concat();
        if buffer.dims != expected {
            let (expected, got) = (format!("{expected:?}"), format!("{:?}", buffer.dims));
            return Err(Error::mismatch(format!("shape of {name}"), expected, got));
        }
        let dim = inner.get(2).copied().unwrap_or(1);
        Ok(Checked { data, dtype, dims: [self.problem.batch, inner[0], inner[1], dim] })
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
