"""`benchmarks/memory.py` finds its figures, here for a small model."""

import json
import os
import subprocess
import sys
from functools import cache

import conftest
import memory
import pytest
from memory_attentions import ATTENTIONS, CUDNN
from memory_step import Step
from memory_worker import QUICK_MODEL, figures

TOKENS = 32_768
RANKS = 8


@cache
def measured(name, tokens=TOKENS):
    return figures(Step(QUICK_MODEL, ATTENTIONS[name], "H100").compiled(tokens))


@pytest.mark.parametrize(
    "name", ["ring", "jax.nn, XLA", "Megatron-style heads", "Ring Self-Attention"]
)
def test_devices_share_weights_and_moments(name):
    """A weight has 2 bytes and its moments have 8. All devices hold the norms."""
    model, found = QUICK_MODEL, measured(name)
    matrices = sum(rows * columns for rows, columns in model.matrices().values())
    shared = model.layers * matrices + 2 * model.vocabulary * model.width
    kept = 10 * (shared // RANKS + (2 * model.layers + 1) * model.width) + 4
    assert found["aliased"] == kept
    assert found["arguments"] == kept + 2 * 4 * TOKENS // RANKS
    assert 0 < found["outputs"] - found["aliased"] < 1024
    parts = found["arguments"] + found["outputs"] - found["aliased"] + found["temporaries"]
    assert found["peak"] == parts


def test_ours_grows_with_the_length_and_kept_scores_with_its_square():
    def growth(name):
        return measured(name, 2 * TOKENS)["temporaries"] / measured(name)["temporaries"]

    assert growth("ring") < 2.1
    assert growth("Ring Self-Attention") > 3.5


def test_cudnn_needs_its_library():
    with pytest.raises(RuntimeError, match="cuDNN not found"):
        measured(CUDNN)


def test_the_script_writes_results_and_a_plot(tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(["jax_plugin", str(conftest.PLUGIN)]),
    }
    command = [sys.executable, "benchmarks/memory.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "ring, offload_attention", CUDNN],
        cwd=memory.HERE.parent,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    results = json.loads((tmp_path / memory.NAME).read_text())
    assert (tmp_path / memory.NAME).with_suffix(".png").exists()
    *rows, failed = results["rows"]
    assert failed["error"] == "cuDNN not found."
    assert {row["fits"] for row in rows} == {True, False}
    assert all(row["host"] > 0 for row in rows)
    # A copy to the host is done after the attention that made its array.
    copies = rows[0]["copies"]["forward"]
    assert all(start > copies["call"] < done for start, done in copies["to"])
    assert "| ring, offload_attention |" in done.stdout
