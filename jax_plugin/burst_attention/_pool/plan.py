"""What a call of a pool does, once for each combination of shapes, shardings and options."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from burst_attention import _checks
from burst_attention._pool import checks, ways
from burst_attention._pool.checks import Tokens
from burst_attention._pool.programs import Call, Method, Place, program
from burst_attention._pool.ways import Way
from burst_attention._types import Arrays


class Request(NamedTuple):
    """What a plan depends on."""

    place: Place
    is_prefill: bool
    static: tuple[tuple[str, Any], ...]
    """Options that are compiled into the program, by their names."""
    with_lse: bool
    data: tuple[str, ...]
    """Names of the options that are arrays."""
    tokens: tuple[Tokens, ...]


class Plan(NamedTuple):
    """The ways of tokens to a pool, the program there, and the ways of results back."""

    there: tuple[Way, ...]
    is_packed: bool
    """Whether query, key and value cross as one array."""
    run: Callable[..., Any]
    back: tuple[Way, ...]

    def send(self, tokens: Arrays) -> Arrays:
        """Returns tokens as the pool's program takes them."""
        leaving = ways.leave(tokens, self.there)
        if not self.is_packed:
            return tuple(ways.cross(leaving, self.there))
        return tuple(ways.cross([ways.packed(*leaving)], self.there[:1]))


@lru_cache(ways.MOST_KEPT)
def plan(request: Request) -> Plan:
    """Returns the plan of a call.

    Raises:
      ValueError, NotImplementedError: for tokens that the pool can't take.
    """
    place, is_prefill, static, with_lse, data, tokens = request
    checks.token_types(place, tokens)
    query = tokens[0]
    checks.out(query, tokens[2].shape[3] if len(tokens) > 2 else dict(static).get("value_dim"))
    # Rings take heads of attention's width.
    is_ring = is_prefill and max(x.shape[3] for x in tokens) <= _checks.MAX_HEAD_DIM
    landing = place.tokens(query.shape[1]) if is_ring else place.whole
    there = tuple(ways.way(x.sharding, landing) for x in tokens)
    is_packed = not any(each.is_direct for each in there)
    packed = tuple((x.shape[2], x.shape[3]) for x in tokens) if is_packed else ()
    targets = _result_shardings(query.sharding, with_lse)
    leaving, back = zip(*(ways.way_back(x, place.whole) for x in targets), strict=True)
    method: Method = "ring" if is_ring else "pieces" if is_prefill else "step"
    call = Call(place, method, "page_table" in data, with_lse, static, packed, leaving)
    return Plan(there, is_packed, program(call), back)


def _result_shardings(query: Sharding, with_lse: bool) -> tuple[Sharding, ...]:
    """Returns the shardings of out and lse on the model's devices."""
    if not with_lse:
        return (query,)
    if isinstance(query, NamedSharding):
        return query, NamedSharding(query.mesh, P(*query.spec[:3]))
    return query, query


def tokens_of(arrays: Arrays) -> tuple[Tokens, ...]:
    """Returns what a plan depends on of query, key and value."""
    return tuple(Tokens(x.shape, str(x.dtype), x.sharding) for x in arrays)
