"""Generation with the caches on other devices than the model's.

A program of JAX has one set of devices. So the model is cut at its attention into programs of its
own devices, and between them `burst_attention.CachePool` attends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from attentions import AXIS
from checkpoint import Params
from flax import nnx
from generator import SHARDED, STRIDE, WHOLE, Cache, Generated, Generator, chunk_positions
from jax.sharding import PartitionSpec as P

Attend = Callable[..., jax.Array]
"""Maps a layer's index, query, key and value to the result of attention."""
Forward = Callable[[Params, jax.Array, jax.Array, Attend], jax.Array]
"""Maps parameters, tokens, the position after them `[1]` and attention to logits."""


@dataclass(frozen=True)
class PooledGenerator(Generator):
    """A model, and other devices that hold its caches."""

    pool: ba.CachePool

    def caches(self, batch: int, positions: int) -> list[Cache]:
        """Returns empty caches of all layers, on the pool's devices."""
        config = self.config
        sizes: dict[str, Any] = {"batch": batch, "positions": positions, "dtype": config.dtype}
        sizes |= {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        return [self.pool.init(**sizes) for _ in range(config.layers)]

    def forward(self, tokens: P) -> Forward:
        """Returns the model, whose devices share tokens as a spec says.

        It gives the logits of each device's last token.
        """
        is_chunk = tokens == SHARDED

        def program(run: Callable[..., Any], *inputs: P, outputs: P = tokens) -> Callable[..., Any]:
            def local(graph: Any, params: Params, *arrays: jax.Array) -> Any:
                def part(params: Params, *arrays: jax.Array) -> Any:
                    return run(nnx.merge(graph, params), *arrays)

                specs = (WHOLE, *inputs)
                sharded = jax.shard_map(part, mesh=self.mesh, in_specs=specs, out_specs=outputs)
                return sharded(params, *arrays)

            return jax.jit(local, static_argnums=0)

        def positions(x: jax.Array, end: jax.Array) -> jax.Array:
            return chunk_positions(x.shape[1], end) if is_chunk else end - 1

        embed = program(lambda model, x: model.embed(x).astype(model.dtype), tokens)
        before = program(lambda block, x, end: block.before(x, positions(x, end)), tokens, WHOLE)
        after = program(lambda block, x, y: block.after(x, y), tokens, tokens)
        last = P(AXIS) if is_chunk else WHOLE
        logits = program(lambda model, x: model.logits(x[:, -1]), tokens, outputs=last)

        def run(params: Params, tokens: jax.Array, end: jax.Array, attend: Attend) -> jax.Array:
            model = nnx.merge(self.graph, params)
            x = embed(self.graph, params, tokens)
            for layer, block in enumerate(map(nnx.split, model.blocks)):
                x = after(*block, x, attend(layer, *before(*block, x, end)))
            return logits(self.graph, params, x)

        return run

    def prefill(self) -> Callable[..., tuple[jax.Array, list[Cache]]]:
        """Returns what adds a chunk of the prompt to the caches, as `Generator.prefill` does."""
        forward = self.forward(SHARDED)

        def run(
            params: Params, tokens: jax.Array, caches: list[Cache], end: jax.Array
        ) -> tuple[jax.Array, list[Cache]]:
            lengths = self.pool.put(end)

            def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                out: jax.Array
                out, caches[layer] = self.pool.prefill(caches[layer], q, k, v, lengths)
                return out

            return forward(params, tokens, end, attend), caches

        return run

    def attend_step(
        self, prompt: list[Cache], own: list[Cache], length: int, data: dict[str, Any]
    ) -> Attend:
        """Returns the attention of one new token of each sample, the `length`-th after the prompt.

        It puts the samples' new caches into `own`.
        """
        lengths = self.pool.put(np.full(len(data["prefix_of"]), length, np.int32))

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            out: jax.Array
            given = {"prefix": prompt[layer], **data}
            out, own[layer] = self.pool.attend(own[layer], q, k, v, lengths, **given)
            return out

        return attend

    def steps(self) -> Callable[..., tuple[Generated, jax.Array, list[Cache]]]:
        """Returns what generates the next tokens of all samples, as `Generator.steps` does."""
        forward, choose = self.forward(WHOLE), jax.jit(self.choose)

        def run(
            params: Params,
            prompt: list[Cache],
            own: list[Cache],
            tokens: jax.Array,
            length: jax.Array,
            key: jax.Array,
        ) -> tuple[Generated, jax.Array, list[Cache]]:
            begin, samples = prompt[0][0].shape[1], len(tokens)
            data = {"prefix_of": self.pool.put(np.zeros(samples, np.int32))}
            data |= {"prefix_lengths": self.pool.put(np.array([begin]))}
            found: list[Generated] = []
            for now in range(int(length), int(length) + STRIDE):
                attend = self.attend_step(prompt, own, now, data)
                end = jnp.full(1, begin + now)
                logits = forward(params, tokens[:, None], end, attend)
                tokens = choose(logits, jax.random.fold_in(key, now))
                found.append((tokens, logits))
            texts, scores = (jnp.stack(x) for x in zip(*found, strict=True))
            return (texts, scores), tokens, own

        return run
