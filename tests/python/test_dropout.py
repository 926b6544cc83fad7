"""Which weights are dropped depends on the random key and on their positions alone."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from bounds import GPU_LSE_LIMIT, close
from burst_attention._attention.features import dropout_words
from features import Problem
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from philox import kept

pytestmark = pytest.mark.oldest_jax

SEQ, HEADS, BATCH, RATE = 64, 4, 4, 0.3
MESHES = [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 4, 1), (1, 2, 4), (2, 2, 2), (1, 8, 1)]
LAYOUTS = ("contiguous", "zigzag", "striped")


def revealing(**changes):
    """Returns a problem whose results show the weights that each pass keeps.

    Weights are all equal. With the identity as values, the output shows the weights of the forward
    pass; with the identity as cotangents, dv shows the weights of the backward pass.
    """
    one = Problem(
        q_len=SEQ, kv_len=SEQ, batch=BATCH, heads=HEADS, kv_heads=HEADS, value_dim=SEQ,
        head_dim=8, dropout=RATE, **changes,
    )  # fmt: skip
    arrays = one.arrays()
    identity = np.eye(SEQ, dtype=arrays["q"].dtype)[:, None]
    identity = np.broadcast_to(identity, (BATCH, SEQ, HEADS, SEQ))
    arrays |= {"q": arrays["q"] * 0, "v": identity, "dout": identity}
    return one, arrays


def masks(found):
    """Returns whether each pass keeps each weight, bool ``[batch, head, query, key]``."""
    out, dv = np.moveaxis(found["o"], 2, 1), np.moveaxis(found["dv"], 2, 1)
    for weights in (out, dv):
        found = weights[weights != 0].astype(np.float64)
        rtol = max(1e-5, float(jnp.finfo(weights.dtype).eps))
        assert np.allclose(found, 1 / SEQ / (1 - RATE), rtol=rtol)
    return out != 0, np.swapaxes(dv != 0, 2, 3)


def expected(words):
    positions = np.arange(SEQ)
    return np.stack(
        [
            [kept(RATE, words, b, h, positions, positions) for h in range(HEADS)]
            for b in range(BATCH)
        ]
    )


@pytest.mark.parametrize(
    "sizes",
    [*MESHES[:-1], pytest.param(MESHES[-1], marks=pytest.mark.needs("speed"))],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_mask_is_the_same_everywhere(sizes):
    """Each mesh has another layout and backward mode, and every one of them occurs."""
    number = MESHES.index(sizes)
    one, arrays = revealing(
        mesh=sizes, layout=LAYOUTS[number % 3], backward=("keys", "queries")[number % 2]
    )
    for mask in masks(one.found(arrays)):
        assert np.array_equal(mask, expected(arrays["dropout_key"]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_mask_is_the_same_in_every_layout(layout, backward):
    one, arrays = revealing(mesh=(1, 4, 1), layout=layout, backward=backward)
    for mask in masks(one.found(arrays)):
        assert np.array_equal(mask, expected(arrays["dropout_key"]))


def test_global_arrays():
    """The sharding tells which batch entries and heads a device has."""
    mesh = ring.mesh(2, 2, 2, axis_type=AxisType.Explicit)
    _, arrays = revealing()
    qkv = ring.put(mesh, *(arrays[name] for name in "qkv"))
    words = arrays["dropout_key"]
    for key in (jax.random.wrap_key_data(words), words):
        out = jax.jit(ba.dot_product_attention, static_argnames="dropout_rate")(
            *qkv, dropout_rate=RATE, dropout_key=key
        )
        assert np.array_equal(np.moveaxis(np.asarray(out), 2, 1) != 0, expected(words))


def test_rate_and_independence():
    """The rate, and the overlap of heads and batch entries, lie within four standard deviations."""
    mask = expected(np.array([3, 4], np.uint32)).reshape(BATCH * HEADS, -1)
    deviation = np.sqrt(RATE * (1 - RATE) / mask.size)
    assert abs(mask.mean() - (1 - RATE)) <= 4 * deviation
    correlations = np.corrcoef(mask)[np.triu_indices(len(mask), 1)]
    assert np.abs(correlations).max() <= 4.5 / np.sqrt(mask.shape[1])
    other = expected(np.array([4, 3], np.uint32)).reshape(mask.shape)
    assert abs(np.corrcoef(mask.ravel(), other.ravel())[0, 1]) <= 4 / np.sqrt(mask.size)
    rows = np.corrcoef(mask[0].reshape(SEQ, SEQ))[np.triu_indices(SEQ, 1)]
    assert abs(rows.mean()) <= 4 / np.sqrt(SEQ * len(rows))


def test_without_the_axes_devices_drop_alike():
    """Without batch_axis and head_axis, devices drop the same weights."""
    one, arrays = revealing(mesh=(2, 1, 2))
    words = arrays["dropout_key"]

    def local(q, k, v):
        return ba.attention(q, k, v, axis_name="context", dropout_rate=RATE, dropout_key=words)

    mesh = ring.mesh(*one.mesh)
    function = jax.shard_map(local, mesh=mesh, in_specs=(ring.SPEC,) * 3, out_specs=ring.SPEC)
    out = np.moveaxis(np.asarray(jax.jit(function)(*(arrays[name] for name in "qkv"))), 2, 1) != 0
    shard = expected(words)[: BATCH // 2, : HEADS // 2]
    assert np.array_equal(out, np.tile(shard, (2, 2, 1, 1)))


def test_words_of_keys():
    """The two words are the first and the last one of a key's data."""
    key = jax.random.fold_in(jax.random.key(7), 5)
    data = np.asarray(jax.random.key_data(key))
    for given in (key, data):
        assert np.array_equal(dropout_words(given, 0.1), data)
    longer = jax.random.wrap_key_data(np.array([1, 2, 3, 4], np.uint32), impl="rbg")
    assert np.array_equal(dropout_words(longer, 0.1), [1, 4])


def test_lse_is_that_without_dropout_and_checkpoint_drops_the_same():
    one = Problem(mesh=(1, 2, 1), dropout=0.5, causal=True, batch=1)
    arrays = one.arrays()
    function = ring.sharded(ring.line(2), is_causal=True, return_residual=True)
    lse = one.found(arrays)["lse"]
    q, k, v = (arrays[name] for name in "qkv")
    # Kernels for GPUs that drop weights sum in another order.
    limit = GPU_LSE_LIMIT if platforms.current().rounds else 0
    close(lse, jax.jit(function)(q, k, v)[1], limit)

    def loss(q, policy):
        def layer(q):
            return ba.dot_product_attention(
                q, k, v, mesh=ring.line(2), spec=P(None, "context"), is_causal=True,
                dropout_rate=0.5, dropout_key=arrays["dropout_key"],
            )  # fmt: skip

        return jnp.sum(jax.checkpoint(layer, policy=policy)(q) ** 2)

    grads = [jax.jit(jax.grad(loss), static_argnums=1)(q, p) for p in (ba.save_attention, None)]
    assert np.array_equal(*grads)
