"""Impossible masks, lengths and orders give a helpful error while tracing."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from features import Problem
from jax import lax
from jax.sharding import PartitionSpec as P
from test_order import ODD, auto

pytestmark = pytest.mark.needs("float32")


def refused(kind, words, *changed, **options):
    arrays = ODD.arrays()
    qkv = [arrays[name] for name in "qkv"]
    qkv[: len(changed)] = changed
    options = {"order": "sequence", **auto(ODD), **options}
    with pytest.raises(kind, match=words):
        ba.dot_product_attention(*qkv, **options)


@pytest.mark.parametrize(
    ("kind", "words", "shape"),
    [
        (
            NotImplementedError,
            r"\[batch, 1, 1, kv_len\], or .* got .*\(2, 1, 45, 45\): the whole .*visible=",
            (2, 1, 45, 45),
        ),
        (
            NotImplementedError,
            r"it is a mask for each head, .* call once for .* visible=\(start, stop\)",
            (2, 4, 1, 45),
        ),
        (NotImplementedError, r"got shape \(1, 1, 45, 45\)", (45, 45)),
        (ValueError, r"shape \(2, 1, 1, 45\), padding of keys, or \(2, 1, 45, 1\)", (2, 1, 1, 44)),
        (ValueError, r"padding of queries, got shape \(3, 1, 45, 1\)", (3, 1, 45, 1)),
        (ValueError, r"at most 4 dimensions, got shape \(1, 2, 1, 1, 45\)", (1, 2, 1, 1, 45)),
    ],
)
def test_masks_of_other_shapes(kind, words, shape):
    refused(kind, f"^mask .*{words}", mask=np.ones(shape, bool))


def test_masks_of_other_types():
    words = "^mask must be bool, .* got float32; a mask that is added to scores is a bias"
    refused(TypeError, words, mask=np.ones((2, 1, 1, 45), np.float32))
    refused(TypeError, "^mask must be an array, got bool", mask=True)


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_bad_lengths(name):
    refused(
        ValueError,
        rf"{name} must have shape \(2,\), one length for each batch entry, got "
        r"shape \(3,\)",
        **{name: np.ones(3, int)},
    )
    words = f"{name} must have an integer type, which is cast to int32, got "
    refused(TypeError, f"{words}float32", **{name: np.ones(2, np.float32)})
    refused(TypeError, f"{words}bool", **{name: np.ones(2, bool)})
    refused(TypeError, f"{name} must be an array, got int", **{name: 3})

    def local(q, k, v):
        lengths = jnp.full(2, 45 + lax.axis_index("context"))
        return ba.attention(q, k, v, axis_name="context", **{name: lengths})

    function = jax.shard_map(
        local, mesh=ring.line(2), in_specs=P(None, "context"), out_specs=P(None, "context")
    )
    arrays = Problem().arrays()
    words = f"{name} must be the same on all devices .* give the lengths in the whole sequence"
    with pytest.raises(ValueError, match=words):
        jax.jit(function)(*(arrays[name] for name in "qkv"))


def test_bad_orders():
    refused(
        ValueError, "order must be one of 'layout' or 'sequence', got 'natural'", order="natural"
    )
    refused(ValueError, "seq of query must be a multiple of 4, .* got 45", order="layout")
    words = "spec is needed, since mesh axes 'data', 'context', 'tensor' are Auto"
    refused(ValueError, words, spec=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'order'"):
        ba.attention(*(np.zeros((1, 8, 1, 8)),) * 3, axis_name="context", order="sequence")


def test_bad_three_dimensions():
    q, k, v = (ODD.arrays()[name] for name in "qkv")
    refused(ValueError, r"key must have 4 dimensions .*x\[None\]", q, k[0], v[0])
    refused(ValueError, "one batch size, got 1 and 2", q[0], k, v)
    words = "at most 4 entries"
    refused(ValueError, words, q[0], k[0], v[0], spec=P("data", "context", "tensor", None))


@pytest.mark.parametrize(
    ("kind", "words", "bad", "total"),
    [
        (TypeError, "numpy or jax array of integers, got list", [0, 3], 4),
        (TypeError, "numpy or jax array of integers, got float32", np.zeros(2, np.float32), 4),
        (TypeError, "numpy or jax array of integers, got bool", np.zeros(2, bool), 4),
        (TypeError, "total_length must be an int, got 4.5", np.zeros(2, int), 4.5),
        (ValueError, "total_length must not be negative, got -1", np.zeros(2, int), -1),
        (
            ValueError,
            r"have shape \[documents \+ 1\], .* got shape \(1, 2\)",
            np.zeros((1, 2), int),
            4,
        ),
        (ValueError, r"got shape \(0,\)", np.zeros(0, int), 4),
        (ValueError, "must begin with 0, never fall .* got", np.array([1, 3]), 4),
        (ValueError, "must begin with 0, never fall .* got", np.array([0, 3, 2], np.uint8), 4),
        (ValueError, "end at most at total_length=4, got", np.array([0, 5]), 4),
    ],
)
def test_bad_cumulative_lengths(kind, words, bad, total):
    with pytest.raises(kind, match=words):
        ba.segment_ids_from_cu_seqlens(bad, total)
