"""A whole training step of a language model of Llama's shape, compiled for GPUs that are not here.

The step computes loss, gradients and AdamW's update. Weights are bfloat16 and moments float32.
Layers run in a `lax.scan`, and the backward pass computes each layer again. A device holds its
shard of the sequence, and one part of every matrix and of its moments. Every layer gathers its
matrices while it needs them, and scatters their gradients (ZeRO, arXiv:1910.02054). With sharded
heads (Megatron, arXiv:1909.08053 and arXiv:2205.05198) a layer instead gathers the rows of the
sequence, computes its own heads and its own part of the feed-forward network, and scatters the rows
of the results.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import burst_attention as ba
import jax
import jax.numpy as jnp
import optax
import topology
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Weights: TypeAlias = dict[str, Any]
AXES = (("context", 8), ("alone", 1))
"""Names and sizes of the mesh axes. A ring along ``alone`` has one rank."""
SHARDS = P(None, ("context", "alone"))
"""Sharding of arrays ``[batch, seq, …]``."""
CHUNK = 2048
"""Tokens of a shard whose logits exist at a time."""
COMPILER = {
    "xla_gpu_autotune_level": 0,  # there is no GPU on which to measure kernels
    # XLA merges small products only, which would make programs of short sequences different.
    "xla_gpu_dot_merger_threshold_mb": 0,
}


@dataclass(frozen=True)
class Model:
    """The sizes of a model; by default those of Llama-7B."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    hidden: int = 11_008
    vocabulary: int = 32_000

    @property
    def width(self) -> int:
        """Returns the width of the residual stream."""
        return self.heads * self.head_dim

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns the shapes of the matrices of a layer."""
        width, kv = self.width, self.kv_heads * self.head_dim
        return {
            **dict.fromkeys(("query", "out"), (width, width)),
            **dict.fromkeys(("key", "value"), (width, kv)),
            **dict.fromkeys(("gate", "up"), (width, self.hidden)),
            "down": (self.hidden, width),
        }


@dataclass(frozen=True)
class Attention:
    """An attention to compare, and how a model uses it."""

    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    """Computes causal attention from a device's shard of query, key and value."""
    layout: Literal["contiguous", "zigzag"] = "contiguous"
    policy: Callable[..., Any] = jax.checkpoint_policies.nothing_saveable
    """Policy of `jax.checkpoint` around each layer."""
    has_sharded_heads: bool = False
    """Whether devices share the heads instead of the sequence."""
    has_whole_rows: bool = False
    """Whether each device holds all rows between layers. Only sharded heads need them."""
    is_global: bool = False
    """Whether ``attend`` takes global arrays, for XLA's partitioner to shard."""


@dataclass(frozen=True)
class Step:
    """One training step: a model with an attention, on a kind of GPU."""

    model: Model
    attention: Attention
    kind: str

    @property
    def mesh(self) -> Mesh:
        """Returns the devices."""
        return topology.mesh(self.kind, AXES)

    @property
    def rows(self) -> P:
        """Returns the sharding of the rows between layers."""
        return P(None, "alone") if self.attention.has_whole_rows else SHARDS

    def specs(self) -> Weights:
        """Returns the sharding of all weights."""
        rows, columns = P(None, "context", None), P(None, None, "context")
        layers = dict.fromkeys(self.model.matrices(), rows)
        if self.attention.has_sharded_heads:
            layers |= dict.fromkeys(("query", "key", "value", "gate", "up"), columns)
        norms = dict.fromkeys(("norm_attention", "norm_hidden"), P())
        ends = dict.fromkeys(("embed", "unembed"), P("context", None))
        return {"layers": layers | norms, "norm": P(), **ends}

    def weights(self) -> Weights:
        """Returns all weights, as shapes."""
        model = self.model
        shapes: dict[str, tuple[int, ...]] = dict(model.matrices())
        shapes |= dict.fromkeys(("norm_attention", "norm_hidden"), (model.width,))
        layers = {name: (model.layers, *shape) for name, shape in shapes.items()}
        ends = dict.fromkeys(("embed", "unembed"), (model.vocabulary, model.width))
        every = {"layers": layers, "norm": (model.width,), **ends}
        return jax.tree.map(self.placed, every, self.specs(), is_leaf=lambda x: type(x) is tuple)

    def placed(self, shape: tuple[int, ...], spec: P, dtype: Any = jnp.bfloat16) -> Any:
        """Returns the type of an array on the devices."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def shards(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
        """Returns a function of global arrays that runs on the shards of each device."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs)

    def matrix(self, shard: jax.Array) -> jax.Array:
        """Returns the part of a layer's matrix that a device multiplies with."""
        return shard if self.attention.has_sharded_heads else gathered(shard, 0)

    def product_of_all(self, x: jax.Array, shard: jax.Array) -> jax.Array:
        """Returns ``x`` times a matrix, summed over devices that hold parts of the sum."""
        y = x @ self.matrix(shard)
        if not self.attention.has_sharded_heads:
            return y
        if self.attention.has_whole_rows:
            return lax.psum(y, "context")
        return lax.psum_scatter(y, "context", scatter_dimension=1, tiled=True)

    def normalised(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns normalised rows: a device's own, or all where heads are sharded."""
        y = normalised(x, scale)
        attention = self.attention
        gathers = attention.has_sharded_heads and not attention.has_whole_rows
        return gathered(y, 1) if gathers else y

    def project(self, x: jax.Array, weights: Weights) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns query, key and value of a device."""
        y = self.normalised(x, weights["norm_attention"])
        q, k, v = (
            (y @ self.matrix(weights[name])).reshape(*y.shape[:2], -1, self.model.head_dim)
            for name in ("query", "key", "value")
        )
        if self.attention.has_sharded_heads:
            at = jnp.arange(y.shape[1])
        else:
            layout = self.attention.layout
            at = ba.local_positions(y.shape[1], axis_name="context", layout=layout)
        return rotated(q, at), rotated(k, at), v

    def rest(self, x: jax.Array, out: jax.Array, weights: Weights) -> jax.Array:
        """Returns the rows behind a layer, from the rows before it and its attention's out."""
        x = x + self.product_of_all(out.reshape(*out.shape[:2], -1), weights["out"])
        y = self.normalised(x, weights["norm_hidden"])
        gate, up = (y @ self.matrix(weights[name]) for name in ("gate", "up"))
        return x + self.product_of_all(jax.nn.silu(gate) * up, weights["down"])

    def layer(self, x: jax.Array, weights: Weights) -> jax.Array:
        """Adds attention to the rows x, and then a feed-forward network."""
        specs = {name: P(*spec[1:]) for name, spec in self.specs()["layers"].items()}
        is_whole = self.attention.has_sharded_heads
        heads = P(None, "alone", "context") if is_whole else SHARDS
        rows = self.rows
        qkv = self.shards(self.project, (rows, specs), (heads,) * 3)(x, weights)
        attend = self.attention.attend
        if not self.attention.is_global:
            attend = self.shards(attend, (heads,) * 3, heads)
        return self.shards(self.rest, (rows, heads, specs), rows)(x, attend(*qkv), weights)

    def loss(self, weights: Weights, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the mean cross entropy of the labels."""
        table = P("context", None)

        def embed(tokens: jax.Array, shard: jax.Array) -> jax.Array:
            return gathered(shard, 0)[tokens]

        x = self.shards(embed, (SHARDS, table), SHARDS)(tokens, weights["embed"])
        x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.rows))
        layer = jax.checkpoint(self.layer, policy=self.attention.policy)
        x, _ = lax.scan(lambda x, each: (layer(x, each), None), x, weights["layers"])
        total = self.shards(cross_entropy, (SHARDS, SHARDS, P(), table), P())
        return total(x, labels, weights["norm"], weights["unembed"]) / labels.size

    def compiled(self, tokens: int) -> Any:
        """Compiles the step for a sequence; new weights and moments replace old ones in place."""
        weights, specs = self.weights(), self.specs()
        optimizer = optax.adamw(1e-4)

        def wide(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

        moments = optax.tree.map_params(
            optimizer,
            lambda x, spec: self.placed(x.shape, spec, x.dtype),
            jax.eval_shape(lambda weights: optimizer.init(wide(weights)), weights),
            specs,
            transform_non_params=lambda x: self.placed(x.shape, P(), x.dtype),
        )

        def step(weights: Weights, moments: Any, tokens: jax.Array, labels: jax.Array) -> Any:
            loss, gradients = jax.value_and_grad(self.loss)(weights, tokens, labels)
            updates, moments = optimizer.update(wide(gradients), moments, wide(weights))
            new = jax.tree.map(lambda x, by: (x + by).astype(x.dtype), weights, updates)
            return new, moments, loss

        ids = self.placed((1, tokens), SHARDS, jnp.int32)
        out = jax.tree.map(lambda x: x.sharding, (weights, moments))
        jitted = jax.jit(
            step, donate_argnums=(0, 1), out_shardings=(*out, NamedSharding(self.mesh, P()))
        )
        return jitted.lower(weights, moments, ids, ids).compile(compiler_options=COMPILER)


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """Returns the shards of all devices, one behind the other."""
    return lax.all_gather(x, "context", axis=axis, tiled=True)


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the rows of x divided by the root of their mean square, times ``scale``."""
    wide = x.astype(jnp.float32)
    root = lax.rsqrt(1e-6 + jnp.mean(wide * wide, axis=-1, keepdims=True))
    return (wide * root).astype(x.dtype) * scale


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns ``x [batch, seq, heads, head_dim]`` with rotary embeddings of its positions."""
    half = x.shape[-1] // 2
    angles = positions.astype(jnp.float32)[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def cross_entropy(
    x: jax.Array, labels: jax.Array, norm: jax.Array, unembed: jax.Array
) -> jax.Array:
    """Returns the summed cross entropy of all tokens, from logits of one chunk at a time."""
    table, chunk = gathered(unembed, 0), math.gcd(CHUNK, x.shape[1])

    @jax.checkpoint
    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, wanted = part
        logits = jnp.einsum(
            "bsw,vw->bsv", normalised(rows, norm), table, preferred_element_type=jnp.float32
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        return total + losses.sum(), None

    def chunks(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    zero = lax.pcast(jnp.float32(0), *SHARDS[1:], to="varying")
    total, _ = lax.scan(add, zero, (chunks(x), chunks(labels)))
    return lax.psum(total, *SHARDS[1:])
