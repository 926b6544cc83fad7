"""The ring of latents, forward and backward.

A chunk goes round the ring while ranks compute with the chunk before it. In the backward pass the
float32 sums of a chunk's gradients follow the chunk, one step behind, and then go home. The ring
ends with the last hop after which a rank sees a chunk::

    forward    (o, lse) = merge over chunks of tile(q, expand(params, latent))
    backward   dq, dk, dv of each tile from o, lse, dout and dlse over all keys
               dparams += dk, dv pulled back to params;  dlatent += dk, dv pulled back to latent
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_attention._attention.vjp import Results
from burst_attention._checkpoint import LSE_NAME, OUT_NAME
from burst_attention._decode.merge import Pair, merged
from burst_attention._latent.tiles import (
    Call,
    Chunk,
    Gradients,
    Inputs,
    Tile,
    floats,
    gradients_of,
    sum_dtype,
)
from burst_attention._mesh import send_on, vary_like

State = TypeVar("State")
"""What ranks add the tiles to: arrays in any tree."""
Step: TypeAlias = Callable[[Tile, State], State]
Residuals: TypeAlias = tuple[Inputs, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def latent_ring(call: Call, inputs: Inputs) -> Results:
    """Returns out and lse of one rank. All inputs vary over the same mesh axes."""
    o, lse = _results(call, inputs)
    return o.astype(inputs.query.dtype), lse


def _forward_rule(call: Call, inputs: Inputs) -> tuple[Results, Residuals]:
    o, lse = _results(call, inputs)
    out, o = o.astype(inputs.query.dtype), o.astype(call.kept_dtype(inputs.query))
    # The names stand here, not at the caller: a policy can only keep what residuals consist of.
    o, lse = checkpoint_name(o, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (inputs, o, lse)


def _backward_rule(call: Call, residuals: Residuals, cotangents: Results) -> tuple[Inputs]:
    inputs, o, lse = residuals

    def step(tile: Tile, state: Gradients) -> Gradients:
        dq, dparams, sums = state
        # The sums of the ranks before arrive during this rank's products.
        sums = sums if tile.is_own else _send_on(call, sums)
        own = partial(tile.backward, o, lse, *cotangents)
        return _if_seen(
            tile, lambda state: jax.tree.map(jnp.add, state, own()), (dq, dparams, sums)
        )

    arrays = (inputs.query, *(floats(x)[0] for x in (inputs.params, inputs.chunk.latent)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x)), arrays)
    dq, dparams, sums = _around(call, inputs, step, vary_like(inputs.query, zeros))
    chunk = Chunk(gradients_of(inputs.chunk.latent, _send_home(call, inputs, sums)), None)
    dparams = gradients_of(inputs.params, dparams)
    return (Inputs(dq.astype(inputs.query.dtype), chunk, dparams, None),)


latent_ring.defvjp(_forward_rule, _backward_rule)


def _results(call: Call, inputs: Inputs) -> Pair:
    """Returns out, float32, and lse of one rank."""

    def step(tile: Tile, state: Pair | None) -> Pair:
        if state is None:
            return tile.forward()
        return _if_seen(tile, lambda state: _merge(state, tile.forward()), state)

    found = _around(call, inputs, step, None)
    assert found is not None
    return found


def _merge(a: Pair, b: Pair) -> Pair:
    """Returns the results over the keys of two parts."""
    outs, logs = zip(a, b, strict=True)
    return merged(jnp.stack(outs), jnp.stack(logs))


def _if_seen(tile: Tile, add: Callable[[State], State], state: State) -> State:
    """Returns the state with a tile added, or the state where no query sees a key of the tile."""
    if tile.is_own:
        return add(state)
    return lax.cond(tile.may_see(), add, lambda state: state, state)


def _around(call: Call, inputs: Inputs, step: Step[State], state: State) -> State:
    """Returns the state after the steps of all chunks, this rank's own first.

    A loop bounds the chunks that live at a time, however early the compiler could exchange them.
    """
    last = _last_hop(call, inputs)
    own = Tile(call, inputs, inputs.chunk, 0, True)
    if last == 0:
        return step(own, state)
    # Before the step: the exchange of the next chunk runs during the step's products.
    following = _send_on(call, inputs.chunk)
    state = step(own, state)

    def body(carry: tuple[Chunk, State], hop: jax.Array) -> tuple[tuple[Chunk, State], None]:
        chunk, state = carry
        following = _send_on(call, chunk)
        return (following, step(Tile(call, inputs, chunk, hop, False), state)), None

    hops = jnp.arange(1, last, dtype=jnp.int32)
    (chunk, state), _ = lax.scan(body, (following, state), hops)
    return step(Tile(call, inputs, chunk, last, False), state)


def _last_hop(call: Call, inputs: Inputs) -> int:
    return call.last_hop(inputs.query.shape[1])


def _send_on(call: Call, arrays: State) -> State:
    """Sends arrays to the next rank and returns the arrays of the rank before."""
    return send_on(arrays, call.axes, call.world_size)


def _send_home(call: Call, inputs: Inputs, arrays: State) -> State:
    """Sends what followed a chunk to the chunk's rank, and returns what followed this rank's."""
    return send_on(arrays, call.axes, call.world_size, -_last_hop(call, inputs))
