"""Predicts the work and the time of attention in a real model, on GPUs that are not here.

The model is that of `docs/real-model.md`: 40 window and 8 global layers over 262,144 tokens, four
GPUs to a ring, 16 rings. `make model-bench` prints the tables of the page. Work is counted for the
placement of packed documents; time is what the simulator predicts.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import burst_attention as ba
import numpy as np
from packed_windows import Shape, busiest_over_mean, documents, keys_seen

LENGTH, DATA, CONTEXT = 262_144, 16, 4
SHAPE = Shape(
    layers=48,
    heads=48,
    kv_heads=12,
    head_dim=128,
    hidden=18_432,
    vocabulary=128_256,
    dtype="bfloat16",
)
"""The hidden width makes about as many parameters as are active for a token in that model."""
GLOBAL = SHAPE.layers // SHAPE.period
WINDOWED = SHAPE.layers - GLOBAL
RATES = (1552, 1297)
"""TFLOP/s that cuDNN 9.27 reached on a GB200, forward and backward: causal, 8,192 tokens, bfloat16.
No Blackwell GPU has timed our kernels."""
LINK = 7200
"""Gb/s of NVLink 5 from a GPU each way, as specified."""


@cache
def placement() -> ba.BalancedDocuments:
    """Returns the documents of a batch, placed on the ranks of their rings."""
    return ba.balance_documents(documents(DATA, LENGTH, seed=0), CONTEXT, seq_len=LENGTH)


@cache
def keys_of_layers() -> dict[str, np.ndarray]:
    """Returns the keys that each token sees, in the order of the rows, by kind of layer."""
    seen = {
        "window": placement().from_ranks(keys_seen(placement(), SHAPE.window)),
        "global": placement().from_ranks(keys_seen(placement())),
    }
    return seen | {"all": WINDOWED * seen["window"] + GLOBAL * seen["global"]}


def work() -> dict[str, list[float]]:
    """Returns the work of the busiest rank over its ring's mean, by placement and kind of layer."""
    order: dict[str, Callable[[np.ndarray], Any]] = {
        "`balance_documents`": placement().to_ranks,
        "`zigzag`": lambda keys: ba.to_layout(keys, CONTEXT, "zigzag"),
        "contiguous": lambda keys: keys,
    }
    return {
        name: [busiest_over_mean(place(keys), CONTEXT) for keys in keys_of_layers().values()]
        for name, place in order.items()
    }


def over_all_devices() -> float:
    """Returns the work of the busiest of all devices over the mean of all devices."""
    keys = placement().to_ranks(keys_of_layers()["all"])
    return busiest_over_mean(keys.reshape(1, -1), DATA * CONTEXT)


def window_like_documents() -> int:
    """Returns the window with as many visible pairs as the documents of the busiest row.

    A window of W of n tokens has n W - W²/2 pairs. In the simulator it stands for documents, since
    every rank of a ring then has the same work with the keys of every rank, as documents have it.
    """
    mean = keys_of_layers()["global"].mean(1).max()
    return round(LENGTH - np.sqrt(LENGTH**2 - 2 * LENGTH * mean))


def command(options: str, rates: tuple[float, float] = RATES) -> list[str]:
    """Returns the command that predicts one layer's attention."""
    shape = f"--world {CONTEXT} --seq {LENGTH} --heads {SHAPE.heads} --kv-heads {SHAPE.kv_heads}"
    machine = f"--tflops {rates[0]:g} {rates[1]:g} --link-gbps {LINK}"
    arguments = f"schedule {shape} --causal {options} {machine}"
    return ["python", "-m", "burst_attention", *arguments.split()]


@cache
def layer_ms(options: str, slower: int = 1) -> list[float]:
    """Returns the milliseconds of a layer's forward and backward pass, for slower kernels too."""
    forward, backward = (rate / slower for rate in RATES)
    words = [*command(options, (forward, backward)), "--json"]
    ended = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout)
    return [1e3 * each["seconds"] for each in found["passes"]]


def layers() -> dict[str, str]:
    """Returns the options of the simulator for each kind of layer.

    Where positions are data every chunk travels to every rank, as with striped rows.
    """
    windowed = f"--window {SHAPE.window - 1} 0"
    return {
        "window layer, placed blocks": f"{windowed} --layout striped",
        "window layer, contiguous": windowed,
        "global layer, placed blocks, these documents": (
            f"--window {window_like_documents() - 1} 0 --layout striped"
        ),
        "global layer, placed blocks, one document": "--layout striped",
        "global layer, contiguous all-gather, one document": "--schedule all_gather",
    }


def step_seconds(windowed: str, of_all: str, slower: int = 1) -> float:
    """Returns the seconds of all layers' attention in a step, for two kinds of layer."""
    options = layers()
    a_window, a_global = (sum(layer_ms(options[name], slower)) for name in (windowed, of_all))
    return (WINDOWED * a_window + GLOBAL * a_global) / 1e3


def steps() -> dict[str, list[float]]:
    """Returns the seconds of attention in a step, at the kernels' rates and at half of them."""
    placed, contiguous = "window layer, placed blocks", "window layer, contiguous"
    kinds = {
        "placed blocks, these documents": (placed, "global layer, placed blocks, these documents"),
        "placed blocks, one document": (placed, "global layer, placed blocks, one document"),
        "contiguous, one document": (
            contiguous,
            "global layer, contiguous all-gather, one document",
        ),
    }
    return {
        name: [step_seconds(*kind, slower) for slower in (1, 2)] for name, kind in kinds.items()
    }


def tables() -> list[list[str]]:
    """Returns the rows of the page's tables of work, of layers and of steps."""
    return [
        [f"| {name} | {' | '.join(f'{x:.2f}' for x in row)} |" for name, row in work().items()],
        [
            f"| {name} | {' | '.join(f'{x:.1f}' for x in layer_ms(options))} |"
            for name, options in layers().items()
        ],
        [f"| {name} | {' | '.join(f'{x:.1f} s' for x in row)} |" for name, row in steps().items()],
    ]


def main() -> None:
    """Prints the tables, and the commands of the predictions."""
    for table in tables():
        print("\n".join(table), end="\n\n")
    print(f"busiest of all devices / mean: {over_all_devices():.2f}")
    print(f"pairs in tiles / visible pairs: {placement().computed_over_visible:.3f}\n")
    for name, options in layers().items():
        print(f"{name}: {' '.join(command(options))}")


if __name__ == "__main__":
    main()
