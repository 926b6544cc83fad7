"""Trains a byte-level transformer on long real text, its sequence sharded across devices.

Every device holds a part of the sequence and the whole (small) model. Inside `jax.shard_map` one
call, `burst_attention.attention`, lets every token attend to all earlier tokens of all devices.
With `--data 2` two rings of devices have sequences of their own, and with `--fsdp` parameters and
optimiser state lie in shards on the devices of all rings.
With `--attention linear`, `delta` or `infini` the call is `linear_attention`, `delta_attention` or
`infini_attention`, whose time grows with the length and not with its square.
`python examples/train_long_context.py --help` lists the options.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, get_args

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import optax
from attentions import ATTENTIONS, AXIS, SEGMENT, Attention, Layout
from checkpoint import Params, load_checkpoint, save_checkpoint
from flax import nnx
from fsdp import AXES, parameter_specs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from text import batches, nats_after_one_byte, standard_library_bytes
from tqdm import tqdm
from transformer import Attend, Config, Transformer

Loss = Callable[[Params, jax.Array, jax.Array], jax.Array]
Batch = tuple[np.ndarray, np.ndarray]
Flags = argparse.Namespace

# Relative difference between sharded and plain attention that rounding explains, by type.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

# Most tokens of the check: the memory of plain attention grows with their square.
MOST_CHECKED = 16_384


def parts_of(layout: Layout, devices: int) -> int:
    """Returns the number of equal parts into which the layout cuts a sequence."""
    return devices * (2 if layout == "zigzag" else 1)


def said(name: str) -> str:
    """Returns a default of each kind of attention, for the help."""
    return " or ".join(f"{getattr(kind, name)} ({key})" for key, kind in ATTENTIONS.items())


def parse() -> Flags:
    """Reads the command line, with the defaults of the kind of attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=[*ATTENTIONS], default="softmax")
    parser.add_argument("--length", type=int, help=f"tokens per sequence; default {said('length')}")
    parser.add_argument("--batch", type=int, help="sequences per step; default one for each ring")
    parser.add_argument("--devices", type=int, default=8, help="CPU devices in a ring")
    parser.add_argument("--data", type=int, default=1, help="rings, with sequences of their own")
    parser.add_argument(
        "--fsdp", action="store_true", help="shard parameters and optimiser state over all devices"
    )
    parser.add_argument("--layout", choices=get_args(Layout), help=f"default {said('layout')}")
    parser.add_argument("--steps", type=int, help=f"optimiser steps; default {said('steps')}")
    parser.add_argument(
        "--dtype", choices=[*TOLERANCE], default="float32", help="type of activations"
    )
    rates = said("learning_rate")
    parser.add_argument("--learning-rate", type=float, help=f"highest rate; default {rates}")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results")
    flags = parser.parse_args()
    kind = ATTENTIONS[flags.attention]
    for name in ("length", "layout", "steps", "learning_rate"):
        if getattr(flags, name) is None:
            setattr(flags, name, getattr(kind, name))
    if flags.batch is None:
        flags.batch = flags.data
    if kind.layout == "contiguous" != flags.layout:
        parser.error(f"--layout: expected contiguous for {flags.attention}, got {flags.layout}")
    if flags.attention == "infini" and flags.length // flags.devices % SEGMENT:
        shortest = f"--length {flags.devices * SEGMENT}"
        parser.error(f"--length: expected whole segments for each device, multiples of {shortest}")
    for name in ("length", "batch", "devices", "data", "steps"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(flags, name)}")
    if flags.batch % flags.data:
        parser.error(f"--batch {flags.batch} can't be shared out evenly to --data {flags.data}")
    parts = parts_of(flags.layout, flags.devices)
    if flags.length % parts:
        parser.error(
            f"--length {flags.length} can't be cut into {parts} equal parts, which layout "
            f"{flags.layout} over {flags.devices} devices needs; "
            f"use {-(-flags.length // parts) * parts}"
        )
    return flags


def mean_loss(
    model: Transformer, inputs: jax.Array, targets: jax.Array, positions: jax.Array, attend: Attend
) -> jax.Array:
    """Returns the mean cross entropy, nats per byte, of `inputs` and `targets [batch, seq]`."""
    logits = model(inputs, positions, attend)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@dataclass(frozen=True)
class Rings:
    """The devices, data × context, the layout of their sequences, and the attention."""

    mesh: Mesh
    layout: Layout
    attention: Attention
    fsdp: bool = False
    """Whether the devices have shards of the parameters."""

    @property
    def devices(self) -> int:
        """Returns the number of devices that share a sequence."""
        return self.mesh.shape[AXIS]

    def shard(self, tokens: np.ndarray) -> jax.Array:
        """Reorders `tokens [batch, seq]` for the layout and shards them."""
        ordered = ba.to_layout(tokens, self.devices, self.layout, axis=1)
        return jax.device_put(ordered, NamedSharding(self.mesh, P(*AXES)))

    def specs(self, params: Any) -> Any:
        """Returns how the devices hold parameters or the optimiser's state."""
        return (
            parameter_specs(params, self.mesh) if self.fsdp else jax.tree.map(lambda _: P(), params)
        )

    def place(self, params: Any) -> Any:
        """Puts parameters or the optimiser's state on the devices."""
        put = partial(NamedSharding, self.mesh)
        return jax.device_put(params, jax.tree.map(put, self.specs(params)))

    def loss(self, graph: nnx.GraphDef[Transformer]) -> Loss:
        """Returns the loss on sharded sequences, as a training program runs it."""

        def local(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            positions = ba.local_positions(inputs.shape[1], axis_name=AXIS, layout=self.layout)
            attend = self.attention.sharded(self.layout)
            mean = mean_loss(nnx.merge(graph, params), inputs, targets, positions, attend)
            return jax.lax.pmean(mean, AXES)

        def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            in_specs = (self.specs(params), P(*AXES), P(*AXES))
            run = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=P())
            return run(params, inputs, targets)

        return loss


def plain_loss(graph: nnx.GraphDef[Transformer], attend: Attend) -> Loss:
    """Returns the same loss on one device, for the whole sequence in its natural order."""

    def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        positions = jnp.arange(inputs.shape[1])
        return mean_loss(nnx.merge(graph, params), inputs, targets, positions, attend)

    return loss


def relative_difference(got: Params, expected: Params) -> float:
    """Returns ||got - expected|| / ||expected|| over all leaves."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    ]
    difference = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return float(np.sqrt(difference / sum(np.sum(b**2) for _, b in pairs)))


def check_first_step(
    graph: nnx.GraphDef[Transformer], params: Params, batch: Batch, rings: Rings, dtype: str
) -> None:
    """Compares loss and gradient with plain attention; stops if rounding does not explain it."""
    parts = parts_of(rings.layout, rings.devices)
    length = min(batch[0].shape[1], MOST_CHECKED // parts * parts)
    inputs, targets = (tokens[:, :length] for tokens in batch)
    on_one_device = plain_loss(graph, rings.attention.plain)
    plain, plain_gradient = jax.jit(jax.value_and_grad(on_one_device))(params, inputs, targets)
    loss, gradient = jax.jit(jax.value_and_grad(rings.loss(graph)))(
        rings.place(params), rings.shard(inputs), rings.shard(targets)
    )
    loss_difference = abs(float(loss) - float(plain)) / float(plain)
    gradient_difference = relative_difference(gradient, plain_gradient)
    print(
        f"step 0 on {length:,} tokens: loss {loss:.6f}, with plain attention on one device "
        f"{plain:.6f}; relative difference of loss {loss_difference:.1e}, of gradient "
        f"{gradient_difference:.1e}"
    )
    # A difference that is NaN is not within the tolerance.
    if not all(x <= TOLERANCE[dtype] for x in (loss_difference, gradient_difference)):
        raise SystemExit(f"expected differences of at most {TOLERANCE[dtype]:.0e} in {dtype}")


def save_curve(path: Path, losses: list[float], title: str, without: list[float]) -> None:
    """Draws the loss of each step, its mean over ten steps, and the loss without attention."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    smooth = [float(np.mean(losses[max(0, at - 9) : at + 1])) for at in range(len(losses))]
    axes.plot(losses, color="tab:blue", alpha=0.35, label="each step")
    axes.plot(smooth, color="tab:blue", label="mean of ten")
    if without:
        label = "best without attention, same bytes"
        axes.plot(without, color="tab:gray", linestyle="--", label=label)
    axes.legend()
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def train(
    rings: Rings,
    loss: Loss,
    params: Params,
    data: Iterator[tuple[jax.Array, jax.Array]],
    flags: Flags,
) -> tuple[Params, list[float], list[float]]:
    """Trains by AdamW with warm-up and cosine decay; returns parameters, losses and seconds."""
    warmup = min(10, flags.steps)
    rate = optax.warmup_cosine_decay_schedule(0.0, flags.learning_rate, warmup, flags.steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, opt_state: optax.OptState, inputs: jax.Array, targets: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, inputs, targets)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = rings.place(optimizer.init(params))
    losses: list[float] = []
    seconds: list[float] = []
    progress = tqdm(range(flags.steps), desc="training", unit="step", mininterval=1.0)
    for _ in progress:
        start = time.perf_counter()
        params, opt_state, value = step(params, opt_state, *next(data))
        losses.append(float(value))
        seconds.append(time.perf_counter() - start)
        speed = flags.batch * flags.length / seconds[-1]
        progress.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
    return params, losses, seconds


def without_attention(text: np.ndarray, flags: Flags) -> list[float]:
    """Returns the losses of every step's bytes if only the previous byte is known."""
    nats = nats_after_one_byte(text)
    steps = islice(batches(text, flags.batch, flags.length, seed=0), flags.steps)
    return [float(nats[inputs, targets].mean()) for inputs, targets in steps]


def tell_softmax_time(mesh: Mesh, dtype: str, batch: Batch) -> None:
    """Prints how long a step with softmax attention would take, from steps of shorter sequences.

    The estimate is a n + b n^2, the work of tokens and of pairs of tokens, through the least of
    three times at each of two lengths.
    """
    rings = Rings(mesh, "zigzag", ATTENTIONS["softmax"])
    graph, params = nnx.split(Transformer(Config(dtype=dtype), nnx.Rngs(0)))
    params, step = rings.place(params), jax.jit(jax.value_and_grad(rings.loss(graph)))
    whole, parts = batch[0].shape[1], parts_of(rings.layout, rings.devices)
    short = max(1, whole // 16 // parts) * parts
    least = []
    for length in (short, 2 * short):
        tokens = [rings.shard(x[:, :length]) for x in batch]
        jax.block_until_ready(step(params, *tokens))
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(step(params, *tokens))
            taken.append(time.perf_counter() - start)
        least.append(min(taken))
    of_pairs = max(0.0, least[1] - 2 * least[0]) / (2 * short**2)
    of_tokens = least[0] / short - of_pairs * short
    print(
        f"with softmax attention it would take about {(of_tokens + of_pairs * whole) * whole:,.0f} "
        f"s, by estimate: a n + b n^2 through the {least[0]:.2f} s and {least[1]:.2f} s measured "
        f"for {short:,} and {2 * short:,} tokens"
    )


def main() -> None:
    """Checks the first step, trains and saves."""
    flags = parse()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.data * flags.devices)
    kind = ATTENTIONS[flags.attention]
    mesh = jax.make_mesh((flags.data, flags.devices), AXES)
    rings = Rings(mesh, flags.layout, kind, flags.fsdp)
    config = Config(dtype=flags.dtype, gates=kind.gates, rotary=kind.rotary)
    graph, params = nnx.split(Transformer(config, nnx.Rngs(0)))
    text = standard_library_bytes()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"mesh {dict(mesh.shape)} of {jax.default_backend()} devices, layout {flags.layout}, "
        f"{flags.batch} x {flags.length:,} tokens ({flags.length // flags.devices:,} per device), "
        f"{flags.dtype}, {size / 1e6:.1f} M parameters, {text.size / 1e6:.1f} MB of Python sources"
    )
    first = next(batches(text, flags.batch, flags.length, seed=0))
    check_first_step(graph, params, first, rings, flags.dtype)

    params = rings.place(params)
    data = (
        (rings.shard(inputs), rings.shard(targets))
        for inputs, targets in batches(text, flags.batch, flags.length, seed=0)
    )
    params, losses, seconds = train(rings, rings.loss(graph), params, data, flags)

    flags.out.mkdir(parents=True, exist_ok=True)
    curve = flags.out / f"{kind.prefix}loss.png"
    checkpoint = flags.out / f"{kind.prefix}checkpoint.npz"
    without = without_attention(text, flags) if kind.gates else []
    title = f"{flags.length:,} tokens, {flags.devices} devices, {flags.layout}{kind.title}"
    save_curve(curve, losses, title, without)
    save_checkpoint(checkpoint, params)
    evaluate, batch = jax.jit(rings.loss(graph)), next(data)
    if evaluate(load_checkpoint(checkpoint, params), *batch) != evaluate(params, *batch):
        raise SystemExit(f"{checkpoint}: the reloaded parameters give another loss")
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} (mean of the last ten steps)")
    if without:
        best = np.mean(without[-10:])
        print(f"best without attention, from the byte before alone: {best:.3f} on the same bytes")
        print(f"a step of {flags.length:,} tokens took {median(seconds):,.1f} s (median)")
        tell_softmax_time(mesh, flags.dtype, first)
    print(f"saved {curve} and {checkpoint} (read back: same loss)")


if __name__ == "__main__":
    main()
