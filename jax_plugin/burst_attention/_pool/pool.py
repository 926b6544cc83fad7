"""Devices that hold caches, apart from those of the model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from burst_attention import _checks, _mesh
from burst_attention._decode.arguments import MOST_COLUMNS
from burst_attention._decode.options import CACHE_LAYOUTS, CacheLayout
from burst_attention._pool import checks, ways
from burst_attention._pool.context import without_contexts
from burst_attention._pool.plan import Request, plan, tokens_of
from burst_attention._pool.programs import Cache, Place, empty
from burst_attention._pool.ways import Way
from burst_attention._types import Axes


class Pending(NamedTuple):
    """A result that a pool's devices compute."""

    results: tuple[jax.Array, ...]
    """out and, if asked for, lse, on the pool's devices."""
    ways: tuple[Way, ...]

    def receive(self) -> Any:
        """Returns out, or (out, lse), on the model's devices, sharded as query was."""
        with without_contexts():
            found = ways.cross(ways.leave(self.results, self.ways), self.ways)
        return found[0] if len(found) == 1 else tuple(found)


class CachePool:
    """Devices that hold key/value caches and attend over them, apart from the model's devices.

    Attention of decoding reads a whole cache for each token, and needs memory and its bandwidth.
    The rest of a model needs FLOPs. In attention offloading (Lamina, arXiv:2405.01814) each has
    devices of its own: for each layer query, key and value go to the pool, and out comes back. A
    pool is a set of other GPUs of the process, or its CPU devices while the model is on GPUs. Each
    cache is sharded over all devices of the pool, as `decode_attention` says.

    A program of JAX has one set of devices, so no ``jit`` holds a whole step of such a model. Cut
    the step at its attention: a compiled program computes query, key and value of a layer, the pool
    attends, and the next program computes the rest of the layer. The methods run compiled programs
    themselves, one for each combination of shapes, and can't be traced. A ``lax.scan`` over layers
    becomes a loop of Python around these programs, in which a traced index takes a layer's
    parameters from the stacked ones, so that all layers share a program::

        pool = ba.CachePool(jax.devices()[4:])
        caches = [pool.init(batch=8, positions=131_072, kv_heads=8, head_dim=128) for _ in layers]
        lengths = pool.put(lengths)                   # once for all layers of a step
        for layer in range(len(caches)):
            x, query, key, value = before(params, layer, x)
            out, caches[layer] = pool.attend(caches[layer], query, key, value, lengths)
            x = after(params, layer, x, out)

    Query, key, value and out cross once each. For tokens ``[batch, T]`` these are::

        batch · T · ((heads + 2 · kv_heads) · head_dim + heads · value_dim) · bytes of an element

    Calls return before the devices have computed. Only between GPUs and CPU devices JAX waits for
    an array before it copies it, so there call `send`, and ``receive`` as late as possible;
    `alternate` does so for several batches. Nothing passes through the host's memory unless the
    pool or the model is there.

    Where several processes share the meshes, each sends from its own devices to its own devices, so
    each must have some of both.

    Args:
      devices: the pool's devices, or a mesh of them that has no axes besides ``axis_name``.
      axis_name: the mesh axis of the sequence, or a pair (outer, inner); default: the axes of the
        mesh, or ``"context"`` for a list of devices.
      layout: where positions are, as in `decode_attention`.
      interleave: consecutive positions on a device, as in `decode_attention`.

    Raises:
      ValueError, TypeError: for devices that make no pool.
    """

    def __init__(
        self,
        devices: Mesh | Sequence[jax.Device],
        *,
        axis_name: str | Axes | None = None,
        layout: CacheLayout = "striped",
        interleave: int | None = None,
    ) -> None:
        mesh, axes = checks.mesh(devices, axis_name)
        kind = _checks.choice("layout", layout, CACHE_LAYOUTS)
        run = None if interleave is None else _checks.size("interleave", interleave)
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(axes))
        self._place = Place(auto, axes, kind, run)

    def __repr__(self) -> str:
        """Returns the devices and how sequences lie on them."""
        mesh, axes, layout, interleave = self._place
        named = f"axis_name={_mesh.axis_name_of(axes)!r}, layout={layout!r}"
        return f"CachePool({list(mesh.devices.flat)}, {named}, interleave={interleave})"

    @property
    def mesh(self) -> Mesh:
        """The mesh of the pool's devices. Caches lie on it."""
        return self._place.mesh

    def init(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = "bfloat16",
        batch: int | None = None,
        positions: int | None = None,
        pages: int | None = None,
        page: int | None = None,
        latents: bool = False,
    ) -> Cache:
        """Makes empty caches of a layer.

        With ``batch`` and ``positions`` each sequence has rows of its own, enough for
        ``positions`` tokens. With ``pages`` and ``page`` the caches are pages, which page tables
        give to sequences. Caches of shared prefixes are caches of rows whose ``batch`` is the
        number of prefixes; beside pages the pool's interleave must be ``page``.

        Args:
          kv_heads: heads of keys and values.
          head_dim: columns of keys.
          value_dim: columns of values; default: ``head_dim``.
          dtype: bfloat16, float16 or float32, that of the new tokens.
          batch: number of sequences.
          positions: the most tokens of a sequence. The devices get equally many rows, in whole runs
            of ``interleave``.
          pages: number of pages on each device.
          page: rows of a page.
          latents: whether the values are the first columns of the keys, as latents have them. There
            is one array, with None in place of values. Calls then take ``value_dim``, and None in
            place of new values.

        Returns:
          ``(key_cache, value_cache)`` on the pool's devices, all zeros:
          ``[batch, rows of all devices, kv_heads, dim]`` or
          ``[pages of all devices, page, kv_heads, dim]``.

        Raises:
          ValueError, TypeError: for sizes that make no cache.
        """
        shape, is_paged = checks.cache_shape(self._place, batch, positions, pages, page)
        heads = _checks.size("kv_heads", kv_heads)
        dims: tuple[int, ...] = (head_dim, head_dim if value_dim is None else value_dim)
        found = checks.dtype(dtype)
        for name, dim in zip(("head_dim", "value_dim"), dims, strict=True):
            _checks.head_dim(name, _checks.integer(name, dim), most=MOST_COLUMNS)
        sharding = self._place.cache(is_paged)
        if _checks.flag("latents", latents):
            if value_dim is not None:
                raise TypeError(
                    "caches of latents have no array of values, so init takes no value_dim, got "
                    f"{value_dim}; give value_dim to the calls"
                )
            dims = dims[:1]
        with without_contexts():
            zeros = [empty((*shape, heads, dim), str(found), sharding)() for dim in dims]
        keys, *values = ways.untraced(zeros)
        return keys, values[0] if values else None

    def put(self, x: object) -> jax.Array:
        """Returns an array that every device of the pool has, such as lengths or a page table.

        `send` puts what is not there yet, so it pays for arrays that several layers share. An array
        of the host is copied, and integers beyond int32 end where int32 does.
        """
        checks.outside_traces(x=x)
        with without_contexts():
            return ways.put([x], self._place.whole)[0]

    def attend(
        self,
        cache: Cache,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        lengths: object,
        **options: Any,
    ) -> tuple[Any, Cache]:
        """Appends new tokens to a layer's caches and attends over them.

        The result is that of `append_to_cache` and `decode_attention` on the pool's mesh, bit for
        bit. It is `send` and ``receive`` at once.

        Args:
          cache: what `init`, or the call before, returned. Its arrays are donated: use those that
            this call returns.
          query: ``[batch, T, heads, head_dim]`` on the model's devices, T from 1 to 16. An array
            may be sharded in any way that cuts out alike. One that is whole on a device, or whose
            shards are one for each device of the pool, crosses as it is; another one is gathered
            first, on the model's devices.
          key: ``[batch, T, kv_heads, head_dim]``.
          value: ``[batch, T, kv_heads, value_dim]``; None for caches of latents.
          lengths: integers ``[batch]``, the tokens of each whole sequence, new ones included. An
            array of NumPy may change after the call.
          **options: those of `decode_attention`, ``page_table`` among them, which all devices of
            the pool share; axis_name, layout and interleave are the pool's. ``prefix`` takes the
            caches of shared prefixes, with ``prefix_of`` and ``prefix_lengths`` of
            `shared_prefix_attention`.

        Returns:
          ``(out, cache)``, out on the model's devices and sharded as query is; with
          ``return_residual=True`` ``((out, lse), cache)``.

        Raises:
          ValueError, TypeError, NotImplementedError: before the devices compute and the cache is
            donated, with the way out.
        """
        pending, cache = self.send(cache, query, key, value, lengths, **options)
        return pending.receive(), cache

    def send(
        self,
        cache: Cache,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        lengths: object,
        **options: Any,
    ) -> tuple[Pending, Cache]:
        """Begins `attend`, with the same arguments.

        Returns:
          ``(pending, cache)``. ``pending.receive()`` returns what `attend` returns first.
        """
        return self._run(False, cache, (query, key, value), lengths, options)

    def prefill(
        self,
        cache: Cache,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        lengths: object,
        **options: Any,
    ) -> tuple[Any, Cache]:
        """Appends a chunk of a prompt to a layer's caches and attends over them.

        Each device of the pool attends an equal part of the chunk's queries, in a ring over the
        caches. Pages, and the prefix of each sequence, are copied into rows for the call. Heads of
        more than 256 columns, such as latents, attend as `attend` does, 16 tokens after 16 tokens.
        Chunks of several lengths are programs of their own.

        Args:
          cache: as in `attend`.
          query: ``[batch, T, heads, head_dim]`` on the model's devices, T any number. Query t
            stands at position lengths − query_lengths + t.
          key: ``[batch, T, kv_heads, head_dim]``.
          value: ``[batch, T, kv_heads, value_dim]``; None for caches of latents.
          lengths: integers ``[batch]``, the tokens of each whole sequence, the chunk included.
          **options: ``page_table``, ``query_lengths``, ``scale``, ``local_window_size``,
            ``logits_soft_cap``, ``sinks``, ``alibi_slopes``, ``value_dim``, ``implementation`` and
            ``return_residual`` of `decode_attention`; ``prefix``, ``prefix_of`` and
            ``prefix_lengths`` as in `attend`.

        Returns:
          ``(out, cache)`` or ``((out, lse), cache)``, as `attend`. Tokens beyond ``query_lengths``
          have out 0.

        Raises:
          ValueError, TypeError, NotImplementedError: before the devices compute, with the way out.
        """
        pending, cache = self._run(True, cache, (query, key, value), lengths, options)
        return pending.receive(), cache

    def _run(
        self,
        is_prefill: bool,
        cache: Cache,
        tokens: tuple[object, object, object],
        lengths: object,
        options: dict[str, Any],
    ) -> tuple[Pending, Cache]:
        """Sends tokens to the pool and starts its program."""
        place = self._place
        static, data, prefix, with_lse = checks.options(is_prefill, options)
        given = checks.tokens(tokens)
        checks.outside_traces(lengths=lengths, **data)
        checks.caches(place, cache, "page_table" in data)
        if prefix is not None:
            checks.prefixes(place, prefix, cache, "page_table" in data)
        request = Request(place, is_prefill, static, with_lse, tuple(data), tokens_of(given))
        how = plan(request)
        with without_contexts():
            sent = how.send(given)
            sizes, *arrays = ways.put([lengths, *data.values()], place.whole)
            named = dict(zip(data, arrays, strict=True))
            results, cache = how.run(tuple(cache), sent, sizes, named, tuple(prefix or ()))
        return Pending(results, how.back), cache
