"""Generates text from one prompt, with a key/value cache that is sharded across devices.

The model is that of `train_long_context.py`. Each device holds an equal part of the prompt's keys
and values, and of those of the samples. The prompt enters in chunks. Then several samples continue
it: they share the prompt's cache, which lies in memory once. The first sample is greedy.
At the end its text is compared with the most probable text of full attention without a cache, and
the logits of all samples with the logits of that attention.
`python examples/generate.py --help` lists the options.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from attentions import AXIS, plain_softmax
from checkpoint import Params, load_checkpoint
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from text import standard_library_bytes
from tqdm import tqdm
from transformer import Attend, Config, Transformer

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of a layer, `[batch, rows, kv_heads, head_dim]`."""
Generated = tuple[jax.Array, jax.Array]
"""Tokens `[tokens, samples]`, and the logits that they were chosen by."""
Flags = argparse.Namespace

SHARDED, WHOLE = P(None, AXIS), P()
STRIDE = 16
"""Tokens of each sample that one program generates."""
append = partial(ba.append_to_cache, axis_name=AXIS, layout="contiguous")
attend_samples = partial(ba.shared_prefix_attention, axis_name=AXIS, layout="contiguous")
NO_END = 2**31 - 1
TOLERANCE = 1e-4
"""Relative difference of logits that rounding explains."""


def parse() -> Flags:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("out/checkpoint.npz"))
    parser.add_argument("--devices", type=int, default=8, help="CPU devices that share the cache")
    parser.add_argument("--prompt", type=int, default=4096, help="bytes of the prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens that enter at once")
    parser.add_argument("--samples", type=int, default=4, help="texts, the first one greedy")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each text")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the other texts")
    flags = parser.parse_args()
    for name in ("devices", "prompt", "chunk", "samples", "tokens"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(flags, name)}")
    if flags.chunk % flags.devices:
        parser.error(f"--chunk {flags.chunk} can't be cut for {flags.devices} devices")
    if flags.prompt % flags.chunk:
        parser.error(f"--prompt {flags.prompt} can't be cut into chunks of {flags.chunk}")
    if flags.tokens % STRIDE:
        parser.error(f"--tokens: expected a multiple of {STRIDE}, got {flags.tokens}")
    if not flags.checkpoint.exists():
        parser.error(f"--checkpoint {flags.checkpoint} does not exist; `make demo` trains a model")
    return flags


def attend_prefill(cache: Cache, written: list[Cache], end: jax.Array) -> Attend:
    """Returns the attention of a chunk of the prompt, of which each device has an equal part.

    `end` is the position after the chunk. The device's queries visit the cache of every device. A
    key is visible from its own position on, and a row that has no key yet is visible to no query.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        gather = partial(jax.lax.all_gather, axis_name=AXIS, axis=1, tiled=True, to="invarying")
        cached = append(*cache, gather(key), gather(value), end)
        written.append(cached)
        rows = ba.local_positions(cached[0].shape[1], axis_name=AXIS)[None]
        visible = (rows, jnp.where(rows < end, NO_END, rows))
        places = chunk_positions(query.shape[1], end)[None]
        return ba.attention(query, *cached, axis_name=AXIS, query_positions=places, visible=visible)

    return attend


def chunk_positions(tokens: int, end: jax.Array) -> jax.Array:
    """Returns the positions of this device's tokens of a chunk that ends before `end`."""
    index = ba.local_positions(tokens, axis_name=AXIS)
    return end[0] - tokens * jax.lax.axis_size(AXIS) + index


def attend_step(prompt: Cache, own: Cache, written: list[Cache], length: jax.Array) -> Attend:
    """Returns the attention of one new token of each sample, the `length`-th after the prompt."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        samples, rows = query.shape[0], prompt[0].shape[1] * jax.lax.axis_size(AXIS)
        lengths = jnp.full(samples, length)
        cached = append(*own, key, value, lengths)
        written.append(cached)
        return attend_samples(
            *(query, *prompt, *cached, lengths),
            prefix_of=jnp.zeros(samples, jnp.int32),
            prefix_lengths=jnp.full(1, rows),
        )

    return attend


@dataclass(frozen=True)
class Generator:
    """A model, and the devices that share its caches."""

    mesh: Mesh
    config: Config
    graph: nnx.GraphDef[Transformer]
    temperature: float

    def caches(self, batch: int, positions: int) -> list[Cache]:
        """Returns empty caches of all layers, for some positions on all devices together."""
        rows = -(-positions // self.mesh.size) * self.mesh.size
        shape = (batch, rows, self.config.kv_heads, self.config.head_dim)
        sharding = NamedSharding(self.mesh, SHARDED)
        zeros = partial(jnp.zeros, shape, self.config.dtype, device=sharding)
        return [(zeros(), zeros()) for _ in range(self.config.layers)]

    def prefill(self) -> Callable[..., tuple[jax.Array, list[Cache]]]:
        """Returns the program that adds a chunk of the prompt to the caches.

        It maps parameters, tokens `[1, chunk]`, caches and the position after the chunk `[1]` to
        the logits of each device's last token, and the caches.
        """

        def local(
            params: Params, tokens: jax.Array, caches: list[Cache], end: jax.Array
        ) -> tuple[jax.Array, list[Cache]]:
            written: list[Cache] = []
            attends = [attend_prefill(cache, written, end) for cache in caches]
            model, positions = nnx.merge(self.graph, params), chunk_positions(tokens.shape[1], end)
            logits = model.with_caches(tokens, positions, attends)
            return logits[:, -1], written

        specs = (WHOLE, SHARDED, SHARDED, WHOLE)
        run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=(P(AXIS), SHARDED))
        return jax.jit(run, donate_argnums=2)

    def steps(self) -> Callable[..., tuple[Generated, jax.Array, list[Cache]]]:
        """Returns the program that generates the next tokens of all samples.

        It maps parameters, caches of the prompt, caches of the samples, the last tokens
        `[samples]`, their number after the prompt and a random key to the new tokens
        `[STRIDE, samples]` with their logits, the last tokens, and the caches of the samples.
        """

        def local(
            params: Params,
            prompt: list[Cache],
            own: list[Cache],
            tokens: jax.Array,
            length: jax.Array,
            key: jax.Array,
        ) -> tuple[Generated, jax.Array, list[Cache]]:
            model = nnx.merge(self.graph, params)
            begin = prompt[0][0].shape[1] * jax.lax.axis_size(AXIS)

            def step(
                carry: tuple[jax.Array, list[Cache]], index: jax.Array
            ) -> tuple[tuple[jax.Array, list[Cache]], Generated]:
                tokens, own = carry
                now, written = length + index, list[Cache]()
                attends = [
                    attend_step(*each, written, now) for each in zip(prompt, own, strict=True)
                ]
                position = (begin + now - 1)[None]
                logits = model.with_caches(tokens[:, None], position, attends)[:, 0]
                following = self.choose(logits, jax.random.fold_in(key, now))
                return (following, written), (following, logits)

            (tokens, own), found = jax.lax.scan(step, (tokens, own), jnp.arange(STRIDE))
            return found, tokens, own

        specs = (WHOLE, SHARDED, SHARDED, WHOLE, WHOLE, WHOLE)
        run = jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=(WHOLE, WHOLE, SHARDED)
        )
        return jax.jit(run, donate_argnums=2)

    def choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the next token of each sample: the most probable one of the first sample."""
        drawn = jax.random.categorical(key, logits / self.temperature)
        return jnp.where(jnp.arange(len(logits)) == 0, jnp.argmax(logits, -1), drawn)

    def without_cache(self) -> Callable[[Params, jax.Array], jax.Array]:
        """Returns the program that maps tokens `[1, seq]` to the logits of full attention."""

        def run(params: Params, tokens: jax.Array) -> jax.Array:
            return nnx.merge(self.graph, params)(tokens, jnp.arange(tokens.shape[1]), plain_softmax)

        return jax.jit(run)


def prefill_prompt(
    generator: Generator, params: Params, prompt: np.ndarray, flags: Flags
) -> tuple[np.ndarray, list[Cache]]:
    """Returns the logits after the prompt `[vocabulary]` and the caches that hold it."""
    prefill, caches = generator.prefill(), generator.caches(1, flags.prompt)
    with tqdm(total=flags.prompt, desc="prefill", unit=" tokens") as bar:
        for start in range(0, flags.prompt, flags.chunk):
            end = start + flags.chunk
            chunk = prompt[None, start:end].astype(np.int32)
            tokens = jax.device_put(chunk, NamedSharding(generator.mesh, SHARDED))
            logits, caches = prefill(params, tokens, caches, jnp.full(1, end))
            jax.block_until_ready(logits)
            bar.update(flags.chunk)
    return np.asarray(logits)[-1], caches


def generate(
    generator: Generator, params: Params, prompt: np.ndarray, flags: Flags
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens `[tokens, samples]` and their logits, and shows the progress."""
    first, caches = prefill_prompt(generator, params, prompt, flags)
    logits, key = jnp.broadcast_to(first, (flags.samples, first.size)), jax.random.key(0)
    tokens = generator.choose(logits, key)
    found, seconds = [(np.asarray(tokens)[None], np.asarray(logits)[None])], []
    tokens = jax.device_put(tokens, NamedSharding(generator.mesh, WHOLE))
    steps, own = generator.steps(), generator.caches(flags.samples, flags.tokens)
    with tqdm(total=flags.tokens * flags.samples, desc="generate", unit=" tokens") as bar:
        for length in range(1, flags.tokens, STRIDE):
            begin = time.perf_counter()
            new, tokens, own = steps(params, caches, own, tokens, jnp.int32(length), key)
            found.append((np.asarray(new[0]), np.asarray(new[1])))
            seconds.append(time.perf_counter() - begin)
            bar.update(STRIDE * flags.samples)
    if len(seconds) > 1:
        # The first call compiles.
        rate = (len(seconds) - 1) * STRIDE * flags.samples / sum(seconds[1:])
        print(f"{rate:,.0f} tokens per second, {flags.samples} samples at once")
    texts, scores = (np.concatenate(x)[: flags.tokens] for x in zip(*found, strict=True))
    return texts, scores


def check(
    generator: Generator, params: Params, prompt: np.ndarray, found: tuple[np.ndarray, np.ndarray]
) -> None:
    """Stops unless full attention without a cache gives the same greedy text and logits."""
    run, largest, (texts, logits) = generator.without_cache(), 0.0, found
    for sample in range(texts.shape[1]):
        whole = np.concatenate([prompt, texts[:-1, sample]]).astype(np.int32)
        exact = np.asarray(run(params, jnp.asarray(whole)[None]))[0, prompt.size - 1 :]
        difference = np.abs(logits[:, sample] - exact).max() / np.abs(exact).max()
        largest = max(largest, float(difference))
        if sample == 0 and not np.array_equal(exact.argmax(-1), texts[:, 0]):
            raise SystemExit("expected the greedy text of full attention without a cache")
    print(
        f"greedy text: the same {len(texts)} tokens as full attention without a cache; largest "
        f"relative difference of the logits of all samples {largest:.1e}"
    )
    if not largest <= TOLERANCE:
        raise SystemExit(f"expected a difference of at most {TOLERANCE:.0e}")


def shown(tokens: np.ndarray) -> str:
    """Returns tokens as text."""
    return bytes(tokens.astype(np.uint8)).decode(errors="replace")


def main() -> None:
    """Loads the model, generates, checks and prints."""
    flags = parse()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.devices)
    mesh = jax.make_mesh((flags.devices,), (AXIS,))
    config = Config()
    graph, fresh = nnx.split(Transformer(config, nnx.Rngs(0)))
    on_one = load_checkpoint(flags.checkpoint, fresh)
    params = jax.device_put(on_one, NamedSharding(mesh, WHOLE))
    text = standard_library_bytes()
    # After a prompt that ends within indentation, the most probable text is blank.
    end = text.tobytes().index(b"self.", text.size // 2) + len("self.")
    prompt = text[end - flags.prompt : end]
    print(
        f"cache over {flags.devices} devices, prompt of {flags.prompt:,} tokens "
        f"({flags.prompt // flags.devices:,} per device), {flags.samples} samples of "
        f"{flags.tokens} tokens"
    )
    generator = Generator(mesh, config, graph, flags.temperature)
    found = generate(generator, params, prompt, flags)
    check(generator, on_one, prompt, found)
    print(f"--- the prompt ends with\n{shown(prompt[-200:])}")
    for sample in range(flags.samples):
        title = "greedy" if sample == 0 else f"sample {sample}, temperature {flags.temperature}"
        print(f"--- {title}\n{shown(found[0][:, sample])}")


if __name__ == "__main__":
    main()
