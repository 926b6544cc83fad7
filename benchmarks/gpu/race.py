"""Contenders that compute the same: compiled with XLA, timed in turns, compared by value."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from .library import AbsentError
from .serve import clock
from .speed import AGREE, figures, wall_milliseconds

FLOP = {"forward": 4.0, "forward + backward": 14.0}
"""FLOPs of a pass for each pair of query and key and each element of a head."""
SECONDS, CALLS = 2.5, 4
"""Seconds of timing, and calls in a row, which hide the cost of calling."""


@runtime_checkable
class Elsewhere(Protocol):
    """A pass that another process computes and times."""

    def milliseconds(self, calls: int) -> float:
        """Returns the time of some calls in a row."""


@dataclass
class Contender:
    """A function of arrays that returns o, then gradients and maybe more; None is no result."""

    function: Callable[..., Any]
    given: Any
    restored: Callable[[Any], Any] | None = lambda x: x
    """Brings a result into the order of the sequence; None if no contender has equal results."""
    devices: int = 1
    """The devices that share its work; times count once for each."""
    passes: tuple[str, ...] = tuple(FLOP)
    """The passes in which it takes part."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why it can't compute a pass, by pass."""
    is_optional: bool = False
    """Whether a row goes on without it where it fails."""

    def program(self, which: str) -> Callable[[], Any]:
        """Returns a compiled pass. XLA leaves out the backward pass where no gradient is wanted."""
        end = 1 if which == "forward" else None
        return partial(jax.jit(lambda *given: tuple(self.function(*given))[:end]), *self.given)

    def ready(self, which: str) -> Callable[[], Any]:
        """Returns a pass that has run once; raises `AbsentError` where there is none."""
        if which in self.missing:
            raise AbsentError(self.missing[which])
        program = self.program(which)
        try:
            jax.block_until_ready(program())
        except Exception as error:  # any type of error: a peer may fail
            if not self.is_optional or isinstance(error, AbsentError):
                raise
            raise AbsentError(f"it can't: {type(error).__name__}: {error}"[:300]) from error
        return program


def race(
    contenders: dict[str, Contender],
    pairs: float = 0.0,
    bars: dict[str, float] | None = None,
    quick: bool = False,
    peer: str | None = None,
) -> dict[str, Any]:
    """Times contenders in turns, and compares the first contender with each other contender.

    Bars apply to the second contender. Without bars, the first contender's time is divided by that
    of ``peer``, or of the fastest contender that has equal results, if any has. A contender that
    can't compute a pass is named with the reason.
    """
    row: dict[str, Any] = {"passes": {}, "shown": [], "wrong": []}
    mine, *_ = contenders
    for which, flop in FLOP.items():
        programs, absent = _ready(contenders, which)
        if mine in absent:
            raise AbsentError(absent[mine])
        theirs = [name for name in programs if name != mine]
        found: dict[str, Any] = {"absent": absent}
        found["differs"] = _all_differences(contenders, programs)
        before = clock()
        found["contenders"] = times = timed(programs, flop * pairs, quick)
        found["clock"] = {"before": before, "after": clock()}
        for name, one in times.items():
            _share(one, contenders[name].devices)
        _compare(found, mine, _peer(contenders, theirs, times, peer, bars), (bars or {}).get(which))
        row["passes"][which] = found
        row["shown"] += [f"{which}: {words}" for words in _shown(found, mine, bool(pairs))]
        row["wrong"] += [f"{which} {words}" for words in _wrong(found, quick)]
    return row


def _ready(
    contenders: dict[str, Contender], which: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Returns the programs of a pass, and by name why contenders have none."""
    programs, absent = {}, {}
    for name, each in contenders.items():
        if which in each.passes:
            try:
                programs[name] = each.ready(which)
            except AbsentError as reason:
                absent[name] = str(reason)
    return programs, absent


def _peer(
    contenders: dict[str, Contender],
    theirs: list[str],
    times: dict[str, dict[str, float]],
    peer: str | None,
    bars: dict[str, float] | None,
) -> str | None:
    """Returns the contender whose time the first one's is divided by, if one is there."""
    if peer in theirs:
        return peer
    if bars:
        return theirs[0] if theirs else None
    equal = [name for name in theirs if contenders[name].restored] or theirs
    return min(equal, key=lambda name: times[name]["ms"], default=None)


def _compare(found: dict[str, Any], mine: str, peer: str | None, bar: float | None) -> None:
    """Adds the peer, the bar, and the ratio of both times."""
    found |= {"peer": peer, "bar": bar}
    if peer is not None:
        times = found["contenders"]
        found["ratio"] = times[mine]["ms"] / times[peer]["ms"]


def _wrong(found: dict[str, Any], quick: bool) -> list[str]:
    """Returns what is wrong with a pass: a bar that it missed, results that differ."""
    bar = None if quick else found["bar"]
    lines = ["missed its bar"] if bar and "ratio" in found and not found["ratio"] <= bar else []
    return lines + [
        f"differs from {name} by {each}, expected at most {AGREE}"
        for name, each in found["differs"].items()
        if not all(x <= AGREE for x in each)
    ]


def _shown(found: dict[str, Any], mine: str, has_rate: bool) -> list[str]:
    """Returns lines about a pass: times of the contenders, and reasons why peers are absent."""
    times, peer, bar = found["contenders"], found["peer"], found["bar"]
    line = f"{times[mine]['ms']:.3f} ms"
    line += f", {times[mine]['tflops']:.0f} TFLOP/s" if has_rate else ""
    line += f", {found['ratio']:.3f} × {peer}" if peer else ""
    line += f", bar {bar:.3f}" if bar else ""
    others = [f"{name} {each['ms']:.3f}" for name, each in times.items() if name != mine]
    lines = [line, *(["others, ms: " + ", ".join(others)] if len(others) > 1 else [])]
    return lines + [f"no {name}: {reason}" for name, reason in found["absent"].items()]


def timed(
    programs: dict[str, Callable[[], Any]], flop: float = 0.0, quick: bool = False
) -> dict[str, dict[str, float]]:
    """Returns the figures of one call of each program; the programs take turns."""
    calls = 1 if quick else CALLS
    waited: dict[str, Callable[[], float | None]] = {
        name: partial(_calls, program, calls) for name, program in programs.items()
    }
    taken = in_turns(waited, quick, SECONDS)
    return {name: figures([ms / calls for ms in each], flop) for name, each in taken.items()}


def in_turns(
    programs: dict[str, Callable[[], float | None]], quick: bool, seconds: float
) -> dict[str, list[float]]:
    """Returns the milliseconds of programs in each round; a trial run has the fewest rounds."""
    return (
        wall_milliseconds(programs, 0.0, least=2) if quick else wall_milliseconds(programs, seconds)
    )


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
        o, lse = found
        return o, lse if one.has_lse else None, *pullback((dout, dlse))

    def stored(name: str, x: jax.Array) -> jax.Array:
        placed = jax.NamedSharding(mesh, one.spec(name))
        return jax.device_put(ba.to_layout(x, size, one.layout), placed)

    given = [stored(name, x) for name, x in arrays.items()]
    return Contender(both, given, lambda x: ba.from_layout(x, size, one.layout), size)


def _share(found: dict[str, float], devices: int) -> None:
    """Counts a time once for each device, and the speed for one device."""
    found["ms"] *= devices
    found["tflops"] /= devices


def _all_differences(
    contenders: dict[str, Contender], programs: dict[str, Callable[[], Any]]
) -> dict[str, list[float]]:
    """Returns by name how far each result of the first program is from another's, relatively.

    The list is empty where results are of two problems.
    """
    mine, *theirs = programs
    first, found = contenders[mine].restored, dict[str, list[float]]()
    own = programs[mine]() if first else ()
    for name in theirs:
        found[name], other = [], contenders[name].restored
        if first and other:
            pairs = zip(own, programs[name](), strict=True)
            found[name] = [float(_distance(first(x), other(y))) for x, y in pairs if y is not None]
    return found


def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns |x − y| / |y|, on one device."""
    device = jax.local_devices()[0]
    return _relative(*(jax.device_put(each, device) for each in (x, y)))


@jax.jit
def _relative(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())


def _calls(program: Callable[[], Any], calls: int) -> float | None:
    """Calls a program several times and waits for the last result.

    Returns the milliseconds that another process tells of its own calls.
    """
    if isinstance(program, Elsewhere):
        return program.milliseconds(calls)
    result = None
    for _ in range(calls):
        result = program()
    jax.block_until_ready(result)
    return None
