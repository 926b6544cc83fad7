"""Contenders that compute the same: compiled with XLA, timed in turns, compared by value."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .speed import AGREE, figures, wall_milliseconds

FLOP = {"forward": 4.0, "forward + backward": 14.0}
"""FLOPs of a pass for each pair of query and key and each element of a head."""
SECONDS, CALLS = 2.5, 4
"""Seconds of timing, and calls in a row, which hide the cost of calling."""


@dataclass
class Contender:
    """A function of arrays that returns o, then gradients and maybe more."""

    function: Callable[..., Any]
    given: Any
    restored: Callable[[Any], Any] | None = lambda x: x
    """Brings a result into the order of the sequence; None if no contender has equal results."""
    devices: int = 1
    """The devices that share its work; times count once for each."""

    def program(self, which: str) -> Callable[[], Any]:
        """Returns a compiled pass. XLA leaves out the backward pass where no gradient is wanted."""
        end = 1 if which == "forward" else None
        return partial(jax.jit(lambda *given: tuple(self.function(*given))[:end]), *self.given)


def race(
    contenders: dict[str, Contender],
    pairs: float = 0.0,
    bars: dict[str, float] | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Times contenders in turns, and compares the first contender with each other contender.

    Bars apply to the second contender; without bars, the peer is the fastest one that has equal
    results, if any has.
    """
    row: dict[str, Any] = {"passes": {}, "shown": [], "wrong": []}
    mine, *theirs = contenders
    for which, flop in FLOP.items():
        programs = {name: each.program(which) for name, each in contenders.items()}
        differs = [
            _differences(contenders[mine], contenders[n], programs[mine], programs[n])
            for n in theirs
        ]
        times = timed(programs, flop * pairs, quick)
        for name, found in times.items():
            _share(found, contenders[name].devices)
        equal = [name for name in theirs if contenders[name].restored] or theirs
        peer = theirs[0] if bars else min(equal, key=lambda name: times[name]["ms"])
        ratio, bar = times[mine]["ms"] / times[peer]["ms"], bars and bars[which]
        row["passes"][which] = {"contenders": times, "ratio": ratio, "bar": bar}
        row["passes"][which]["differs"] = differs
        tflops = f", {times[mine]['tflops']:.0f} TFLOP/s" if pairs else ""
        shown = f"{which}: {times[mine]['ms']:.3f} ms{tflops}, {ratio:.3f} × {peer}"
        row["shown"].append(shown + (f", bar {bar:.3f}" if bar else ""))
        if bar and not ratio <= bar and not quick:
            row["wrong"].append(f"{which} missed its bar")
        if not all(x <= AGREE for found in differs for x in found):
            row["wrong"].append(f"{which} differs by {differs}, expected at most {AGREE}")
    return row


def timed(
    programs: dict[str, Callable[[], Any]], flop: float = 0.0, quick: bool = False
) -> dict[str, dict[str, float]]:
    """Returns the figures of one call of each program; the programs take turns."""
    waited: dict[str, Callable[[], None]] = {
        name: partial(_calls, program) for name, program in programs.items()
    }
    taken = wall_milliseconds(waited, 0.0 if quick else SECONDS)
    return {name: figures([ms / CALLS for ms in each], flop) for name, each in taken.items()}


def arrays_of(one: Any, is_random: bool = True) -> dict[str, Any]:
    """Returns q, k, v, dout and dlse of a problem, on the GPU. Random numbers take memory."""
    rows, keys = (one.batch, one.q_len, one.heads), (one.batch, one.kv_len, one.kv_heads)
    shapes = {
        name: (*x, one.head_dim)
        for name, x in zip(("q", "k", "v", "dout"), (rows, keys, keys, rows), strict=True)
    }
    if is_random:
        draw = partial(jax.random.normal, dtype=jnp.bfloat16)
        found = {name: draw(jax.random.key(i), x) for i, (name, x) in enumerate(shapes.items())}
    else:
        found = {name: jnp.zeros(x, jnp.bfloat16) for name, x in shapes.items()}
    return found | {"dlse": jnp.zeros(rows)}


def pairs_of(one: Any) -> float:
    """Returns the pairs that the mask allows, times heads and their elements."""
    seen = one.q_len / (2 if one.causal else 1)
    seen = min(seen, one.window[0] + 1) if one.window else seen
    return float(one.batch * seen * one.q_len * one.heads * one.head_dim)


def ring(one: Any, arrays: dict[str, Any]) -> Contender:
    """Returns a ring: its ranks share a GPU, or have a GPU each where there are several."""
    if len(jax.local_devices()) > 1:
        return _sharded(one, arrays)
    import virtual  # type: ignore[import-not-found]

    given = jax.jit(partial(virtual.operands, one))(arrays)
    return Contender(partial(virtual.both, one), given, partial(virtual.restored, one))


def launch(one: Any, arrays: dict[str, Any]) -> Contender:
    """Returns the same work without a ring."""
    return _sharded(replace(one, mesh=(1, 1, 1), layout="contiguous"), arrays)


def _sharded(one: Any, arrays: dict[str, Any]) -> Contender:
    """Returns the work with a GPU for each rank."""
    import burst_attention as ba

    mesh, size = one.device_mesh(), one.mesh[1]
    names = {name: one.spec(name) for name in "qkv"}
    results = one.spec("dout"), one.spec("dlse")
    attend = jax.shard_map(one.local, mesh=mesh, in_specs=(names,), out_specs=results)

    def both(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
        found, pullback = jax.vjp(lambda *qkv: attend(dict(zip("qkv", qkv, strict=True))), q, k, v)
        return *found, *pullback((dout, dlse))

    def stored(name: str, x: jax.Array) -> jax.Array:
        placed = jax.NamedSharding(mesh, one.spec(name))
        return jax.device_put(ba.to_layout(x, size, one.layout), placed)

    given = [stored(name, x) for name, x in arrays.items()]
    return Contender(both, given, lambda x: ba.from_layout(x, size, one.layout), size)


def _share(found: dict[str, float], devices: int) -> None:
    """Counts a time once for each device, and the speed for one device."""
    found["ms"] *= devices
    found["tflops"] /= devices


def _differences(first: Contender, other: Contender, *programs: Callable[[], Any]) -> list[float]:
    """Returns the relative difference of each result; nothing if results are of two problems."""
    if first.restored is None or other.restored is None:
        return []
    pairs = zip(*(program() for program in programs), strict=True)
    return [float(_distance(first.restored(x), other.restored(y))) for x, y in pairs]


def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns |x − y| / |y|, on one device."""
    device = jax.local_devices()[0]
    return _relative(*(jax.device_put(each, device) for each in (x, y)))


@jax.jit
def _relative(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())


def _calls(program: Callable[[], Any]) -> None:
    """Calls a program several times and waits for the last result."""
    result = None
    for _ in range(CALLS):
        result = program()
    jax.block_until_ready(result)
