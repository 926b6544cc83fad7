"""Everything static about a call: what does not depend on the values of arrays."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from burst_attention import _checks, _confirmed, _environment, _mesh
from burst_attention._attention import choice, implementation
from burst_attention._attention.features import Features
from burst_attention._attention.options import (
    KERNELS,
    NO_LIMIT,
    BackwardOrder,
    Kernels,
    Options,
    Window,
)
from burst_attention._layouts import positions_of
from burst_attention._types import Axes, Layout

KERNELS_VARIABLE = "BURST_ATTENTION_KERNELS"
"""The environment variable that names the kernels of GPUs where a call leaves the choice."""


@dataclass(frozen=True)
class Ring:
    """A ring of devices and its computation: most fields become attributes of the custom calls."""

    options: Options
    axes: Axes
    """Mesh axes of the sequence: rank = outer · inner size + inner. Without axes, each device is a
    ring."""
    world_size: int
    schedule: str
    """The library's name of the schedule, such as ``double_ring`` for rings over two axes."""
    schedule_name: str
    """The schedule in the names of calls: that of all devices, also where heads are scattered."""
    inner_size: int
    """Ranks of an inner ring; 0 if there are no inner rings."""
    node: int | None
    """How many neighbouring ranks form a node, for predictions; None for the machine's number."""
    window: Window
    """How many positions before and after its own in the layout a query sees, or `NO_LIMIT`.
    Negative where `query_offset` moves its own out of the window."""
    softmax_scale: float
    layout: Layout
    implementation: str | None
    """``cpu``, ``cuda`` or ``xla``; None where lowering decides. See `implementation`."""
    groups: tuple[int, ...]
    """Logical ids of the devices of all rings, see `ring_groups`."""
    lse_gradient: bool
    """Whether lse may have a gradient."""
    kernels: Kernels
    """The kernels of GPUs that may compute, as the library names them."""
    backward_order: BackwardOrder
    """The order of sums in gradients, as the library names it."""

    def positions(self, length: int) -> Int32[Array, " rows"]:
        """Returns the positions that the layout gives to this rank's rows."""
        rows = jnp.arange(length, dtype=jnp.int32)
        return positions_of(rows, lax.axis_index(self.axes), self.world_size, length, self.layout)

    @property
    def keeps_float32(self) -> bool:
        """Whether the backward pass gets o in float32 however many keys there are."""
        return self.options.residual_dtype is not None


def ring_along(
    axes: Axes,
    options: Options,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    features: Features,
    lse_gradient: bool,
) -> Ring:
    """Returns the ring of a call inside ``shard_map``."""
    query, key, _ = qkv
    mesh = _mesh.ring_mesh(axes)
    _mesh.all_axes_manual(mesh, *qkv)
    for name in ("batch_axis", "head_axis"):
        _check_axes(name, getattr(options, name), mesh, axes)
    for name, x in (("query", query), ("key", key)):
        _checks.shard_length(name, x.shape[1], options.layout)
    axes = _mesh.levels(mesh, axes)
    world_size = _mesh.axes_size(mesh, axes)
    chosen = implementation.chosen(options.implementation, mesh, query.dtype, world_size)
    implementation.check_soft_cap(options.logits_soft_cap, chosen)
    implementation.check_residual_dtype(options.residual_dtype is not None, chosen)
    sizes = tuple(mesh.shape[name] for name in axes)
    # Where positions are data, any rank may have keys that a query sees.
    everything = (NO_LIMIT, NO_LIMIT)
    window = options.window(world_size * max(query.shape[1], key.shape[1]))
    window = everything if features.has_positions else window
    schedule = choice.library_name(choice.resolved(options, qkv, sizes, chosen, window), axes)
    return Ring(
        options=options,
        axes=axes,
        world_size=world_size,
        schedule=schedule,
        schedule_name=schedule,
        inner_size=sizes[1] if schedule == "double_ring" else 0,
        node=sizes[1] if len(sizes) == 2 else None,
        window=window,
        softmax_scale=options.softmax_scale(query.shape[3]),
        layout=options.layout,
        implementation=chosen,
        groups=_mesh.ring_groups(mesh, axes),
        lse_gradient=lse_gradient,
        kernels=_kernels(options, chosen),
        backward_order=order_of_sums(options.backward_order),
    )


def _kernels(options: Options, chosen: str | None) -> Kernels:
    """Returns the kernels of GPUs that may compute a call: ``auto`` where cuDNN is confirmed."""
    if options.kernels != "auto":
        return options.kernels
    if asked := _environment.choice(KERNELS_VARIABLE, "tile", "cudnn"):
        return _checks.choice(KERNELS_VARIABLE, asked, KERNELS)
    return "auto" if _confirmed.confirmed("cudnn", chosen) else "tile"


def order_of_sums(asked: BackwardOrder) -> BackwardOrder:
    """Returns the order of sums in gradients, ``fixed`` in place of ``auto`` where XLA's flags ask
    for the same bits in every run."""
    return "fixed" if asked == "auto" and _environment.asks_for_determinism() else asked


def _check_axes(name: str, names: Axes, mesh: jax.sharding.AbstractMesh, ring_axes: Axes) -> None:
    """Raises for axes of the batch or the heads that the mesh or the sequence does not leave."""
    if set(names) & set(ring_axes):
        raise ValueError(
            f"{name} must not name the axis that shards the sequence, "
            f"axis_name={_mesh.axis_name_of(ring_axes)!r}, got {_mesh.axis_name_of(names)!r}"
        )
    unknown = [x for x in names if x not in mesh.manual_axes]
    if unknown:
        raise ValueError(
            f"{name} must name axes of the surrounding jax.shard_map, of "
            f"{_checks.listed(mesh.manual_axes)}, got {unknown[0]!r}"
        )
