"""How ranks compute in turn: each begins with the state that the rank before it has left.

Where the devices of all ranks share the cores of one process, ranks that wait for each other lose
no time, and no rank computes what its tokens would do to a state that it does not have yet. With
the delta rule that takes half as long as both passes.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from burst_attention._linear.meeting import meet
from burst_attention._linear.states import Call, State
from burst_attention._mesh import permute, vary_like

Results = TypeVar("Results")


def share_cores(platform: str | None, heads: int) -> bool:
    """Whether all devices share the cores of this process, and one device's heads use all cores.

    ``heads`` are those of all sequences on a device. Fewer heads than cores share their cores, but
    not without loss.
    """
    if platform != "cpu" or jax.process_count() > 1:
        return False
    return heads >= len(os.sched_getaffinity(0))


def in_turn(
    call: Call,
    first: State,
    compute: Callable[[State], Results],
    state_of: Callable[[Results], State],
    *,
    back: bool = False,
) -> Results:
    """Returns what ``compute`` returns for the state before this rank's tokens.

    ``first`` is the state before rank 0, and ``state_of`` finds the state after a rank's tokens in
    its results. With ``back`` ranks follow each other from the last to the first.
    """
    ranks = list(range(call.world_size))[:: -1 if back else 1]
    rank, own = lax.axis_index(call.axes), first
    # A rank has its results once its turn has come, and hands them from turn to turn from then on.
    results: Results = jax.tree.map(
        lambda x: vary_like(first, lax.empty(x.shape, x.dtype)), jax.eval_shape(compute, first)
    )

    def turn(of_rank: int, own: State, results: Results) -> Results:
        computed: Results = lax.cond(
            rank == of_rank,
            lambda own, _: compute(own),
            lambda _, results: results,
            own,
            results,
        )
        return computed

    for sender, receiver in pairwise(ranks):
        results = turn(sender, own, results)
        sent = meet(call.axes, call.platform, state_of(results))
        came = permute(sent, call.axes, [(sender, receiver)])
        own = jnp.where(rank == receiver, came, own)
    return turn(ranks[-1], own, results)
