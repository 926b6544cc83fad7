"""Rows of decoding, and of the host's time for a call."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .problems import Rows
from .race import FLOP, arrays_of, ring, timed

DISPATCHES = 20
"""Calls in a row whose time is the host's. XLA lets 32 wait for a device."""


class DecodeRows(Rows):
    """Rows whose calls are short."""

    def decode(self, tokens: int) -> dict[str, Any]:
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

    def latents(self, tokens: int) -> dict[str, Any]:
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

    def host(self) -> dict[str, Any]:
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


def _dispatch_us(program: Callable[[], Any]) -> float:
    """Returns the microseconds of the host for a call; the device's work is shorter or waits."""
    jax.block_until_ready(program())
    began = time.perf_counter()
    results = [program() for _ in range(DISPATCHES)]
    took = time.perf_counter() - began
    jax.block_until_ready(results)
    return took / DISPATCHES * 1e6
