"""``vmap`` of one device's computation.

JAX can map a dimension that the mesh shards: over the axes of ``spmd_axis_name``, or over Explicit
axes that shard the arrays. Inside the ``vmap`` JAX's types do not show these axes. A computation
that exchanges messages, or that tells rings apart, needs them. So the functions here compute
outside of the ``vmap``, where the mapped dimension is a dimension of the arrays, and where each
device has its own part of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from burst_attention._derivatives import without_transpose
from burst_attention._mesh import (
    explicit_axes,
    names_of,
    over_axes,
    union_of_varying,
    vary_like,
    vary_over,
)
from burst_attention._types import ArrayType, Axes

Results = TypeVar("Results")
"""Arrays, in any tree."""
Entries: TypeAlias = Callable[[Callable[..., Results], list[jax.Array], list[bool]], Results]
"""Computes all entries of a mapped dimension, the first one of the arrays that have it."""


def over_batch(function: Callable[..., Results], *operands: object) -> Results:
    """Returns ``function(*operands)``, whose ``vmap`` puts the mapped dimension into the batch.

    Operands and results are trees of arrays that have the batch first.
    """
    return _mapped(function, operands, _in_batch)


def one_by_one(function: Callable[..., Results], *operands: object) -> Results:
    """Returns ``function(*operands)``, whose ``vmap`` computes one entry after the other."""
    return _mapped(function, operands, _in_turn)


def mapped_on_devices(function: Callable[..., Results], *operands: object) -> Results:
    """Returns ``function(*operands)``, whose ``vmap`` is that of the function on each device.

    Inside it types show the axes that the outer ``vmap`` hides. JAX does not join arrays that the
    outer one maps over axes of ``spmd_axis_name`` with arrays that it leaves whole, such as
    constants of a user's function. The function casts its operands to one type itself.
    """
    return _mapped(function, operands, _in_vmap)


def spread(arrays: Results) -> Results:
    """Returns arrays that a ``vmap`` over axes of ``spmd_axis_name`` maps, all or none.

    JAX neither joins such arrays with arrays that the ``vmap`` leaves whole, nor sums the gradient
    of a whole array if a ``custom_vjp`` computes it. It sums the gradient of the difference here,
    which XLA leaves out: the array minus 0.
    """
    given, tree = jax.tree.flatten(vary_like(arrays, arrays))
    zero, _ = _zero(given)

    def mapped(x: jax.Array) -> jax.Array:
        nothing = jnp.asarray(zero, x.dtype)
        return x ^ nothing if x.dtype == bool else x - nothing

    return jax.tree.unflatten(tree, map(mapped, given))


def _zero(given: list[jax.Array]) -> tuple[ArrayType, frozenset[str]]:
    """Returns False, which a ``vmap`` maps with one of the arrays, and the axes that it hides.

    It does so over axes of ``spmd_axis_name`` only, and the axes are known while it is traced.
    """
    # The rule lives as long as the program, so it must hold no traced array.
    found: list[frozenset[str]] = []
    shown = union_of_varying(given)
    zero = custom_vmap(lambda *arrays: vary_like(arrays, jnp.zeros((), bool)))

    @zero.def_vmap
    def rule(size: int, _: object, *arrays: jax.Array) -> tuple[jax.Array, bool]:
        hidden = union_of_varying(arrays) - shown
        found.append(hidden)
        shape = (size,) if hidden else ()
        return vary_like(arrays, jnp.zeros(shape, bool)), bool(hidden)

    result = without_transpose(zero(*map(lax.stop_gradient, given)))
    return result, frozenset[str]().union(*found)


@contextmanager
def explained_vmaps() -> Iterator[None]:
    """Says what to write where JAX can't map the ``shard_map`` of a call by nested ``vmap``s.

    Under a ``vmap`` over axes of ``spmd_axis_name``, JAX types the arithmetic of an inner ``vmap``
    as different along these axes. Then it refuses the results of a ``shard_map`` between the two.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "_RepError":
            raise
        raise NotImplementedError(
            "the vmap with spmd_axis_name must be the innermost one, since JAX can't compute "
            "another vmap inside it over a shard_map; exchange the two, "
            "jax.vmap(jax.vmap(f, spmd_axis_name=...)), or give the inner dimension to the call as "
            "its batch"
        ) from error


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def all_to_all(
    x: Shaped[Array, "batch ..."], axes: Axes, split_axis: int, concat_axis: int
) -> Shaped[Array, "batch ..."]:
    """Returns ``lax.all_to_all`` of tiles.

    XLA would gather a mapped dimension that Explicit axes shard.
    """
    exchange = partial(
        lax.all_to_all, axis_name=axes, split_axis=split_axis, concat_axis=concat_axis, tiled=True
    )
    return over_batch(exchange, x)


def _exchange(
    x: jax.Array, axes: Axes, split_axis: int, concat_axis: int
) -> tuple[jax.Array, None]:
    return all_to_all(x, axes, split_axis, concat_axis), None


def _exchange_back(
    axes: Axes, split_axis: int, concat_axis: int, _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    return (without_transpose(all_to_all(cotangent, axes, concat_axis, split_axis)),)


all_to_all.defvjp(_exchange, _exchange_back)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather(x: Shaped[Array, "batch n ..."], axes: Axes) -> Shaped[Array, "batch all_n ..."]:
    """Returns ``lax.all_gather`` of rows."""
    return over_batch(partial(lax.all_gather, axis_name=axes, axis=1, tiled=True), x)


def _gather(x: jax.Array, axes: Axes) -> tuple[jax.Array, None]:
    return all_gather(x, axes), None


def _sum_back(axes: Axes, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    scatter = partial(lax.psum_scatter, axis_name=axes, scatter_dimension=1, tiled=True)
    return (over_batch(scatter, cotangent),)


all_gather.defvjp(_gather, _sum_back)


def _mapped(
    function: Callable[..., Results], operands: object, entries: Entries[Results]
) -> Results:
    """Returns ``function(*operands)``, whose ``vmap`` is ``entries``."""
    given, tree = jax.tree.flatten(operands)
    _, hidden = _zero(given)

    def one(*arrays: jax.Array) -> Results:
        # JAX types some arrays by the axes that the vmap hides, such as zeros that are cotangents.
        if entries is not _in_vmap:
            arrays = vary_over(union_of_varying(arrays) | hidden, arrays)
        return function(*jax.tree.unflatten(tree, arrays))

    call = custom_vmap(lambda *arrays: _on_devices(one, arrays))

    @call.def_vmap
    def rule(_: int, mapped: list[bool], *arrays: jax.Array) -> tuple[Results, object]:
        def compute(*own: jax.Array) -> Results:
            return entries(one, list(own), mapped)

        results = _on_owners(compute, arrays, mapped)
        return results, jax.tree.map(lambda _: True, results)

    return without_transpose(call(*given))


def _in_batch(
    function: Callable[..., Results], arrays: list[jax.Array], mapped: list[bool]
) -> Results:
    size = arrays[mapped.index(True)].shape[0]
    whole = [
        x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(arrays, mapped, strict=True)
    ]
    results = over_batch(function, *(x.reshape(size * x.shape[1], *x.shape[2:]) for x in whole))
    batch = whole[0].shape[1]
    return jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)


def _in_turn(
    function: Callable[..., Results], arrays: list[jax.Array], mapped: list[bool]
) -> Results:
    def one(entry: list[jax.Array]) -> Results:
        parts = iter(entry)
        pairs = zip(arrays, mapped, strict=True)
        return one_by_one(function, *(next(parts) if is_mapped else x for x, is_mapped in pairs))

    found: Results = lax.map(one, [x for x, y in zip(arrays, mapped, strict=True) if y])
    return found


def _in_vmap(
    function: Callable[..., Results], arrays: list[jax.Array], mapped: list[bool]
) -> Results:
    found: Results = jax.vmap(function, [0 if is_mapped else None for is_mapped in mapped])(*arrays)
    return found


def _on_owners(
    function: Callable[..., Results], arrays: tuple[jax.Array, ...], mapped: list[bool]
) -> Results:
    """Computes on each device with its own part of the mapped dimension."""
    first = arrays[mapped.index(True)]
    axes = names_of(jax.typeof(first).sharding.spec[0])
    if not axes:
        return function(*arrays)
    own, whole = PartitionSpec(axes), PartitionSpec()
    specs = tuple(own if is_mapped else whole for is_mapped in mapped)
    return over_axes(function, specs, own, set(axes))(*arrays)


def _on_devices(function: Callable[..., Results], arrays: tuple[jax.Array, ...]) -> Results:
    """Computes on each device along the Explicit axes that are not manual.

    The arrays are the same on all of them.
    """
    if not explicit_axes(*arrays):
        return function(*arrays)
    return over_axes(function, PartitionSpec(), PartitionSpec())(*arrays)
