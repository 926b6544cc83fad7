"""The rows of `ring_gpu.py`: what the package computes in a JAX program, against its peers."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from . import serve
from .library import AbsentError
from .race import FLOP, Contender, arrays_of, launch, pairs_of, race, ring, timed

RANKS = 8
RING_BARS = dict(zip(FLOP, (1.12, 1.08), strict=True))
"""The largest ratio of a ring's time, on all its GPUs, to that of one launch."""
PRUNED = 3.0
"""The largest ratio of a window's share of the causal mask's time to its share of the pairs."""
WINDOW = 64
"""The part of the sequence that a window spans."""
DOCUMENT = 1024
"""Tokens of a packed document."""
PEAK_BARS = {"grouped": 14.0, "equal": 24.0}
"""The largest peak, as a multiple of one 16-bit tensor like q. With as many key/value heads as
query heads, inputs and results alone take 8, double-buffered float32 sums of dq, dk and dv take 12,
and travelling queries and dout take 4."""
ROOMY = 60e9
"""Bytes of a device that holds 32 heads of 64K tokens twice, with gradients."""
DISPATCHES = 20
"""Calls in a row whose time is the host's. XLA lets 32 wait for a device."""
GRIDS = [{"heads": heads, "tokens": tokens} for tokens in (4096, 8192) for heads in PEAK_BARS]
LAYERS: list[dict[str, Any]] = [
    {"head_dim": 64},
    {"causal": False},
    {"head_dim": 64, "causal": False},
]
"""Changes of a layer of as many key/value heads as query heads."""
ROWS: dict[str, list[dict[str, Any]]] = {
    "ring": GRIDS,
    "window": [{}],
    "layer": GRIDS[2:] + [GRIDS[3] | change for change in LAYERS],
    "cudnn": [GRIDS[2], GRIDS[3], GRIDS[3] | LAYERS[0]],
    "packed": [{}],
    "mask": [{}],
    "decode": [{"tokens": tokens} for tokens in (131072, 16384)],
    "latents": [{"tokens": tokens} for tokens in (131072, 32768)],
    "host": [{}],
    "linear": [{"channels": channels} for channels in (False, True)],
    "delta": [{"channels": channels} for channels in (False, True)],
    "infini": [{}],
    "memory": [{"heads": heads, "by": by} for by in ("ring", "launch") for heads in PEAK_BARS],
}
"""The arguments of each row, by kind."""


class Work:
    """The rows, by kind."""

    def __init__(self, quick: bool):
        self._quick = quick

    def measure(self, kind: str, **about: Any) -> dict[str, Any]:
        """Returns a row: what was measured, and what is wrong with it."""
        row: dict[str, Any] = getattr(self, f"_{kind}")(**about)
        found: dict[str, Any] = {"device": jax.local_devices()[0].device_kind}
        found |= {"devices": len(jax.local_devices())}
        return found | {"jax": jax.__version__, "nvidia-smi": serve.nvidia_smi()} | row

    def _ring(self, **about: Any) -> dict[str, Any]:
        one = self._problem(**about)
        arrays = arrays_of(one)
        contenders = {"ring": ring(one, arrays), "one launch": launch(one, arrays)}
        return self._race(contenders, pairs_of(one), RING_BARS)

    def _window(self) -> dict[str, Any]:
        whole = self._problem("grouped", 8192, layout="contiguous")
        one = replace(whole, window=(whole.q_len // WINDOW, 0))
        arrays = arrays_of(one)
        contenders = {
            "with the window": ring(one, arrays),
            "whole causal mask": replace(ring(whole, arrays), restored=None),
            "one launch": launch(one, arrays),
        }
        bar = PRUNED * pairs_of(one) / pairs_of(whole)
        return self._race(contenders, pairs_of(one), dict.fromkeys(FLOP, bar))

    def _layer(self, **about: Any) -> dict[str, Any]:
        one = self._problem(**about, ranks=1, batch=1 if self._quick else 4)
        arrays = arrays_of(one)
        mask = {"is_causal": one.causal}
        ours = _contender(arrays, **mask)
        # A trial run needs no cuDNN.
        by = "xla" if self._quick else "cudnn"
        theirs = _contender(
            arrays, partial(jax.nn.dot_product_attention, implementation=by), **mask
        )
        try:
            jax.block_until_ready(theirs.program("both")())
        except Exception as error:  # any type of error: a peer may fail
            raise AbsentError(f"jax.nn can't: {error}"[:300]) from error
        return self._race({"ours": ours, f"jax.nn by {by}": theirs}, pairs_of(one))

    def _cudnn(self, **about: Any) -> dict[str, Any]:
        one = self._problem(**about, ranks=1, batch=1 if self._quick else 4)
        arrays = arrays_of(one)
        options = {"is_causal": one.causal, "backward_order": "any"}
        contenders = {
            "cuDNN": _contender(arrays, kernels="cudnn", **options),
            "own kernels": _contender(arrays, kernels="tile", **options),
        }
        return self._race(contenders, pairs_of(one))

    def _packed(self) -> dict[str, Any]:
        """Times documents in one row; the same work in rows of their own bounds it from below."""
        one = self._problem("equal", 65536, ranks=1, causal=False)
        length = one.q_len // 4 if self._quick else DOCUMENT
        arrays = arrays_of(one)
        ids = (jnp.arange(one.q_len, dtype=jnp.int32) // length)[None]
        apart = {name: x.reshape(-1, length, *x.shape[2:]) for name, x in arrays.items()}
        contenders = {
            "packed": _contender(arrays, segment_ids=ids),
            "a row for each document": replace(
                _contender(apart), restored=lambda x: x.reshape(1, -1, *x.shape[2:])
            ),
            "one document": replace(_contender(arrays), restored=None),
        }
        row = self._race(contenders, pairs_of(one) * length / one.q_len)
        share = length / one.q_len
        for which, found in row["passes"].items():
            times = {name: each["ms"] for name, each in found["contenders"].items()}
            found["share"] = times["packed"] / times["one document"] / share
            row["shown"].append(f"{which}: {found['share']:.2f} × its share of one document")
        return row

    def _mask(self) -> dict[str, Any]:
        """Times a causal mask as intervals, which are data, against the flag."""
        import burst_attention as ba

        one = self._problem("equal", 8192, ranks=1, batch=1 if self._quick else 4)
        arrays = arrays_of(one)
        rows = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (one.batch, *x.shape[1:])),
            ba.masks.chunked(one.q_len, one.q_len).arguments,
        )
        contenders = {
            "as intervals": _contender(arrays, **rows),
            "is_causal": _contender(arrays, is_causal=True),
        }
        return self._race(contenders, pairs_of(one))

    def _decode(self, tokens: int) -> dict[str, Any]:
        """Times a step of decoding against a copy of as many bytes."""
        import burst_attention as ba

        tokens, batch = (256, 2) if self._quick else (tokens, 524288 // tokens)
        heads, kv_heads, dim = (2, 1, 64) if self._quick else (32, 8, 128)
        draw = partial(jax.random.normal, dtype=jnp.bfloat16)
        keys, values = (draw(jax.random.key(i), (batch, tokens, kv_heads, dim)) for i in (1, 2))
        query = draw(jax.random.key(0), (batch, 1, heads, dim))
        lengths = jnp.full(batch, tokens, jnp.int32)
        # Half of the bytes of a copy are read.
        source = jnp.zeros(keys.nbytes // 4, jnp.int32)
        programs: dict[str, Callable[[], Any]] = {
            "ours": partial(jax.jit(ba.decode_attention), query, keys, values, lengths),
            "copy": partial(jax.jit(jnp.negative), source),
        }
        times = timed(programs, quick=self._quick)
        speed = {
            name: 2 * size / times[name]["ms"] / 1e6
            for name, size in (("ours", keys.nbytes), ("copy", source.nbytes))
        }
        ratio = speed["ours"] / speed["copy"]
        shown = f"{times['ours']['ms']:.3f} ms, {speed['ours']:.0f} GB/s, {ratio:.2f} × a copy's"
        return {"contenders": times, "gb_s": speed, "ratio": ratio, "shown": [shown], "wrong": []}

    def _host(self) -> dict[str, Any]:
        """Compares the host's time for calls of a tiny ring with its time for plain additions."""
        one = self._problem("equal", 64)
        length = 64 * one.mesh[1]
        one = replace(one, q_len=length, kv_len=length, heads=1, kv_heads=1)
        add = partial(jax.jit(jnp.add), jnp.ones(8), jnp.ones(8))
        programs: dict[str, Callable[[], Any]] = {"plain": add}
        programs |= {n: ring(one, arrays_of(one)).program(n) for n in FLOP}
        took = {name: _dispatch_us(program) for name, program in programs.items()}
        ranks = one.mesh[1]
        # One GPU carries out the steps of all ranks.
        steps = ranks**2 if len(jax.local_devices()) == 1 else ranks
        passes = dict(zip(FLOP, (1, 2), strict=True))
        step = {n: (took[n] - took["plain"]) / steps / count for n, count in passes.items()}
        shown = [f"{n}: {took[n]:.0f} µs a call, {us:.1f} µs a step" for n, us in step.items()]
        return {"us_a_call": took, "us_a_step": step, "shown": shown, "wrong": []}

    def _latents(self, tokens: int) -> dict[str, Any]:
        """Times a step of decoding over latents against jax.nn and a copy of as many bytes."""
        from decode_programs import LATENTS, latents

        tokens = 256 if self._quick else tokens
        programs = latents(tokens, "bfloat16")
        source = jnp.zeros(tokens * LATENTS["head_dim"] // 4, jnp.int32)
        programs["copy"] = partial(jax.jit(jnp.negative), source)
        times = timed(programs, quick=self._quick)
        ms = {name: found["ms"] for name, found in times.items()}
        peer = min(ms[name] for name in ms if name.startswith("jax.nn"))
        words = f"{ms['ours']:.3f} ms, {ms['ours'] / peer:.2f} × jax.nn, {ms['copy']:.3f} a copy"
        return {"contenders": times, "ratio": ms["ours"] / peer, "shown": [words], "wrong": []}

    def _linear(self, channels: bool) -> dict[str, Any]:
        from linear_programs import CHUNKS, chunked, ours

        contenders: dict[str, Any] = {"ours": lambda *x: ours(1, *x[:4])}
        if channels:
            contenders["decays of heads"] = lambda *x: ours(1, *x[:3], x[3][..., 0])
        else:
            for chunk in CHUNKS:
                plain = partial(chunked, chunk, again=True)
                contenders[f"plain JAX, chunks of {chunk}"] = lambda *x, run=plain: run(*x[:4])
        return self._recurrence(contenders, channels)

    def _delta(self, channels: bool) -> dict[str, Any]:
        from delta_programs import CHUNKS, chunked, ours

        def plain(chunk: int, *arrays: jax.Array) -> jax.Array:
            return chunked(chunk, *(x.astype(jnp.float32) for x in arrays))  # as systems need

        contenders: dict[str, Any] = {"ours": partial(ours, 1)}
        contenders |= {f"plain JAX, chunks of {chunk}": partial(plain, chunk) for chunk in CHUNKS}
        return self._recurrence(contenders, channels)

    def _infini(self) -> dict[str, Any]:
        """Times Infini-attention against the sum of its parts."""
        from delta_programs import INFINI

        row = self._recurrence({name: function for name, (function, _) in INFINI.items()})
        for which, found in row["passes"].items():
            ours, *parts = (each["ms"] for each in found["contenders"].values())
            found["ratio"] = ours / sum(parts)
            row["shown"].append(f"{which}: {found['ratio']:.2f} × the sum of its parts")
        return row

    def _recurrence(
        self, contenders: dict[str, Callable[..., Any]], channels: bool = False
    ) -> dict[str, Any]:
        """Times programs of q, k, v, log decays and β, as many as they take."""
        length = 4096 if self._quick else 32768
        one = replace(
            self._problem("equal", length, 1, head_dim=64, q_len=length, kv_len=length),
            heads=8,
            kv_heads=8,
        )
        q, k, v, dout, _ = arrays_of(one).values()
        k = (k / jnp.linalg.norm(k, axis=3, keepdims=True)).astype(k.dtype)
        logs = jnp.full(q.shape if channels else q.shape[:3], jnp.log(0.99))
        beta = jax.nn.sigmoid(jax.random.normal(jax.random.key(9), q.shape[:3]))

        def contender(attend: Callable[..., Any]) -> Contender:
            def both(*inputs: Any) -> Any:
                out, pullback = jax.vjp(attend, *inputs)
                return out, *pullback(dout.astype(out.dtype))

            return Contender(both, [q, k, v, logs, beta], restored=None)

        return self._race({name: contender(each) for name, each in contenders.items()})

    def _memory(self, heads: str, by: str) -> dict[str, Any]:
        one = self._problem(heads, 8192, None if by == "ring" else 1)
        arrays = arrays_of(one, is_random=False)
        contender = (ring if by == "ring" else launch)(one, arrays)
        unit = arrays["q"].nbytes / contender.devices
        del arrays
        jax.block_until_ready(contender.program("both")())
        peak = (jax.local_devices()[-1].memory_stats() or {}).get("peak_bytes_in_use")
        if peak is None:
            raise AbsentError("this device's allocator does not tell its peak")
        multiple, bar = peak / unit, PEAK_BARS[heads]
        shown = f"{peak / 2**30:.2f} GiB, {multiple:.1f} × one tensor like q, bar {bar:g}"
        missed = multiple > bar and not self._quick
        row = {"peak_bytes": peak, "multiple": multiple, "bar": bar}
        return row | {"shown": [shown], "wrong": ["it missed its bar"] * missed}

    def _problem(self, heads: str, tokens: int, ranks: int | None = None, **more: Any) -> Any:
        """Returns a problem, with ``tokens`` on each rank, as the tests have problems.

        Without ``ranks`` a ring has a rank for each GPU, or eight ranks on one GPU.
        """
        from features import Problem  # type: ignore[import-not-found]

        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        many, few = (2, 1) if self._quick else (32, 8) if limit >= ROOMY else (8, 2)
        gpus = len(jax.local_devices())
        ranks = ranks or (gpus if gpus > 1 else RANKS)
        length = 128 if self._quick else ranks * tokens
        sizes = {"q_len": length, "kv_len": length, "heads": many}
        sizes["kv_heads"] = few if heads == "grouped" else many
        sizes["head_dim"] = sizes["value_dim"] = more.pop("head_dim", 128)
        given = {"batch": 1, "dtype": "bfloat16", "causal": True, "layout": "zigzag"}
        return Problem(mesh=(1, ranks, 1), **(given | sizes | more))

    def _race(
        self,
        contenders: dict[str, Contender],
        pairs: float = 0.0,
        bars: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        return race(contenders, pairs, bars, self._quick)


def _contender(
    arrays: dict[str, Any], attend: Callable[..., jax.Array] | None = None, **options: Any
) -> Contender:
    """Returns results and gradients of attention on one device: ours, or that of a peer."""
    if attend is None:
        import burst_attention as ba

        devices, kinds = jax.local_devices()[:1], (AxisType.Auto,)
        mesh = jax.make_mesh((1,), ("context",), kinds, devices=devices)
        spec = jax.P(None, "context")
        attend = partial(ba.dot_product_attention, mesh=mesh, spec=spec)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        o, pullback = jax.vjp(partial(attend, **options), q, k, v)
        return o, *pullback(dout)

    return Contender(both, [arrays[name] for name in ("q", "k", "v", "dout")])


def _dispatch_us(program: Callable[[], Any]) -> float:
    """Returns the microseconds of the host for a call; the device's work is shorter or waits."""
    jax.block_until_ready(program())
    began = time.perf_counter()
    results = [program() for _ in range(DISPATCHES)]
    took = time.perf_counter() - began
    jax.block_until_ready(results)
    return took / DISPATCHES * 1e6
