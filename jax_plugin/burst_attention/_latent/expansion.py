"""The user's function ``expand``, traced in each call.

``expand`` may read what changes after the call, such as an attribute, a list or a global. So no
cache has it as a key, and nothing runs it later than the call: the ring and its backward pass
compute with the programs that the call has traced. Arrays that ``expand`` finds in its
surroundings are operands of these programs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from burst_attention import _checks
from burst_attention._attention.options import AnyArray
from burst_attention._mesh import vary_like, varying_axes

Tree: TypeAlias = Any
"""Arrays in any tree, as the user has them."""
Expand: TypeAlias = Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]
"""Returns key and value of latents, from parameters and latents."""
Leaves: TypeAlias = list[Shaped[Array, "..."]]
"""The arrays of a tree."""
OfLeaves: TypeAlias = Callable[[Leaves, Leaves], object]
"""``expand`` as a function of the arrays of its trees."""
Kind: TypeAlias = tuple[int, frozenset[str]]
"""The tokens of a chunk of latents, and the mesh axes over which it varies."""
Captured: TypeAlias = dict[Kind, list[Shaped[AnyArray, "..."]]]
"""The arrays that ``expand`` found in its surroundings, for each kind of chunk."""
KeyValue: TypeAlias = tuple[
    Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads value_dim"]
]
Put: TypeAlias = Callable[[Leaves], Leaves]
"""Returns arrays, of which those of floats are replaced."""
NOT_IN_THE_TEXT = re.compile("callback|debug_print|custom_vmap")
"""Primitives with functions of Python that the text of a lowered program does not show."""


@dataclass(frozen=True)
class Expansion:
    """What ``expand`` computes, as one call has traced it."""

    programs: Mapping[Kind, Any] = field(compare=False)
    """The program for each kind of chunk, of captured arrays, params and latents."""
    text: object
    """What tells programs apart: all that they compute, or an object that equals no other."""

    def __call__(self, captured: Captured, params: Leaves, latent: Leaves) -> KeyValue:
        """Returns key and value of some tokens."""
        kind = _kind(latent)
        if kind not in self.programs:
            raise NotImplementedError(
                "a vmap with spmd_axis_name maps a program that JAX has traced without it, and "
                "expand is traced in it already; put jax.jit around this vmap, not inside it"
            )
        arrays = (*captured[kind], *params, *latent)
        key, value = jax.core.eval_jaxpr(self.programs[kind].jaxpr, (), *arrays)
        return key, value

    def samples(
        self,
        captured: Captured,
        params: Leaves,
        latent: Leaves,
        cotangents: Float[Array, "2"] | None,
    ) -> Leaves:
        """Returns results of all programs, and gradients if there are cotangents."""
        results: list[jax.Array] = []
        for rows, _ in self.programs:
            own, with_params = floats(params)
            part, with_part = floats([x[:, :rows] for x in latent])

            def expanded(
                params: Leaves,
                latent: Leaves,
                put: tuple[Put, Put] = (with_params, with_part),
            ) -> KeyValue:
                return self(captured, put[0](params), put[1](latent))

            if cotangents is None:
                results += expanded(own, part)
                continue
            pair, pullback = jax.vjp(expanded, own, part)
            given = [jnp.full_like(x, y) for x, y in zip(pair, cotangents, strict=True)]
            results += [*pair, *jax.tree.leaves(pullback(tuple(vary_like(pair, given))))]
        return results

    def shows_all(self) -> bool:
        """Whether the text of the lowered programs shows all that they do."""
        return not any(NOT_IN_THE_TEXT.search(str(each)) for each in self.programs.values())


def traced(
    expand: OfLeaves,
    query: Float[Array, "batch q_len heads head_dim"],
    params: Leaves,
    latent: Leaves,
    lengths: Iterable[int],
) -> tuple[dict[Kind, Any], Captured]:
    """Returns the programs of ``expand`` for the first tokens of latents, for some lengths."""
    programs, captured = {}, {}
    for rows in lengths:
        part = [x[:, :rows] for x in latent]
        with _explained_meshes():
            found = jax.make_jaxpr(lambda *trees: _checked(query, trees[1], expand(*trees)))(
                params, part
            )
        # Traced anew, the program holds no array.
        kind = _kind(part)
        captured[kind] = [x if isinstance(x, jax.Array) else np.asarray(x) for x in found.consts]
        programs[kind] = jax.make_jaxpr(
            lambda consts, *arrays, jaxpr=found.jaxpr: jax.core.eval_jaxpr(jaxpr, consts, *arrays)
        )(captured[kind], *params, *part)
    return programs, captured


def _kind(latent: Leaves) -> Kind:
    return latent[0].shape[1], varying_axes(latent[0])


@contextmanager
def _explained_meshes() -> Iterator[None]:
    """Says what to do with arrays that JAX can't bring into a ``shard_map`` by a closure."""
    try:
        yield
    except NotImplementedError as error:
        if "Closing over inputs to shard_map" not in str(error):
            raise
        raise NotImplementedError(
            "expand must find arrays that lie on Explicit mesh axes in params or latent, but it "
            "found one in its surroundings, from where JAX can't bring it into the shard_map of "
            "latent_attention; give this array in params"
        ) from error


def _checked(
    query: Float[Array, "batch q_len heads head_dim"], latent: Leaves, pair: Any
) -> KeyValue:
    """Returns key and value of a chunk, checked."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            "expand(params, latent) must return a pair of arrays (key, value), got "
            f"{_checks.describe(pair)}"
        )
    like = jax.ShapeDtypeStruct(query.shape, query.dtype)
    key, value = map(_checks.as_array, _checks.array_types(like, *pair, any_head_dim=True)[1:])
    if key.shape[1] != latent[0].shape[1]:
        raise ValueError(
            f"expand(params, latent) must return a key for each of the {latent[0].shape[1]} "
            f"tokens of latent, got key of shape {key.shape}; it gets one chunk at a time"
        )
    return key, value


def floats(arrays: Leaves) -> tuple[Leaves, Put]:
    """Returns the arrays of floats, and a function that puts others in their place."""
    are_floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

    def put(others: Leaves) -> Leaves:
        rest = iter(others)
        return [next(rest) if is_one else x for x, is_one in zip(arrays, are_floats, strict=True)]

    return [x for x, is_one in zip(arrays, are_floats, strict=True) if is_one], put


def without_gradient(captured: Captured) -> Captured:
    """Returns captured arrays whose derivatives are errors."""
    return jax.tree.map(
        lambda x: _constant(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, captured
    )


@jax.custom_jvp
def _constant(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return x


@_constant.defjvp
def _refuse(primals: tuple[jax.Array], tangents: object) -> NoReturn:
    raise NotImplementedError(
        "expand must find arrays that are differentiated in params or latent, but it found "
        f"{jax.typeof(primals[0])} in its surroundings; give this array to latent_attention in "
        "params, or put jax.lax.stop_gradient around it"
    )
