"""Features: the arrays of a call besides query, key and value, in one table.

All code that checks arguments, shards global arrays, scatters heads, orders the operands of custom
calls or returns gradients reads the table. The library declares the operands of its custom calls;
the table adds the arguments that bring them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from burst_attention import _ffi
from burst_attention._attention.arguments import Value, batched, cast, intervals, mask_sides
from burst_attention._batching import spread
from burst_attention._checks import array_type, as_array, index, shaped
from burst_attention._types import ArrayType, Axes


class Feature(NamedTuple):
    """A row of the table. Shapes consist of the names that `lengths` returns and of numbers."""

    name: str
    """The field of `Features`."""
    argument: str
    """The keyword argument that brings the array."""
    dtype: str
    each: str
    """What one element is, in the words of errors."""
    shape: str
    """The shape of the array that the argument brings."""
    operand: str
    """The shape of the array that `as_operands` returns; empty for one that it never gets."""
    differentiable: bool = False
    """Whether the array has a gradient."""
    partial: Mapping[str, str] | None = None
    """For each platform the shape of the gradient that calls return; its sum is the operand's."""


ARGUMENTS = {
    "query_segment_ids": ("segment_ids", "id", "batch q_len"),
    "key_segment_ids": ("segment_ids", "id", "batch kv_len"),
    "alibi_slopes": ("alibi_slopes", "slope", "heads"),
    "visible": ("visible", "interval", "batch kv_len 2"),
    "also_visible": ("visible", "interval", "batch kv_len 2"),
    "query_positions": ("query_positions", "position", "batch q_len"),
    "key_positions": ("key_positions", "position", "batch kv_len"),
    "dropout": ("dropout_key", "word", "2"),
}
"""For each operand the argument that brings it, the word for an element, and the shape that the
argument has."""


def _operand(row: _ffi.FeatureOperand) -> Feature:
    argument, each, shape = ARGUMENTS[row["name"]]
    operand = " ".join(map(str, row["shape"]))
    parts = (row["name"], argument, row["dtype"], each, shape, operand)
    gradient = row["gradient"]
    if gradient is None:
        return Feature(*parts)
    partial = {platform: " ".join(map(str, dims)) for platform, dims in gradient.items()}
    return Feature(*parts, differentiable=True, partial=partial)


OPERANDS = tuple(map(_operand, _ffi.interface()["feature_operands"]))
"""The features whose arrays the custom calls take, in their order."""
FEATURES = (
    *OPERANDS,
    Feature("sinks", "sinks", "float32", "logit", "heads", "batch heads", differentiable=True),
    Feature("query_mask", "mask", "bool", "flag", "batch q_len", ""),
    Feature("key_mask", "mask", "bool", "flag", "batch kv_len", ""),
    Feature("query_offset", "query_offset", "int32", "position", "batch", ""),
    Feature("query_seq_lengths", "query_seq_lengths", "int32", "length", "batch", ""),
    Feature("key_value_seq_lengths", "key_value_seq_lengths", "int32", "length", "batch", ""),
)
"""Every feature that has an array."""


class Features(NamedTuple):
    """The arrays of a call, None where absent: as arguments, or as `as_operands` returns them."""

    query_segment_ids: Int32[Array, "batch q_len"] | None = None
    key_segment_ids: Int32[Array, "batch kv_len"] | None = None
    alibi_slopes: Float32[Array, "*batch heads"] | None = None
    visible: Int32[Array, "batch kv_len 2"] | None = None
    also_visible: Int32[Array, "batch kv_len 2"] | None = None
    query_positions: Int32[Array, "batch q_len"] | None = None
    key_positions: Int32[Array, "batch kv_len"] | None = None
    dropout: UInt32[Array, "*batch words"] | None = None
    sinks: Float32[Array, "*batch heads"] | None = None
    query_mask: Bool[Array, "batch q_len"] | None = None
    key_mask: Bool[Array, "batch kv_len"] | None = None
    query_offset: Int32[Array, " batch"] | None = None
    query_seq_lengths: Int32[Array, " batch"] | None = None
    key_value_seq_lengths: Int32[Array, " batch"] | None = None

    def present(self) -> list[tuple[Feature, jax.Array]]:
        """Returns the arrays that are present, each with its row of the table."""
        return [(row, x) for row, x in zip(FEATURES, self, strict=True) if x is not None]

    @property
    def has_positions(self) -> bool:
        """Whether positions are data, so that the layout says nothing about the mask."""
        data = (self.query_positions, self.key_positions, self.query_offset)
        return any(x is not None for x in data)

    def takes_data(self, query_offset: int) -> bool:
        """Whether calls need positions of rows, beyond what the layout says.

        A static offset of the queries shifts the window. Slopes and dropout need the positions.
        """
        counts = self.alibi_slopes is not None or self.dropout is not None
        return self.visible is not None or self.has_positions or (query_offset != 0 and counts)

    def operands(self) -> list[tuple[Feature, jax.Array]]:
        """Returns the operands of the custom calls, each with its row of the table."""
        return [(row, x) for row, x in self.present() if row in OPERANDS]

    def differentiable(self) -> list[tuple[Feature, jax.Array]]:
        """Returns the arrays that have a gradient, each with its row of the table."""
        return [(row, x) for row, x in self.present() if row.differentiable]


def batch_of_one(qkv: Value, options: Mapping[str, object]) -> tuple[Value, dict[str, object]]:
    """Returns query, key and value of three dimensions, and arrays of their rows, with a batch."""
    of_rows = (row.argument for row in OPERANDS if row.shape.startswith("batch "))
    return batched(qkv, 3), {**options, **{name: batched(options.get(name), 1) for name in of_rows}}


def lengths(query: ArrayType, key: ArrayType) -> dict[str, int]:
    """Returns the lengths that shapes of the table name."""
    batch, q_len, heads, _ = query.shape
    _, kv_len, kv_heads, _ = key.shape
    counts = {"q_len": q_len, "kv_len": kv_len, "heads": heads, "kv_heads": kv_heads}
    return {"batch": batch, **counts}


def check_features(
    given: Mapping[str, object], query: ArrayType, key: ArrayType, dropout_rate: float
) -> Features:
    """Returns the arrays among the arguments of `attention`, checked."""
    sizes = lengths(query, key)
    values = {row.name: (row.argument, given.get(row.argument)) for row in FEATURES}
    values |= {"visible": ("visible", None), "also_visible": ("visible", None)}
    values |= intervals(given.get("visible"), sizes["batch"], sizes["kv_len"])
    static_offset = index(given.get("query_offset"))
    if static_offset is not None:
        values["query_offset"] = ("query_offset", None)
    values |= _pair_of_ids(given.get("segment_ids"), sizes["q_len"], sizes["kv_len"])
    values |= {"query_mask": ("mask", None), "key_mask": ("mask", None)}
    values |= mask_sides(given.get("mask"), sizes["batch"], sizes["q_len"], sizes["kv_len"])
    values["dropout"] = ("dropout_key", dropout_words(given.get("dropout_key"), dropout_rate))
    found = Features(*(_checked(row, *values[row.name], sizes) for row in FEATURES))
    has_offset = bool(static_offset) or found.query_offset is not None
    if has_offset and found.query_positions is not None:
        raise ValueError(
            "query_offset and query_positions must not both be given: add the offset to the "
            "positions"
        )
    return found


def _checked(row: Feature, title: str, value: object, sizes: Mapping[str, int]) -> jax.Array | None:
    """Returns an array that has the dtype and the shape of its row."""
    if value is None:
        return None
    names = row.shape.split()
    expected = tuple(sizes[name] if name in sizes else int(name) for name in names)
    unit = "head of query" if "heads" in names else "token" if len(names) > 1 else "batch entry"
    value = cast(title, row.each, value, row.dtype)

    def hint(shape: tuple[int, ...]) -> str:
        if names[0] == "batch" and len(shape) == len(names) - 1:
            return "; add the batch dimension with jnp.broadcast_to"
        times, rest = divmod(sum(shape), sizes["heads"])
        if names == ["heads"] and len(shape) == 1 and times > 1 and not rest:
            return f"; where heads are sharded, each device takes the {row.each}s of its own heads"
        return ""

    words = f"one {row.each} for each {unit}"
    return shaped(title, value, row.dtype, expected, words, hint)


def _pair_of_ids(value: object, q_len: int, kv_len: int) -> dict[str, tuple[str, object]]:
    """Returns the ids of query and of key with their titles in errors, where both are given."""
    if not isinstance(value, tuple | list):
        if value is not None and q_len != kv_len:
            raise ValueError(
                "segment_ids must be a pair (ids of query, ids of key) where these differ in "
                f"length, got one array for {q_len} and {kv_len} tokens"
            )
        return {}
    if len(value) != 2:
        raise ValueError(
            "segment_ids must be one array or a pair (ids of query, ids of key), got "
            f"{len(value)} arrays"
        )
    titles = {"query_segment_ids": "segment_ids of query", "key_segment_ids": "segment_ids of key"}
    pairs = zip(titles.items(), value, strict=True)
    return {name: (title, array_type(title, ids)) for (name, title), ids in pairs}


def dropout_words(key: object, rate: float) -> UInt32[Array, "2"] | None:
    """Returns the first and the last word of a key's data; None where nothing is dropped."""
    if not rate:
        return None
    if key is None:
        raise ValueError(
            f"dropout_rate={rate:g} needs dropout_key, a key such as jax.random.key(0), another "
            "one for every step and layer"
        )
    found = array_type("dropout_key", key)
    shape = tuple(found.shape)
    if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        if shape:
            raise ValueError(f"dropout_key must be one key, got an array of keys of shape {shape}")
        words = jax.random.key_data(as_array(found)).reshape(-1)
        return words[jnp.array([0, words.size - 1])]
    if found.dtype != jnp.uint32 or shape != (2,):
        raise TypeError(
            "dropout_key must be a key of jax.random, or its data uint32 of shape (2,), got "
            f"{found.dtype} of shape {shape}"
        )
    return as_array(found)


def as_operands(
    features: Features, batch: int, heads: int, batch_axes: Axes, head_axes: Axes
) -> Features:
    """Returns features of which every operand has an entry for each batch entry.

    The gradient of an array that batch entries share is then the sum that JAX's transpose makes.
    """
    if features.dropout is not None:
        offsets = dropout_offsets(features.dropout, batch, heads, batch_axes, head_axes)
        features = features._replace(dropout=offsets)
    shared = {
        row.name: jnp.broadcast_to(x, (batch, *x.shape))
        for row, x in features.present()
        if row.operand == f"batch {row.shape}"
    }
    return features._replace(**shared)


def dropout_offsets(
    words: UInt32[Array, "2"], batch: int, heads: int, batch_axes: Axes, head_axes: Axes
) -> UInt32[Array, "batch 4"]:
    """Returns for each batch entry the key's two words, its index and its first query head's index.

    Both indices count in the whole array, whose batch and heads the axes shard. Philox4x32-10
    under this key gives each weight a number, which decides whether the weight is dropped::

        r = philox((key position // 4, query position, query head, batch entry))[key position % 4]
        kept where r ≥ round(rate · 2³²), and divided by 1 − rate

    So the mesh, the layout and the schedule do not matter.
    """
    entry, head = _first_index(batch_axes, batch), _first_index(head_axes, heads)
    entries = entry + jnp.arange(batch, dtype=jnp.uint32)
    columns = spread((words[0], words[1], entries, head))
    return jnp.stack([jnp.broadcast_to(column, (batch,)) for column in columns], axis=1)


def _first_index(axes: Axes, count: int) -> UInt32[Array, ""]:
    """Returns the index of a device's first entry in a whole array of ``count`` on each device."""
    index = lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)
    return index.astype(jnp.uint32) * jnp.uint32(count)
