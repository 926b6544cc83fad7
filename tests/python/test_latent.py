"""Attention over latents that travel equals attention over keys that are expanded first."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from bounds import check
from jax.sharding import PartitionSpec as P
from reference import dense

pytestmark = pytest.mark.needs("products", "float32")

X = P(None, "context")
HEADS, NOPE, ROPE, VALUE_DIM, COLUMNS = 4, 24, 8, 16, 20
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 4)},
    "causal-window": {"is_causal": True, "local_window_size": (21, 0)},
    "soft-cap": {"is_causal": True, "logits_soft_cap": 1.5},
    "segments": {"is_causal": True, "segments": True},
}


def expand(params, latent):
    key = jnp.einsum("bsc,chd->bshd", latent["columns"], params["key"])
    rope = jnp.broadcast_to(latent["rope"][:, :, None], (*key.shape[:3], ROPE))
    value = jnp.einsum("bsc,chd->bshd", latent["columns"], params["value"])
    return jnp.concatenate([key, rope.astype(key.dtype)], -1), value


def inputs(tokens, dtype=np.float32):
    """Returns query, latent, params and the cotangents of out and lse."""
    shapes = [
        (2, tokens, HEADS, NOPE + ROPE),
        (2, tokens, COLUMNS),
        (2, tokens, ROPE),
        (COLUMNS, HEADS, NOPE),
        (COLUMNS, HEADS, VALUE_DIM),
        (2, tokens, HEADS, VALUE_DIM),
        (2, tokens, HEADS),
    ]
    query, columns, rope, key, value, dout, dlse = (
        x.astype(np.float32) for x in ring.normal(0, *shapes, dtype=np.float32)
    )
    query, columns, rope, key, value, dout = (
        x.astype(dtype) for x in (query, columns, rope, key / 4, value / 4, dout)
    )
    latent, params = {"columns": columns, "rope": rope}, {"key": key, "value": value}
    return query, latent, params, dout, dlse


def segments(tokens):
    """Returns ids of documents with padding at the end."""
    ids = np.repeat(np.arange(2 * tokens // 10 + 1), 10)[: 2 * tokens].reshape(2, tokens)
    ids[:, -5:] = -1
    return ids


def sharded(mesh, ids=None, layout="contiguous", **options):
    def local(query, latent, params, ids):
        return ba.latent_attention(
            query,
            latent,
            expand,
            params,
            axis_name="context",
            segment_ids=ids,
            layout=layout,
            return_residual=True,
            **options,
        )

    function = jax.shard_map(local, mesh=mesh, in_specs=(X, X, P(), X), out_specs=(X, X))
    return lambda *x: function(*x, ids)


def found(size, layout, arrays, ids=None, **options):
    """Returns results and gradients by name, in the order of the sequence."""
    query, latent, params, dout, dlse = arrays
    stored = lambda tree: jax.tree.map(lambda x: ba.to_layout(x, size, layout), tree)  # noqa: E731
    restored = lambda x: np.asarray(ba.from_layout(np.asarray(x), size, layout))  # noqa: E731
    ids = None if ids is None else ba.to_layout(ids, size, layout)
    function = sharded(ring.line(size), ids, layout, **options)
    given = (stored(query), stored(latent), params)
    (o, lse), (dq, dlatent, dparams) = ring.gradients(function)(given, stored((dout, dlse)))
    dlatent = {name: restored(x) for name, x in dlatent.items()}
    return {"o": restored(o), "lse": restored(lse), "dq": restored(dq)}, dlatent | dparams


def expected(arrays, ids=None, **options):
    """Returns the float64 reference, and gradients of latents and params by name."""
    query, latent, params, dout, dlse = arrays
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    c, wk, wv = wide(latent["columns"]), wide(params["key"]), wide(params["value"])
    rope = np.broadcast_to(wide(latent["rope"])[:, :, None], (*query.shape[:3], ROPE))
    key = np.concatenate([np.einsum("bsc,chd->bshd", c, wk), rope], -1)
    value = np.einsum("bsc,chd->bshd", c, wv)
    left, right = options.get("local_window_size", (None, None))
    features = {"soft_cap": options.get("logits_soft_cap"), "window": None}
    if left is not None:
        features["window"] = (left, right)
    if ids is not None:
        features["segments"] = (ids, ids)
    out = dense(
        query, key, value, dout, dlse, causal=options.get("is_causal", False), **features
    )
    dk, dv = out.dk[..., :NOPE], out.dv
    gradients = {
        "columns": np.einsum("bshd,chd->bsc", dk, wk) + np.einsum("bshd,chd->bsc", dv, wv),
        "rope": out.dk[..., NOPE:].sum(2),
        "key": np.einsum("bsc,bshd->chd", c, dk),
        "value": np.einsum("bsc,bshd->chd", c, dv),
    }
    return out, gradients


def near(found, expected, bound):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        wrong = np.linalg.norm(np.float64(found[name]) - want) / np.linalg.norm(want)
        assert wrong <= bound, f"{name}: error {wrong:.2e}, allowed {bound:.2e}"


def agree(size, layout, mask, dtype=np.float32, bound=3e-6, tokens=48, **options):
    options = MASKS[mask] | options
    ids = segments(tokens) if options.pop("segments", False) else None
    arrays = inputs(tokens, dtype)
    want, want_gradients = expected(arrays, ids, **options)
    got, got_gradients = found(size, layout, arrays, ids, **options)
    check(got, want, arrays[3], jnp.dtype(dtype).name)
    near(got_gradients, want_gradients, bound)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, "contiguous"), (2, "zigzag"), (4, "contiguous"), (4, "striped"), (4, "zigzag")],
)
def test_it_equals_expansion_before_attention(size, layout, mask):
    agree(size, layout, mask)
