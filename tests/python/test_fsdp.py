"""The example's models train alike in shards, data × context, and on one device."""

from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

WHEEL = "the wheel's environments have JAX and pytest alone"
nnx = pytest.importorskip("flax.nnx", reason=WHEEL)
optax = pytest.importorskip("optax", reason=WHEEL)
training = pytest.importorskip("train_long_context", reason=WHEEL)
fsdp = pytest.importorskip("fsdp", reason=WHEEL)
AXES, ATTENTIONS = fsdp.AXES, training.ATTENTIONS

pytestmark = pytest.mark.needs("products", "float32")

DATA, CONTEXT, LENGTH = 2, 4, 64
LIMIT = 2e-5
"""Largest relative difference of two programs that compute in float32."""


@cache
def model(attention, layers=1):
    """Returns the graph and the parameters of a small model."""
    sizes = {"layers": layers, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 64}
    kind = ATTENTIONS[attention]
    config = training.Config(vocabulary=48, gates=kind.gates, rotary=kind.rotary, **sizes)
    return nnx.split(training.Transformer(config, nnx.Rngs(0)))


def rings(attention, sharded=True):
    kind, mesh = ATTENTIONS[attention], jax.make_mesh((DATA, CONTEXT), AXES)
    return training.Rings(mesh, kind.layout, kind, sharded)


def step(loss):
    """Returns the program of a training step: loss, gradients, new parameters and new state."""
    optimizer = optax.adamw(1e-2)

    def run(params, state, inputs, targets):
        value, gradient = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradient, state, params)
        return value, gradient, optax.apply_updates(params, updates), state

    return optimizer.init, jax.jit(run)


@pytest.mark.long
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_step_is_that_of_one_device(monkeypatch, attention, sharded):
    monkeypatch.setattr("attentions.SEGMENT", LENGTH // CONTEXT // 2)
    graph, params = model(attention)
    tokens = np.random.default_rng(1).integers(0, 48, (DATA, LENGTH + 1), np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    init, run = step(training.plain_loss(graph, ATTENTIONS[attention].plain))
    loss, gradient, new, _ = run(params, init(params), inputs, targets)

    own = rings(attention, sharded)
    init, run = step(own.loss(graph))
    placed = own.place(params)
    state = own.place(init(placed))
    found = run(placed, state, own.shard(inputs), own.shard(targets))
    assert abs(float(found[0]) - float(loss)) <= LIMIT * float(loss)
    for got, expected in zip(found[1:3], (gradient, new), strict=True):
        assert training.relative_difference(got, expected) <= LIMIT
    # Gradients, new parameters and new state stay in the shards of what they replace.
    for now, before in zip(found[1:], (placed, placed, state), strict=True):
        for x, y in zip(jax.tree.leaves(now), jax.tree.leaves(before), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, y.ndim)
    shards = [x.size // x.addressable_shards[0].data.size for x in jax.tree.leaves(placed)]
    # Of four numbers, such as one for each head, there are no eight shards.
    whole = sum(x.shape[0] % 8 > 0 for x in jax.tree.leaves(placed))
    assert shards.count(8) == (len(shards) - whole if sharded else 0)


def test_each_layer_is_gathered_once_in_each_pass():
    """The backward pass gathers the layer again, and sums gradients into shards."""
    graph, params = model("softmax", layers=2)
    own = rings("softmax")
    tokens = own.shard(np.zeros((DATA, LENGTH), np.int32))
    program = jax.make_jaxpr(jax.value_and_grad(own.loss(graph)))(own.place(params), tokens, tokens)
    of_layers = len(jax.tree.leaves(params["blocks"]))
    others = len(jax.tree.leaves(params)) - of_layers
    assert str(program).count(" all_gather[") == 2 * of_layers + others
    assert str(program).count(" reduce_scatter[") == of_layers + others


def test_arrays_are_cut_where_shards_are_equal():
    mesh = jax.make_mesh((DATA, CONTEXT), AXES)
    arrays = {"even": np.ones((16, 3)), "odd": np.ones((12, 8)), "stacked": np.ones((3, 8, 5))}
    specs = fsdp.parameter_specs(arrays | {"scalar": np.ones(())}, mesh)
    assert specs == {"even": P(AXES, None), "odd": P(), "stacked": P(), "scalar": P()}
    stacked = fsdp.parameter_specs(arrays, mesh, stacked="stacked")
    assert stacked == {"even": P(AXES, None), "odd": P(), "stacked": P(None, AXES, None)}
