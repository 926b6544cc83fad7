"""Training steps with a ring, sharded parameters and their collectives, as in a real program."""

import re
import sys
from functools import partial
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import model, ours, plain
from .ours import AXIS
from .problem import Layout

LAYOUT: Layout = "zigzag"
RATE, MOMENTUM = 0.02, 0.9
SEQ, BATCH, BESIDE = 2048, 2, 1 << 20
SHORT_SEQ, SHORT_BESIDE = 128, 1 << 10
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""Lets collectives run at the same time as operations that do not need their results."""


def train(steps: int, attention: str, devices: int, rehearse: bool) -> dict[str, Any]:
    """Returns the losses of some steps, whether gathers during them were right, and the overlap.

    `attention` is `ring`, `gathered` (plain JAX over several devices) or `plain` (jax.nn's). The
    mesh has one axis, which shards the parameters too. The program gathers a parameter at its use,
    and sums and scatters its gradient. It sums the gradients of the scales, which every device
    holds.
    """
    config = model.Config(layers=1, hidden=128, heads=2, kv_heads=1) if rehearse else model.Config()
    seq, length = (SHORT_SEQ, SHORT_BESIDE) if rehearse else (SEQ, BESIDE)
    mesh = ours.line(devices)
    specs = {n: P(AXIS) if model.is_sharded(n) else P() for n in model.create(config)}
    parameters = {n: _put(mesh, specs[n], x) for n, x in model.create(config).items()}
    speeds = jax.tree.map(jnp.zeros_like, parameters)
    beside = _put(mesh, P(AXIS), np.arange(length * devices, dtype=np.int32))
    stepping = jax.jit(
        jax.shard_map(
            partial(_step, config, attention),
            mesh=mesh,
            in_specs=(specs, specs, P(AXIS), P(None, AXIS), P(None, AXIS)),
            out_specs=(specs, specs, P(AXIS), P(), P(AXIS)),
        )
    )
    data = [_data(mesh, seq, step % 8) for step in range(min(steps, 8))]
    compiled, scheduled = _compile(stepping, parameters, speeds, beside, *data[0])
    found, sums = [], []
    for step in range(steps):
        state = compiled(parameters, speeds, beside, *data[step % 8])
        parameters, speeds, beside, loss, total = state
        found.append(loss)
        sums.append(total)
        if step % 10 == 9:  # between these steps the host does not wait
            print(f"step {step + 1}: loss {float(loss):.4f}", file=sys.stderr, flush=True)
    totals = [int(np.asarray(x.addressable_data(0))[0]) for x in sums]
    return {
        "losses": [float(loss) for loss in found],
        "gathered": totals == _expected(length * devices, steps),
        "in flight": _in_flight(compiled.as_text()),
        "scheduler": scheduled,
    }


def _step(
    config: model.Config,
    attention: str,
    parameters: model.Parameters,
    speeds: model.Parameters,
    beside: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
) -> Any:
    """Computes one step of gradient descent with momentum, and an unrelated gather."""
    positions = ba.local_positions(inputs.shape[1], axis_name=AXIS, layout=LAYOUT)
    fetch = partial(lax.all_gather, axis_name=AXIS, axis=0, tiled=True)
    attend = _attention(attention)

    def mean(parameters: model.Parameters) -> jax.Array:
        of_tokens = model.losses(config, parameters, fetch, inputs, targets, positions, attend)
        return lax.pmean(of_tokens.mean(), AXIS)

    loss, gradients = jax.value_and_grad(mean)(parameters)
    speeds = jax.tree.map(lambda s, g: MOMENTUM * s + g, speeds, gradients)
    parameters = jax.tree.map(lambda x, s: x - RATE * s, parameters, speeds)
    everywhere = lax.all_gather(beside, AXIS, tiled=True)
    # Integers wrap round, so the order of the sum does not matter.
    return parameters, speeds, beside + 1, loss, everywhere.sum(dtype=jnp.int32)[None]


def _attention(name: str) -> model.Attend:
    if name == "plain":
        return partial(jax.nn.dot_product_attention, is_causal=True)
    attention: Any = {"ring": ba.attention, "gathered": plain.gathered}[name]
    return partial(attention, axis_name=AXIS, is_causal=True, layout=LAYOUT)


def _compile(stepping: Any, *arguments: Any) -> tuple[Any, str]:
    lowered = stepping.lower(*arguments)
    try:
        return lowered.compile(OPTIONS), "latency hiding"
    except Exception as error:  # any type of error: this XLA may lack the option
        return lowered.compile(), f"XLA's default: {str(error)[:100]}"


def _in_flight(program: str) -> dict[str, int]:
    """Counts our calls, and our calls between the start and the end of a collective of XLA."""
    if "is_scheduled=true" not in program:
        return {}
    open_, calls, beside = 0, 0, 0
    for line in program.splitlines():
        if re.search(r"= .*\b(all-gather|all-reduce|async)-start\(", line):
            open_ += 1
        elif re.search(r"= .*\b(all-gather|all-reduce|async)-done\(", line):
            open_ -= 1
        elif 'custom_call_target="burst_attention' in line:
            calls += 1
            beside += open_ > 0
    return {"calls": calls, "beside a collective": beside}


def _data(mesh: Mesh, seq: int, step: int) -> list[jax.Array]:
    text = model.tokens(seq + 2, BATCH, step)
    size = mesh.shape[AXIS]
    pair = (text[:, :seq], text[:, 1 : seq + 1])
    return [_put(mesh, P(None, AXIS), np.asarray(ba.to_layout(x, size, LAYOUT))) for x in pair]


def _put(mesh: Mesh, spec: P, x: Any) -> jax.Array:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)


def _expected(count: int, steps: int) -> list[int]:
    first = count * (count - 1) // 2
    return [(first + step * count + 2**31) % 2**32 - 2**31 for step in range(steps)]
