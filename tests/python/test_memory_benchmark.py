"""The memory benchmark's attentions give one loss and one gradient; its search and its page."""

import json
from pathlib import Path

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

memory, step, table, worker = (
    pytest.importorskip(name, reason="the wheel's environments have JAX and pytest alone")
    for name in ("memory", "memory_step", "memory_table", "memory_worker")
)
ATTENTIONS = memory.ATTENTIONS
DENSE, CUDNN = "jax.nn, XLA", "jax.nn, cuDNN"
MODEL = step.Model(layers=2, heads=16, kv_heads=8, head_dim=16, hidden=64, vocabulary=64)
TOKENS = 512


class OnCpus(step.Step):
    """A step on CPU devices."""

    @property
    def mesh(self):
        return jax.make_mesh((8, 1), ("context", "alone"), axis_types=(AxisType.Auto,) * 2)


def loss_and_gradients(name):
    """Returns them for float32 weights."""
    here = OnCpus(MODEL, ATTENTIONS[name], "CPU")
    random = np.random.default_rng(0)

    def weight(type_):
        scale = 0.05 if len(type_.shape) > 2 else 1.0
        x = scale * random.standard_normal(type_.shape, np.float32)
        return jax.device_put(x, type_.sharding)

    weights = jax.tree.map(weight, here.weights())
    ids = random.integers(MODEL.vocabulary, size=(1, TOKENS + 1))
    placed = here.placed((1, TOKENS), P(None, "context")).sharding
    tokens, labels = (
        jax.device_put(ba.to_layout(jnp.array(x), 8, here.attention.layout), placed)
        for x in (ids[:, :-1], ids[:, 1:])
    )
    return jax.jit(jax.value_and_grad(here.loss))(weights, tokens, labels)


@pytest.fixture(scope="module")
def dense():
    return loss_and_gradients(DENSE)


@pytest.mark.long
@pytest.mark.needs("float32")
@pytest.mark.parametrize("name", [x for x in ATTENTIONS if x not in (DENSE, CUDNN)])
def test_every_attention_computes_the_same_step(name, dense):
    (loss, gradients), (expected, all_expected) = loss_and_gradients(name), dense
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for got, wanted in zip(*map(jax.tree.leaves, (gradients, all_expected)), strict=True):
        difference = np.linalg.norm(np.asarray(got) - np.asarray(wanted))
        assert difference <= 1e-4 * np.linalg.norm(np.asarray(wanted))


@pytest.mark.needs("text")
@pytest.mark.parametrize(("most", "found"), [(7, 6), (8, 8), (11, 8), (12, 12), (3, 3), (0.2, 0)])
def test_the_search_finds_the_longest_length(most, found):
    """Among powers of two and 1.5 times these."""
    asked = []

    def fits(length):
        asked.append(length / 4096)
        return length / 4096 <= most

    assert worker.longest(fits, 4 * 4096) == found * 4096
    assert len(asked) <= 6


@pytest.mark.needs("text")
def test_a_line_has_its_slope_and_its_largest_residual():
    rows = [{"length": 8 * n, "devices": 8, "peak": 100 + 3 * n} for n in (1, 2, 4, 8)]
    slope, none, residual = table.line(rows)
    assert (slope, none, residual) == pytest.approx((3, 100, 0), abs=1e-9)
    rows[1]["peak"] *= 1.1
    assert table.line(rows)[2] > 0.03


@pytest.mark.needs("text")
def test_the_page_has_the_tables_of_the_results():
    results = json.loads((Path(memory.HERE) / "results" / memory.NAME).read_text())
    page = memory.PAGE.read_text()
    assert table.filled(page, results) == page
