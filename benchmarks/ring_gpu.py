"""Measures rings on an NVIDIA GPU: their time against one launch of the same work, and their peak.

All ranks of a ring share one GPU, with copies in place of messages. The kinds of rows:

  ring    a virtual ring of eight against one launch of the same work
  window  a virtual ring with a window against the whole causal mask
  layer   a layer on one device against jax.nn's attention by cuDNN
  linear  linear attention against plain JAX in chunks
  memory  the peak of forward and backward pass, against one tensor like q

Each row runs in a process of its own with a limit on its time, so no failure hides another. The
results go to results/<device>-ring.json. `--quick` takes tiny shapes and ignores the bars. `make
gpu-check` calls this program after the tests.

Exit code 0: all rows that ran passed; 1: a row failed or missed its bar; 2: nothing to run on.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gpu import report, serve
from gpu.library import AbsentError
from gpu.session import LostError, Session, UnusableError, module
from gpu.speed import AGREE, figures, wall_milliseconds

ROW_S = 120.0
"""Seconds after which a row counts as hanging."""
RANKS = 8
FLOP = {"forward": 4.0, "forward + backward": 14.0}
"""FLOPs of a pass for each pair of query and key and each element of a head."""
RING_BARS = dict(zip(FLOP, (1.12, 1.08), strict=True))
"""The largest ratio of a virtual ring's time to that of one launch."""
PRUNED = 3.0
"""The largest ratio of a window's share of the causal mask's time to its share of the pairs."""
WINDOW = 64
"""The part of the sequence that a window spans."""
PEAK_BARS = {"grouped": 14.0, "equal": 24.0}
"""The largest peak, as a multiple of one 16-bit tensor like q. With as many key/value heads as
query heads, inputs and results alone take 8, double-buffered float32 sums of dq, dk and dv take 12,
and travelling queries and dout take 4."""
ROOMY = 60e9
"""Bytes of a device that holds 32 heads of 64K tokens twice, with gradients."""
SECONDS, CALLS = 2.5, 4
"""Seconds of timing, and calls in a row, which hide the cost of calling."""
GRIDS = [{"heads": heads, "tokens": tokens} for tokens in (4096, 8192) for heads in PEAK_BARS]
ROWS: dict[str, list[dict[str, Any]]] = {
    "ring": GRIDS,
    "window": [{}],
    "layer": GRIDS[2:],
    "linear": [{}],
    "memory": [{"heads": heads, "ranks": ranks} for ranks in (RANKS, 1) for heads in PEAK_BARS],
}
"""The arguments of each row, by kind."""


@dataclass
class Contender:
    """A function of arrays that returns o, then gradients and maybe more."""

    function: Callable[..., Any]
    given: Any
    restored: Callable[[Any], Any] | None = lambda x: x
    """Brings a result into the order of the sequence; None if no contender has equal results."""

    def program(self, which: str) -> Callable[[], Any]:
        """Returns a compiled pass. XLA leaves out the backward pass where no gradient is wanted."""
        end = 1 if which == "forward" else None
        return partial(jax.jit(lambda *given: tuple(self.function(*given))[:end]), *self.given)


class Work:
    """The rows, by kind."""

    def __init__(self, quick: bool):
        self._quick = quick

    def measure(self, kind: str, **about: Any) -> dict[str, Any]:
        """Returns a row: what was measured, and what is wrong with it."""
        row: dict[str, Any] = getattr(self, f"_{kind}")(**about)
        found: dict[str, Any] = {"device": jax.local_devices()[0].device_kind}
        return found | {"jax": jax.__version__, "nvidia-smi": serve.nvidia_smi()} | row

    def _ring(self, **about: Any) -> dict[str, Any]:
        one = self._problem(**about)
        arrays = _arrays(one)
        contenders = {"virtual ring": _virtual(one, arrays), "one launch": _launch(one, arrays)}
        return self._race(contenders, _pairs(one), RING_BARS)

    def _window(self) -> dict[str, Any]:
        whole = self._problem("grouped", 8192, layout="contiguous")
        one = replace(whole, window=(whole.q_len // WINDOW, 0))
        arrays = _arrays(one)
        contenders = {
            "with the window": _virtual(one, arrays),
            "whole causal mask": replace(_virtual(whole, arrays), restored=None),
            "one launch": _launch(one, arrays),
        }
        bar = PRUNED * _pairs(one) / _pairs(whole)
        return self._race(contenders, _pairs(one), dict.fromkeys(FLOP, bar))

    def _layer(self, **about: Any) -> dict[str, Any]:
        import burst_attention as ba

        one = self._problem(**about, ranks=1, batch=1 if self._quick else 4)
        arrays = _arrays(one)

        def contender(attend: Callable[..., jax.Array]) -> Contender:
            def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
                o, pullback = jax.vjp(partial(attend, is_causal=True), q, k, v)
                return o, *pullback(dout)

            return Contender(both, [arrays[name] for name in ("q", "k", "v", "dout")])

        mesh, spec = one.device_mesh(), one.spec("q")
        ours = contender(partial(ba.dot_product_attention, mesh=mesh, spec=spec))
        # A trial run needs no cuDNN.
        by = "xla" if self._quick else "cudnn"
        peer = contender(partial(jax.nn.dot_product_attention, implementation=by))
        try:
            jax.block_until_ready(peer.program("both")())
        except Exception as error:  # any type of error: a peer may fail
            raise AbsentError(f"jax.nn can't: {error}"[:300]) from error
        return self._race({"ours": ours, f"jax.nn by {by}": peer}, _pairs(one))

    def _linear(self) -> dict[str, Any]:
        import burst_attention as ba
        from linear_programs import CHUNKS, SHARDS, chunked, mesh_of

        quick: dict[str, Any] = {"q_len": 256, "kv_len": 256} if self._quick else {}
        one = self._problem("equal", 32768, ranks=1, **quick)
        logs = jnp.full((1, one.q_len, one.heads), jnp.log(0.99))
        *qkv, dout, _ = _arrays(one).values()

        def contender(attend: Callable[..., Any]) -> Contender:
            def both(*inputs: Any) -> Any:
                out, pullback = jax.vjp(attend, *inputs)
                return out, *pullback(dout.astype(out.dtype))

            return Contender(both, [*qkv, logs], restored=None)

        def local(q: Any, k: Any, v: Any, logs: Any) -> Any:
            return ba.linear_attention(q, k, v, axis_name="context", log_decay=logs)

        inputs, mesh = (SHARDS,) * 4, mesh_of(1)
        ours = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=SHARDS)
        contenders = {"ours": contender(ours)}
        for chunk in CHUNKS:
            plain = contender(partial(chunked, chunk, again=True))
            contenders[f"plain JAX, chunks of {chunk}"] = plain
        return self._race(contenders)

    def _memory(self, heads: str, ranks: int) -> dict[str, Any]:
        one = self._problem(heads, 8192, ranks)
        arrays = _arrays(one, is_random=False)
        contender = (_launch if ranks == 1 else _virtual)(one, arrays)
        unit = arrays["q"].nbytes
        del arrays
        jax.block_until_ready(contender.program("both")())
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if peak is None:
            raise AbsentError("this device's allocator does not tell its peak")
        multiple, bar = peak / unit, PEAK_BARS[heads]
        shown = f"{peak / 2**30:.2f} GiB, {multiple:.1f} × one tensor like q, bar {bar:g}"
        missed = multiple > bar and not self._quick
        row = {"peak_bytes": peak, "multiple": multiple, "bar": bar}
        return row | {"shown": [shown], "wrong": ["it missed its bar"] * missed}

    def _problem(self, heads: str, tokens: int, ranks: int = RANKS, **more: Any) -> Any:
        """Returns a causal problem, with ``tokens`` on each rank, as the tests have problems."""
        from features import Problem  # type: ignore[import-not-found]

        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        many, few = (2, 1) if self._quick else (32, 8) if limit >= ROOMY else (8, 2)
        length = 128 if self._quick else ranks * tokens
        sizes = {"q_len": length, "kv_len": length, "head_dim": 128, "value_dim": 128}
        sizes |= {"heads": many, "kv_heads": few if heads == "grouped" else many}
        given = {"batch": 1, "dtype": "bfloat16", "causal": True, "layout": "zigzag"}
        return Problem(mesh=(1, ranks, 1), **(given | sizes | more))

    def _race(
        self,
        contenders: dict[str, Contender],
        pairs: float = 0.0,
        bars: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """Times contenders, which take turns, and compares the first one with the others.

        Bars apply to the second contender; without bars, the peer is the fastest one.
        """
        row: dict[str, Any] = {"passes": {}, "shown": [], "wrong": []}
        mine, *theirs = contenders
        for which, flop in FLOP.items():
            programs = {name: each.program(which) for name, each in contenders.items()}
            differs = [
                _differences(contenders[mine], contenders[n], programs[mine], programs[n])
                for n in theirs
            ]
            waited: dict[str, Callable[[], None]] = {
                name: partial(_calls, program) for name, program in programs.items()
            }
            taken = wall_milliseconds(waited, 0.0 if self._quick else SECONDS)
            times = {n: figures([ms / CALLS for ms in x], flop * pairs) for n, x in taken.items()}
            peer = theirs[0] if bars else min(theirs, key=lambda name: times[name]["ms"])
            ratio, bar = times[mine]["ms"] / times[peer]["ms"], bars and bars[which]
            row["passes"][which] = {"contenders": times, "ratio": ratio, "bar": bar}
            row["passes"][which]["differs"] = differs
            tflops = f", {times[mine]['tflops']:.0f} TFLOP/s" if pairs else ""
            shown = f"{which}: {times[mine]['ms']:.3f} ms{tflops}, {ratio:.3f} × {peer}"
            row["shown"].append(shown + (f", bar {bar:.3f}" if bar else ""))
            if bar and not ratio <= bar and not self._quick:
                row["wrong"].append(f"{which} missed its bar")
            if not all(x <= AGREE for found in differs for x in found):
                row["wrong"].append(f"{which} differs by {differs}, expected at most {AGREE}")
        return row


def _arrays(one: Any, is_random: bool = True) -> dict[str, Any]:
    """Returns q, k, v, dout and dlse of a problem, on the GPU. Random numbers take memory."""
    rows, keys = (one.batch, one.q_len, one.heads), (one.batch, one.kv_len, one.kv_heads)
    shapes = {
        name: (*x, 128)
        for name, x in zip(("q", "k", "v", "dout"), (rows, keys, keys, rows), strict=True)
    }
    if is_random:
        draw = partial(jax.random.normal, dtype=jnp.bfloat16)
        found = {name: draw(jax.random.key(i), x) for i, (name, x) in enumerate(shapes.items())}
    else:
        found = {name: jnp.zeros(x, jnp.bfloat16) for name, x in shapes.items()}
    return found | {"dlse": jnp.zeros(rows)}


def _pairs(one: Any) -> float:
    """Returns the pairs that the mask allows, times heads and their elements."""
    seen = min(one.q_len / 2, one.window[0] + 1) if one.window else one.q_len / 2
    return float(one.batch * seen * one.q_len * one.heads * one.head_dim)


def _virtual(one: Any, arrays: dict[str, Any]) -> Contender:
    """Returns a ring whose ranks share the GPU."""
    import virtual  # type: ignore[import-not-found]

    given = jax.jit(partial(virtual.operands, one))(arrays)
    return Contender(partial(virtual.both, one), given, partial(virtual.restored, one))


def _launch(one: Any, arrays: dict[str, Any]) -> Contender:
    """Returns the same work without a ring."""
    alone = replace(one, mesh=(1, 1, 1))
    names = {name: alone.spec(name) for name in "qkv"}
    results = alone.spec("dout"), alone.spec("dlse")
    mesh = alone.device_mesh()
    attend = jax.shard_map(alone.local, mesh=mesh, in_specs=(names,), out_specs=results)

    def both(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
        found, pullback = jax.vjp(lambda *qkv: attend(dict(zip("qkv", qkv, strict=True))), q, k, v)
        return *found, *pullback((dout, dlse))

    return Contender(both, list(arrays.values()))


def _differences(first: Contender, other: Contender, *programs: Callable[[], Any]) -> list[float]:
    """Returns the relative difference of each result; nothing if results are of two problems."""
    if first.restored is None or other.restored is None:
        return []
    pairs = zip(*(program() for program in programs), strict=True)
    return [float(_distance(first.restored(x), other.restored(y))) for x, y in pairs]


@jax.jit
def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())


def _calls(program: Callable[[], Any]) -> None:
    """Calls a program several times and waits for the last result."""
    result = None
    for _ in range(CALLS):
        result = program()
    jax.block_until_ready(result)


def bench(session: Session, kinds: list[str], folder: Path) -> bool:
    """Measures the rows; returns whether all rows that ran passed."""
    results: dict[str, Any] = {"device": "unknown device", "rows": {}, "failed": {}}
    for kind, about in [(kind, about) for kind, each in ROWS.items() for about in each]:
        if kind not in kinds:
            continue
        name = ", ".join([kind, *(f"{key} {value}" for key, value in about.items())])
        session.close()
        answer = session.ask({"part": "measure", "kind": kind, **about}, ROW_S)
        row = answer.get("result", answer)
        results["device"] = row.get("device", results["device"])
        wrong = [answer["error"]] if "error" in answer else row.get("wrong", [])
        left_out = [f"left out: {answer['absent']}"] if "absent" in answer else []
        for text in [*row.get("shown", []), *left_out, *(f"FAILED: {text}" for text in wrong)]:
            print(f"{name:<36}{text}", flush=True)
        results["rows"][name] = row
        results["failed"] |= {name: wrong} if wrong else {}
        report.save(results, folder / f"{report.slug(results['device'])}-ring.json")
    print(f"{len(results['failed'])} of {len(results['rows'])} rows failed")
    return not results["failed"]


def main() -> int:
    """Measures, or serves as the process of a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="use tiny shapes, as a trial run")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="kinds of rows")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        is_usable = flags.quick or jax.default_backend() == "gpu"
        why = None if is_usable else "expected an NVIDIA GPU that jax can use, found none"
        serve.serve(Work(flags.quick), sys.stdin, serve.own_output(), lambda: why, lambda: None)
        return 0
    session = Session(None, [*module("ring_gpu"), "--serve", *["--quick"] * flags.quick])
    results = Path(__file__).parent / "results"
    folder = flags.out or (results / "partial" if flags.quick else results)
    try:
        session.start()
        return 0 if bench(session, flags.only, folder) else 1
    except (LostError, UnusableError) as why:
        print(why)
        return 2
    finally:
        session.close()


if __name__ == "__main__":
    sys.exit(main())
