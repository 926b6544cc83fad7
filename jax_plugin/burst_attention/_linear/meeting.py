"""Where the ranks of a recurrence wait for each other on CPU devices: in the library, not in XLA.

XLA ends the process if a device waits in a collective for longer than 40 s, even if no device is
missing and the others still compute, as devices that share cores or compute in turn may do. Ranks
meet in the library before each exchange and at the end. There only time in which nothing computes
counts as waiting. A rank that never comes is an error of the call after the rank timeout.
"""

from typing import TypeVar

import jax
import numpy as np
from jax import lax

from burst_attention import _ffi, _mesh
from burst_attention._types import Arrays, Axes

Tree = TypeVar("Tree")


def meet(axes: Axes, platform: str | None, arrays: Tree) -> Tree:
    """Returns a rank's arrays once all ranks along ``axes`` have theirs.

    Other platforms than CPU devices need no meeting. CPU devices of several processes wait in XLA's
    collectives, which have no such limit there.
    """
    size = lax.axis_size(axes)
    if size == 1 or platform not in ("cpu", None) or jax.process_count() > 1:
        return arrays
    leaves, structure = jax.tree.flatten(arrays)

    def cpu(place: jax.Array, *leaves: jax.Array) -> Arrays:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        attributes: _ffi.Attributes = {
            "world_size": np.int64(size),
            "axis_name": ", ".join(axes),
        }
        same = {1 + i: i for i in range(len(leaves))}
        met = _ffi.call(_ffi.MEETING, results, (place, *leaves), attributes, aliases=same)
        return tuple(map(_mesh.vary_like, leaves, met))

    operands = (_mesh.rank_and_ring(axes), *leaves)
    if platform == "cpu":
        met = cpu(*operands)
    else:
        met = lax.platform_dependent(*operands, cpu=cpu, default=lambda _, *leaves: leaves)
    result: Tree = jax.tree.unflatten(structure, met)
    return result
