"""The public calls that are tried on every mesh, with the arrays that each takes."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import tour_arrays
from jax import lax
from mesh_cases import QKV, Call


def softmax(case, a):
    """Attention on global arrays, with every array that may come whole."""
    more = {
        name: a[name]
        for name in ("mask", "sinks", "alibi_slopes", "segment_ids", "key_value_seq_lengths")
    }
    dropout = {"dropout_rate": 0.2, "dropout_key": jax.random.key(7)}
    qkv = (a[name] for name in QKV)
    way = case.way() | dropout
    return ba.dot_product_attention(*qkv, is_causal=True, return_residual=True, **more, **way)


def in_sequence(case, a):
    """Attention over tokens that no layout can cut, in the order of the sequence."""
    way = case.way() | {"axis_name": case.axes, "segment_ids": a["odd_ids"]}
    qkv = (a[name] for name in tour_arrays.ODD)
    return ba.dot_product_attention(*qkv, order="sequence", layout="striped", **way)


def scattered(case, a):
    """Attention whose heads are scattered, as a layer of Flax calls it."""
    is_double = sum(case.sizes[name] > 1 for name in case.axes) > 1
    schedule = "hybrid" if is_double else "ulysses"
    call = ba.flax_attention_fn(schedule=schedule, **case.way())
    return call(*(a[name] for name in QKV), mask=a["mask"])


def linear(case, a):
    """Linear attention on global arrays, with its state."""
    names = ("decay", "initial_state", "segment_ids")
    options = case.way() | {name: a[name] for name in names}
    return ba.linear_attention(
        *(a[name] for name in QKV), return_state=True, method="ring", **options
    )


def delta(case, a):
    """The delta rule on global arrays, with decays of channels."""
    q, k, v = (a[name] for name in QKV)
    options = case.way() | {"log_decay": a["channels"], "initial_state": a["initial_state"]}
    return ba.delta_attention(q, k / 8, v, a["beta"], **options)


def infini(case, a):
    """Infini-attention on global arrays, from a memory to a memory."""
    qkv = (a[name] for name in QKV)
    options = {"segment_size": 4, "memory": a["memory"]}
    return ba.infini_attention(*qkv, a["gate"], **options, **case.way())


def expanded(gate, latent):
    """Returns keys and values of latents; each device has its own heads of ``gate``."""
    key = latent[:, :, None] * gate[:, None]
    return key, latent[:, :, None] + jnp.arange(8.0) * gate[:, None]


def latents(case, a):
    """Attention over latents that travel, on global arrays."""
    way = case.way()
    if way:
        way["params_spec"] = case.spec("gate")
    arrays = a["query"], a["latent"], expanded, a["gate"]
    return ba.latent_attention(*arrays, is_causal=True, segment_ids=a["segment_ids"], **way)


def on_shards(case, a):
    """Attention of shards, rematerialised, and over latents."""

    def local(a):
        names = ("sinks", "alibi_slopes", "segment_ids")
        options = {name: a[name] for name in names}
        attend = partial(ba.attention, axis_name=case.axes, is_causal=True, **options)
        # JAX fails jax.checkpoint inside a shard_map that a vmap maps over spmd_axis_name.
        if case.is_explicit or not case.stage_axis:
            attend = jax.checkpoint(attend, policy=ba.save_attention)
        out = attend(*(a[name] for name in QKV))
        arrays = a["query"], a["latent"], expanded, a["gate"]
        return out, ba.latent_attention(*arrays, axis_name=case.axes, is_causal=True)

    return case.shards(local, a, ("query", "query"))


def recurrences(case, a):
    """Linear attention and the delta rule of shards."""

    def local(a):
        q, k, v = (a[name] for name in QKV)
        way = {"axis_name": case.axes}
        linear = ba.linear_attention(q, k, v, decay=a["decay"], **way)
        delta = ba.delta_attention(q, k / 8, v, a["beta"], segment_ids=a["segment_ids"], **way)
        return linear, delta

    return case.shards(local, a, ("query", "query"))


def shifted(case, a):
    """Neighbours of tokens in each layout, and the positions of tokens."""

    def local(a):
        x, ids, ranks = a["query"], a["segment_ids"], {"axis_name": case.axes}
        near = ba.shift(x, -1, segment_ids=ids, **ranks) + ba.shift(x, 3, **ranks)
        positions = ba.local_positions(x.shape[1], **ranks)
        return near * positions[:, None, None]

    return case.shards(local, a, "query")


def decoded(case, a):
    """A token that enters caches, its attention, and that behind a shared prefix."""

    def local(a):
        held, new = (
            [a[name] for name in tour_arrays.CACHES],
            [a[name] for name in tour_arrays.TOKEN],
        )
        way = {"axis_name": case.axes, "layout": "contiguous"}
        held = ba.append_to_cache(*held, *new[1:], a["lengths"], **way)
        out, lse = ba.decode_attention(
            new[0], *held, a["lengths"], sinks=a["sinks"], return_residual=True, **way
        )
        prefixes = {name: a[name] for name in ("prefix_of", "prefix_lengths")}
        shared = [a[name] for name in tour_arrays.PREFIXES]
        behind = ba.shared_prefix_attention(
            new[0], *shared, *held, a["own_lengths"], **prefixes, **way
        )
        return *held, out, lse, behind

    return case.shards(local, a, (*tour_arrays.CACHES, "token", "token", "token"))


def steps(case, a):
    """Calls on arrays that may lie on any mesh, or on none."""
    q, k, v = (lax.squeeze(a[name], [1]) for name in tour_arrays.TOKEN)
    state = a["initial_state"]
    beta = jnp.ones(state.shape[:2])
    return (
        ba.linear_attention_step(q, k, v, state, decay=a["decay"]),
        ba.delta_attention_step(q, k, v, state, beta),
        ba.merge_attention((a["out"], a["lse"]), (2 * a["out"], a["lse"] - 1)),
        ba.from_layout(ba.to_layout(a["out"], 2, "zigzag") + 1, 2, "zigzag"),
    )


CALLS = [
    Call(
        "softmax",
        softmax,
        (*QKV, "mask", "sinks", "alibi_slopes", "segment_ids", "key_value_seq_lengths"),
    ),
    Call("in sequence", in_sequence, (*tour_arrays.ODD, "odd_ids")),
    Call("scattered", scattered, (*QKV, "mask")),
    Call("linear", linear, (*QKV, "decay", "initial_state", "segment_ids")),
    Call("delta", delta, (*QKV, "beta", "channels", "initial_state")),
    Call("infini", infini, (*QKV, "gate", "memory")),
    Call("latents", latents, ("query", "latent", "gate", "segment_ids")),
    Call(
        "shards",
        on_shards,
        (*QKV, "sinks", "alibi_slopes", "segment_ids", "latent", "gate"),
        is_global=False,
    ),
    Call("recurrences", recurrences, (*QKV, "decay", "beta", "segment_ids"), is_global=False),
    Call("shift", shifted, ("query", "segment_ids"), is_global=False),
    Call(
        "decode",
        decoded,
        (
            *tour_arrays.CACHES,
            *tour_arrays.TOKEN,
            *tour_arrays.PREFIXES,
            "lengths",
            "own_lengths",
            "prefix_of",
            "prefix_lengths",
            "sinks",
        ),
        has_gradient=False,
        is_global=False,
    ),
    Call("steps", steps, (*tour_arrays.TOKEN, "initial_state", "decay", "out", "lse")),
]
