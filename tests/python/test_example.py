"""The examples, run as programs: training checks itself, trains and saves; the model generates."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import refusal

pytestmark = [pytest.mark.needs("text"), pytest.mark.oldest_jax]

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ("--length", "512", "--steps", "6", "--devices", "4")


def example(*arguments, program="train_long_context"):
    """Runs an example and returns the finished process."""
    needs_examples()
    command = [sys.executable, str(EXAMPLES / f"{program}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def needs_examples():
    """Skips a test where packages of the examples are missing."""
    for name in ("flax.nnx", "optax", "tqdm", "matplotlib"):
        pytest.importorskip(name, reason="the wheel's environments have JAX and pytest alone")


@pytest.mark.long
@pytest.mark.parametrize(
    ("attention", "prefix", "options"),
    [
        ("softmax", "", ()),
        ("linear", "linear-", ()),
        ("delta", "delta-", ()),
        ("infini", "infini-", ("--length", "4096")),
        ("softmax", "", ("--data", "2", "--fsdp")),
    ],
)
def test_it_trains(tmp_path, attention, prefix, options):
    ended = example("--attention", attention, *TINY, *options, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) ", ended.stdout).groups())
    assert last < first - 0.3, ended.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{prefix}loss.png", f"{prefix}checkpoint.npz"}
    assert "read back: same loss" in ended.stdout
    # The example predicts softmax attention's time only where that attention would take too long.
    assert ("with softmax attention it would take" in ended.stdout) == (attention != "softmax")


@pytest.mark.long
def test_a_trained_model_generates(tmp_path):
    trained = example(*TINY, "--out", tmp_path)
    assert trained.returncode == 0, trained.stderr
    sizes = ("--prompt", "128", "--chunk", "64", "--samples", "2", "--tokens", "32")
    checkpoint = tmp_path / "checkpoint.npz"
    ended = example("--checkpoint", checkpoint, "--devices", "4", *sizes, program="generate")
    assert ended.returncode == 0, ended.stderr
    assert "the same 32 tokens as full attention without a cache" in ended.stdout
    assert re.search(r"[\d,]+ tokens per second, 2 samples at once", ended.stdout)
    assert len(ended.stdout.split("--- sample 1, temperature 0.7\n")[1]) > 20
    # With the caches on other devices the texts are the same.
    options = ("--checkpoint", checkpoint, "--devices", "2", "--pool", "4", *sizes)
    pooled = example(*options, program="generate")
    assert pooled.returncode == 0, pooled.stderr
    assert "cache over 4 other devices" in pooled.stdout
    texts = [x.stdout[x.stdout.index("--- the prompt ends") :] for x in (ended, pooled)]
    assert texts[0] == texts[1]


TRAIN, GENERATE = "train_long_context", "generate"


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (
            TRAIN,
            ("--attention", "linear", "--layout", "zigzag"),
            "--layout: expected contiguous for linear, got zigzag",
        ),
        (
            TRAIN,
            ("--data", "2", "--batch", "3"),
            "--batch 3 can't be shared out evenly to --data 2",
        ),
        (GENERATE, ("--pool", "3"), "--pool: expected 0 or a divisor of --prompt 4096, got 3"),
        (GENERATE, ("--chunk", "100"), "--chunk 100 can't be cut for 8 devices"),
        (GENERATE, ("--prompt", "100"), "--prompt 100 can't be cut into chunks of 1024"),
        (GENERATE, ("--tokens", "17"), "--tokens: expected a multiple of 16, got 17"),
        (
            GENERATE,
            ("--checkpoint", "none.npz"),
            "does not exist; `make demo` trains a model",
        ),
    ],
)
def test_wrong_options_are_errors(program, arguments, message, monkeypatch, capsys):
    needs_examples()
    assert message in refusal(program, arguments, monkeypatch, capsys)
