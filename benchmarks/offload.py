"""Times caches on other devices (`burst_attention.CachePool`), and draws two batches in turn.

First, the time of a layer beyond decoding itself: a chain of calls, each with the output of the
call before as its query, by `CachePool.attend` and by the same program on the pool's devices alone.
Then a small model decodes two batches in turn. JAX's profiler says when the model's devices compute
and when the pool's do. Writes results/offload-<cpu>.json and, with matplotlib, draws
results/offload-<cpu>.png. `make offload-bench` calls this program.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import machine
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import alternate

HERE = Path(__file__).parent
MOST = 8
"""CPU devices."""
LAYERS = 16
BATCH, HEADS, KV_HEADS, DIM = 4, 32, 8, 128
WORLDS = ((1, 1), (1, 4), (4, 4))
"""Devices of the model and of the pool."""
HIDDEN, ROWS = 4096, 32
"""Columns and rows of the products of the small model, which make it as slow as the pool."""
Spans = list[tuple[float, float]]
"""Beginning and end of what a set of devices does, in seconds."""


def put(count: int, *arrays: np.ndarray) -> list[jax.Array]:
    """Returns arrays that each of the model's devices has."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("tensor",))
    return [jax.device_put(x, NamedSharding(mesh, P())) for x in arrays]


def pool_of(count: int) -> ba.CachePool:
    """Returns a pool of devices that no model has."""
    return ba.CachePool(jax.devices()[MOST // 2 :][:count])


def tokens() -> list[np.ndarray]:
    """Returns query, key and value of one token of each sequence."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, 1, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [np.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def chains(world: tuple[int, int], positions: int) -> dict[str, Callable[[], object]]:
    """Returns a chain of layers by a pool, and by the program of the pool's devices alone."""
    pool, (query, *new) = pool_of(world[1]), put(world[0], *tokens())
    init = partial(pool.init, batch=BATCH, positions=positions, kv_heads=KV_HEADS, head_dim=DIM)
    caches = {name: [init() for _ in range(4)] for name in ("alone", "apart")}
    lengths = pool.put(np.full(BATCH, positions, np.int32))
    there = [pool.put(x) for x in (query, *new)]
    cut = P(None, "context")

    @partial(jax.jit, donate_argnums=0)
    @partial(
        jax.shard_map,
        mesh=pool.mesh,
        in_specs=(cut, P(), P(), P(), P()),
        out_specs=(P(), cut),
    )
    def step(
        cache: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys, values = ba.append_to_cache(*cache, k, v, n, axis_name="context")
        return ba.decode_attention(q, keys, values, n, axis_name="context"), (keys, values)

    def run(name: str, call: Callable[..., Any], first: jax.Array, *others: jax.Array) -> None:
        held, x = caches[name], first
        for layer in range(LAYERS):
            at = layer % len(held)
            x, held[at] = call(held[at], x, *others, lengths)
        jax.block_until_ready(x)

    return {
        "alone": partial(run, "alone", step, *there),
        "apart": partial(run, "apart", pool.attend, query, *new),
    }


def beyond_decoding(positions: int, budget_s: float) -> list[dict[str, Any]]:
    """Prints and returns the time of a layer by a pool, and beyond that of decoding alone."""
    found = []
    for world in WORLDS:
        taken = alternate(chains(world, positions), budget_s, least=7, most=25)
        layer = {name: [x / LAYERS for x in each] for name, each in taken.items()}
        more = median(x - y for x, y in zip(layer["apart"], layer["alone"], strict=True))
        each: dict[str, Any] = {"model": world[0], "pool": world[1], "positions": positions}
        each |= {name: median(x) for name, x in layer.items()}
        found.append(each | {"more": more, "least_more": min(layer["apart"]) - min(layer["alone"])})
        print(
            f"  {world[0]} + {world[1]} devices, {positions:,} positions: decoding "
            f"{1e3 * each['alone']:.2f} ms a layer, {1e3 * more:.2f} ms more with the cache apart "
            f"(of minima {1e3 * found[-1]['least_more']:.2f})",
            flush=True,
        )
    return found


class Batch:
    """Sequences of a small model, whose caches are in a pool."""

    def __init__(self, pool: ba.CachePool, positions: int, layers: int) -> None:
        self.pool, self.layers = pool, layers
        sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "float32"}
        self.caches = [pool.init(batch=1, positions=positions, **sizes) for _ in range(layers)]
        self.lengths = pool.put(np.full(1, positions, np.int32))
        (self.x,) = put(1, np.ones((1, 1, HEADS, DIM), np.float32))


def small_model() -> Callable[[jax.Array], list[jax.Array]]:
    """Returns a program that computes a layer's query, key and value of the output before."""
    random, columns = np.random.default_rng(0), (HEADS + 2 * KV_HEADS) * DIM
    shapes = ((HEADS * DIM, HIDDEN), (HIDDEN, columns))
    up, down = put(1, *(random.standard_normal(x, np.float32) / 64 for x in shapes))

    @jax.jit
    def layer(up: jax.Array, down: jax.Array, x: jax.Array) -> list[jax.Array]:
        rows = jnp.broadcast_to(x.reshape(1, -1), (ROWS, HEADS * DIM))
        parts = jnp.split(
            jnp.tanh(rows @ up)[:, :] @ down, [HEADS * DIM, (HEADS + KV_HEADS) * DIM], 1
        )
        return [x.mean(0).reshape(1, 1, -1, DIM) for x in parts]

    return partial(layer, up, down)


def in_turn(positions: int, layers: int = 4) -> dict[str, Any]:
    """Prints and returns when the model's devices and the pool compute, with two batches."""
    pool, model = pool_of(1), small_model()
    batches = [Batch(pool, positions, layers) for _ in range(2)]

    def step(batch: Batch) -> Generator[None, None, jax.Array]:
        x = batch.x
        for layer in range(batch.layers):
            query, key, value = model(x)
            pending, batch.caches[layer] = pool.send(
                batch.caches[layer], query, key, value, batch.lengths
            )
            yield
            x = pending.receive()
        return x

    def run() -> None:
        jax.block_until_ready(ba.alternate(step, batches))

    def one_by_one() -> None:
        for batch in batches:
            jax.block_until_ready(ba.alternate(step, [batch]))

    taken = alternate({"in turn": run, "one by one": one_by_one}, budget_s=5.0)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        spans = busy(jax.profiler.ProfileData.from_file(str(path)))
    total = {name: sum(end - start for start, end in each) for name, each in spans.items()}
    both = sum(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans["model"] for b in spans["pool"]
    )
    share = both / min(total.values())
    speedup = median(taken["one by one"]) / median(taken["in turn"])
    print(
        f"  two batches in turn: model {1e3 * total['model']:.1f} ms, pool "
        f"{1e3 * total['pool']:.1f} ms, both at once {share:.0%} of the shorter time; "
        f"{speedup:.2f} x as fast as one batch after the other",
        flush=True,
    )
    return {"spans": spans, "both_share": share, "speedup": speedup, "positions": positions}


def busy(profile: Any) -> dict[str, Spans]:
    """Returns when programs with and without attention run, in seconds from the first one on."""
    found: dict[str, list[tuple[float, float]]] = {"model": [], "pool": []}
    for line in (line for plane in profile.planes for line in plane.lines):
        events = [(x.name, x.start_ns * 1e-9, x.end_ns * 1e-9) for x in line.events]
        for name, start, end in events:
            if name == "ThunkExecutor::Execute":
                inside = [n for n, first, last in events if start <= first and last <= end]
                is_pool = any(n.startswith("burst_attention_decode") for n in inside)
                found["pool" if is_pool else "model"].append((start, end))
    first = min(start for each in found.values() for start, _ in each)
    return {name: joined((a - first, b - first) for a, b in each) for name, each in found.items()}


def joined(spans: Any) -> Spans:
    """Returns spans in order, of which those that meet are one."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws when the model's devices and the pool compute."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 2.4), layout="constrained")
    for row, (name, colour) in enumerate({"model": "tab:blue", "pool": "tab:orange"}.items()):
        bars = [(1e3 * start, 1e3 * (end - start)) for start, end in found["spans"][name]]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colour, edgecolor="white")
    axes.set(yticks=(0, 1), yticklabels=("model", "pool"), xlabel="time, ms", ylim=(1.6, -0.6))
    axes.set_title(
        f"Two batches in turn: both compute {found['both_share']:.0%} of the shorter one's time"
    )
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of each comparison")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", MOST)
    name = f"{machine.cpu_name()}, {machine.cores()} cores"
    print(f"{name}, bfloat16, {HEADS}:{KV_HEADS} heads of {DIM}, {BATCH} sequences")
    times = [x for positions in flags.positions for x in beyond_decoding(positions, flags.budget)]
    turns = in_turn(16_384)
    path = flags.out / f"offload-{machine.slug()}"
    found = {"cpu": name, "jax": jax.__version__, "beyond_decoding": times, "in_turn": turns}
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    draw(turns, path.with_suffix(".png"))
    print(f"wrote {path}.json and {path}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
