"""Shards between the order of the sequence and a layout, inside ``shard_map``.

A rank r of P brings its contiguous shard of n tokens. No rank holds much more than such a shard:

- zigzag: the shard is the chunks 2r and 2r + 1 of 2P. Rank d takes the chunks d and 2P − 1 − d, of
  which one is even. So one permutation of ranks moves the even chunks, another one the odd chunks.
- striped: position p goes to rank p mod P. An all-to-all exchange moves ⌈n/P⌉ tokens between any
  two ranks: token i of rank r is item ⌊i/P⌋ of those for rank (r·n + i) mod P. Where P does not
  divide n, some ranks fill the last item with a token that the other side drops.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from burst_attention._batching import all_to_all
from burst_attention._mesh import permute
from burst_attention._types import Axes, Layout


@dataclass(frozen=True)
class Reorder:
    """The exchange of a sequence's tokens between the ranks of some mesh axes."""

    axes: Axes
    size: int
    """The number of ranks: P."""
    layout: Layout

    def into_layout(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Returns this rank's shard in the layout, from its contiguous shard."""
        return x if self._moves_nothing(x, axis) else self._moved_in(x, axis)

    def out_of_layout(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Returns this rank's contiguous shard: inverts `into_layout`."""
        return x if self._moves_nothing(x, axis) else self._moved_out(x, axis)

    # Outside jit, one program instead of one for each operation.
    @partial(jax.jit, static_argnums=(0, 2))
    def _moved_in(self, x: jax.Array, axis: int) -> jax.Array:
        if self.layout == "zigzag":
            even, odd = jnp.split(x, 2, axis)
            even, odd = self._permute(even, self._owners(0)), self._permute(odd, self._owners(1))
            return jnp.concatenate(self._by_parity(even, odd), axis)
        n, rank = x.shape[axis], lax.axis_index(self.axes)
        received = self._exchange(x, self._tokens(rank, self._ranks, n), axis)
        positions = rank + self.size * jnp.arange(n, dtype=jnp.int32)
        return _take(received, self._indices(positions // n, positions % n, n), axis)

    @partial(jax.jit, static_argnums=(0, 2))
    def _moved_out(self, x: jax.Array, axis: int) -> jax.Array:
        if self.layout == "zigzag":
            first, second = jnp.split(x, 2, axis)
            even, odd = self._by_parity(first, second)
            back = [[(to, rank) for rank, to in self._owners(parity)] for parity in (0, 1)]
            return jnp.concatenate(
                [self._permute(even, back[0]), self._permute(odd, back[1])], axis
            )
        n, rank = x.shape[axis], lax.axis_index(self.axes)
        positions = self._ranks * n + self._tokens(self._ranks, rank, n)
        received = self._exchange(x, positions // self.size, axis)
        tokens = jnp.arange(n, dtype=jnp.int32)
        return _take(received, self._indices((rank * n + tokens) % self.size, tokens, n), axis)

    def _moves_nothing(self, x: jax.Array, axis: int) -> bool:
        return self.layout == "contiguous" or self.size == 1 or x.shape[axis] == 0

    def _owners(self, parity: int) -> list[tuple[int, int]]:
        """Returns each rank with the rank that takes its chunk of a parity."""
        chunks = range(parity, 2 * self.size, 2)
        return [(rank, min(c, 2 * self.size - 1 - c)) for rank, c in enumerate(chunks)]

    def _permute(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
        return permute(x, self.axes, pairs)

    def _by_parity(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (x, y) on even ranks, (y, x) on odd ones: even and odd chunk in stored order.

        Applied twice, it changes nothing.
        """
        is_even = lax.axis_index(self.axes) % 2 == 0
        return jnp.where(is_even, x, y), jnp.where(is_even, y, x)

    @property
    def _ranks(self) -> Int32[Array, "ranks 1"]:
        return jnp.arange(self.size, dtype=jnp.int32)[:, None]

    def _items(self, n: int) -> int:
        """Returns how many tokens two ranks exchange."""
        return -(-n // self.size)

    def _tokens(self, owner: jax.Array, taker: jax.Array, n: int) -> Int32[Array, "ranks items"]:
        """Returns the tokens of the shard of ``owner`` that belong to the stripe of ``taker``."""
        items = jnp.arange(self._items(n), dtype=jnp.int32)
        return (taker - owner * n) % self.size + self.size * items[None]

    def _indices(self, ranks: jax.Array, tokens: jax.Array, n: int) -> Int32[Array, " seq"]:
        """Returns the indices, among items received from all ranks, of tokens of shards."""
        return ranks * self._items(n) + tokens // self.size

    def _exchange(self, x: jax.Array, rows: Int32[Array, "ranks items"], axis: int) -> jax.Array:
        """Sends each rank its rows, and returns what all ranks send, one behind the other."""
        sent = _take(x, rows.reshape(-1), axis)
        return all_to_all(sent, self.axes, axis, axis)


def _take(x: jax.Array, rows: Int32[Array, " rows"], axis: int) -> jax.Array:
    return jnp.take(x, rows, axis, mode="clip")
