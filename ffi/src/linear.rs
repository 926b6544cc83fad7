//! Linear attention of one device's tokens on CPUs. These calls need no other rank.

use std::ptr::NonNull;

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::linear::{BackwardIo, Device, ForwardIo, Scan, backward, forward, scan};
use burst_attention::host::ring::Executor;

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::handler::guard_stage;
use crate::shapes::split;
use crate::sys;

/// The computation of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// The state after the tokens.
    State,
    /// The outputs and the state after the tokens.
    Forward,
    /// All gradients.
    Backward,
}

/// Handles the execute stage: computes on XLA's thread and on the workers that all calls share, and
/// waits for no other device.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn execute(
    raw: *mut sys::XLA_FFI_CallFrame,
    kind: Kind,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let Executor { isa, pool } = Executor::global()?;
        match kind {
            Kind::State => state_call(frame, (*isa, pool)),
            Kind::Forward => forward_call(frame, (*isa, pool)),
            Kind::Backward => backward_call(frame, (*isa, pool)),
        }
    };
    // SAFETY: the caller guarantees what `guard_stage` demands of the frame.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}

fn state_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [left, right, log_decay] = frame.arguments()?;
    let [out] = frame.results()?;
    let shapes = Shapes::new([&left, &left, &right], &log_decay)?;
    let attributes = frame.attributes()?;
    scan(
        device,
        &Scan {
            left: &shapes.key("keys", &left)?,
            right: &shapes.value("values", &right)?,
            scale: attributes.get("scale")?,
            log_decay: &shapes.rows("log_decay", &log_decay)?,
            backward: attributes.get("backward")?,
            out: &shapes.state("state", &out)?,
        },
    );
    Ok(())
}

fn forward_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [q, k, v, log_decay, before] = frame.arguments()?;
    let [o, after] = frame.results()?;
    let shapes = Shapes::new([&q, &k, &v], &log_decay)?;
    let io = ForwardIo {
        q: shapes.query("query", &q)?,
        k: shapes.key("key", &k)?,
        v: shapes.value("value", &v)?,
        scale: frame.attributes()?.get("scale")?,
        log_decay: shapes.rows("log_decay", &log_decay)?,
        before: shapes.state("state", &before)?,
        o: shapes.output("out", &o)?,
        after: shapes.state("state after", &after)?,
    };
    forward(device, &io);
    Ok(())
}

fn backward_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [q, k, v, log_decay, before, dout, dafter] = frame.arguments()?;
    let [dq, dk, dv, dlog_decay, dbefore] = frame.results()?;
    let shapes = Shapes::new([&q, &k, &v], &log_decay)?;
    let io = BackwardIo {
        q: shapes.query("query", &q)?,
        k: shapes.key("key", &k)?,
        v: shapes.value("value", &v)?,
        scale: frame.attributes()?.get("scale")?,
        log_decay: shapes.rows("log_decay", &log_decay)?,
        before: shapes.state("state", &before)?,
        dout: shapes.output("dout", &dout)?,
        dafter: shapes.state("gradient of the state", &dafter)?,
        dq: shapes.query("dq", &dq)?,
        dk: shapes.key("dk", &dk)?,
        dv: shapes.value("dv", &dv)?,
        dlog_decay: shapes.rows("dlog_decay", &dlog_decay)?,
        dbefore: shapes.state("gradient of the state before", &dbefore)?,
    };
    backward(device, &io);
    Ok(())
}

/// Sizes that the operands share. The leading dimensions are folded into the batch.
struct Shapes {
    outer: Vec<usize>,
    len: usize,
    /// Heads of decays, states and outputs.
    heads: usize,
    /// Heads of queries, keys and values, divisors of `heads`.
    own_heads: [usize; 3],
    k_dim: usize,
    v_dim: usize,
    dtype: Option<Dtype>,
}

impl Shapes {
    /// Reads the sizes from queries, keys and values, each `[…, length, its heads, its dim]`, and
    /// from `log_decay` `[…, length, heads]`.
    fn new(arrays @ [q, k, v]: [&Buffer; 3], log_decay: &Buffer) -> Result<Shapes> {
        let (outer, [len, _, k_dim]) = split("query", q)?;
        split("key", k)?;
        let (_, [_, _, v_dim]) = split("value", v)?;
        let Some(&heads) = log_decay.dims.last() else {
            return Err(Error::mismatch("shape of log_decay", "[..., length, heads]", "[]"));
        };
        let own_heads = arrays.map(|buffer| buffer.dims[buffer.dims.len() - 2]);
        for (name, own) in ["query", "key", "value"].into_iter().zip(own_heads) {
            if own == 0 || !heads.is_multiple_of(own) {
                let expected = format!("a divisor of the heads of log_decay ({heads})");
                return Err(Error::mismatch(format!("heads of {name}"), expected, own));
            }
        }
        let dtype = q.dtype.activation();
        Ok(Shapes { outer: outer.to_vec(), len, heads, own_heads, k_dim, v_dim, dtype })
    }

    fn query(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        self.array(name, buffer, [self.own_heads[0], self.k_dim])
    }

    fn key(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        self.array(name, buffer, [self.own_heads[1], self.k_dim])
    }

    fn value(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        self.array(name, buffer, [self.own_heads[2], self.v_dim])
    }

    fn output(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        self.array(name, buffer, [self.heads, self.v_dim])
    }

    fn rows(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        let (data, batch) = self.memory(name, buffer, Dtype::F32, &[self.len, self.heads])?;
        Ok(HostArray::jax(data, Dtype::F32, [batch, self.len, self.heads, 1]))
    }

    /// Returns a state `[…, heads, k_dim, v_dim]`, whose rows are those of k_dim.
    fn state(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        let Shapes { heads, k_dim, v_dim, .. } = *self;
        let (data, batch) = self.memory(name, buffer, Dtype::F32, &[heads, k_dim, v_dim])?;
        Ok(HostArray::by_head(data, Dtype::F32, [batch, heads, k_dim, v_dim]))
    }

    fn array(&self, name: &str, buffer: &Buffer, [heads, dim]: [usize; 2]) -> Result<HostArray> {
        let Some(dtype) = self.dtype else {
            let expected = "float32, bfloat16 or float16";
            return Err(Error::mismatch(format!("dtype of {name}"), expected, buffer.dtype));
        };
        let (data, batch) = self.memory(name, buffer, dtype, &[self.len, heads, dim])?;
        Ok(HostArray::jax(data, dtype, [batch, self.len, heads, dim]))
    }

    fn memory(
        &self,
        name: &str,
        buffer: &Buffer,
        dtype: Dtype,
        inner: &[usize],
    ) -> Result<(NonNull<u8>, usize)> {
        let data = buffer.memory(name, dtype.into(), &[&self.outer, inner].concat())?;
        Ok((data, self.outer.iter().product()))
    }
}
