"""Our attention and its gradients through JAX, as a user calls it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import burst_attention as ba
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .problem import Problem

AXIS = "context"
SPEC = P(None, AXIS)
NAMES = ("o", "lse", "dq", "dk", "dv")


def line(count: int) -> Mesh:
    """The first devices as one ring."""
    return Mesh(np.array(jax.devices()[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def passes(problem: Problem, mesh: Mesh, attention: Callable[..., Any] = ba.attention) -> Any:
    """A compiled function of q, k, v, dout, dlse on the mesh: o, lse, dq, dk, dv."""
    local = partial(
        attention,
        axis_name=AXIS,
        is_causal=problem.is_causal,
        layout=problem.layout,
        backward=problem.backward,
        return_residual=True,
    )
    attend = jax.shard_map(local, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=(SPEC, SPEC))

    @jax.jit
    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple[jax.Array, ...]:
        (o, lse), pullback = jax.vjp(attend, q, k, v)
        return o, lse, *pullback((dout, dlse))

    return run


def put(mesh: Mesh, problem: Problem) -> list[jax.Array]:
    """The inputs in the problem's layout, each process placing its own shards."""
    sharding, size = NamedSharding(mesh, SPEC), mesh.shape[AXIS]
    placed: list[jax.Array] = []
    for x in problem.inputs().values():
        stored = np.asarray(ba.to_layout(x, size, problem.layout))
        placed.append(jax.make_array_from_callback(stored.shape, sharding, stored.__getitem__))
    return placed


def restored(problem: Problem, stored: list[Any]) -> dict[str, Any]:
    """Whole results on the host, by name, back in the order of the sequence."""
    return {
        name: np.asarray(ba.from_layout(np.asarray(x), problem.world_size, problem.layout))
        for name, x in zip(NAMES, stored, strict=True)
    }
