"""Calls of the public interface on meshes that trainers have, each with its arrays and gradients.

A case is one call on one mesh. The expected results are those of the same call on one device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product as combinations

import case_list
import jax
import numpy as np
import ring
import tour_arrays
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STAGES = 2
QKV = ("query", "key", "value")
SHARED = frozenset({"key", "sinks", "decay", "gate"})
"""Arrays that all stages of a ``vmap`` share."""
MESHES = {
    "one device": ({"data": 1, "context": 1, "tensor": 1}, ("context",)),
    "tensor of one": ({"data": 2, "context": 2, "tensor": 1}, ("context",)),
    "data of one": ({"tensor": 2, "data": 1, "context": 2}, ("context",)),
    "another order": ({"gpu": 2, "data": 1, "node": 2, "tensor": 1}, ("node", "gpu")),
    "three names": ({"outer": 1, "context": 4, "expert": 1}, ("outer", "context", "expert")),
    "four names": ({"c": 1, "b": 2, "a": 1, "d": 2}, ("a", "b", "c", "d")),
}
"""The axes of a mesh with their sizes, and the axes of the sequence, the outermost one first."""
FACTORS = {
    "mesh": tuple(MESHES),
    "types": ("Auto", "Explicit"),
    "place": ("sharded", "whole", "numpy", "unnamed", "all numpy"),
    "mapped": ("no", "vmap", "stage of one", "stages"),
}
"""What all calls are tried with.

``place`` says where arrays are. Query, key and value are sharded in all but the last two, the other
arrays in the first alone. In ``unnamed`` their types leave out axes of one device.
``mapped`` is a ``vmap`` of two stages, in the last two over an axis of one or two devices: JAX maps
Auto axes by ``spmd_axis_name``, and Explicit ones by the types of arrays.
"""


@dataclass(frozen=True)
class Case:
    """A call on a mesh."""

    call: "Call"
    mesh: str
    types: str
    place: str
    mapped: str

    def __str__(self):
        return ", ".join([self.call.name, *(getattr(self, name) for name in FACTORS)])

    @property
    def sizes(self):
        return MESHES[self.mesh][0] | {"stage": STAGES if self.mapped == "stages" else 1}

    @property
    def axes(self):
        """The axes of the sequence."""
        return MESHES[self.mesh][1]

    @property
    def stage_axis(self):
        """The mesh axis of the stages, if one shards them."""
        return "stage" if self.mapped.startswith("stage") else None

    @property
    def is_explicit(self):
        return self.types == "Explicit"

    def on(self):
        """Returns the mesh."""
        names, sizes = zip(*self.sizes.items(), strict=True)
        kinds = (AxisType.Explicit if self.is_explicit else AxisType.Auto,) * len(names)
        return Mesh(ring.devices(*sizes), names, kinds)

    def spec(self, name, without_names=False):
        """Returns how an array is sharded; without the names of axes of one device where asked."""
        cuts = {
            "batch": [x for x in ("data",) if x in self.sizes],
            "seq": list(self.axes),
            "heads": [x for x in ("tensor",) if x in self.sizes],
        }

        def entry(dimension):
            names = cuts.get(dimension, [])
            kept = [x for x in names if self.sizes[x] > 1 or not without_names]
            return tuple(kept or (names[:1] if dimension == "seq" else ())) or None

        return P(*map(entry, DIMENSIONS[name].split()))

    def way(self):
        """Returns the arguments that say where arrays are."""
        if self.is_explicit and self.place != "all numpy":
            return {}
        return {"mesh": self.on(), "spec": self.spec("query")}

    def put(self, name, x):
        """Returns an array where the case has it."""
        is_mapped = self.mapped != "no" and name not in SHARED
        is_row = name in (*QKV, *tour_arrays.ODD)
        is_numpy = self.place == "all numpy" or (self.place == "numpy" and not is_row)
        # The types of all arrays that a vmap maps over an Explicit axis must name it.
        if is_numpy and not (is_mapped and self.is_explicit and self.stage_axis):
            return x
        is_whole = not is_row and self.place in ("whole", "numpy")
        spec = P() if is_whole else self.spec(name, self.place == "unnamed" and is_row)
        if is_mapped:
            spec = P(self.stage_axis, *spec)
        return jax.device_put(x, NamedSharding(self.on(), spec))

    def shards(self, local, arrays, outs):
        """Returns results of a function of shards, whose ``outs`` are named as arrays are."""
        specs = {name: self.spec(name) for name in arrays}
        out_specs = jax.tree.map(self.spec, outs)
        run = jax.shard_map(local, mesh=self.on(), in_specs=(specs,), out_specs=out_specs)
        return run(arrays)

    def refusal(self):
        """Returns the words of the error where the call can't be had so, else None."""
        whole = self.is_explicit and self.place == "all numpy"
        cut = [x for x, size in self.sizes.items() if size > 1 and x != "stage"]
        if self.call.name == "in sequence":
            # The call itself shards the sequence.
            cut = [x for x in cut if x not in self.axes]
        return "must be sharded as .* use jax.reshard" if whole and cut else None

    def is_jax_able(self):
        """Whether JAX can differentiate a ``shard_map`` of such arrays.

        XLA refuses the sum of a mapped array's gradient over axes of one device where the axis of
        an Explicit ``vmap`` is the only one of several devices.
        """
        alone = self.is_explicit and self.mapped == "stages" and self.mesh == "one device"
        mapped = tour_arrays.TRAINED.intersection(self.call.names) - SHARED
        every = {name for name in self.sizes if name != "stage"}
        return not alone or all(every <= self.names(name) for name in mapped)

    def names(self, array):
        """Returns the names of mesh axes in an array's spec."""
        return {name for entry in self.spec(array) for name in entry or ()}

    def expected(self):
        """Returns the results on one device."""
        return of_one_device(self.call, self.mapped != "no")

    def run(self):
        """Returns the results and, where the call has them, the gradients."""
        given = {name: jax.tree.map(partial(self.put, name), x) for name, x in inputs(self).items()}
        function = partial(self.call.function, self)
        if self.mapped != "no":
            over = {} if self.is_explicit else {"spmd_axis_name": self.stage_axis}
            axes = {name: None if name in SHARED else 0 for name in self.call.names}
            function = jax.vmap(function, in_axes=(axes,), **over)
        return differentiated(function, self.call.has_gradient)(given)


def differentiated(function, has_gradient=True):
    """Returns a program of arrays by name: results and gradients, where results are cotangents."""

    @jax.jit
    def run(given):
        trained = {name: x for name, x in given.items() if name in tour_arrays.TRAINED}
        others = {name: x for name, x in given.items() if name not in trained}
        if not has_gradient:
            return function(given)
        results, pullback = jax.vjp(lambda trained: function(trained | others), trained)
        return results, pullback(results)

    return run


@dataclass(frozen=True)
class Call:
    """A call of the public interface."""

    name: str
    function: Callable
    """A function of a case and of arrays by name."""
    names: tuple[str, ...]
    """The arrays that the call takes."""
    has_gradient: bool = True
    is_global: bool = True
    """Whether the call takes global arrays, which may lie anywhere."""


@cache
def of_one_device(call, is_mapped):
    """Returns results on one device, of one stage after the other if they are mapped."""
    case = Case(call, "one device", "Auto", "sharded", "no")
    run, found = differentiated(partial(call.function, case), call.has_gradient), []
    for stage in range(STAGES if is_mapped else 1):
        given = {name: _stage(name, arrays()[name], stage) for name in call.names}
        found.append(jax.tree.map(np.asarray, run(given)))
    if not is_mapped:
        return found[0]
    stacked = jax.tree.map(lambda *x: np.stack(x), *found)
    if not call.has_gradient:
        return stacked
    results, (gradients,) = stacked
    summed = {name: x.sum(0) if name in SHARED else x for name, x in gradients.items()}
    return results, (summed,)


def inputs(case):
    """Returns the arrays of a case on the host, those that are mapped with all stages."""
    if case.mapped == "no":
        return {name: arrays()[name] for name in case.call.names}

    def stages(name):
        each = [_stage(name, arrays()[name], stage) for stage in range(STAGES)]
        return each[0] if name in SHARED else jax.tree.map(lambda *x: np.stack(x), *each)

    return {name: stages(name) for name in case.call.names}


def _stage(name, x, stage):
    """Returns an array of a stage: the batch turned round in the second one."""
    is_other = stage and name not in SHARED
    return jax.tree.map(lambda x: np.flip(x, 0).copy() if is_other else x, x)


@cache
def arrays():
    """Returns every array by name, on the host."""
    found = dict(tour_arrays.arrays())
    odd = {"odd_ids": found["segment_ids"][:, 1:], "latent": found["key"][:, :, 0]}
    return found | odd | {"beta": 1 / (1 + np.exp(-found["beta"])), "memory": found["memory"]}


DIMENSIONS = {
    **dict.fromkeys(
        (*QKV, "out", "lse", "beta", "channels", "key_cache", "value_cache"), "batch seq heads"
    ),
    **dict.fromkeys(("segment_ids", "latent"), "batch seq"),
    **dict.fromkeys(("sinks", "alibi_slopes", "decay", "gate"), "heads"),
    **dict.fromkeys(tour_arrays.ODD, "batch whole heads"),
    **dict.fromkeys(tour_arrays.TOKEN, "batch token heads"),
    **dict.fromkeys(tour_arrays.PREFIXES, "prefixes seq heads"),
    **dict.fromkeys(("initial_state", "memory"), "batch heads"),
    **dict.fromkeys(
        ("lengths", "own_lengths", "prefix_of", "key_value_seq_lengths", "odd_ids"), "batch"
    ),
    "prefix_lengths": "prefixes",
    "mask": "batch one one seq",
    "positions": "seq",
}
"""The first dimensions of each array."""


def product(calls):
    """Returns all cases of some calls."""
    every = [(call, choice) for call in calls for choice in combinations(*FACTORS.values())]
    cases = [Case(call, *choice) for call, choice in every]
    return [
        case
        for case in cases
        if (case.call.is_global or case.place == "sharded") and case.is_jax_able()
    ]


def chosen(calls):
    """Returns few cases in which every pair of factors occurs that occurs in any case."""
    values = {"call": calls} | FACTORS

    def allowed(picked):
        is_global = "call" not in picked or picked["call"].is_global
        able = len(picked) < len(values) or Case(**picked).is_jax_able()
        return able and (is_global or picked.get("place", "sharded") == "sharded")

    return [Case(**x) for x in case_list.pairwise(values, lambda picked, values: 0, allowed)]
