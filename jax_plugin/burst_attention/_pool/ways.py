"""The ways of arrays between the devices of a model and those of a pool.

A program of XLA has one set of devices, so arrays leave one program and enter another. An array
crosses once, however many devices hold copies of it:

- Where each device has a shard of its own, and both sets have equally many devices, each shard goes
  to the device at the same place of the other set.
- Otherwise one device's copy crosses, and the other set copies or cuts it. A sharded array is
  gathered before, by a program on its own devices: JAX would gather it in the host's memory.

Each process sends from its own devices to its own devices, since JAX copies nothing between
processes outside of programs.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from burst_attention._mesh import names_of


class Way(NamedTuple):
    """The shardings that an array has on its way, one after another."""

    gathered: Sharding | None
    """On its own devices before it crosses, None to leave it as it is."""
    crossing: Sharding
    """On the other devices, as it arrives."""
    landing: Sharding
    """On the other devices, at the end."""

    @property
    def is_direct(self) -> bool:
        """Whether every device sends a shard of its own."""
        return self.gathered is None and self.crossing is self.landing


def local_devices(sharding: Sharding) -> list[jax.Device]:
    """Returns this process's devices of a sharding, in their order."""
    own = sharding.addressable_devices
    if isinstance(sharding, NamedSharding):
        return [device for device in sharding.mesh.devices.flat if device in own]
    return sorted(own, key=lambda device: device.id)


@cache
def way(source: Sharding, target: Sharding) -> Way:
    """Returns the way of an array, whose sharding is ``target`` at the end if it crosses whole."""
    landing_device = SingleDeviceSharding(local_devices(target)[0])
    if source.is_fully_replicated:
        return Way(None, landing_device, target)
    if matched := same_places(source, target):
        return Way(None, matched, matched)
    return Way(_whole_like(source), landing_device, target)


def _whole_like(source: Sharding) -> NamedSharding:
    """Returns the sharding of arrays that are whole on each device of ``source``."""
    if not isinstance(source, NamedSharding):
        raise ValueError(
            "arrays for a CachePool must have a NamedSharding, lie on one device or be the same "
            f"on all devices, got {source}; give the program that makes them out_shardings"
        )
    return NamedSharding(source.mesh, P())


@cache
def way_back(target: Sharding, home: Sharding) -> tuple[Sharding, Way]:
    """Returns how a program shards a result over a pool, and the result's way to ``target``.

    ``home`` is the sharding of an array that is whole on every device of the pool.
    """
    if not target.is_fully_replicated and (matched := same_places(target, home)):
        return matched, Way(None, target, target)
    return home, Way(None, SingleDeviceSharding(local_devices(target)[0]), target)


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


def cross(arrays: Sequence[jax.Array], ways: Sequence[Way]) -> list[jax.Array]:
    """Sends arrays along their ways. Returns at once where JAX copies without the host."""
    arrays = _all_gathered(arrays, ways)
    leaving = [
        x if way.is_direct else x.addressable_data(0) for x, way in zip(arrays, ways, strict=True)
    ]
    arrived = send(leaving, [each.crossing for each in ways])
    if all(each.crossing is each.landing for each in ways):
        return arrived
    if all(each.landing.is_fully_addressable for each in ways):
        return jax.device_put(arrived, [each.landing for each in ways])
    return [_spread(x, each.landing) for x, each in zip(arrived, ways, strict=True)]


def send(arrays: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """Copies arrays to the other set of devices. Everything that crosses passes through here."""
    found: list[jax.Array] = jax.device_put(arrays, shardings)
    return found


def put(given: Sequence[object], whole: NamedSharding) -> list[jax.Array]:
    """Returns arrays that are whole on every device of the sharding ``whole``."""
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for x in given]
    away = [x for x in arrays if not isinstance(x, jax.Array) or x.sharding != whole]
    if not away:
        return arrays
    ones = [x if isinstance(x, np.ndarray) else _whole_on_one(x) for x in away]
    if whole.is_fully_addressable:
        moved = iter(jax.device_put(ones, whole))
    else:
        moved = iter([_spread(x, whole) for x in ones])
    return [x if isinstance(x, jax.Array) and x.sharding == whole else next(moved) for x in arrays]


def _whole_on_one(x: jax.Array) -> jax.Array:
    """Returns a copy of an array on one of its devices."""
    if not x.is_fully_replicated:
        (x,) = _resharding((_whole_like(x.sharding),))(x)
    return x.addressable_data(0)


def _all_gathered(arrays: Sequence[jax.Array], ways: Sequence[Way]) -> Sequence[jax.Array]:
    """Returns arrays of which those are gathered whose ways say so, by one program."""
    to = tuple(way.gathered for way in ways if way.gathered is not None)
    if not to:
        return arrays
    cut = [x for x, way in zip(arrays, ways, strict=True) if way.gathered is not None]
    found = iter(_resharding(to)(*cut))
    return [
        x if way.gathered is None else next(found) for x, way in zip(arrays, ways, strict=True)
    ]


@cache
def _resharding(to: tuple[Sharding, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the program that gives arrays other shardings on the same devices."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays

    return jax.jit(run, out_shardings=to)


def _spread(x: jax.Array, target: Sharding) -> jax.Array:
    """Returns an array of the devices of all processes, each of which has its own copy of ``x``."""
    own = local_devices(target)
    assert isinstance(target, NamedSharding)
    whole = NamedSharding(target.mesh, P())
    copies = jax.device_put([x] * len(own), own)
    found = jax.make_array_from_single_device_arrays(x.shape, whole, copies)
    return found if target.is_fully_replicated else _resharding((target,))(found)[0]
