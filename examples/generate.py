"""Generates text from one prompt, with a key/value cache that is sharded across devices.

The model is that of `train_long_context.py`. Each device holds an equal part of the prompt's keys
and values, and of those of the samples. The prompt enters in chunks. Then several samples continue
it: they share the prompt's cache, which lies in memory once. The first sample is greedy. With
`--pool` other devices than the model's hold the caches and compute attention.
At the end its text is compared with the most probable text of full attention without a cache, and
the logits of all samples with the logits of that attention.
`python examples/generate.py --help` lists the options.
"""

import argparse
import time
from pathlib import Path

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from attentions import AXIS
from checkpoint import Params, load_checkpoint
from flax import nnx
from generator import SHARDED, STRIDE, WHOLE, Cache, Generator
from jax.sharding import Mesh, NamedSharding
from pooled import PooledGenerator
from text import standard_library_bytes
from tqdm import tqdm
from transformer import Config, Transformer

Flags = argparse.Namespace

TOLERANCE = 1e-4
"""Relative difference of logits that rounding explains."""


def parse() -> Flags:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("out/checkpoint.npz"))
    parser.add_argument("--devices", type=int, default=8, help="CPU devices of the model")
    parser.add_argument("--pool", type=int, default=0, help="other devices, for the caches")
    parser.add_argument("--prompt", type=int, default=4096, help="bytes of the prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens that enter at once")
    parser.add_argument("--samples", type=int, default=4, help="texts, the first one greedy")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each text")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the other texts")
    flags = parser.parse_args()
    for name in ("devices", "prompt", "chunk", "samples", "tokens"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(flags, name)}")
    if flags.pool < 0 or (flags.pool and flags.prompt % flags.pool):
        parser.error(
            f"--pool: expected 0 or a divisor of --prompt {flags.prompt}, got {flags.pool}"
        )
    if flags.chunk % flags.devices:
        parser.error(f"--chunk {flags.chunk} can't be cut for {flags.devices} devices")
    if flags.prompt % flags.chunk:
        parser.error(f"--prompt {flags.prompt} can't be cut into chunks of {flags.chunk}")
    if flags.tokens % STRIDE:
        parser.error(f"--tokens: expected a multiple of {STRIDE}, got {flags.tokens}")
    if not flags.checkpoint.exists():
        parser.error(f"--checkpoint {flags.checkpoint} does not exist; `make demo` trains a model")
    return flags


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
    jax.config.update("jax_num_cpu_devices", flags.devices + flags.pool)
    devices, others = np.split(np.array(jax.devices()), [flags.devices])
    mesh = Mesh(devices, (AXIS,))
    config = Config()
    graph, fresh = nnx.split(Transformer(config, nnx.Rngs(0)))
    on_one = load_checkpoint(flags.checkpoint, fresh)
    params = jax.device_put(on_one, NamedSharding(mesh, WHOLE))
    text = standard_library_bytes()
    # After a prompt that ends within indentation, the most probable text is blank.
    end = text.tobytes().index(b"self.", text.size // 2) + len("self.")
    prompt = text[end - flags.prompt : end]
    holders = flags.pool or flags.devices
    print(
        f"cache over {holders} {'other ' if flags.pool else ''}devices, prompt of "
        f"{flags.prompt:,} tokens ({-(-flags.prompt // holders):,} per device), {flags.samples} "
        f"samples of {flags.tokens} tokens"
    )
    generator = Generator(mesh, config, graph, flags.temperature)
    if flags.pool:
        pool = ba.CachePool(list(others), axis_name=AXIS, layout="contiguous")
        generator = PooledGenerator(mesh, config, graph, flags.temperature, pool)
    found = generate(generator, params, prompt, flags)
    check(generator, on_one, prompt, found)
    print(f"--- the prompt ends with\n{shown(prompt[-200:])}")
    for sample in range(flags.samples):
        title = "greedy" if sample == 0 else f"sample {sample}, temperature {flags.temperature}"
        print(f"--- {title}\n{shown(found[0][:, sample])}")


if __name__ == "__main__":
    main()
