"""Checks of what a pool is made of and of what its calls get."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from burst_attention import _checks, _mesh
from burst_attention._attention.options import check_options
from burst_attention._checks import describe, listed
from burst_attention._pool import ways
from burst_attention._pool.programs import Place
from burst_attention._types import Arrays, Axes

ARRAYS = (
    *("query_lengths", "page_table", "sinks", "alibi_slopes"),
    *("prefix_of", "prefix_lengths"),
)
"""Options that are arrays."""
OF_PREFIX = ("prefix", "prefix_of", "prefix_lengths")
OF_PREFILL = (
    *("page_table", "query_lengths", "scale", "local_window_size", "logits_soft_cap"),
    *("sinks", "alibi_slopes", "value_dim", "implementation", "return_residual"),
    *OF_PREFIX,
)
KEPT = "arrays on the pool's devices, as CachePool.init returns them"
OF_POOL = ("axis_name", "layout", "interleave")
"""Options of `decode_attention` that a pool has."""
OF_ATTENTION = ("scale", "local_window_size", "logits_soft_cap", "implementation")
"""Options of `attention` that are no arrays."""


class Tokens(NamedTuple):
    """What the type of query, key or value says, and where the array is."""

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding


def mesh(devices: object, axis_name: object) -> tuple[Mesh, Axes]:
    """Returns the mesh of a pool's devices, and its axes in the order of the sequence."""
    if not isinstance(devices, Mesh):
        found = _devices(devices)
        axes = _mesh.ring_axes("context" if axis_name is None else axis_name)
        if len(axes) != 1:
            raise ValueError(
                f"a list of devices has one axis, got axis_name={axis_name!r}; give a mesh with "
                "both axes"
            )
        return Mesh(np.array(found), axes), axes
    axes = _mesh.ring_axes(devices.axis_names if axis_name is None else axis_name)
    if set(axes) != set(devices.axis_names):
        raise ValueError(
            f"the mesh of a pool must have the axes of the sequence alone, {listed(axes)}, got "
            f"{listed(devices.axis_names)}: each cache is sharded over all devices of a pool; make "
            "a pool for each group of devices"
        )
    _mesh.levels(devices, axes)
    return devices, axes


def _devices(value: object) -> list[jax.Device]:
    found = list(value) if isinstance(value, Sequence | np.ndarray) else []
    if not found or not all(isinstance(x, jax.Device) for x in found):
        raise TypeError(
            f"devices must be a mesh or a list of at least one device, got {describe(value)}; such "
            "as jax.devices()[4:] or jax.devices('cpu')"
        )
    if len(set(found)) < len(found):
        raise ValueError(f"each device of a pool must be named once, got {found}")
    return found


def cache_shape(
    place: Place, batch: object, positions: object, pages: object, page: object
) -> tuple[tuple[int, int], bool]:
    """Returns the first two dimensions of caches, and whether they are pages."""
    ranks = place.mesh.size
    given = {"batch": batch, "positions": positions, "pages": pages, "page": page}
    named = [name for name, x in given.items() if x is not None]
    if named == ["batch", "positions"]:
        run = ranks * (place.interleave or 1)
        rows = -(-_checks.size("positions", positions) // run) * run
        return (_checks.size("batch", batch), _checks.size("positions", rows)), False
    if named == ["pages", "page"]:
        rows = _checks.size("page", page)
        if place.interleave not in (None, rows):
            raise ValueError(
                f"page must be the pool's interleave, {place.interleave}, since whole pages go "
                f"round the devices, got {rows}; leave interleave out of the pool"
            )
        return (_checks.size("pages", ranks * _checks.size("pages", pages)), rows), True
    raise TypeError(
        "caches have either batch and positions or pages and page, got "
        f"{' and '.join(named) or 'none of them'}"
    )


def dtype(value: Any) -> np.dtype:
    """Returns the dtype of caches."""
    found = np.dtype(jax.numpy.dtype(value))
    if str(found) not in _checks.DTYPES:
        raise TypeError(f"dtype must be {listed(_checks.DTYPES, quote=False)}, got {found}")
    return found


class Options(NamedTuple):
    """The keyword arguments of a call."""

    static: tuple[tuple[str, Any], ...]
    """Options that are compiled into the program, by their names."""
    data: dict[str, object]
    """Options that are arrays."""
    prefix: Any
    """Caches of shared prefixes, or None."""
    with_lse: bool


def options(is_prefill: bool, given: Mapping[str, Any]) -> Options:
    """Returns the keyword arguments of a method."""
    for each in given:
        if each in OF_POOL:
            raise TypeError(f"{each} is the pool's: give it to CachePool, and leave it out here")
        if is_prefill and each not in OF_PREFILL:
            raise TypeError(
                f"CachePool.prefill() got an unexpected keyword argument {each!r}; it takes "
                f"{', '.join(OF_PREFILL)}"
            )
    rest = {each: x for each, x in given.items() if x is not None}
    prefixes = [each for each in OF_PREFIX if each in rest]
    if len(prefixes) not in (0, len(OF_PREFIX)):
        raise TypeError(
            f"shared prefixes need {', '.join(OF_PREFIX)} together, got {' and '.join(prefixes)}"
        )
    prefix = rest.pop("prefix", None)
    with_lse = _checks.flag("return_residual", rest.pop("return_residual", False))
    data = {each: rest.pop(each) for each in ARRAYS if each in rest}
    static = tuple(sorted((each, _static(each, x)) for each, x in rest.items()))
    # Programs are kept by their options, and Python takes 0, 0.0 and False for one key.
    check_options("CachePool", {each: rest[each] for each in OF_ATTENTION if each in rest})
    return Options(static, data, prefix, with_lse)


def outside_traces(**named: object) -> None:
    """Raises for traced arrays, or lists of them."""
    for name, given in named.items():
        for x in jax.tree.leaves(given):
            if isinstance(x, jax.core.Tracer):
                raise TypeError(
                    f"{name} must be an array outside of any trace, got {describe(x)}: "
                    f"{ways.OUTSIDE}"
                )


def _static(name: str, value: Any) -> Any:
    """Returns an option that is compiled into the program, as a key of programs."""
    found = tuple(value) if isinstance(value, list) else value
    try:
        hash(found)
    except TypeError:
        raise TypeError(
            f"{name} must be a Python value, since it is compiled into the program, got "
            f"{describe(value)}"
        ) from None
    return found


def prefixes(place: Place, given: Any, cache: Any, is_paged: bool) -> None:
    """Raises for caches of prefixes that are not on the pool's devices, or not cut as pages are."""
    caches(place, given, False, "prefix")
    if any(x is y for x in given for y in cache if x is not None):
        raise ValueError(
            "prefix must not be the cache that the call writes, since its arrays are donated; give "
            "a copy, tuple(map(jnp.copy, prefix))"
        )
    if is_paged and place.layout == "striped" and place.interleave is None:
        raise ValueError(
            "whole pages go round the devices, so prefixes beside pages must be cut alike; make "
            "the pool with interleave=page, and the prefixes in that pool"
        )


def caches(place: Place, given: object, is_paged: bool, name: str = "cache") -> None:
    """Raises for caches that are not on the pool's devices."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(
            f"{name} must be a pair (key_cache, value_cache), as CachePool.init returns it, got "
            f"{describe(given)}"
        )
    expected = place.cache(is_paged)
    if given[0] is given[1] is not None:
        raise ValueError(f"{name} must have arrays of its own for keys and for values, got one")
    for x in given:
        if x is None:
            continue
        outside_traces(**{name: x})
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} must have {KEPT}, got {describe(x)}")
        if x.is_deleted():
            raise ValueError(
                f"{name} was donated to an earlier call, which wrote new tokens in place; use the "
                "cache that this call returned"
            )
        if x.sharding != expected and x.sharding.device_set != expected.device_set:
            raise ValueError(f"{name} must have {KEPT}, got an array on {_named(x.sharding)}")


def tokens(given: Sequence[object]) -> Arrays:
    """Returns query, key and value; caches of keys alone have none."""
    for name, x in zip(("query", "key", "value"), given, strict=True):
        if x is None and name == "value":
            continue
        outside_traces(**{name: x})
        if not isinstance(x, jax.Array):
            raise TypeError(
                f"{name} must be an array of JAX on the model's devices, got {describe(x)}; use "
                "jax.device_put"
            )
    return tuple(x for x in given if isinstance(x, jax.Array))


def token_types(place: Place, given: Sequence[Tokens]) -> None:
    """Raises for new tokens that do not go together, or can't reach the pool."""
    query = given[0]
    for name, x in zip(("query", "key", "value"), given, strict=False):
        alike = x.dtype == query.dtype and x.shape[:2] == query.shape[:2]
        if len(x.shape) != 4 or not alike:
            raise ValueError(
                "query, key and value must have shape [batch, T, heads, head_dim] and one batch, T "
                f"and dtype, got query {list(query.shape)} {query.dtype} and {name} "
                f"{list(x.shape)} {x.dtype}"
            )
        if 0 in x.shape:
            raise ValueError(
                f"{name} must have at least one sequence, token, head and column, "
                f"[batch, T, heads, head_dim], got {list(x.shape)}"
            )
        if x.sharding.device_set != query.sharding.device_set:
            raise ValueError(
                f"query and {name} must be on the same devices, got {_named(query.sharding)} and "
                f"{_named(x.sharding)}"
            )
    model, pool = (_processes(x) for x in (query.sharding, place.whole))
    if model != pool:
        raise NotImplementedError(
            "each process that has devices of the model must have devices of the pool too, since "
            "JAX copies no array from one process to another outside of programs; got a model in "
            f"processes {sorted(model)} and a pool in processes {sorted(pool)}; take devices of "
            "each process for both, or run a model and a pool of jax.local_devices() in each"
        )


def out(query: Tokens, columns: object) -> None:
    """Raises where out, of a number of columns, can't be sharded as query is.

    Later the caches would be lost with the error.
    """
    if (width := _checks.index(columns)) is None:
        return
    shape = (*query.shape[:3], width)
    try:
        query.sharding.shard_shape(shape)
    except ValueError:
        raise ValueError(
            f"out is sharded as query is, but {query.sharding} can't cut its shape {list(shape)}; "
            "cut the heads or the batch of query instead of its columns"
        ) from None


def _processes(sharding: Sharding) -> set[int]:
    """Returns the processes that have devices of a sharding."""
    devices: set[Any] = sharding.device_set
    return {device.process_index for device in devices}


def _named(sharding: Sharding) -> str:
    """Returns the devices of a sharding in the words of an error."""
    devices: list[Any] = list(sharding.device_set)
    return str(sorted(devices, key=lambda device: device.id))
