"""Rings over the CPU devices of several processes.

The library's ring within a process can't reach other processes, so here the program walks the
schedule: one custom call for each stretch of a rank's work, and between two of them what ranks send
each other, by ``lax.ppermute``. What a rank keeps meanwhile (accumulators, and chunks that it uses
more than once) lies in one array, the arena, which every call gets and gives back in place.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from burst_attention import _ffi

Arrays: TypeAlias = tuple[jax.Array, ...]
Shapes: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]


def walk(
    call: Any, plan: _ffi.Plan, axes: tuple[str, ...], operands: Arrays, results: Shapes
) -> Arrays:
    """Results of one rank's pass; ``call(operands, results, aliases, stretch)`` does a stretch.

    A rank sends at each hop as much as the rank that sends most; the schedule of a full ring has
    equal parcels, one with pruned chunks has not.
    """
    batch = operands[0].shape[0]

    def block(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, size), jnp.uint8)

    kept_shapes = (block(plan.arena_bytes), *results)
    kept: Arrays = ()
    under_way: dict[int, jax.Array] = {}
    for stretch in range(plan.stretches):
        arriving = [under_way.pop(i) for i, hop in enumerate(plan.hops) if hop.to == stretch]
        leaving = [i for i, hop in enumerate(plan.hops) if hop.start == stretch]
        parcels = tuple(block(plan.hops[i].bytes) for i in leaving)
        first = len(operands)
        aliases = {first + i: i for i in range(len(kept))}
        outputs = call((*operands, *kept, *arriving), kept_shapes + parcels, aliases, stretch)
        kept = outputs[: len(kept_shapes)]
        for i, parcel in zip(leaving, outputs[len(kept_shapes) :], strict=True):
            under_way[i] = lax.ppermute(parcel, axes, plan.hops[i].pairs)
    return kept[1:]
