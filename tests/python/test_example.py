"""The training example, run as a program, checks itself, trains, saves and reads back."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("text")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_long_context.py"
TINY = ("--length", "512", "--steps", "6", "--devices", "4")


def example(*arguments):
    """Runs the example and returns the finished process."""
    for name in ("flax.nnx", "optax", "tqdm", "matplotlib"):
        pytest.importorskip(name, reason="the wheel's environments have JAX and pytest alone")
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.long
@pytest.mark.parametrize(("attention", "prefix"), [("softmax", ""), ("linear", "linear-")])
def test_it_trains(tmp_path, attention, prefix):
    ended = example("--attention", attention, *TINY, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) ", ended.stdout).groups())
    assert last < first - 0.3, ended.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{prefix}loss.png", f"{prefix}checkpoint.npz"}
    assert "read back: same loss" in ended.stdout
    # The example predicts softmax attention's time only where that attention would take too long.
    assert ("with softmax attention it would take" in ended.stdout) == (attention == "linear")


@pytest.mark.long
def test_linear_attention_wants_the_order_of_the_sequence():
    ended = example("--attention", "linear", "--layout", "zigzag", *TINY)
    assert ended.returncode == 2
    assert "--layout: expected contiguous for linear attention, got zigzag" in ended.stderr
