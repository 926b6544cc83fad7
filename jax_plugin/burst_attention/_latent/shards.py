"""Latent attention of one device's queries in a whole, sharded sequence."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

from burst_attention import _checks, _mesh
from burst_attention._attention.options import Options
from burst_attention._attention.vjp import Results
from burst_attention._batching import mapped_on_devices, spread
from burst_attention._derivatives import without_transpose
from burst_attention._latent.expansion import (
    Captured,
    Expansion,
    Kind,
    Leaves,
    OfLeaves,
    traced,
    without_gradient,
)
from burst_attention._latent.ring import latent_ring, varied
from burst_attention._latent.tiles import Call, Inputs, has_halves
from burst_attention._types import Axes

CALLER = "latent_attention"


class Settings(NamedTuple):
    """What is static about a call, wherever it runs."""

    expand: Expansion
    options: Options
    with_lse: bool
    """Whether lse may have a gradient."""


def trace(
    axes: Axes, expand: OfLeaves, options: Options, inputs: Inputs
) -> tuple[Expansion, Captured]:
    """Returns the programs of ``expand`` for this device's chunks, and their captured arrays."""
    rows, programs, captured = inputs.query.shape[1], dict[Kind, Any](), Captured()
    lengths = (rows, rows // 2) if has_halves(options) else (rows,)

    def record(inputs: Inputs) -> jax.Array:
        (own,) = varied(inputs)
        for all_, found in zip(
            (programs, captured),
            traced(expand, own.query, own.params, own.chunk.latent, lengths),
            strict=True,
        ):
            all_.update(found)
        return own.query

    # A vmap with spmd_axis_name traces once more, for the types that the ring has in it.
    mapped_on_devices(record, lax.stop_gradient(_typed(axes, options, inputs)))
    return Expansion(programs, object()), captured


def attend(axes: Axes, settings: Settings, inputs: Inputs) -> Results:
    """Returns out and lse of this device's queries; all arguments are checked."""
    assert inputs.captured is not None
    own = _typed(axes, settings.options, inputs)
    size = _mesh.axes_size(_mesh.ring_mesh(axes, CALLER), axes)
    call = Call(settings.expand, settings.options, axes, size, settings.with_lse)
    own = own._replace(captured=without_gradient(inputs.captured))
    return without_transpose(latent_ring(call, own))


def samples(
    axes: Axes, settings: Settings, inputs: Inputs, cotangents: Float[Array, "2"] | None = None
) -> Leaves:
    """Returns what ``expand`` computes of this device's chunks, and gradients from cotangents."""
    assert inputs.captured is not None
    own = _typed(axes, settings.options, inputs)
    return settings.expand.samples(inputs.captured, own.params, own.chunk.latent, cotangents)


def _typed(axes: Axes, options: Options, inputs: Inputs) -> Inputs:
    """Returns inputs that vary over the same mesh axes, but for the captured arrays.

    The programs of ``expand`` take these as they were found.
    """
    _checks.shard_length("query", inputs.query.shape[1], options.layout)
    mesh = _mesh.ring_mesh(axes, CALLER)
    globally = f", or call {CALLER} outside of it, on global arrays"
    _mesh.all_axes_manual(mesh, inputs.query, globally=globally)
    # Before the custom_vjp: the transpose of this cast sums the gradients of params.
    return spread(_mesh.vary_together(axes, inputs._replace(captured=None)))
