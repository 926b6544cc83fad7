"""Problems with masks and features: their inputs, the reference's results and the ring's."""

from dataclasses import dataclass, field
from functools import partial

import burst_attention as ba
import jax
import numpy as np
import platforms
import ring
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from reference import dense

ROWS = P(*ring.AXES[:2])
SPECS = {
    **dict.fromkeys(("q", "k", "v", "dout"), ring.SPEC),
    "dlse": P(*ring.AXES),
    **dict.fromkeys(("q_segments", "kv_segments", "q_positions", "kv_positions"), ROWS),
    **dict.fromkeys(("starts", "stops"), ROWS),
    **dict.fromkeys(("sinks", "alibi_slopes"), P("tensor")),
    "dropout_key": P(),
}
PAIR = ("node", "context")
"""The mesh axes of a double ring, the outer one first."""
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dz", "alibi_slopes": "dslopes"}


@dataclass(frozen=True)
class Problem:
    """One attention problem over a mesh (data, context, tensor), with whole arrays' lengths."""

    mesh: tuple[int, int, int] = (1, 4, 1)
    inner: int = 0
    """Ranks of an inner ring; if not 0, the ranks stand on two axes, ``node`` and ``context``."""
    schedule: str = "auto"
    layout: str = "contiguous"
    backward: str = "auto"
    dtype: str = "float32"
    batch: int = 2
    q_len: int = 48
    kv_len: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    causal: bool = False
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    segments: str | None = None
    """A kind of `segment_ids`."""
    visible: str | None = None
    """A kind of `intervals`."""
    positions: bool = False
    """Whether rows stand in a random order, so that their positions are data."""
    offset: int = 0
    """Positions by which the first query stands after the first key."""
    slopes: bool = False
    sinks: bool = False
    dropout: float = 0.0
    kernels: str = "auto"
    order: str | None = None
    """The order of sums of gradients; None for the platform's."""
    residual_dtype: str | None = None
    implementation: str | None = None
    changes: dict = field(default_factory=dict)
    """Arrays that replace random ones, by name."""

    def __post_init__(self):
        for name in ("head_dim", "value_dim"):
            object.__setattr__(self, name, platforms.columns(getattr(self, name)))

    def arrays(self):
        """Returns all inputs and cotangents by name, in the order of the sequence."""
        rows = (self.batch, self.q_len, self.heads)
        keys = (self.batch, self.kv_len, self.kv_heads)
        shapes = [(*rows, self.head_dim), (*keys, self.head_dim), (*keys, self.value_dim)]
        shapes.append((*rows, self.value_dim))
        found = zip("qkvd", ring.normal(sum(keys), *shapes, dtype=self.dtype), strict=True)
        found = {"dout" if name == "d" else name: x for name, x in found}
        (found["dlse"],) = ring.normal(sum(rows), rows)
        if not self.has_lse:
            found["dlse"][:] = 0
        return found | self.feature_arrays() | self.changes

    @property
    def has_lse(self):
        """Whether the call returns lse, which then has a gradient."""
        return self.kernels != "cudnn" and not platforms.has_cudnn()

    def feature_arrays(self):
        """Returns the arrays of the features by name.

        Sinks weigh about as much as some keys. Slopes add few units to the score of the farthest
        key, since more units would cost float32 its digits.
        """
        found, (sinks, slopes) = {}, ring.normal(self.heads, *[(self.heads,)] * 2)
        if self.sinks:
            found["sinks"] = sinks + 1
        if self.slopes:
            found["alibi_slopes"] = slopes * np.float32(4 / max(self.q_len, self.kv_len))
        if self.segments:
            found |= segment_ids(self.segments, self.batch, self.q_len, self.kv_len)
        if self.visible:
            found |= intervals(self.visible, self.batch, self.q_len, self.kv_len)
        if self.positions:
            found |= permutations(self.batch, self.q_len, self.kv_len)
        if self.dropout:
            found["dropout_key"] = np.asarray(jax.random.key_data(jax.random.key(self.batch)))
        return found

    def expected(self, arrays):
        """Returns the reference's results."""
        return dense(
            *(arrays[name] for name in ("q", "k", "v", "dout", "dlse")),
            causal=self.causal,
            window=self.window,
            soft_cap=self.soft_cap,
            segments=self.segments and (arrays["q_segments"], arrays["kv_segments"]),
            slopes=arrays.get("alibi_slopes"),
            sinks=arrays.get("sinks"),
            dropout=(self.dropout, arrays["dropout_key"]) if self.dropout else None,
            visible=(arrays["starts"], arrays["stops"]) if self.visible else None,
            positions=self.row_positions(arrays),
        )

    def row_positions(self, arrays):
        """Returns the positions of queries and of keys where they are not the indices."""
        if self.positions:
            return arrays["q_positions"], arrays["kv_positions"]
        if not self.offset:
            return None
        shapes = ((self.batch, n) for n in (self.q_len, self.kv_len))
        queries, keys = (np.broadcast_to(np.arange(shape[1]), shape) for shape in shapes)
        return queries + self.offset, keys

    def options(self, arrays):
        """Returns the keyword arguments of the public functions."""
        found = {
            "is_causal": self.causal,
            "local_window_size": self.window,
            "logits_soft_cap": self.soft_cap,
            "dropout_rate": self.dropout,
            "layout": self.layout,
            "schedule": self.schedule,
            "backward": self.backward,
            "backward_order": self.order or platforms.order(),
            "kernels": self.kernels,
            "residual_dtype": self.residual_dtype,
            "implementation": self.implementation,
            "return_residual": self.has_lse,
        }
        names = ("sinks", "alibi_slopes", "dropout_key")
        found |= {name: arrays[name] for name in names if name in arrays}
        if self.visible:
            found["visible"] = arrays["starts"], arrays["stops"]
        if self.positions:
            found["query_positions"] = arrays["q_positions"]
            found["key_positions"] = arrays["kv_positions"]
        if self.offset:
            found["query_offset"] = self.offset
        if self.segments:
            ids = arrays["q_segments"], arrays["kv_segments"]
            same = self.q_len == self.kv_len and self.segments != "absent"
            found["segment_ids"] = ids[0] if same else ids
        return found

    def local(self, arrays):
        """Runs `attention` on a shard."""
        found = ba.attention(
            *(arrays[name] for name in "qkv"),
            axis_name=PAIR if self.inner else "context",
            batch_axis="data",
            head_axis="tensor",
            **self.options(arrays),
        )
        return self.pair(found)

    def pair(self, found):
        """Returns o and lse of what a call returns; a column of o stands for lse without one."""
        return found if self.has_lse else (found, found[..., 0].astype(np.float32))

    def found(self, arrays, check_vma=True):
        """Returns results and gradients by name, on the host and in the order of the sequence."""
        mesh = self.device_mesh()
        specs = {name: self.spec(name) for name in arrays if name not in ("dout", "dlse")}
        function = jax.shard_map(
            self.local,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(self.spec("dout"), self.spec("dlse")),
            check_vma=check_vma,
        )
        return self.run(function, mesh, arrays)

    def device_mesh(self):
        """Returns a mesh data × context × tensor, or data × node × context × tensor."""
        mesh = ring.mesh(*self.mesh)
        if not self.inner:
            return mesh
        data, context, tensor = self.mesh
        devices = mesh.devices.reshape(data, context // self.inner, self.inner, tensor)
        return Mesh(devices, ("data", *PAIR, "tensor"), axis_types=(AxisType.Auto,) * 4)

    def spec(self, name):
        """Returns the sharding of an array."""
        if not self.inner:
            return SPECS[name]
        return P(*(PAIR if axis == "context" else axis for axis in SPECS[name]))

    def run(self, function, mesh, arrays):
        """Returns results and gradients, as `found` does, of any function of the arrays."""
        placed = {name: self.placed(mesh, name, x) for name, x in arrays.items()}
        cotangents = placed.pop("dout"), placed.pop("dlse")
        inputs = {name: placed.pop(name) for name in GRADIENTS if name in placed}
        (o, lse), grads = _gradients(function, inputs, placed, cotangents)
        return {
            name: ring.on_host(x) if x.ndim == 1 else ring.restored(self.layout, self.mesh[1], x)[0]
            for name, x in self.named(o, lse, grads).items()
        }

    def named(self, o, lse, grads):
        """Returns results and gradients by name; lse only where the call returns it."""
        results = {"o": o, "lse": lse} if self.has_lse else {"o": o}
        return results | {GRADIENTS[name]: x for name, x in grads.items()}

    def placed(self, mesh, name, x):
        """Returns an array on the mesh, in the order of the layout."""
        if x.ndim > 1:
            (x,) = ring.stored(self.layout, self.mesh[1], x)
        return jax.device_put(x, jax.NamedSharding(mesh, self.spec(name)))


@partial(jax.jit, static_argnums=0)
def _gradients(function, inputs, others, cotangents):
    results, pullback = jax.vjp(lambda inputs: function({**inputs, **others}), inputs)
    return results, pullback(cotangents)[0]


def intervals(kind, batch, q_len, kv_len):
    """Returns intervals of query positions for each key.

    ``causal``: each key is seen from its own position on. ``random``: one interval, of any length,
    some are empty and some reach beyond the sequence. ``twice``: two such intervals. ``hidden``: no
    query sees the last third of the keys, nor does the first third of the queries see any key.
    """
    generator = np.random.default_rng(q_len + kv_len)
    shape = (batch, kv_len, 2) if kind == "twice" else (batch, kv_len)
    if kind == "causal":
        starts = np.broadcast_to(np.arange(kv_len), shape)
        stops = np.full(shape, 2**31 - 1)
    else:
        starts, stops = generator.integers(-5, q_len + 5, (2, *shape))
    if kind == "hidden":
        starts, stops = np.maximum(starts, q_len // 3), np.maximum(stops, q_len)
        stops[:, -(kv_len // 3) :] = -1
    return {"starts": starts.astype(np.int32), "stops": stops.astype(np.int32)}


def permutations(batch, q_len, kv_len):
    """Returns positions of rows in a random order, another one in each batch entry."""
    generator = np.random.default_rng(q_len * 3 + kv_len)

    def positions(length):
        rows = [generator.permutation(length) for _ in range(batch)]
        return np.stack(rows).astype(np.int32)

    queries = positions(q_len)
    return {
        "q_positions": queries,
        "kv_positions": queries.copy() if q_len == kv_len else positions(kv_len),
    }


def segment_ids(kind, batch, q_len, kv_len):
    """Returns segment ids of documents of random lengths; ids are not sorted, and one comes twice.

    ``padded``: the end is padding, and so is a part of the middle. ``absent``: no key is in the
    segment of the first third of the queries, and no query in that of the last third of the keys.
    """
    generator = np.random.default_rng(batch + q_len)
    ids = np.empty((batch, q_len), np.int32), np.empty((batch, kv_len), np.int32)
    for entry in range(batch):
        ends = np.sort(generator.uniform(0.1, 0.9, 3))
        names = np.array([17, 3, 2**31 - 1 - entry, 17], np.int32)
        for part in ids:
            places = (np.arange(part.shape[1]) + 0.5) / part.shape[1]
            part[entry] = names[np.searchsorted(ends, places)]
            if kind == "padded":
                part[entry, places > 0.8] = -1
                part[entry, (places > 0.4) & (places < 0.5)] = -(2**31)
    if kind == "absent":
        ids[0][:, : q_len // 3] = 100
        ids[1][:, -(kv_len // 3) :] = 200
    return {"q_segments": ids[0], "kv_segments": ids[1]}
