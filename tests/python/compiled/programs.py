"""Training steps as users write them, compiled for GPUs that this machine does not have."""

from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

import burst_attention as ba
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import topology
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, HEADS, HEAD_DIM = 2, 8, 64
WIDTH = HEADS * HEAD_DIM
TOKENS = 28_672
"""Tokens of a device's shard. The factor 7 occurs in the size of no other array, so it tells arrays
with a row for each token."""
COMPILER = {
    "xla_gpu_autotune_level": 0,  # there is no GPU on which to measure kernels
    # XLA otherwise merges the products for q, k and v and cuts the result with three copies.
    "xla_gpu_dot_merger_threshold_mb": 0,
}


@dataclass(frozen=True)
class Step:
    """One training step of a small transformer: loss, gradients and new weights."""

    options: dict = field(default_factory=dict)
    """Keyword arguments of the attention."""
    axes: tuple[tuple[str, int], ...] = (("context", 8),)
    """Names and sizes of the mesh axes. ``data`` shards the batch and ``tensor`` the heads; the
    others shard the sequence."""
    kind: str = "H100"
    is_linear: bool = False
    features: tuple[str, ...] = ()
    """Trained features."""
    has_documents: bool = False
    policy: object = None
    """Policy of `jax.checkpoint` around each layer, in one loop over all layers."""
    is_unrolled: bool = False
    """Whether checkpointed layers stand one behind the other, without a loop."""
    tokens: int = TOKENS
    kv_heads: int = 4

    @property
    def is_loop(self):
        return self.policy is not None and not self.is_unrolled

    @property
    def ring_axes(self):
        """The mesh axes that shard the sequence."""
        return tuple(name for name, _ in self.axes if name not in ("data", "tensor"))

    def size(self, *names):
        """Returns the number of devices along some axes."""
        return prod(size for name, size in self.axes if name in names)

    def weights(self):
        """Returns shape, dtype and sharding of the weights of a layer."""
        kv, tensor = self.kv_heads * HEAD_DIM, "tensor" if self.size("tensor") > 1 else None
        columns, rows = P(None, tensor), P(tensor, None)
        shapes = dict.fromkeys(("query", "out", "up", "down"), (WIDTH, WIDTH))
        shapes |= {"key": (WIDTH, kv), "value": (WIDTH, kv)}
        if self.is_linear:
            shapes["log_decay"] = (WIDTH, HEADS)
        found = {
            name: (shape, jnp.bfloat16, rows if name in ("out", "down") else columns)
            for name, shape in shapes.items()
        }
        return found | {name: ((HEADS,), jnp.float32, P(tensor)) for name in self.features}

    def layer(self, x, weights):
        """Adds attention to x, and then a small network."""
        y = normalised(x)
        q, k, v = (self.split(y @ weights[name]) for name in ("query", "key", "value"))
        out = self.attend(y, q, k, v, weights)
        x = x + self.summed(out.reshape(*out.shape[:2], -1) @ weights["out"])
        hidden = jax.nn.gelu(normalised(x) @ weights["up"])
        return x + self.summed(hidden @ weights["down"])

    def split(self, x):
        """Splits rows into heads."""
        return x.reshape(*x.shape[:2], -1, HEAD_DIM)

    def attend(self, y, q, k, v, weights):
        """Returns the attention's output; ``y`` are the rows from which q, k and v come."""
        axes = self.ring_axes if len(self.ring_axes) > 1 else self.ring_axes[0]
        if self.is_linear:
            logs = jax.nn.log_sigmoid((y @ weights["log_decay"]).astype(jnp.float32))
            return ba.linear_attention(q, k, v, axis_name=axes, log_decay=logs, **self.options)
        given = {name: weights[name] for name in self.features}
        if self.has_documents:
            ids = jnp.arange(y.shape[1], dtype=jnp.int32) // 1000
            given["segment_ids"] = jnp.broadcast_to(ids, y.shape[:2])
        return ba.attention(q, k, v, axis_name=axes, **given, **self.options)

    def summed(self, x):
        return jax.lax.psum(x, "tensor") if self.size("tensor") > 1 else x

    def loss(self, weights, x):
        """Returns the loss, from a device's shard of the rows x."""
        layer = self.layer
        if self.policy is not None:
            layer = jax.checkpoint(layer, policy=self.policy)
        if self.is_loop:
            x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, weights)
        else:
            for each in weights:
                x = layer(x, each)
        names = tuple(name for name, _ in self.axes if name != "tensor")
        return jax.lax.psum(jnp.sum(x.astype(jnp.float32) ** 2), names)

    def compiled(self):
        """Compiles the step, with weights that the new weights replace in place."""
        mesh = topology.mesh(self.kind, self.axes)
        lead, unsharded = ((LAYERS,), (None,)) if self.is_loop else ((), ())
        specs, arrays = {}, {}
        for name, (shape, dtype, spec) in self.weights().items():
            specs[name] = P(*unsharded, *spec)
            arrays[name] = placed(mesh, (*lead, *shape), dtype, specs[name])
        if not self.is_loop:
            specs, arrays = [specs] * LAYERS, [arrays] * LAYERS
        rows = P("data" if self.size("data") > 1 else None, self.ring_axes, None)
        loss = jax.shard_map(self.loss, mesh=mesh, in_specs=(specs, rows), out_specs=P())

        def step(weights, x):
            found, gradients = jax.value_and_grad(loss)(weights, x)
            new = jax.tree.map(lambda w, g: w - (1e-3 * g).astype(w.dtype), weights, gradients)
            return new, found

        shape = (self.size("data"), self.tokens * self.size(*self.ring_axes), WIDTH)
        x = placed(mesh, shape, jnp.bfloat16, rows)
        return jax.jit(step, donate_argnums=0).lower(arrays, x).compile(compiler_options=COMPILER)


def normalised(x):
    """Returns the rows of x divided by the root of their mean square."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(1e-6 + jnp.mean(wide * wide, axis=-1, keepdims=True))
    return (wide * root).astype(x.dtype)


def placed(mesh, shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


CAUSAL = {"is_causal": True, "layout": "zigzag", "schedule": "ring"}
PAIR = (("node", 2), ("context", 4))
RING = Step(CAUSAL)
RECOMPUTED = jax.checkpoint_policies.nothing_saveable
STEPS = {
    "ring": RING,
    "all_gather": Step(CAUSAL | {"schedule": "all_gather"}),
    "balanced": Step({"is_causal": True, "schedule": "balanced"}),
    "double ring": replace(RING, axes=PAIR),
    "ulysses": Step(CAUSAL | {"schedule": "ulysses"}, kv_heads=8),
    "hybrid": Step(CAUSAL | {"schedule": "hybrid"}, axes=PAIR),
    "data and tensor": replace(RING, axes=(("data", 2), ("context", 2), ("tensor", 2))),
    "context outermost": replace(RING, axes=(("context", 4), ("data", 2))),
    "features": Step(
        CAUSAL
        | {"local_window_size": (4095, 0), "logits_soft_cap": 30.0, "dropout_rate": 0.1}
        | {"dropout_key": np.array([1, 2], np.uint32)},
        features=("alibi_slopes", "sinks"),
        has_documents=True,
    ),
    "saved": replace(RING, policy=ba.save_attention),
    "recomputed": replace(RING, policy=RECOMPUTED),
    "offloaded": replace(RING, policy=ba.offload_attention),
    "offloaded, unrolled": replace(RING, policy=ba.offload_attention, is_unrolled=True),
    "linear": Step(is_linear=True),
    "linear, saved": Step(is_linear=True, policy=ba.save_attention),
    "saved, H200": replace(RING, policy=ba.save_attention, kind="H200"),
    "saved, B200": replace(RING, policy=ba.save_attention, kind="B200"),
    "saved, GB200": replace(RING, policy=ba.save_attention, kind="GB200"),
    "linear, B200": Step(is_linear=True, kind="B200"),
    "64 H200": replace(RING, axes=(("context", 64),), kind="H200"),
    "64 H200, double ring": replace(
        RING, axes=(("data", 2), ("node", 4), ("context", 8)), kind="H200"
    ),
}


@cache
def compiled(name):
    """Returns a step's executable."""
    return STEPS[name].compiled()


@cache
def program(name):
    """Returns a step's scheduled program."""
    return hlo.Program(compiled(name).as_text())
