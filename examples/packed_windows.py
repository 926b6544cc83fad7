"""Trains a model with window and global layers on packed documents, data × context.

Of six layers, five see a window of 512 tokens, with rotary embeddings; the sixth sees the whole
document, without. `balance_documents` gives blocks of the documents to the devices of a ring, with
nearly equal work for each. All devices share the parameters. The first step is compared with
dense attention on one device. `docs/real-model.md` has the shape for 64 GPUs.
`python examples/packed_windows.py --help` lists the options.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import optax
from attentions import AXIS
from flax import nnx
from fsdp import AXES, gathered, parameter_specs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from text import batches, standard_library_bytes
from train_long_context import relative_difference
from transformer import Attend, Block, Config, rematerialised

Array = Any
"""An array of JAX, or on the host of numpy."""
Params = nnx.State[Any, Any]
Step = Callable[..., tuple[Params, optax.OptState, jax.Array, jax.Array]]
Attends = Callable[[int | None], Attend]
"""Returns the attention of a layer with a window of some tokens, or of a global layer."""

STACKED = "periods"
"""The name of the parameters that have an axis of layers."""
CHUNK = 4096
"""Most tokens whose logits a device has at a time."""
NO_LABEL = -1
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative differences of float32 programs that rounding explains."""


@dataclass(frozen=True)
class Shape(Config):
    """Sizes of the model; the defaults suit CPU devices."""

    layers: int = 6
    kv_heads: int = 1
    head_dim: int = 128
    hidden: int = 1536
    window: int = 512
    """Keys that a query of a window layer sees, its own included."""
    period: int = 6
    """Layers up to and with a global one."""


class Batch(NamedTuple):
    """Rows of packed documents, int32 `[batch, seq]` each."""

    tokens: Array
    segment_ids: Array
    mask: ba.masks.Mask


class Period(nnx.Module):
    """Window layers, then a global layer."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        self.window = shape.window
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.period)])

    def __call__(self, x: jax.Array, positions: Array, attends: Attends) -> jax.Array:
        """Maps `x [batch, seq, width]` to the same shape."""
        *windowed, last = self.blocks
        for block in windowed:
            x = rematerialised(block, x, positions, attends(self.window))
        return rematerialised(last, x, None, attends(None))


class Model(nnx.Module):
    """A decoder of equal periods, which one loop computes."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=shape.dtype, rngs=rngs)
        split = nnx.split_rngs(splits=shape.layers // shape.period)
        self.dtype = shape.dtype
        self.embed = nnx.Embed(shape.vocabulary, shape.width, rngs=rngs)
        self.periods = split(nnx.vmap(partial(Period, shape)))(rngs)
        self.norm = nnx.RMSNorm(shape.width, dtype=shape.dtype, rngs=rngs)
        self.unembed = linear(shape.width, shape.vocabulary)

    def __call__(
        self, tokens: Array, labels: jax.Array, positions: Array, attends: Attends
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of the cross entropies, in nats, and the number of labels."""
        graph, periods = nnx.split(self.periods)

        def period(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
            return nnx.merge(graph, params)(x, positions, attends), None

        x = gathered(self.embed)(tokens).astype(self.dtype)
        x, _ = jax.lax.scan(period, x, periods)
        norm, unembed = gathered(self.norm), gathered(self.unembed)

        @jax.checkpoint
        def nats(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            rows, labels = chunk
            logits = unembed(norm(rows)).astype(jnp.float32)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
            return jnp.sum(jnp.where(labels == NO_LABEL, 0, each))

        size = gcd(CHUNK, labels.size)
        chunks = x.reshape(-1, size, x.shape[2]), labels.reshape(-1, size)
        return jnp.sum(jax.lax.map(nats, chunks)), jnp.sum(labels != NO_LABEL, dtype=jnp.float32)


def abstract(shape: Shape) -> tuple[nnx.GraphDef[Model], Params]:
    """Returns the model's graph, and the types of its parameters without their values."""
    return nnx.split(nnx.eval_shape(lambda: Model(shape, nnx.Rngs(0))))


def ring_loss(graph: nnx.GraphDef[Model], mesh: Mesh, block: int) -> Callable[..., jax.Array]:
    """Returns the mean cross entropy of a batch over the devices of the mesh.

    `block` is the number of tokens in a block of `balance_documents`.
    """

    def local(params: Params, batch: Batch) -> jax.Array:
        mask: Any = batch.mask

        def attends(window: int | None) -> Attend:
            left = {} if window is None else {"local_window_size": (window - 1, 0)}
            return partial(ba.attention, axis_name=AXIS, **mask.arguments, **left)

        labels = ba.shift(
            batch.tokens,
            axis_name=AXIS,
            fill=NO_LABEL,
            segment_ids=batch.segment_ids,
            positions=mask.query_positions,
            block=block,
        )
        found = nnx.merge(graph, params)(batch.tokens, labels, mask.rope_positions, attends)
        total, count = jax.lax.psum(jnp.stack(found), AXES)
        return total / count

    def loss(params: Params, batch: Batch) -> jax.Array:
        specs = parameter_specs(params, mesh, STACKED), P(*AXES)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(params, batch)

    return loss


def dense_loss(graph: nnx.GraphDef[Model]) -> Callable[..., jax.Array]:
    """Returns the same loss on one device, by dense attention in the order of the rows."""

    def loss(params: Params, batch: Batch) -> jax.Array:
        tokens, ids = batch.tokens, batch.segment_ids
        before = jnp.arange(tokens.shape[1])[:, None] - jnp.arange(tokens.shape[1])

        def attends(window: int | None) -> Attend:
            near = before >= 0 if window is None else (before >= 0) & (before < window)
            seen = near & (ids[:, :, None] == ids[:, None])
            return partial(jax.nn.dot_product_attention, mask=seen[:, None])

        follows = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        follows = jnp.pad(follows, ((0, 0), (0, 1)))
        labels = jnp.where(follows, jnp.roll(tokens, -1, 1), NO_LABEL)
        model = nnx.merge(graph, params)
        total, count = model(tokens, labels, batch.mask.rope_positions, attends)
        return total / count

    return loss


def train_step(loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Step:
    """Returns a step: new parameters, new state, the loss and the gradient's norm."""

    def step(
        params: Params, state: optax.OptState, batch: Batch
    ) -> tuple[Params, optax.OptState, jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(gradient)

    return step


def documents(rows: int, length: int, seed: int) -> list[list[int]]:
    """Returns the lengths of the documents in each row, log-normal, median length / 64 and σ 1.2.

    They fill the rows; the last document of a row is cut.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        lengths = random.lognormal(np.log(length / 64), 1.2, length).astype(int) + 1
        ends = np.minimum(np.cumsum(lengths), length)
        found.append(np.diff(ends[: np.searchsorted(ends, length) + 1], prepend=0).tolist())
    return found


def keys_seen(balance: ba.BalancedDocuments, window: int | None = None) -> np.ndarray:
    """Returns how many keys each token sees, `[rows, seq]` in the order of the ranks."""
    keys = balance.mask.rope_positions.astype(np.int64) + 1
    seen = keys if window is None else np.minimum(keys, window)
    return np.where(balance.segment_ids < 0, 0, seen)


def busiest_over_mean(keys: np.ndarray, ranks: int) -> float:
    """Returns the pairs that the busiest rank computes over the mean of its ring, of all rows."""
    pairs = keys.reshape(len(keys), ranks, -1).sum(2)
    return float((pairs.max(1) / pairs.mean(1)).max())


def packed_batch(
    tokens: np.ndarray, lengths: list[list[int]], ranks: int, block: int
) -> tuple[Batch, ba.BalancedDocuments]:
    """Returns rows of documents in the order in which the ranks of a ring hold them."""
    balance = ba.balance_documents(lengths, ranks, block, seq_len=tokens.shape[1])
    batch = Batch(balance.to_ranks(tokens), balance.segment_ids, balance.mask)
    return batch, balance


def check_first_step(
    graph: nnx.GraphDef[Model],
    params: Params,
    batch: Batch,
    balance: ba.BalancedDocuments,
    mesh: Mesh,
) -> None:
    """Compares loss and gradient with dense attention; stops if rounding does not explain it."""
    in_order = jax.tree.map(balance.from_ranks, batch)
    plain, plain_gradient = jax.jit(jax.value_and_grad(dense_loss(graph)))(params, in_order)
    loss = ring_loss(graph, mesh, balance.block)
    found, gradient = jax.jit(jax.value_and_grad(loss))(*placed(mesh, params, batch))
    loss_difference = abs(float(found) - float(plain)) / float(plain)
    gradient_difference = relative_difference(gradient, plain_gradient)
    print(
        f"loss {found:.6f}, with dense attention on one device {plain:.6f}; relative difference "
        f"of loss {loss_difference:.1e}, of gradient {gradient_difference:.1e}"
    )
    if not (loss_difference <= LOSS_TOLERANCE and gradient_difference <= GRADIENT_TOLERANCE):
        raise SystemExit(f"expected at most {LOSS_TOLERANCE:.0e} and {GRADIENT_TOLERANCE:.0e}")


def placed(mesh: Mesh, params: Any, batch: Batch) -> tuple[Any, Batch]:
    """Puts parameters, or the optimiser's state, and a batch on the devices."""
    specs = parameter_specs(params, mesh, STACKED), jax.tree.map(lambda _: P(*AXES), batch)
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    return jax.device_put((params, batch), shardings)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shape = Shape()
    for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "window", "period"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(shape, name))
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--data", type=int, default=2, help="rings, with a row each")
    parser.add_argument("--context", type=int, default=4, help="CPU devices of a ring")
    parser.add_argument("--block", type=int, default=128, help="tokens of a block of documents")
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    flags = parser.parse_args()
    for name, value in vars(flags).items():
        if value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if flags.layers % flags.period:
        parser.error(f"--layers {flags.layers} must be a multiple of --period {flags.period}")
    if flags.heads % flags.kv_heads:
        parser.error(f"--heads {flags.heads} must be a multiple of --kv-heads {flags.kv_heads}")
    if flags.length % (flags.context * flags.block):
        parser.error(
            f"--length {flags.length} must be a multiple of --context · --block, "
            f"{flags.context} · {flags.block}"
        )
    return flags


def main() -> None:
    """Checks the first step and trains."""
    flags = parse()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.data * flags.context)
    mesh = jax.make_mesh((flags.data, flags.context), AXES)
    shape = Shape(**{name: getattr(flags, name) for name in vars(Shape()) if name in flags})
    graph, params = nnx.split(Model(shape, nnx.Rngs(0)))
    texts = batches(standard_library_bytes(), flags.data, flags.length, seed=0)

    def batch_of(step: int) -> tuple[Batch, ba.BalancedDocuments]:
        lengths = documents(flags.data, flags.length, seed=step)
        return packed_batch(next(texts)[0], lengths, flags.context, flags.block)

    batch, balance = batch_of(0)
    print(
        f"mesh {dict(mesh.shape)}, {flags.data} x {flags.length:,} tokens, "
        f"{shape.layers - shape.layers // shape.period} window and "
        f"{shape.layers // shape.period} global layers, {shape.heads}:{shape.kv_heads} heads"
    )
    each = [keys_seen(balance, window) for window in (shape.window, None)]
    busiest = [f"{busiest_over_mean(keys, flags.context):.3f}" for keys in each]
    print(
        f"work of the busiest rank / mean: window layers {busiest[0]}, global layers {busiest[1]}"
    )
    check_first_step(graph, params, batch, balance, mesh)

    optimizer = optax.adamw(3e-4)
    params, batch = placed(mesh, params, batch)
    state, _ = placed(mesh, optimizer.init(params), batch)
    step = jax.jit(
        train_step(ring_loss(graph, mesh, flags.block), optimizer), donate_argnums=(0, 1)
    )
    for number in range(flags.steps):
        begin = time.perf_counter()
        params, state, loss, norm = step(params, state, batch)
        jax.block_until_ready(loss)
        seconds = time.perf_counter() - begin
        print(f"step {number}: loss {loss:.3f}, norm of gradient {norm:.3f}, {seconds:.1f} s")
        batch = placed(mesh, {}, batch_of(number + 1)[0])[1]


if __name__ == "__main__":
    main()
