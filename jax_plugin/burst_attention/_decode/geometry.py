"""Which position of its sequence each row of a sharded cache holds."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int32


@dataclass(frozen=True)
class Geometry:
    """How positions are dealt to the ranks: in runs of ``interleave``, one rank after another.

    With I = interleave and P = world_size, row i of rank r holds position::

        p(i) = (i // I) · P · I + r · I + i % I

    In the layout ``contiguous`` a run is all rows that a rank has for a sequence.
    """

    interleave: int
    world_size: int
    capacity: int
    """Rows of a sequence on each rank."""

    def positions(
        self, rows: Int32[Array, "*rows"], rank: Int32[Array, ""]
    ) -> Int32[Array, "*rows"]:
        """Returns the positions of a rank's rows."""
        run, within = rows // self.interleave, rows % self.interleave
        return (run * self.world_size + rank) * self.interleave + within

    def rows_before(
        self, position: Int32[Array, "*any"], rank: Int32[Array, ""]
    ) -> Int32[Array, "*any"]:
        """Returns how many rows of a rank hold a smaller position, which is not negative."""
        turn = self.world_size * self.interleave
        own = jnp.clip(position % turn - rank * self.interleave, 0, self.interleave)
        return jnp.minimum(position // turn * self.interleave + own, self.capacity)

    def place(
        self, position: Int32[Array, "*any"]
    ) -> tuple[Int32[Array, "*any"], Int32[Array, "*any"]]:
        """Returns the rank and the row that hold a position, which is not negative.

        The row of a position beyond all ranks' rows is ``capacity`` or more.
        """
        run, within = position // self.interleave, position % self.interleave
        return run % self.world_size, run // self.world_size * self.interleave + within
