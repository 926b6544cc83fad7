"""Linear attention against plain JAX, chunked and token by token, all in this run.

Prints a table of forward + backward: the ratio to the fastest chunked program, time against length
and against the number of devices. `make linear-bench` is the way to call it.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import burst_attention as ba
import jax
import jax.numpy as jnp
import machine
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import alternate

HERE = Path(__file__).parent
CHUNKS = (64, 128, 256)
SHARDS = P(None, "context")
Program = Callable[[], Any]


def chunked(chunk: int, *arrays: jax.Array) -> jax.Array:
    """Plain JAX: a scan over chunks, products of matrices inside them."""
    q, _, v, _ = arrays
    batch, length, heads, _ = q.shape
    parts = [x.reshape(batch, length // chunk, chunk, heads, -1) for x in arrays]
    parts = [x.transpose(1, 0, 3, 2, 4) for x in parts]
    see = jnp.tril(jnp.ones((chunk, chunk), bool))

    def step(state: jax.Array, part: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k, v, logs = part
        sums = jnp.cumsum(logs[..., 0], axis=-1)
        between = jnp.where(see, sums[..., :, None] - sums[..., None, :], -jnp.inf)
        weights = jnp.einsum("bhik,bhjk->bhij", q, k) * jnp.exp(between)
        out = jnp.einsum("bhij,bhjv->bhiv", weights, v)
        out += jnp.exp(sums)[..., None] * jnp.einsum("bhik,bhkv->bhiv", q, state)
        left = k * jnp.exp(sums[..., -1:] - sums)[..., None]
        state = jnp.exp(sums[..., -1])[..., None, None] * state
        return state + jnp.einsum("bhjk,bhjv->bhkv", left, v), out

    state = jnp.zeros((batch, heads, q.shape[3], v.shape[3]))
    _, out = lax.scan(step, state, parts)
    return out.transpose(1, 0, 3, 2, 4).reshape(v.shape)


def recurrent(q: jax.Array, k: jax.Array, v: jax.Array, logs: jax.Array) -> jax.Array:
    """Plain JAX: token by token, the definition."""

    def step(state: jax.Array, token: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k, v, logs = token
        state = jnp.exp(logs)[..., None, None] * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    batch, _, heads, k_dim = q.shape
    state = jnp.zeros((batch, heads, k_dim, v.shape[3]))
    _, out = lax.scan(step, state, [x.swapaxes(0, 1) for x in (q, k, v, logs)])
    return out.swapaxes(0, 1)


def ours(devices: int, *arrays: jax.Array) -> jax.Array:
    """`linear_attention` over so many devices."""
    q, k, v, logs = arrays
    attend: Any = jax.shard_map(
        lambda q, k, v, logs: ba.linear_attention(q, k, v, axis_name="context", log_decay=logs),
        mesh=mesh_of(devices),
        in_specs=(SHARDS,) * 4,
        out_specs=SHARDS,
    )
    out: jax.Array = attend(q, k, v, logs)
    return out


def mesh_of(devices: int) -> Mesh:
    """The first devices, in a line."""
    return Mesh(np.array(jax.devices()[:devices]), ("context",))


def inputs(length: int, heads: int, dim: int) -> list[np.ndarray]:
    """q, k, v, log decays of 0.99, and the cotangent."""
    random = np.random.default_rng(0)
    q, k, v, dout = (random.standard_normal((1, length, heads, dim), np.float32) for _ in range(4))
    logs = np.full((1, length, heads), np.log(0.99), np.float32)
    return [q, k, v, logs, dout]


def program(function: Callable[..., jax.Array], arrays: list[np.ndarray], devices: int) -> Program:
    """Forward and backward, compiled, with inputs in place."""

    def both(*arrays: jax.Array) -> Any:
        *inputs, dout = arrays
        out, pullback = jax.vjp(function, *inputs)
        return out, pullback(dout)

    placed = [jax.device_put(x, NamedSharding(mesh_of(devices), SHARDS)) for x in arrays]
    compiled = jax.jit(both).lower(*placed).compile()
    return lambda: jax.block_until_ready(compiled(*placed))


def timed(programs: dict[str, Program], budget_s: float) -> dict[str, float]:
    """Median seconds of each, printed."""
    found = {name: median(each) for name, each in alternate(programs, budget_s).items()}
    for name, seconds in found.items():
        print(f"  {name:<28} {seconds * 1e3:10,.1f} ms", flush=True)
    return found


def bench(flags: argparse.Namespace) -> dict[str, Any]:
    """Everything, printed as it comes."""
    scale, heads, dim = (16 if flags.quick else 1), flags.heads, 64
    length = 32768 // scale
    print(f"S {length}, {heads} heads, D {dim}, float32, forward + backward")
    arrays = inputs(length, heads, dim)
    programs = {
        f"plain JAX, chunks of {c}": program(partial(chunked, c), arrays, 1) for c in CHUNKS
    }
    programs |= {f"ours, {n} devices": program(partial(ours, n), arrays, n) for n in (1, 2, 4, 8)}
    speed = timed(programs, flags.budget)
    ratio = min(s for name, s in speed.items() if "plain" in name) / speed["ours, 1 devices"]
    print(f"  {ratio:.2f} x as fast as the fastest chunked program")
    few = inputs(2048 // scale, heads, dim)
    print(f"S {2048 // scale}: token by token")
    tokens = timed(
        {
            "plain JAX, lax.scan": program(recurrent, few, 1),
            "ours, 1 devices": program(partial(ours, 1), few, 1),
        },
        flags.budget / 4,
    )
    lengths: dict[str, float] = {}
    for length in (131072 // scale, 262144 // scale):
        print(f"S {length}")
        longer = {"ours, 8 devices": program(partial(ours, 8), inputs(length, heads, dim), 8)}
        lengths[str(length)] = timed(longer, flags.budget / 2)["ours, 8 devices"]
    short, long = lengths.values()
    print(f"  twice the length takes {long / short:.2f} x the time")
    return {"speed": speed, "ratio": ratio, "token_by_token": tokens, "lengths": lengths}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="short sequences: does it run at all?")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of timing per table")
    flags = parser.parse_args()
    print(f"{machine.cpu_name()}, {machine.cores()} cores")
    results = {"cpu": machine.cpu_name(), "heads": flags.heads} | bench(flags)
    folder = HERE / "results" / ("partial" if flags.quick else "")
    folder.mkdir(exist_ok=True)
    path = folder / f"linear-{machine.slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
