"""The computation that every kind of decoding consists of: the partial of one rank."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

from jaxtyping import Array, Float, Float32, Int32

from burst_attention._decode.geometry import Geometry

Split: TypeAlias = Literal["balanced", "fixed"]
"""How the work on a device is cut."""
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Work:
    """Everything static about a partial."""

    scale: float
    soft_cap: float
    """0 for none."""
    window: int
    """How many positions before its own a query sees; −1 for all."""
    interleave: int
    world_size: int
    split: Split
    implementation: Literal["xla"] | None
    shares_sources: bool = False
    """Whether several entries may read one source."""
    values_in_keys: int = 0
    """How many first columns of the keys are the values; 0 for values of their own."""

    def on_prefixes(self, interleave: int) -> "Work":
        """Returns the same work on shared prefixes, with their interleave."""
        return replace(self, interleave=interleave, shares_sources=True)

    def value_dim(self, operands: "Operands") -> int:
        """Returns the columns of values and results."""
        return self.values_in_keys or operands.values.shape[3]

    def geometry(self, capacity: int) -> Geometry:
        """Returns where positions are, with a number of rows of a source on each rank."""
        return Geometry(self.interleave, self.world_size, capacity)


class Operands(NamedTuple):
    """The arrays of a partial, in the order in which the library's call on CPU devices takes them.

    Row i of a source is row i % page of the page ``page_table[source, i // page]``; `Geometry` says
    its position p. Query t of entry b stands at starts + t. It sees the row if::

        p < lengths;   p ≤ starts + t;   starts + t − p ≤ window, with a window
        0 ≤ source < sources;   t < query_lengths;   starts + t ≥ 0

    and if the page exists. The score of the row is cap(scale · q k) + slope · (p − (starts + t)).
    Queries that see no row have o = 0 and lse = −∞. What no query of an entry sees reaches none of
    its results, be it NaN, and entries of the page table that belong to such rows are never used.
    """

    query: Float[Array, "batch queries heads head_dim"]
    key_cache: Float[Array, "pages page kv_heads head_dim"]
    value_cache: Float[Array, "pages page kv_heads value_dim"] | None
    """None where the values are the first columns of the keys."""
    page_table: Int32[Array, "sources columns"]
    """The pages of each source, a sequence or a shared prefix."""
    source: Int32[Array, " batch"]
    """The source that an entry reads; −1 for none."""
    lengths: Int32[Array, " batch"]
    """Positions of the source that an entry may see."""
    starts: Int32[Array, " batch"]
    """Position of query 0."""
    query_lengths: Int32[Array, " batch"]
    """Queries in use."""
    rank: Int32[Array, ""]
    slopes: Float32[Array, " heads"] | None
    """ALiBi slopes."""

    @property
    def values(self) -> Float[Array, "pages page kv_heads columns"]:
        """The array whose first columns are the values."""
        return self.key_cache if self.value_cache is None else self.value_cache
