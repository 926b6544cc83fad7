"""Latent attention of one device's queries in a whole, sharded sequence."""

from typing import NamedTuple

from burst_attention import _checks, _mesh
from burst_attention._attention.options import Options
from burst_attention._attention.vjp import Results
from burst_attention._batching import spread
from burst_attention._latent.ring import latent_ring
from burst_attention._latent.tiles import Call, Expand, Inputs
from burst_attention._types import Axes

CALLER = "latent_attention"


class Settings(NamedTuple):
    """What is static about a call, wherever it runs."""

    expand: Expand
    options: Options
    with_lse: bool
    """Whether lse may have a gradient."""


def attend(axes: Axes, settings: Settings, inputs: Inputs) -> Results:
    """Returns out and lse of this device's queries; all arguments are checked."""
    _checks.shard_length("query", inputs.query.shape[1], settings.options.layout)
    mesh = _mesh.ring_mesh(axes, CALLER)
    globally = f", or call {CALLER} outside of it, on global arrays"
    _mesh.all_axes_manual(mesh, inputs.query, globally=globally)
    call = Call(
        settings.expand, settings.options, axes, _mesh.axes_size(mesh, axes), settings.with_lse
    )
    # Before the custom_vjp: the transpose of this cast sums the gradients of params.
    return latent_ring(call, spread(_mesh.vary_together(axes, inputs)))
