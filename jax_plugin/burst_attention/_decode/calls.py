"""Implementations of the partial of one rank: the library's calls, and plain JAX."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _confirmed, _ffi, _mesh
from burst_attention._batching import one_by_one
from burst_attention._decode import gpu, plain
from burst_attention._decode.merge import Pair
from burst_attention._decode.work import Operands, Work
from burst_attention._mesh import vary_like


def partial(work: Work, operands: Operands) -> Pair:
    """Returns o ``[batch, queries, heads, value_dim]`` and lse of this rank's keys, float32."""
    return one_by_one(functools.partial(_implemented, work), operands)


def _implemented(work: Work, operands: Operands) -> Pair:
    """Returns the partial of the implementation that serves the platform of the lowering."""
    query, keys = operands[:2]
    if query.size == 0 or keys.size == 0 or operands.page_table.size == 0:
        o = jnp.zeros((*query.shape[:3], work.value_dim(operands)), jnp.float32)
        return vary_like(operands, (o, jnp.full(o.shape[:3], -jnp.inf, jnp.float32)))
    platform = _mesh.platform(jax.sharding.get_abstract_mesh())
    if work.implementation == "xla" or _confirmed.refuted("decode_attention", platform):
        return plain.partial(work, operands)
    calls: dict[str, Callable[..., Pair]]
    calls = {"cpu": _cpu, "cuda": gpu.partial, "default": plain.partial}
    branches = {name: functools.partial(call, work) for name, call in calls.items()}
    pair: Pair = lax.platform_dependent(operands, **branches)
    return pair


def _cpu(work: Work, operands: Operands) -> Pair:
    query = operands.query
    shapes = ((*query.shape[:3], work.value_dim(operands)), query.shape[:3])
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    attributes: _ffi.Attributes = {
        "scale": np.float32(work.scale),
        "soft_cap": np.float32(work.soft_cap),
        "window": np.int64(work.window),
        "interleave": np.int64(work.interleave),
        "world_size": np.int64(work.world_size),
        "values_in_keys": np.int64(operands.value_cache is None),
    }
    given = tuple(x for x in operands if x is not None)
    o, lse = _ffi.call(_ffi.DECODE, results, given, attributes)
    return vary_like(operands, (o, lse))
