//! Linear attention and the delta rule over one device's tokens on CPUs. These calls need no other
//! rank.

use std::ptr::NonNull;

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::linear::{
    BackwardIo, Device, ForwardIo, Scan, StateGradient, Transfer, backward, forward, scan,
    state_gradient, transfer,
};
use burst_attention::host::ring::Executor;

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::handler::{COORDINATOR, guard_stage};
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
    /// What the tokens do to the state before them, with the delta rule.
    DeltaState,
    /// The gradient of the state before the tokens, if no later token has any, with the delta rule.
    DeltaStateGradient,
    /// The outputs and the state after the tokens, with the delta rule.
    DeltaForward,
    /// All gradients, with the delta rule.
    DeltaBackward,
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
        let _computing = COORDINATOR.computing();
        match kind {
            Kind::State => state_call(frame, (*isa, pool)),
            Kind::Forward => forward_call(frame, (*isa, pool)),
            Kind::Backward => backward_call(frame, (*isa, pool)),
            Kind::DeltaState => transfer_call(frame, (*isa, pool)),
            Kind::DeltaStateGradient => state_gradient_call(frame, (*isa, pool)),
            Kind::DeltaForward => delta_forward_call(frame, (*isa, pool)),
            Kind::DeltaBackward => delta_backward_call(frame, (*isa, pool)),
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
            scale: attributes.scale()?,
            log_decay: &shapes.decays("log_decay", &log_decay)?,
            backward: attributes.get("backward")?,
            out: &shapes.state("state", &out)?,
        },
    );
    Ok(())
}

fn transfer_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [k, v, log_decay, beta] = frame.arguments()?;
    let [out] = frame.results()?;
    let shapes = Shapes::new([&k, &k, &v], &log_decay)?;
    transfer(
        device,
        &Transfer {
            k: &shapes.key("key", &k)?,
            v: &shapes.value("value", &v)?,
            log_decay: &shapes.decays("log_decay", &log_decay)?,
            beta: &shapes.rows("beta", &beta)?,
            out: &shapes.transfer("state", &out)?,
        },
    );
    Ok(())
}

fn state_gradient_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [q, k, dout, log_decay, beta] = frame.arguments()?;
    let [out] = frame.results()?;
    let shapes = Shapes::new([&q, &k, &dout], &log_decay)?;
    state_gradient(
        device,
        &StateGradient {
            q: &shapes.query("query", &q)?,
            k: &shapes.key("key", &k)?,
            scale: frame.attributes()?.scale()?,
            dout: &shapes.output("dout", &dout)?,
            log_decay: &shapes.decays("log_decay", &log_decay)?,
            beta: &shapes.rows("beta", &beta)?,
            out: &shapes.state("gradient of the state", &out)?,
        },
    );
    Ok(())
}

fn forward_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [q, k, v, log_decay, before] = frame.arguments()?;
    attend(frame, device, [&q, &k, &v, &log_decay], None, &before)
}

fn delta_forward_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [q, k, v, log_decay, beta, before] = frame.arguments()?;
    attend(frame, device, [&q, &k, &v, &log_decay], Some(&beta), &before)
}

/// Computes the outputs and the state after the tokens, with the delta rule if there is a β.
fn attend(
    frame: &CallFrame<'_>,
    device: Device<'_>,
    [q, k, v, log_decay]: [&Buffer; 4],
    beta: Option<&Buffer>,
    before: &Buffer,
) -> Result<()> {
    let [o, after] = frame.results()?;
    let shapes = Shapes::new([q, k, v], log_decay)?;
    let io = ForwardIo {
        q: shapes.query("query", q)?,
        k: shapes.key("key", k)?,
        v: shapes.value("value", v)?,
        scale: frame.attributes()?.scale()?,
        log_decay: shapes.decays("log_decay", log_decay)?,
        beta: beta.map(|beta| shapes.rows("beta", beta)).transpose()?,
        before: shapes.state("state", before)?,
        o: shapes.output("out", &o)?,
        after: shapes.state("state after", &after)?,
    };
    forward(device, &io);
    Ok(())
}

fn backward_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [q, k, v, log_decay, before, dout, dafter] = frame.arguments()?;
    let [dq, dk, dv, dlog_decay, dbefore] = frame.results()?;
    let inputs = [&q, &k, &v, &log_decay, &before, &dout, &dafter];
    differentiate(frame, device, inputs, [&dq, &dk, &dv, &dlog_decay, &dbefore], None)
}

fn delta_backward_call(frame: &CallFrame<'_>, device: Device<'_>) -> Result<()> {
    let [q, k, v, log_decay, beta, before, dout, dafter] = frame.arguments()?;
    let [dq, dk, dv, dlog_decay, dbeta, dbefore] = frame.results()?;
    let inputs = [&q, &k, &v, &log_decay, &before, &dout, &dafter];
    let results = [&dq, &dk, &dv, &dlog_decay, &dbefore];
    differentiate(frame, device, inputs, results, Some([&beta, &dbeta]))
}

/// Computes all gradients, with the delta rule if there are β and the place of its gradient.
fn differentiate(
    frame: &CallFrame<'_>,
    device: Device<'_>,
    [q, k, v, log_decay, before, dout, dafter]: [&Buffer; 7],
    [dq, dk, dv, dlog_decay, dbefore]: [&Buffer; 5],
    betas: Option<[&Buffer; 2]>,
) -> Result<()> {
    let shapes = Shapes::new([q, k, v], log_decay)?;
    let io = BackwardIo {
        q: shapes.query("query", q)?,
        k: shapes.key("key", k)?,
        v: shapes.value("value", v)?,
        scale: frame.attributes()?.scale()?,
        log_decay: shapes.decays("log_decay", log_decay)?,
        beta: betas.map(|[beta, _]| shapes.rows("beta", beta)).transpose()?,
        before: shapes.state("state", before)?,
        dout: shapes.output("dout", dout)?,
        dafter: shapes.state("gradient of the state", dafter)?,
        dq: shapes.query("dq", dq)?,
        dk: shapes.key("dk", dk)?,
        dv: shapes.value("dv", dv)?,
        dlog_decay: shapes.decays("dlog_decay", dlog_decay)?,
        dbeta: betas.map(|[_, dbeta]| shapes.rows("dbeta", dbeta)).transpose()?,
        dbefore: shapes.state("gradient of the state before", dbefore)?,
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
    /// Log decays of a head and a token.
    decays: usize,
    dtype: Option<Dtype>,
}

impl Shapes {
    /// Reads the sizes from queries, keys and values, each `[…, length, its heads, its dim]`, and
    /// from `log_decay` `[…, length, heads]`, or `[…, length, heads, k_dim]` with a decay for each
    /// channel of keys.
    fn new(arrays @ [q, k, v]: [&Buffer; 3], log_decay: &Buffer) -> Result<Shapes> {
        let (outer, [len, _, k_dim]) = split("query", q)?;
        split("key", k)?;
        let (_, [_, _, v_dim]) = split("value", v)?;
        let (heads, decays) = match log_decay.dims.get(outer.len() + 1..) {
            Some(&[heads]) => (heads, 1),
            Some(&[heads, channels]) => (heads, channels),
            _ => {
                let expected = "[..., length, heads] or [..., length, heads, key head_dim]";
                let got = format!("{:?}", log_decay.dims);
                return Err(Error::mismatch("shape of log_decay", expected, got));
            }
        };
        let own_heads = arrays.map(|buffer| buffer.dims[buffer.dims.len() - 2]);
        for (name, own) in ["query", "key", "value"].into_iter().zip(own_heads) {
            if own == 0 || !heads.is_multiple_of(own) {
                let expected = format!("a divisor of the heads of log_decay ({heads})");
                return Err(Error::mismatch(format!("heads of {name}"), expected, own));
            }
        }
        let dtype = q.dtype.activation();
        Ok(Shapes { outer: outer.to_vec(), len, heads, own_heads, k_dim, v_dim, decays, dtype })
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

    fn decays(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        if self.decays == 1 && buffer.dims.len() == self.outer.len() + 2 {
            return self.rows(name, buffer);
        }
        let inner = [self.len, self.heads, self.k_dim];
        let (data, batch) = self.memory(name, buffer, Dtype::F32, &inner)?;
        Ok(HostArray::jax(data, Dtype::F32, [batch, self.len, self.heads, self.k_dim]))
    }

    fn state(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        self.by_head(name, buffer, self.v_dim)
    }

    fn transfer(&self, name: &str, buffer: &Buffer) -> Result<HostArray> {
        self.by_head(name, buffer, self.k_dim + self.v_dim)
    }

    /// Returns a state `[…, heads, k_dim, columns]`, whose rows are those of k_dim.
    fn by_head(&self, name: &str, buffer: &Buffer, columns: usize) -> Result<HostArray> {
        let Shapes { heads, k_dim, .. } = *self;
        let (data, batch) = self.memory(name, buffer, Dtype::F32, &[heads, k_dim, columns])?;
        Ok(HostArray::by_head(data, Dtype::F32, [batch, heads, k_dim, columns]))
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
