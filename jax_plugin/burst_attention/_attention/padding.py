"""Padding inside a call: of tokens, as segment ids, and of head dimensions, as zeros."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from burst_attention._attention.features import Features
from burst_attention._attention.options import Options
from burst_attention._attention.visibility import positions
from burst_attention._attention.vjp import Qkv
from burst_attention._checks import HEAD_DIM_MULTIPLE
from burst_attention._padding import PADDING, padded_to
from burst_attention._types import ArrayType, Three


def pad_head_dims(options: Options, qkv: Qkv) -> tuple[Options, Three]:
    """Returns q, k and v with head dimensions that kernels compute, and the scale of the given one.

    Zeros at the end of query and key change no score. Zeros at the end of value are columns of out.
    """
    query, key, value = qkv
    scale = options.softmax_scale(query.shape[3])
    query, key, value = (padded_to(x, HEAD_DIM_MULTIPLE, 3) for x in qkv)
    return replace(options, scale=scale), (query, key, value)


def padding_as_ids(
    features: Features,
    qkv: Sequence[ArrayType],
    options: Options,
    positions_of: Callable[[int], Int32[Array, " rows"]],
) -> Features:
    """Returns features whose segment ids hide what masks and lengths hide.

    A hidden row gets the id −1. Every other row keeps its id; without ids, rows have the id 0.
    ``positions_of`` returns the positions that the layout gives to a number of rows.
    """
    names = ("query_mask", "key_mask", "query_seq_lengths", "key_value_seq_lengths")
    if all(getattr(features, name) is None for name in names):
        return features
    of_layout = (positions_of(x.shape[1]) for x in qkv[:2])
    queries, keys = positions(options, features, *of_layout)
    return features._replace(
        query_segment_ids=_ids(
            features.query_segment_ids,
            features.query_mask,
            features.query_seq_lengths,
            queries,
            qkv[0].shape[0],
        ),
        key_segment_ids=_ids(
            features.key_segment_ids,
            features.key_mask,
            features.key_value_seq_lengths,
            keys,
            qkv[0].shape[0],
        ),
        **dict.fromkeys(names),
    )


def _ids(
    given: Int32[Array, "batch seq"] | None,
    mask: Bool[Array, "batch seq"] | None,
    lengths: Int32[Array, " batch"] | None,
    positions: Int32[Array, "#batch seq"],
    batch: int,
) -> Int32[Array, "batch seq"]:
    """Returns the ids of one side's rows."""
    found = jnp.zeros((batch, positions.shape[1]), jnp.int32) if given is None else given
    if mask is not None:
        found = jnp.where(mask, found, PADDING)
    if lengths is not None:
        found = jnp.where(positions < lengths[:, None], found, PADDING)
    return found
