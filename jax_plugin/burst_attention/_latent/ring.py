"""The ring of latents, forward and backward.

A chunk goes round the ring while ranks compute with the chunk before it. In the backward pass the
float32 sums of a chunk's gradients follow the chunk, one step behind, and then go home. The ring
ends with the last hop after which a rank sees a chunk. A window on both sides takes chunks up the
ring and then down::

    forward    (o, lse) = merge over chunks of tile(q, expand(params, latent))
    backward   dq, dk, dv of each tile from o, lse, dout and dlse over all keys
               dparams += dk, dv pulled back to params;  dlatent += dk, dv pulled back to latent
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_attention._attention.vjp import Results
from burst_attention._batching import mapped_on_devices
from burst_attention._checkpoint import LSE_NAME, OUT_NAME
from burst_attention._decode.merge import Pair, merged
from burst_attention._derivatives import refuse_second
from burst_attention._latent.expansion import floats
from burst_attention._latent.tiles import (
    Call,
    Chunk,
    Gradients,
    Inputs,
    Rows,
    Tile,
    gradients_of,
    sum_dtype,
    taken,
)
from burst_attention._mesh import send_on, vary_like

State = TypeVar("State")
"""What ranks add the tiles to: arrays in any tree."""
Step: TypeAlias = Callable[[Tile, State], State]
Residuals: TypeAlias = tuple[Inputs, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def latent_ring(call: Call, inputs: Inputs) -> Results:
    """Returns out and lse of one rank.

    All inputs but the captured ones vary over the same mesh axes.
    """
    o, lse = _results(call, inputs)
    return o.astype(inputs.query.dtype), lse


def _forward_rule(call: Call, inputs: Inputs) -> tuple[Results, Residuals]:
    o, lse = _results(call, inputs)
    out, o = o.astype(inputs.query.dtype), o.astype(call.kept_dtype(inputs.query))
    # The names stand here, not at the caller: a policy can only keep what residuals consist of.
    o, lse = checkpoint_name(o, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (inputs, o, lse)


def _backward_rule(call: Call, residuals: Residuals, cotangents: Results) -> tuple[Inputs]:
    return (_gradients(call, residuals, cotangents),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(call: Call, residuals: Residuals, cotangents: Results) -> Inputs:
    """Returns the gradients of one rank's inputs."""
    return mapped_on_devices(partial(_backward, call), residuals, cotangents)


def _backward(call: Call, residuals: Residuals, cotangents: Results) -> Inputs:
    """Computes `_gradients`."""
    inputs, o, lse, cotangents = varied(*residuals, cotangents)

    def step(tile: Tile, state: Gradients) -> Gradients:
        dq, dparams, sums = state
        # The sums of the ranks before arrive during this rank's products. So these products do not
        # take the sums as operands. They start from zeros, and the sums are added afterwards.
        sums = _send_on(call, sums, tile.way)
        dq, dparams, found = _if_seen(
            tile,
            lambda part, state: _added(part, state, part.backward(o, lse, *cotangents)),
            (dq, dparams, vary_like(sums, jax.tree.map(jnp.zeros_like, sums))),
        )
        return dq, dparams, jax.tree.map(jnp.add, sums, found)

    def go_home(state: Gradients, hops: int) -> Gradients:
        dq, dparams, sums = state
        return dq, dparams, _send_on(call, sums, -hops)

    arrays = (inputs.query, *(floats(x)[0] for x in (inputs.params, inputs.chunk.latent)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x)), arrays)
    state = vary_like(inputs.query, zeros)
    dq, dparams, sums = _around(call, inputs, step, state, go_home)
    chunk = Chunk(gradients_of(inputs.chunk.latent, sums), None)
    dparams = gradients_of(inputs.params, dparams)
    return Inputs(dq.astype(inputs.query.dtype), chunk, dparams, None, None)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(call: Call, inputs: Inputs) -> Pair:
    """Returns out, float32, and lse of one rank."""
    return mapped_on_devices(partial(_forward, call), inputs)


def _forward(call: Call, inputs: Inputs) -> Pair:
    """Computes `_results`."""
    (inputs,) = varied(inputs)

    def step(tile: Tile, state: Pair | None) -> Pair:
        if state is None:
            return tile.forward()
        return _if_seen(tile, _merged, state)

    found = _around(call, inputs, step, None, lambda state, _: state)
    assert found is not None
    return found


latent_ring.defvjp(_forward_rule, _backward_rule)
# Deriving a rule itself is a second derivative.
_results.defjvp(refuse_second)
_gradients.defjvp(refuse_second)


def varied(inputs: Inputs, *others: Any) -> tuple[Any, ...]:
    """Returns arrays that vary over the same mesh axes, but for the captured arrays.

    The programs of ``expand`` take these as they were found.
    """
    own, *rest = vary_like((inputs, others), (inputs._replace(captured=None), *others))
    return own._replace(captured=inputs.captured), *rest


def _merged(tile: Tile, state: Pair) -> Pair:
    """Returns the results over the keys before and those of a tile."""
    before = tuple(taken(x, tile.queries) for x in state)
    outs, logs = zip(before, tile.forward(), strict=True)
    found = merged(jnp.stack(outs), jnp.stack(logs))
    o, lse = (_put(x, tile.queries, part) for x, part in zip(state, found, strict=True))
    return o, lse


def _added(tile: Tile, state: Gradients, found: Gradients) -> Gradients:
    """Returns gradients and those of a tile's rows added."""
    dq, dparams, dlatent = state
    return (
        _plus(dq, tile.queries, found[0]),
        jax.tree.map(jnp.add, dparams, found[1]),
        jax.tree.map(lambda x, part: _plus(x, tile.keys, part), dlatent, found[2]),
    )


def _plus(x: jax.Array, rows: Rows, part: jax.Array) -> jax.Array:
    """Returns an array with a part added to some of its rows."""
    return _put(x, rows, taken(x, rows) + part)


def _put(x: jax.Array, rows: Rows, part: jax.Array) -> jax.Array:
    """Returns an array with a part in the place of some of its rows."""
    return part if rows is None else lax.dynamic_update_slice_in_dim(x, part, rows[0], axis=1)


def _if_seen(tile: Tile, add: Callable[[Tile, State], State], state: State) -> State:
    """Returns the state with a tile added, or the state where no query sees a key of the tile."""
    if tile.way == 0:
        return add(tile, state)
    branches: list[Callable[[State], State]] = [lambda state: state]
    branches += [partial(add, part) for part in tile.parts()]
    found: State = lax.switch(tile.which(), branches, state)
    return found


def _around(
    call: Call,
    inputs: Inputs,
    step: Step[State],
    state: State,
    end: Callable[[State, int], State],
) -> State:
    """Returns the state after the steps of all chunks, this rank's own first.

    ``end`` follows the last step of the way up, and that of the way down, with the way's hops.
    """
    up, down = call.hops(inputs.query.shape[1])
    ways = [(hops, way) for hops, way in ((up, 1), (down, -1)) if hops > 0]
    # Before the step: the exchange of the next chunk runs during the step's products.
    following = [_send_on(call, inputs.chunk, way) for _, way in ways]
    state = step(Tile(call, inputs, inputs.chunk, 0, 0), state)
    for chunk, (hops, way) in zip(following, ways, strict=True):
        state = _one_way(call, inputs, step, (chunk, state), hops, way)
        state = end(state, hops * way)
    return state


def _one_way(
    call: Call,
    inputs: Inputs,
    step: Step[State],
    carry: tuple[Chunk, State],
    hops: int,
    way: int,
) -> State:
    """Returns the state after the steps of the chunks that come up or down the ring.

    A loop bounds the chunks that live at a time, however early the compiler could exchange them.
    """

    def body(carry: tuple[Chunk, State], hop: jax.Array) -> tuple[tuple[Chunk, State], None]:
        chunk, state = carry
        following = _send_on(call, chunk, way)
        return (following, step(Tile(call, inputs, chunk, hop, way), state)), None

    (chunk, state), _ = lax.scan(body, carry, way * jnp.arange(1, hops, dtype=jnp.int32))
    return step(Tile(call, inputs, chunk, way * hops, way), state)


def _send_on(call: Call, arrays: State, hops: int) -> State:
    """Sends arrays some ranks up and returns those that arrive; none with 0 hops."""
    return send_on(arrays, call.axes, call.world_size, hops)
