"""The ways of arrays between the devices of a model and those of a pool.

A program of XLA has one set of devices, so arrays leave one program and enter another. An array
crosses once, however many devices hold copies of it:

- Where each device has a shard of its own, and both sets have equally many devices, each shard goes
  to the device at the same place of the other set.
- Otherwise one device's copy crosses, and the other set copies or cuts it. A sharded array is
  gathered before, by a program on its own devices: JAX would gather it in the host's memory.
- Where both sets are CPU devices, which share the host's memory, nothing crosses. One call of
  ``jax.device_put`` then makes all copies (80 µs instead of 200 for four devices).

Each process sends from its own devices to its own devices, since JAX copies nothing between
processes outside of programs.

A call of ``jax.device_put`` takes more time than a small copy, so query, key and value cross as one
array.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from burst_attention._checks import beyond_int32, describe
from burst_attention._mesh import names_of

Found = TypeVar("Found", bound=Sequence[jax.Array])

MOST_KEPT = 1024
"""How many results each cache of a pool keeps, such as programs: those that were used last."""
OUTSIDE = (
    "a pool's programs run on other devices, so call it between the compiled programs of the "
    "model, not inside jax.jit, jax.shard_map, jax.lax.scan or jax.grad"
)
"""Why a pool takes no traced arrays, and the way out."""


class Way(NamedTuple):
    """The shardings that an array has on its way, one after another."""

    gathered: Sharding | None
    """On its own devices before it crosses, None to leave it as it is."""
    crossing: Sharding
    """On the other devices, as it arrives."""
    landing: Sharding
    """On the other devices, at the end."""

    is_direct: bool = False
    """Whether every device sends a shard of its own."""


def local_devices(sharding: Sharding) -> list[jax.Device]:
    """Returns this process's devices of a sharding, in their order."""
    own = sharding.addressable_devices
    if isinstance(sharding, NamedSharding):
        return [device for device in sharding.mesh.devices.flat if device in own]
    return sorted(own, key=lambda device: device.id)


@lru_cache(MOST_KEPT)
def way(source: Sharding, target: Sharding) -> Way:
    """Returns the way of an array, whose sharding is ``target`` at the end if it crosses whole."""
    if source.is_fully_replicated:
        return Way(None, _crossing(source, target), target)
    if matched := same_places(source, target):
        return Way(None, matched, matched, is_direct=True)
    return Way(_whole_like(source), _crossing(source, target), target)


def _crossing(source: Sharding, target: Sharding) -> Sharding:
    """Returns the sharding of a whole array as it arrives on the devices of ``target``."""
    if target.num_devices == 1 or (_is_in_host(source) and _is_in_host(target)):
        return target
    return SingleDeviceSharding(local_devices(target)[0])


def _is_in_host(sharding: Sharding) -> bool:
    """Returns whether a sharding's devices are CPU devices of this process."""
    devices: set[jax.Device] = sharding.device_set
    return sharding.is_fully_addressable and all(x.platform == "cpu" for x in devices)


def _whole_like(source: Sharding) -> NamedSharding:
    """Returns the sharding of arrays that are whole on each device of ``source``."""
    if not isinstance(source, NamedSharding):
        raise ValueError(
            "arrays for a CachePool must have a NamedSharding, lie on one device or be the same "
            f"on all devices, got {source}; give the program that makes them out_shardings"
        )
    return NamedSharding(source.mesh, P())


@lru_cache(MOST_KEPT)
def way_back(target: Sharding, home: Sharding) -> tuple[Sharding, Way]:
    """Returns how a program shards a result over a pool, and the result's way to ``target``.

    ``home`` is the sharding of an array that is whole on every device of the pool.
    """
    if not target.is_fully_replicated and (matched := same_places(target, home)):
        return matched, Way(None, target, target, is_direct=True)
    return home, Way(None, _crossing(home, target), target)


def same_places(source: Sharding, target: Sharding) -> NamedSharding | None:
    """Returns a sharding of equal shards in the same order on the devices of ``target``.

    None where devices share a shard, where one set has more devices than the other, or where
    several processes hold them.
    """
    if not isinstance(source, NamedSharding) or not isinstance(target, NamedSharding):
        return None
    mesh, devices = source.mesh, target.mesh.devices
    shards = math.prod(mesh.shape[name] for entry in source.spec for name in names_of(entry))
    if shards != mesh.size or mesh.size != devices.size:
        return None
    if not (source.is_fully_addressable and target.is_fully_addressable):
        return None
    types = (AxisType.Auto,) * len(mesh.axis_names)
    view = Mesh(devices.reshape(mesh.devices.shape), mesh.axis_names, axis_types=types)
    return NamedSharding(view, source.spec)


def leave(arrays: Sequence[jax.Array], ways: Sequence[Way]) -> list[jax.Array]:
    """Returns what of each array is to cross, where it comes from."""
    arrays = _all_gathered(arrays, ways)
    return [
        x if way.is_direct else x.addressable_data(0) for x, way in zip(arrays, ways, strict=True)
    ]


@jax.jit
def packed(*tokens: jax.Array) -> jax.Array:
    """Returns arrays ``[batch, T, heads, dim]`` side by side, ``[batch, T, columns]``."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in tokens], axis=2)


def unpacked(
    tokens: jax.Array, heads: Sequence[tuple[int, int]]
) -> list[Float[Array, "batch T heads dim"]]:
    """Inverts `packed`, given heads and dim of each array."""
    ends = list(accumulate(count * dim for count, dim in heads))
    parts = jnp.split(tokens, ends[:-1], axis=2)
    return [x.reshape(*x.shape[:2], *each) for x, each in zip(parts, heads, strict=True)]


def cross(leaving: list[jax.Array], ways: Sequence[Way]) -> list[jax.Array]:
    """Sends what `leave` returned. Returns at once where JAX copies without the host."""
    arrived = send(leaving, [each.crossing for each in ways])
    if all(each.crossing is each.landing for each in ways):
        return arrived
    if all(each.landing.is_fully_addressable for each in ways):
        found: list[jax.Array] = jax.device_put(arrived, [each.landing for each in ways])
        return found
    return [_spread(x, each.landing) for x, each in zip(arrived, ways, strict=True)]


def send(arrays: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """Copies arrays to the other set of devices. Everything that crosses passes through here."""
    found: list[jax.Array] = jax.device_put(arrays, shardings)
    return untraced(found)


def untraced(found: Found) -> Found:
    """Returns arrays, or raises where the call that made them is being traced."""
    if any(isinstance(x, jax.core.Tracer) for x in found):
        raise TypeError(f"the methods of a CachePool can't be traced: {OUTSIDE}")
    return found


def put(given: Sequence[object], whole: NamedSharding) -> list[jax.Array]:
    """Returns arrays that are whole on every device of the sharding ``whole``."""
    found = {
        at: x for at, x in enumerate(given) if isinstance(x, jax.Array) and x.sharding == whole
    }
    away = [at for at in range(len(given)) if at not in found]
    if away:
        ones = [_whole_on_one(given[at]) for at in away]
        if whole.is_fully_addressable:
            moved = jax.device_put(ones, whole)
        else:
            moved = [_spread(x, whole) for x in ones]
        found.update(zip(away, untraced(moved), strict=True))
    return [found[at] for at in range(len(given))]


def _whole_on_one(x: object) -> jax.Array | np.ndarray:
    """Returns a copy of an array on one of its devices, or on the host if it is there."""
    if not isinstance(x, jax.Array):
        return _copied(x)
    if not x.is_fully_replicated:
        (x,) = untraced(_resharding((_whole_like(x.sharding),))(x))
    return x.addressable_data(0)


def _copied(x: object) -> np.ndarray:
    """Returns a copy of an array of the host, since CPU devices may keep the memory that they get.

    Integers that JAX narrows end where the narrow type does. So none becomes another number.
    """
    whole = np.array(x)
    if whole.dtype.kind in "OSU":
        raise TypeError(f"arrays for a CachePool must hold numbers, got {describe(x)}")
    narrow = jax.dtypes.canonicalize_dtype(whole.dtype)
    if whole.dtype.kind not in "iu" or narrow == whole.dtype:
        return whole
    limits = np.iinfo(narrow)
    clipped = np.clip(whole, limits.min, limits.max)
    if not isinstance(x, np.ndarray | np.generic) and (clipped != whole).any():
        raise beyond_int32("arrays for a CachePool", x)
    return np.array(clipped, narrow)


def _all_gathered(arrays: Sequence[jax.Array], ways: Sequence[Way]) -> Sequence[jax.Array]:
    """Returns arrays of which those are gathered whose ways say so, by one program."""
    to = tuple(way.gathered for way in ways if way.gathered is not None)
    if not to:
        return arrays
    cut = [x for x, way in zip(arrays, ways, strict=True) if way.gathered is not None]
    found = iter(untraced(_resharding(to)(*cut)))
    return [x if way.gathered is None else next(found) for x, way in zip(arrays, ways, strict=True)]


@lru_cache(MOST_KEPT)
def _resharding(to: tuple[Sharding, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the program that gives arrays other shardings on the same devices."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays

    return jax.jit(run, out_shardings=to)


def _spread(x: jax.Array | np.ndarray, target: Sharding) -> jax.Array:
    """Returns an array of the devices of all processes, each of which has its own copy of ``x``."""
    own = local_devices(target)
    assert isinstance(target, NamedSharding)
    whole = NamedSharding(target.mesh, P())
    copies = jax.device_put([x] * len(own), own)
    found = jax.make_array_from_single_device_arrays(x.shape, whole, copies)
    return found if target.is_fully_replicated else _resharding((target,))(found)[0]
