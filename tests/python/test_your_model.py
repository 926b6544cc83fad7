"""The page "Bring your own model": its program trains, restores and orders tokens as it says.

The tests run the code of the page and compare it with dense attention on one device.
"""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import burst_attention as ba
import jax
import numpy as np
import pytest
from test_documents import DOCS, ROOT, blocks

pytestmark = pytest.mark.needs("float32", "products")

LOSS_LIMIT = 1e-5
"""Largest difference of a loss from that of dense attention on one device."""
MISTAKE = 0.1
"""How much a loss grows at least where a loader orders tokens wrongly."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Returns the names of the page, after its program trained, saved and restored."""
    for name in ("flax.nnx", "grain", "optax", "orbax.checkpoint"):
        pytest.importorskip(name, reason="the wheel's environments have JAX and pytest alone")
    folder, names = tmp_path_factory.mktemp("your-model"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks(DOCS / "your-model.md", "python"):
            exec(compile(block, "your-model.md", "exec"), names)
    return SimpleNamespace(**names, checkpoints=folder / "checkpoints")


def losses_of(page, attend, state, *batches):
    """Returns the losses of a state on batches, without training."""
    run = jax.jit(lambda state, batch: page.step(page.run.graph, attend, state, batch)[1])
    return [float(run(state, batch)) for batch in batches]


def dense(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def test_losses_are_those_of_dense_attention(page):
    one = page.Training(page.line(1), page.windows)
    run, found = jax.jit(partial(page.step, one.graph, dense)), []
    for _ in page.first + page.rest:
        one.state, loss = run(one.state, one.batch())
        found.append(float(loss))
    assert np.allclose(found, page.first + page.rest, rtol=0, atol=LOSS_LIMIT)
    assert found[-1] < found[0] / 3


def test_a_restored_run_continues_bit_for_bit(page):
    """The page compares losses, this test compares the whole states after them."""
    states = [jax.tree.leaves(training.state) for training in (page.run, page.same)]
    assert len(states[0]) > 10
    for x, y in zip(*states, strict=True):
        assert x.sharding == y.sharding
        assert np.array_equal(x, y)


@pytest.mark.long
def test_a_run_on_other_devices_has_the_same_state_sharded_anew(page):
    for x, y in zip(*(jax.tree.leaves(t.state) for t in (page.run, page.fewer)), strict=True):
        assert (len(x.sharding.device_set), len(y.sharding.device_set)) == (8, 4)
        assert np.allclose(x, y, rtol=0, atol=1e-6)


CONTINUE = """
import json, sys
sys.path.insert(0, "tests/python")
from test_documents import DOCS, blocks
names = {}
for block in blocks(DOCS / "your-model.md", "python"):
    if "run, same" in block:
        break
    exec(compile(block, "your-model.md", "exec"), names)
run = names["Training"](names["line"](8), names["windows"])
with names["ocp"].CheckpointManager(sys.argv[1]) as manager:
    run.restore(manager)
print(json.dumps(run.train(4)))
"""


@pytest.mark.long
def test_another_process_continues_bit_for_bit(page):
    command = [sys.executable, "-c", CONTINUE, str(page.checkpoints)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == page.rest


def test_arrays_in_different_orders_give_a_wrong_loss(page):
    """Each mistake that the page names, next to the loader's own order and dense attention."""
    batch = next(page.loader(page.windows, 1))
    stored = {name: ba.to_layout(x, 8, "zigzag") for name, x in batch.items()}
    assert all(np.array_equal(x, stored[k]) for k, x in next(page.loader(page.windows, 8)).items())
    state = jax.device_get(page.run.state)
    (expected,) = losses_of(page, dense, state, batch)
    right, *wrong = losses_of(
        page, page.attention(page.line(8)), state, stored,
        {**stored, "targets": batch["targets"]},
        {**stored, "positions": batch["positions"]},
        batch,
    )  # fmt: skip
    assert abs(right - expected) <= LOSS_LIMIT
    assert min(wrong) >= expected + MISTAKE, (expected, wrong)


def test_python_map_hides_the_state_of_a_loader(page, tmp_path):
    batches = map(dict, page.loader(page.windows, 8))
    with pytest.raises(AttributeError, match="'map' object has no attribute 'get_state'"):
        page.grain.checkpoint.CheckpointHandler().save(tmp_path, batches)


def test_a_run_without_the_state_of_its_loader_repeats_its_batches(page):
    with page.ocp.CheckpointManager(page.checkpoints) as manager:
        page.same.restore(manager)
    assert page.same.batches.get_state() == {"next_index": 4}
    page.same.batches = page.loader(page.windows, 8)
    (loss,) = page.same.train(1)
    assert abs(loss - page.rest[0]) > 100 * LOSS_LIMIT


def test_the_state_of_a_loader_fits_any_number_of_devices(page):
    eight, four = page.loader(page.windows, 8), page.loader(page.windows, 4)
    next(eight)
    four.set_state(eight.get_state())
    of_eight, of_four = next(eight), next(four)
    for name in ("tokens", "targets", "positions"):
        x, y = of_eight[name], of_four[name]
        assert not np.array_equal(x, y)
        assert np.array_equal(ba.from_layout(x, 8, "zigzag"), ba.from_layout(y, 4, "zigzag"))
