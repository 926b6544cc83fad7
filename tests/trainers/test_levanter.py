"""Levanter's models of levanter.grug: one step of training with this attention as with its own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from burst_attention.integrations.levanter import attention
from levanter.grug.attention import AttentionMask, reference_attention
from levanter.grug.sharding import compact_grug_mesh
from levanter.models import snowball

LIMIT = 2e-6
"""Largest norm of the error of a value, and of all gradients, relative to their norm."""


def norm(tree):
    return np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))


def check(found, expected):
    """Compares a value and gradients with others."""
    for x, y in zip(found, expected, strict=True):
        assert norm(jax.tree.map(np.subtract, x, y)) <= LIMIT * norm(y)


def test_a_step_of_snowball(monkeypatch):
    """A mixture of experts whose layers alternate between a window and full causal attention."""
    config = snowball.SnowballConfig(
        vocab_size=128, hidden_dim=64, intermediate_dim=32, shared_expert_intermediate_dim=32,
        num_experts=4, num_experts_per_token=2, num_layers=5, num_heads=4, num_kv_heads=2,
        head_dim=16, max_seq_len=128, sliding_window=32,
    )  # fmt: skip
    mesh = compact_grug_mesh(context_axis_size=4)
    calls = []

    def counted(*args, **options):
        calls.append(options)
        return attention(*args, **options)

    with jax.set_mesh(mesh):
        model = snowball.SnowballTransformer.init(config, key=jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (4, 128), 0, 128)
        spread = jax.random.normal(jax.random.key(2), (4, 128, 64))

        def step(model):
            return eqx.filter_value_and_grad(lambda model: (model(tokens) * spread).sum())(model)

        own = eqx.filter_jit(lambda model: step(model))(model)
        monkeypatch.setattr(snowball, "attention", counted)
        found = eqx.filter_jit(lambda model: step(model))(model)
    assert calls
    check(found, own)


IDS = np.repeat([[0] * 20 + [1] * 30 + [2] * 14], 2, axis=0).astype(np.int32)
MASKS = {
    "causal": AttentionMask.causal(),
    "window": AttentionMask.causal(sliding_window=9),
    "packed": AttentionMask.causal().with_segment_ids(IDS),
    "packed window to the left": AttentionMask(sliding_window=9).with_segment_ids(IDS),
    "none": None,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    arrays = [
        jax.random.normal(jax.random.key(i), (2, 64, h, 16)) for i, h in enumerate((4, 2, 2, 4))
    ]

    def run(function):
        def loss(q, k, v):
            return (function(q, k, v) * arrays[3]).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays[:3])

    with jax.set_mesh(compact_grug_mesh(context_axis_size=4)):
        found = run(lambda *qkv: attention(*qkv, MASKS[name]))
    own = run(lambda *qkv: reference_attention(*qkv, MASKS[name], logits_dtype=jnp.float32))
    check(found, own)
