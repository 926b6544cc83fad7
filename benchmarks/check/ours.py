"""Our attention and its gradients through JAX, as a user calls them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import burst_attention as ba
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .problem import OPERANDS, PER_HEAD, Problem

AXIS, OUTER = "context", "node"
SPEC = P(None, AXIS)
WHOLE = (*PER_HEAD, "dropout_key")
"""Inputs that every rank holds whole."""


def line(count: int) -> Mesh:
    """Returns the first devices as one ring."""
    return Mesh(np.array(jax.devices()[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def mesh_of(problem: Problem) -> Mesh:
    """Returns the devices of the problem's ring, along two axes for a double ring."""
    if not problem.inner:
        return line(problem.world_size)
    devices = np.array(jax.devices()[: problem.world_size]).reshape(-1, problem.inner)
    return Mesh(devices, (OUTER, AXIS), axis_types=(AxisType.Auto,) * 2)


def axes(problem: Problem) -> Any:
    """Returns the axis of the ring, or the two axes of a double ring."""
    return (OUTER, AXIS) if problem.inner else AXIS


def passes(problem: Problem, mesh: Mesh, attention: Callable[..., Any] = ba.attention) -> Any:
    """Returns a compiled function from the problem's inputs on the mesh to its results."""
    operands, wanted = _operands(problem), _differentiated(problem)

    @jax.jit
    def run(*arrays: Any) -> tuple[jax.Array, ...]:
        given = dict(zip(operands, arrays, strict=True))
        cotangents = given.pop("dout"), given.pop("dlse")
        inputs = {name: given.pop(name) for name in wanted}
        specs = {name: spec(name, axes(problem)) for name in (*inputs, *given)}
        attend = jax.shard_map(
            partial(_local, problem, attention),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(P(None, axes(problem)),) * 2,
        )
        (o, lse), pullback = jax.vjp(lambda inputs: attend({**inputs, **given}), inputs)
        (found,) = pullback(cotangents)
        return o, lse, *(found[name] for name in wanted)

    return run


def _local(problem: Problem, attention: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Computes a rank's part, with only the arguments that the problem needs."""
    qkv = [given[name] for name in "qkv"]
    given = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    options: dict[str, Any] = {}
    if problem.segments:
        options["segment_ids"] = given.pop("q_segments"), given.pop("kv_segments")
    if problem.dropout:
        options["dropout_rate"] = problem.dropout
    if problem.window:
        options["local_window_size"] = problem.window
    if problem.schedule in ("balanced", "all_gather"):
        options["schedule"] = problem.schedule
    if problem.soft_cap:
        options["logits_soft_cap"] = problem.soft_cap
    return attention(
        *qkv,
        axis_name=axes(problem),
        is_causal=problem.is_causal,
        layout=problem.layout,
        backward=problem.backward,
        backward_order=problem.backward_order,
        return_residual=True,
        **given,
        **options,
    )


def spec(name: str, axes: Any = AXIS) -> P:
    """Returns the sharding of an input."""
    return P() if name in WHOLE else P(None, axes)


def _operands(problem: Problem) -> list[str]:
    """Returns the names of the inputs, in order."""
    features = {
        "sinks": problem.sinks,
        "alibi_slopes": problem.slopes,
        "q_segments": problem.segments,
        "kv_segments": problem.segments,
        "dropout_key": problem.dropout,
    }
    return [*OPERANDS, *(name for name, there in features.items() if there)]


def _differentiated(problem: Problem) -> list[str]:
    """Returns the names of inputs with gradients, in the order of the results."""
    return [name for name in _operands(problem) if name in ("q", "k", "v", *PER_HEAD)]


def put(mesh: Mesh, problem: Problem) -> list[jax.Array]:
    """Returns the inputs in the problem's layout; each process places its own shards."""
    size, along = problem.world_size, axes(problem)
    placed: list[jax.Array] = []
    for name, x in problem.inputs().items():
        sharding = NamedSharding(mesh, spec(name, along))
        if name not in WHOLE:
            x = np.asarray(ba.to_layout(x, size, problem.layout))
        placed.append(jax.make_array_from_callback(x.shape, sharding, x.__getitem__))
    return placed


def restored(problem: Problem, stored: dict[str, Any]) -> dict[str, Any]:
    """Returns whole results on the host, by name, in the order of the sequence."""
    return {
        name: np.asarray(x)
        if x.ndim == 1
        else np.asarray(ba.from_layout(np.asarray(x), problem.world_size, problem.layout))
        for name, x in stored.items()
    }
