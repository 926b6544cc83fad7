"""A model that generates, with key/value caches that are sharded across its devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
from attentions import AXIS, plain_softmax
from checkpoint import Params
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformer import Attend, Config, Transformer

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of a layer, `[batch, rows, kv_heads, head_dim]`."""
Generated = tuple[jax.Array, jax.Array]
"""Tokens `[tokens, samples]`, and the logits that they were chosen by."""

SHARDED, WHOLE = P(None, AXIS), P()
STRIDE = 16
"""Tokens of each sample that a call generates."""
append = partial(ba.append_to_cache, axis_name=AXIS, layout="contiguous")
attend_samples = partial(ba.shared_prefix_attention, axis_name=AXIS, layout="contiguous")
NO_END = 2**31 - 1


def attend_prefill(cache: Cache, written: list[Cache], end: jax.Array) -> Attend:
    """Returns the attention of a chunk of the prompt, of which each device has an equal part.

    `end` is the position after the chunk. The device's queries visit the cache of every device. A
    key is visible from its own position on, and a row that has no key yet is visible to no query.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        gather = partial(jax.lax.all_gather, axis_name=AXIS, axis=1, tiled=True, to="invarying")
        cached = append(*cache, gather(key), gather(value), end)
        written.append(cached)
        rows = ba.local_positions(cached[0].shape[1], axis_name=AXIS)[None]
        visible = (rows, jnp.where(rows < end, NO_END, rows))
        places = chunk_positions(query.shape[1], end)[None]
        return ba.attention(query, *cached, axis_name=AXIS, query_positions=places, visible=visible)

    return attend


def chunk_positions(tokens: int, end: jax.Array) -> jax.Array:
    """Returns the positions of this device's tokens of a chunk that ends before `end`."""
    index = ba.local_positions(tokens, axis_name=AXIS)
    return end[0] - tokens * jax.lax.axis_size(AXIS) + index


def attend_step(prompt: Cache, own: Cache, written: list[Cache], length: jax.Array) -> Attend:
    """Returns the attention of one new token of each sample, the `length`-th after the prompt."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        samples, rows = query.shape[0], prompt[0].shape[1] * jax.lax.axis_size(AXIS)
        lengths = jnp.full(samples, length)
        cached = append(*own, key, value, lengths)
        written.append(cached)
        return attend_samples(
            *(query, *prompt, *cached, lengths),
            prefix_of=jnp.zeros(samples, jnp.int32),
            prefix_lengths=jnp.full(1, rows),
        )

    return attend


@dataclass(frozen=True)
class Generator:
    """A model, and the devices that share its caches."""

    mesh: Mesh
    config: Config
    graph: nnx.GraphDef[Transformer]
    temperature: float

    def caches(self, batch: int, positions: int) -> list[Cache]:
        """Returns empty caches of all layers, for some positions on all devices together."""
        rows = -(-positions // self.mesh.size) * self.mesh.size
        shape = (batch, rows, self.config.kv_heads, self.config.head_dim)
        sharding = NamedSharding(self.mesh, SHARDED)
        zeros = partial(jnp.zeros, shape, self.config.dtype, device=sharding)
        return [(zeros(), zeros()) for _ in range(self.config.layers)]

    def prefill(self) -> Callable[..., tuple[jax.Array, list[Cache]]]:
        """Returns the program that adds a chunk of the prompt to the caches.

        It maps parameters, tokens `[1, chunk]`, caches and the position after the chunk `[1]` to
        the logits of each device's last token, and the caches.
        """

        def local(
            params: Params, tokens: jax.Array, caches: list[Cache], end: jax.Array
        ) -> tuple[jax.Array, list[Cache]]:
            written: list[Cache] = []
            attends = [attend_prefill(cache, written, end) for cache in caches]
            model, positions = nnx.merge(self.graph, params), chunk_positions(tokens.shape[1], end)
            logits = model.with_caches(tokens, positions, attends)
            return logits[:, -1], written

        specs = (WHOLE, SHARDED, SHARDED, WHOLE)
        run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=(P(AXIS), SHARDED))
        return jax.jit(run, donate_argnums=2)

    def steps(self) -> Callable[..., tuple[Generated, jax.Array, list[Cache]]]:
        """Returns the program that generates the next tokens of all samples.

        It maps parameters, caches of the prompt, caches of the samples, the last tokens
        `[samples]`, their number after the prompt and a random key to the new tokens
        `[STRIDE, samples]` with their logits, the last tokens, and the caches of the samples.
        """

        def local(
            params: Params,
            prompt: list[Cache],
            own: list[Cache],
            tokens: jax.Array,
            length: jax.Array,
            key: jax.Array,
        ) -> tuple[Generated, jax.Array, list[Cache]]:
            model = nnx.merge(self.graph, params)
            begin = prompt[0][0].shape[1] * jax.lax.axis_size(AXIS)

            def step(
                carry: tuple[jax.Array, list[Cache]], index: jax.Array
            ) -> tuple[tuple[jax.Array, list[Cache]], Generated]:
                tokens, own = carry
                now, written = length + index, list[Cache]()
                attends = [
                    attend_step(*each, written, now) for each in zip(prompt, own, strict=True)
                ]
                position = (begin + now - 1)[None]
                logits = model.with_caches(tokens[:, None], position, attends)[:, 0]
                following = self.choose(logits, jax.random.fold_in(key, now))
                return (following, written), (following, logits)

            (tokens, own), found = jax.lax.scan(step, (tokens, own), jnp.arange(STRIDE))
            return found, tokens, own

        specs = (WHOLE, SHARDED, SHARDED, WHOLE, WHOLE, WHOLE)
        run = jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=(WHOLE, WHOLE, SHARDED)
        )
        return jax.jit(run, donate_argnums=2)

    def choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the next token of each sample: the most probable one of the first sample."""
        drawn = jax.random.categorical(key, logits / self.temperature)
        return jnp.where(jnp.arange(len(logits)) == 0, jnp.argmax(logits, -1), drawn)

    def without_cache(self) -> Callable[[Params, jax.Array], jax.Array]:
        """Returns the program that maps tokens `[1, seq]` to the logits of full attention."""

        def run(params: Params, tokens: jax.Array) -> jax.Array:
            return nnx.merge(self.graph, params)(tokens, jnp.arange(tokens.shape[1]), plain_softmax)

        return jax.jit(run)
