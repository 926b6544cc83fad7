"""Loops over a device's segments that keep no array of the length.

A loop takes a *group* of segments at a time, and a *window* of groups around it. The forward pass
keeps the memory before each window. The backward pass goes back through the windows: for each it
computes the memories before the window's groups, and then everything of each group once more. So
besides inputs and results there are the arrays of one group, and a memory for each window and for
each group of a window, which are about equally many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from burst_attention._infini.segments import Gates, Memory, Rows, Segments
from burst_attention._mesh import vary_like

GROUP = 2_048
"""The most tokens of a group of several segments on CPU devices, whose caches hold their arrays."""
GPU_ELEMENTS = 2**24
"""The most elements of an array of a group of several segments on GPUs: 64 MiB in float32. Kernels
of one short segment are too small to keep a GPU busy."""
WINDOWS = 16
"""The most windows of a device."""
Starts: TypeAlias = tuple[
    Float32[Array, "batch windows kv_heads head_dim value_dim"],
    Float32[Array, "batch windows kv_heads head_dim"],
]
"""M and z before each window."""
Pulled: TypeAlias = Callable[[Memory, Rows, jax.Array, Memory], tuple[Memory, Any, Any]]
"""Returns gradients of a group from its first memory, its rows and the gradients of its results:
those of the memory, those that are summed over groups, and those of rows."""


@dataclass(frozen=True)
class Plan:
    """The groups and windows of a device's segments."""

    segments: Segments
    group: int
    """Tokens of a group."""
    groups: int
    """Groups of a window."""
    windows: int

    def forward(self, memory: Memory, rows: Rows, gate: Gates) -> tuple[jax.Array, Memory, Starts]:
        """Returns outputs, the memory after all tokens, and what `backward` needs."""

        def group(
            carry: tuple[Memory, jax.Array], at: Int32[Array, ""]
        ) -> tuple[tuple[Memory, jax.Array], None]:
            memory, outs = carry
            out, memory = self.segments.attend(memory, self._part(rows, at), gate)
            return (memory, self._put(outs, out, at)), None

        def window(
            carry: tuple[Memory, jax.Array], index: Int32[Array, ""]
        ) -> tuple[tuple[Memory, jax.Array], Memory]:
            return lax.scan(group, carry, self._within(index))[0], carry[0]

        q, v = rows.query, rows.value
        outs = vary_like(rows, jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype))
        (memory, outs), starts = lax.scan(window, (vary_like(rows, memory), outs), self._all())
        return outs, memory, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), starts)

    def after(self, memory: Memory, rows: Rows) -> Memory:
        """Returns the memory after all tokens."""

        def group(memory: Memory, at: Int32[Array, ""]) -> tuple[Memory, None]:
            return self._advanced(memory, rows, at), None

        return lax.scan(group, vary_like(rows, memory), self._groups())[0]

    def sums(
        self, key: Float[Array, "batch seq kv_heads head_dim"]
    ) -> Float32[Array, "batch kv_heads head_dim"]:
        """Returns what all tokens add to z."""

        def group(z: jax.Array, at: Int32[Array, ""]) -> tuple[jax.Array, None]:
            return z + self.segments.sums(self._part(key, at)), None

        zeros = jnp.zeros((key.shape[0], *key.shape[2:]), jnp.float32)
        return lax.scan(group, vary_like(key, zeros), self._groups())[0]

    def backward(
        self, starts: Starts, rows: Rows, gate: Gates, dout: jax.Array, dafter: Memory
    ) -> tuple[Memory, Gates, Rows]:
        """Returns the gradients of the first memory, of gates and of rows."""

        def pulled(
            memory: Memory, rows: Rows, dout: jax.Array, dafter: Memory
        ) -> tuple[Memory, Gates, Rows]:
            pull = jax.vjp(self.segments.attend, memory, rows, gate)[1]
            dmemory, drows, dgate = pull((dout, dafter))
            return dmemory, dgate, drows

        return self._back(pulled, starts, rows, dout, dafter, jnp.zeros_like(gate), rows)

    def memory_back(
        self, starts: Starts, rows: Rows, gate: Gates, dout: jax.Array, dafter: Memory
    ) -> Memory:
        """Returns the gradient of the first memory alone."""

        def pulled(
            memory: Memory, rows: Rows, dout: jax.Array, dafter: Memory
        ) -> tuple[Memory, None, None]:
            pull = jax.vjp(lambda memory: self.segments.recall(memory, rows, gate), memory)[1]
            return *pull((dout.astype(jnp.float32), dafter)), None, None

        return self._back(pulled, starts, rows, dout, dafter, None, None)[0]

    def _back(
        self,
        pulled: Pulled,
        starts: Starts,
        rows: Rows,
        dout: Float[Array, "batch seq heads value_dim"],
        dafter: Memory,
        summed: Any,
        of_rows: Any,
    ) -> tuple[Memory, Any, Any]:
        """Returns the gradients of the first memory, the sums over groups, and those of rows.

        ``summed`` and ``of_rows`` have the types of the latter two.
        """

        def window(carry: Any, given: tuple[Memory, Int32[Array, ""]]) -> tuple[Any, None]:
            first, index = given

            def group(carry: Any, given: tuple[Memory, Int32[Array, ""]]) -> tuple[Any, None]:
                (memory, at), (dmemory, sums, gradients) = given, carry
                own = self._part(rows, at), self._part(dout, at)
                dmemory, more, drows = pulled(memory, *own, dmemory)
                put = jax.tree.map(lambda all_, one: self._put(all_, one, at), gradients, drows)
                return (dmemory, jax.tree.map(jnp.add, sums, more), put), None

            def advance(memory: Memory, at: Int32[Array, ""]) -> tuple[Memory, Memory]:
                return self._advanced(memory, rows, at), memory

            inner = self._within(index)
            if self.groups == 1:
                before = jax.tree.map(lambda x: x[None], first)
            else:
                before = lax.scan(advance, first, inner)[1]
            return lax.scan(group, carry, (before, inner), reverse=True)[0], None

        zeros = jax.tree.map(jnp.zeros_like, (summed, of_rows))
        carry = vary_like((rows, starts, dout), (dafter, *zeros))
        by_window = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), starts)
        found: tuple[Memory, Any, Any] = lax.scan(
            window, carry, (by_window, self._all()), reverse=True
        )[0]
        return found

    def _advanced(self, memory: Memory, rows: Rows, at: Int32[Array, ""]) -> Memory:
        """Returns the memory after a group."""
        key, value = self._part((rows.key, rows.value), at)
        return self.segments.advance(memory, key, value)

    def _groups(self) -> Int32[Array, " groups"]:
        """Returns the indices of all groups."""
        return jnp.arange(self.windows * self.groups, dtype=jnp.int32)

    def _all(self) -> Int32[Array, " windows"]:
        """Returns the indices of windows."""
        return jnp.arange(self.windows, dtype=jnp.int32)

    def _within(self, window: Int32[Array, ""]) -> Int32[Array, " groups"]:
        """Returns the indices of a window's groups."""
        return window * self.groups + jnp.arange(self.groups, dtype=jnp.int32)

    def _part(self, arrays: Any, at: Int32[Array, ""]) -> Any:
        """Returns the rows of a group."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, at * self.group, self.group, axis=1), arrays
        )

    def _put(self, whole: jax.Array, part: jax.Array, at: Int32[Array, ""]) -> jax.Array:
        """Returns all rows, those of a group replaced."""
        return lax.dynamic_update_slice_in_dim(whole, part, at * self.group, axis=1)


def plan_of(segments: Segments, rows: Rows, platform: str | None) -> Plan:
    """Returns the plan for a device's tokens."""
    q, v = rows.query, rows.value
    tokens, elements = q.shape[1], q.shape[0] * q.shape[2] * max(q.shape[3], v.shape[3])
    most = GROUP if platform in ("cpu", None) else GPU_ELEMENTS // elements
    count = tokens // segments.size
    together = _divisor(count, max(1, most // segments.size))
    windows = _divisor(count // together, WINDOWS)
    return Plan(segments, together * segments.size, count // together // windows, windows)


def _divisor(number: int, most: int) -> int:
    """Returns the greatest divisor that does not exceed a limit."""
    return next(x for x in range(min(number, most), 0, -1) if number % x == 0)
