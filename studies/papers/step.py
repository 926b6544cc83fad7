"""The time and the memory of a training step: attention by the simulator, the rest by formulas.

A layer computes ``2 · parameters · tokens`` FLOPs forward and twice as many backward. Each layer is
computed again before its backward pass, without attention where its results are kept::

    step = layers · ((2 or 1) · attention forward + attention backward + 4 · linear layers forward)

The exchange of sharded parameters, embeddings, the loss and the optimizer are left out.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from burst_attention import _ffi

from papers.claims import DENSE

BASELINES = {"ring_self_attention", "megatron_tp"}
"""Methods that the library's simulator does not know."""
PROGRAM = Path(__file__).parents[2] / "target" / "checked" / "burst-attention-baselines"
"""Answers what the simulator's clock gives for them."""


@dataclass(frozen=True)
class Model:
    """The shape of a decoder with gated linear units."""

    layers: int
    heads: int
    head_dim: int
    ffn: int
    vocabulary: int

    @property
    def hidden(self) -> int:
        """Returns the width of activations."""
        return self.heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Returns the parameters of a layer: q, k, v and output, and three matrices of the unit."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Returns the parameters of all layers, the embedding and the last layer."""
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden


LLAMA_7B = Model(layers=32, heads=32, head_dim=128, ffn=11008, vocabulary=32000)
LLAMA_33_HEADS = Model(layers=32, heads=33, head_dim=128, ffn=11008, vocabulary=32000)
TNL_1B = Model(layers=16, heads=16, head_dim=128, ffn=5632, vocabulary=64000)


@dataclass(frozen=True)
class Machine:
    """A machine of the simulator, as the library reads it, and the peak of its products."""

    name: str
    peak: float
    """16-bit FLOP/s."""
    memory: float
    """Bytes of a GPU's memory."""
    bandwidth: float
    """Bytes per second of its memory."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Numbers that replace the machine's own."""

    @property
    def dense(self) -> float:
        """Returns the FLOP/s of linear layers."""
        return DENSE * self.peak


@dataclass(frozen=True)
class Method:
    """How attention is divided among GPUs."""

    schedule: str
    layout: str = "contiguous"
    backward: str = "keys"
    keeps_attention: bool = False
    """Whether the results of attention are kept, so that it is not computed again."""
    pads_heads: bool = False
    """Whether heads are padded to a multiple of the GPUs."""
    is_causal: bool = True

    @property
    def exchanges(self) -> int:
        """Returns 2 where a layer's gated unit exchanges as much as its attention, else 1."""
        return 2 if self.schedule == "megatron_tp" else 1


BURST = Method("ring", "zigzag", "queries")
BURST_NODES = Method("double_ring", "zigzag", "queries")
ZIGZAG = Method("ring", "zigzag")
CONTIGUOUS = Method("ring")
DISTFLASH = Method("balanced", backward="auto", keeps_attention=True)
ULYSSES = Method("ulysses", pads_heads=True)
SCORES = Method("ring_self_attention")
MEGATRON = Method("megatron_tp")


def passes(
    model: Model, tokens: int, ranks: int, method: Method, machine: Machine
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the simulator answers about both passes of a layer's causal attention."""
    heads = -(-model.heads // ranks) * ranks if method.pads_heads else model.heads
    question = {
        "schedule": method.schedule,
        "layout": method.layout,
        "world_size": ranks,
        "batch": 1,
        "q_len": tokens // ranks,
        "kv_len": tokens // ranks,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": model.head_dim,
        "value_dim": model.head_dim,
        "dtype": "bfloat16",
        "window": {"right": 0 if method.is_causal else None},
        "softmax_scale": 1.0,
        "machine": {"name": machine.name, **machine.numbers},
    }
    if method.schedule in BASELINES:
        forward, backward = _of_baseline(json.dumps(question | {"memory": machine.bandwidth}))
    else:
        of_library = {"ask": "simulate", "backward": method.backward, "timeline": False}
        forward, backward = _of_schedule(json.dumps(question | of_library))
    return forward, backward


@cache
def _of_schedule(question: str) -> list[dict[str, Any]]:
    found: Any = _ffi.ask(question)
    return list(found["passes"])


@cache
def _of_baseline(question: str) -> list[dict[str, Any]]:
    if not PROGRAM.exists():
        raise FileNotFoundError(f"expected {PROGRAM}, which `make baselines` builds")
    return list(json.loads(subprocess.check_output([PROGRAM], input=question, text=True)))


def seconds(model: Model, tokens: int, ranks: int, method: Method, machine: Machine) -> float:
    """Returns the seconds of a step."""
    both = passes(model, tokens, ranks, method, machine)
    times = [each["seconds"] + (method.exchanges - 1) * each["exposed"] for each in both]
    linear = 2 * model.layer_parameters * tokens / ranks / machine.dense
    runs = 1 if method.keeps_attention else 2
    return model.layers * (runs * times[0] + times[1] + 4 * linear)


def sent(model: Model, tokens: int, ranks: int, method: Method, machine: Machine) -> int:
    """Returns the bytes that all GPUs send for a layer in both passes, nothing computed again."""
    both = passes(model, tokens, ranks, method, machine)
    return method.exchanges * sum(each["sent"]["within"] + each["sent"]["between"] for each in both)


CHUNK = 128
"""Tokens that linear attention multiplies with each other directly."""


def linear_seconds(model: Model, tokens: int, ranks: int, method: str, machine: Machine) -> float:
    """Returns the seconds of a step with linear attention, by ``lasp`` or another exchange.

    Forward, a token of a head takes 4·D² FLOPs for the state and 2·D·`CHUNK` for its chunk, at the
    rate of linear layers; backward twice as many. LASP hands a float32 state from GPU to GPU, one
    after the other, in each pass. The others exchange what they exchange for softmax attention.
    """
    head_dim, local = model.head_dim, tokens / ranks
    products = local * model.heads * (4 * head_dim**2 + 2 * head_dim * CHUNK) / machine.dense
    linear = 2 * model.layer_parameters * local / machine.dense
    if method == "lasp":
        waits = [_chain(model, ranks, machine)] * 2
    else:
        other = Method(method)
        both = passes(model, tokens, ranks, other, machine)
        waits = [other.exchanges * each["exposed"] for each in both]
    return model.layers * (2 * waits[0] + waits[1] + 4 * (products + linear))


def _chain(model: Model, ranks: int, machine: Machine) -> float:
    """Returns the seconds until a state has gone from the first GPU to the last."""
    found = numbers(machine.name, ranks)
    state = 4 * model.heads * model.head_dim**2
    between = (ranks - 1) // int(found["ranks_per_node"])
    hops = {"within": ranks - 1 - between, "between": between}
    return sum(
        count * (found["launch"] + found[link]["latency"] + state / found[link]["bandwidth"])
        for link, count in hops.items()
        if count
    )


@cache
def numbers(machine: str, ranks: int) -> dict[str, Any]:
    """Returns the numbers of a machine, which the answer about any problem holds."""
    problem = {"world_size": ranks, "batch": 1, "q_len": 8, "kv_len": 8, "heads": 1, "kv_heads": 1}
    rest = {"head_dim": 8, "value_dim": 8, "dtype": "bfloat16", "layout": "contiguous"}
    asked = {"ask": "simulate", "schedule": "ring", "machine": {"name": machine}}
    more = {"softmax_scale": 1.0, "backward": "keys", "timeline": False}
    found: Any = _ffi.ask(json.dumps(asked | problem | rest | more))
    return dict(found["machine"])


def memory(
    model: Model, tokens: int, ranks: int, states: int, scores: int = 0, kept: int = 1
) -> float:
    """Returns the bytes of a step on one GPU.

    Weights, gradients and the optimizer's states take 16 bytes a parameter over ``states`` GPUs.
    Each layer keeps its inputs, with attention's results ``kept`` is 2. One layer at a time holds
    eight arrays of the width of activations and six of the gated unit, and ``scores`` bytes; or the
    loss holds eight bytes for each logit.
    """
    local = tokens / ranks
    layer = 2 * local * (8 * model.hidden + 6 * model.ffn) + scores
    loss = 8 * local * model.vocabulary
    inputs = kept * model.layers * 2 * local * model.hidden
    return 16 * model.parameters / states + inputs + max(layer, loss)


def longest(takes: Callable[[int], float], machine: Machine, ranks: int) -> int:
    """Returns the most tokens, a power of two, whose step fits the memory of a GPU."""
    tokens = 1 << (64 * ranks - 1).bit_length()
    if takes(tokens) > machine.memory:
        raise ValueError(f"expected {tokens} tokens to fit {machine.memory:.3g} bytes")
    while takes(2 * tokens) <= machine.memory:
        tokens *= 2
    return tokens
