"""The model with window and global layers trains on packed documents as dense attention does."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import refusal
from jax.sharding import PartitionSpec as P

WHEEL = "the wheel's environments have JAX and pytest alone"
windows = pytest.importorskip("packed_windows", reason=WHEEL)

PROGRAM = Path(windows.__file__)
ROWS, RANKS, LENGTH, BLOCK, WINDOW = 2, 4, 128, 8, 20
SMALL = {"layers": 4, "period": 2, "heads": 4, "head_dim": 8, "hidden": 64, "window": WINDOW}


@pytest.fixture(scope="module")
def small():
    """Returns the graph and parameters of a small model, a batch and its placement."""
    shape = windows.Shape(vocabulary=48, **SMALL)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 48, (ROWS, LENGTH), np.int32)
    graph, params = windows.abstract(shape)
    params = jax.tree.map(lambda x: 0.2 * random.standard_normal(x.shape, np.float32), params)
    lengths = [[70, 3, 41, 14], [20, 60, 40]]
    return graph, params, *windows.packed_batch(tokens, lengths, RANKS, BLOCK)


@pytest.mark.long
@pytest.mark.needs("products", "float32")
def test_loss_and_gradients_are_those_of_dense_attention(small, capsys):
    """The program's own check passes, also with padding."""
    graph, params, batch, balance = small
    mesh = jax.make_mesh((ROWS, RANKS), windows.AXES)
    windows.check_first_step(graph, params, batch, balance, mesh)
    assert "with dense attention on one device" in capsys.readouterr().out
    assert (batch.segment_ids < 0).sum() == 8


@pytest.mark.needs("text")
def test_a_query_counts_the_keys_that_it_sees(small):
    """Counts are the sums of the boolean matrix, with and without a window."""
    *_, batch, balance = small
    ids, place = batch.segment_ids, batch.mask.query_positions
    before = place[:, :, None] - place[:, None]
    seen = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None] & (before >= 0)
    assert np.array_equal(windows.keys_seen(balance), seen.sum(2))
    assert np.array_equal(windows.keys_seen(balance, WINDOW), (seen & (before < WINDOW)).sum(2))
    assert windows.busiest_over_mean(np.array([[1, 0, 2, 1], [1, 1, 1, 1]]), 2) == 1.5


@pytest.mark.needs("text")
def test_layers_of_the_loop_are_cut_behind_their_axis(small):
    mesh = jax.make_mesh((ROWS, RANKS), windows.AXES)
    specs = windows.parameter_specs(small[1], mesh, windows.STACKED)
    assert specs["periods"]["blocks"][0]["query"]["kernel"].get_value() == P(
        None, windows.AXES, None
    )
    assert specs["unembed"]["kernel"].get_value() == P(windows.AXES, None)


@pytest.mark.needs("text")
def test_documents_fill_rows():
    rows = windows.documents(3, 1000, seed=0)
    assert [sum(row) for row in rows] == [1000] * 3
    assert min(map(min, rows)) > 0
    assert rows[0] != rows[1]
    assert rows == windows.documents(3, 1000, seed=0)


def run(*arguments):
    """Runs the program, with XLA's optimisations."""
    command = [sys.executable, str(PROGRAM), *arguments]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)


@pytest.mark.needs("text")
@pytest.mark.long
def test_the_program_trains_at_a_64th_of_the_length():
    """4,096 tokens with the window, the ratio of heads and the blocks of the real shape."""
    ended = run("--layers", "2", "--period", "2", "--hidden", "256", "--steps", "1")
    assert ended.returncode == 0, ended.stderr
    assert "2 x 4,096 tokens, 1 window and 1 global layers, 4:1 heads" in ended.stdout
    assert "step 0: loss" in ended.stdout


@pytest.mark.needs("text")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "4"), "--layers 4 must be a multiple of --period 6"),
        (("--kv-heads", "3"), "--heads 4 must be a multiple of --kv-heads 3"),
        (("--length", "4000"), "--length 4000 must be a multiple of --context · --block, 4 · 128"),
        (("--data", "0"), "--data: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_errors(arguments, message, monkeypatch, capsys):
    assert message in refusal("packed_windows", arguments, monkeypatch, capsys)
