"""Padding inside a call: of tokens, as segment ids, and of head dimensions, as zeros."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from burst_attention._attention.features import Features
from burst_attention._attention.options import Options
from burst_attention._attention.ring import Ring
from burst_attention._attention.vjp import Qkv
from burst_attention._checks import HEAD_DIM_MULTIPLE
from burst_attention._padding import PADDING, padded_to
from burst_attention._types import Three


def pad_head_dims(options: Options, qkv: Qkv) -> tuple[Options, Three]:
    """Returns q, k and v with head dimensions that kernels compute, and the scale of the given one.

    Zeros at the end of query and key change no score. Zeros at the end of value are columns of out.
    """
    query, key, value = qkv
    scale = options.softmax_scale(query.shape[3])
    query, key, value = (padded_to(x, HEAD_DIM_MULTIPLE, 3) for x in qkv)
    return replace(options, scale=scale), (query, key, value)


def padding_as_ids(features: Features, qkv: Qkv, ring: Ring) -> Features:
    """Returns features whose segment ids hide what masks and lengths hide.

    A hidden row gets the id −1. Every other row keeps its id; without ids, rows have the id 0.
    """
    names = ("query_mask", "key_mask", "query_seq_lengths", "key_value_seq_lengths")
    if all(getattr(features, name) is None for name in names):
        return features
    batch = qkv[0].shape[0]

    def ids(
        given: Int32[Array, "batch seq"] | None,
        mask: Bool[Array, "batch seq"] | None,
        lengths: Int32[Array, " batch"] | None,
        positions: Int32[Array, "batch seq"] | None,
        seq: int,
    ) -> Int32[Array, "batch seq"]:
        found = jnp.zeros((batch, seq), jnp.int32) if given is None else given
        if mask is not None:
            found = jnp.where(mask, found, PADDING)
        if lengths is not None:
            if positions is None:
                positions = ring.positions(seq)[None]
            found = jnp.where(positions < lengths[:, None], found, PADDING)
        return found

    q, k = (x.shape[1] for x in qkv[:2])
    return features._replace(
        query_segment_ids=ids(
            features.query_segment_ids,
            features.query_mask,
            features.query_seq_lengths,
            features.query_positions,
            q,
        ),
        key_segment_ids=ids(
            features.key_segment_ids,
            features.key_mask,
            features.key_value_seq_lengths,
            features.key_positions,
            k,
        ),
        **dict.fromkeys(names),
    )
