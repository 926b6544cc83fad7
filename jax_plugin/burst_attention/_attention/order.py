"""``order="sequence"``: global arrays in the order of the sequence and of any length.

Outside ``shard_map`` arrays are padded to a length that the layout can cut. Inside, shards go into
the layout and results come out of it, so no device holds a whole sequence for it.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from burst_attention._attention.features import Feature, Features
from burst_attention._attention.options import NO_LIMIT, Options
from burst_attention._attention.reorder import Reorder
from burst_attention._attention.vjp import Qkv
from burst_attention._layouts import parts
from burst_attention._mesh import axes_size
from burst_attention._padding import PADDING, padded_to
from burst_attention._types import AnyMesh, Axes, Three

Order: TypeAlias = Literal["layout", "sequence"]
ORDERS: tuple[Order, ...] = get_args(Order)

FILL = dict.fromkeys(("query_segment_ids", "key_segment_ids"), PADDING)
"""What fills the end of a feature; 0 or False for all others."""


@dataclass(frozen=True)
class InSequence:
    """The way between the order of the sequence and a layout over a mesh."""

    mesh: AnyMesh
    axes: Axes
    """Mesh axes of the sequence."""
    options: Options

    def padded(self, qkv: Qkv, features: Features) -> tuple[Three, Features]:
        """Returns global arrays padded at the end where the layout needs it."""
        query, key, value = (self._cut(self._padded(x, 1), 1, self.axes) for x in qkv)
        q_len, kv_len = qkv[0].shape[1], qkv[1].shape[1]
        is_seen = features.has_positions or self._reaches_past(kv_len, q_len)
        if key.shape[1] > kv_len and is_seen and features.key_mask is None:
            features = features._replace(key_mask=jnp.ones((len(key), kv_len), bool))
        found = {row.name: x for row, x in features.present()}
        for row, x, axis in _along_sequence(features):
            x = self._padded(x, axis, FILL.get(row.name, 0))
            # An array that is whole on every device may stay so.
            found[row.name] = self._cut(x, axis, self.axes) if any(_spec_of(x)) else x
        return (query, key, value), Features(**found)

    def into_layout(self, qkv: Qkv, features: Features) -> tuple[Three, Features]:
        """Returns the shards of a device in the layout, from its shards of the sequence."""
        query, key, value = map(self._reorder.into_layout, qkv)
        found = {
            row.name: self._reorder.into_layout(x, axis)
            for row, x, axis in _along_sequence(features)
        }
        return (query, key, value), features._replace(**found)

    def out_of_layout(self, x: jax.Array) -> jax.Array:
        """Returns out or lse of a device's shard of the sequence."""
        return self._reorder.out_of_layout(x)

    def result(
        self, x: Shaped[Array, "batch padded_len heads *value_dim"], query: jax.Array
    ) -> Shaped[Array, "batch q_len heads *value_dim"]:
        """Returns the rows of out or lse that are no padding, of Explicit axes like query."""
        return (x if _spec_of(query)[1] else self._cut(x, 1, None))[:, : query.shape[1]]

    def placed(
        self, x: Shaped[Array, "batch q_len heads *value_dim"], query: jax.Array
    ) -> Shaped[Array, "batch q_len heads *value_dim"]:
        """Returns out or lse sharded like query, where query says how."""
        if isinstance(query, jax.core.Tracer) or not isinstance(query.sharding, NamedSharding):
            return x
        # Outside jit, operations on Auto axes leave their results where they like.
        spec = PartitionSpec(*query.sharding.spec[:3])
        return jax.device_put(x, NamedSharding(query.sharding.mesh, spec))

    @property
    def _reorder(self) -> Reorder:
        return Reorder(self.axes, axes_size(self.mesh, self.axes), self.options.layout)

    def _reaches_past(self, kv_len: int, q_len: int) -> bool:
        """Returns whether the last query sees positions after the last key.

        Elsewhere the mask hides the padding of keys from all queries, and no ids are needed.
        """
        _, right = self.options.window(max(q_len, kv_len))
        return right == NO_LIMIT or q_len - 1 + right >= kv_len

    def _padded(self, x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
        """Returns an array padded at the end of ``axis`` to a length that the layout can cut."""
        size = axes_size(self.mesh, self.axes)
        return padded_to(x, parts(size, self.options.layout), axis, fill)

    def _cut(self, x: jax.Array, axis: int, axes: Axes | None) -> jax.Array:
        """Returns an array of which Explicit ones of ``axes`` cut the dimension ``axis``.

        An array that other axes cut stays as it is: the checks of the placement name it.
        """
        names = tuple(name for name in axes or () if name in self.mesh.explicit_axes)
        spec = _spec_of(x)
        if not self.mesh.explicit_axes or bool(spec[axis]) == bool(names):
            return x
        spec[axis] = names or None
        return jax.reshard(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


def _spec_of(x: jax.Array) -> list[str | Axes | None]:
    """Returns the sharding of an array, as far as its type says it."""
    spec = list(jax.typeof(x).sharding.spec)
    return spec + [None] * (x.ndim - len(spec))


def _along_sequence(features: Features) -> list[tuple[Feature, jax.Array, int]]:
    """Returns the arrays that have rows of the sequence, each with the dimension of the rows."""
    return [
        (row, x, axis)
        for row, x in features.present()
        for axis, name in enumerate(row.shape.split())
        if name in ("q_len", "kv_len")
    ]
