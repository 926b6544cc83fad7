"""Sentences of pages that repeat measured figures, made from the files of results."""

from collections.abc import Iterable
from typing import Any

import result_files as files
from result_files import results


def sentences() -> Iterable[tuple[str, str]]:
    """Yields the name of a page, and words with measured figures that stand in it."""
    yield from cpu_sentences()
    yield from decode_sentences()
    yield from linear_sentences()
    yield from gpu_sentences()
    yield from profile_sentences()


def cpu_sentences() -> Iterable[tuple[str, str]]:
    """Yields pages and words of the measurements on CPUs."""
    cpu = results(files.CPU)
    equal, single = cpu["ring"]
    yield (
        "benchmarks",
        "Eight virtual devices in zigzag layout take {:.2f} times the time of one device, and "
        "{:.2f} times in the forward pass".format(*ratios(equal, "both", "forward")),
    )
    words = "With one key/value head they take {:.2f} and {:.2f} times the time."
    yield "benchmarks", words.format(*ratios(single, "both", "forward"))
    window, packed = cpu["masks"]
    words = "take{} {:.3f} times the time forward and {:.3f} times with the backward pass"
    yield "benchmarks", words.format("s", *ratios(window, "forward", "both"))
    yield "benchmarks", words.format("", *ratios(packed, "forward", "both"))
    (kept,) = cpu["checkpoint"]
    yield "benchmarks", f"`save_attention` takes {kept['ratio']:.2f} times the time"
    (memory,) = cpu["memory"]
    yield (
        "benchmarks",
        f"{memory['extra_bytes'] / 2**20:.0f} MiB beyond inputs, outputs and gradients, "
        f"{memory['of_kv']:.2f} times the size of key and value",
    )
    masks = results(files.MASKS_CPU)
    yield (
        "benchmarks",
        f"as intervals takes {masks['causal']['visible_to_is_causal']:.2f} times the time",
    )
    yield "benchmarks", f"in one row is {masks['tree']['apart_to_tree']:.2f} times as fast"
    documents = masks["documents"]
    words = "has {pairs:.2f} times the mean of the pairs, and takes {time:.2f} times the mean"
    yield "benchmarks", words.format(**documents["max_over_mean"])
    ways = {
        (row["where"], row["way"]): row["ratio"]
        for row in results(files.SCHEDULES_CPU)["rows"]
        if row["pass"] == "both"
    }
    one = [
        ways["one process", way]
        for way in (
            "double ring 2 x 4",
            "double ring 4 x 2",
            "all_gather",
            "ulysses",
            "hybrid 2 x 4",
            "balanced",
        )
    ]
    words = "{:.2f} and {:.2f}; `all_gather` {:.2f}; `ulysses` {:.2f}; `hybrid` {:.2f}; "
    words += "`balanced` {:.2f}"
    yield "benchmarks", words.format(*one)
    several = [
        ways[f"{count} processes", way] for way in ("ring", "double ring 2 x 4") for count in (2, 4)
    ]
    words = "takes {:.2f} times the time over 2 processes and {:.2f} times over 4. A double ring "
    words += "takes {:.2f} and {:.2f} times"
    yield "benchmarks", words.format(*several)


def decode_sentences() -> Iterable[tuple[str, str]]:
    """Yields words of the measurements of decoding on CPUs."""
    decode = results(files.DECODE_CPU)
    pages, ranks = decode["pages"], decode["ranks"]
    words = "{:.2f} times the time of a cache without pages (131,072 tokens, bfloat16), {:.2f} of"
    roofs = {name: each["of_roof"] for name, each in pages["seconds"].items()}
    yield "benchmarks", words.format(pages["paged_to_contiguous"], roofs["paged"])
    words = "takes {:.2f} times the time of 32 sequences of equal length with the same sum. It "
    words += "reaches {:.2f} of the roof"
    yield "benchmarks", words.format(pages["ragged_to_equal"], roofs["ragged"])
    words = "Eight virtual devices take {:.2f} times the time of one"
    yield "benchmarks", words.format(ranks["several_to_one"])
    yield "benchmarks", f"in a compiled loop costs {ranks['overhead_s'] * 1e3:.2f} ms"
    shared = {(row["dtype"], row["requests"]): row for row in decode["prefixes"]}
    for dtype in ("float32", "bfloat16"):
        row = shared[dtype, 32]
        roof = row["seconds"]["shared prefix"]["of_roof"]
        words = f"{roof:.2f} of the roof in {dtype} and {row['separate_to_shared']:.2f} times as"
        yield "benchmarks", f"{words} fast{' as separate caches' * (dtype == 'float32')}"
    single = (1 / shared[dtype, 1]["separate_to_shared"] for dtype in ("float32", "bfloat16"))
    words = "With one request it takes {:.2f} and {:.2f} times the time of one cache"
    yield "benchmarks", words.format(*single)
    words = "is {:.2f} times the time in a cache of 2,048"
    yield "benchmarks", words.format(decode["appending"]["ratio"])
    for row in results(files.LATENTS_CPUS)["decode"]:
        words = (
            "{}, {}: {:.1f} times as fast as `jax.nn` at 32,768 tokens and {:.1f} times at 131,072"
        )
        yield "benchmarks", words.format(row["machine"], row["dtype"], *row["jax.nn_to_ours"])


def linear_sentences() -> Iterable[tuple[str, str]]:
    """Yields words of the measurements of recurrences on a CPU."""
    linear = results(files.LINEAR_CPU)
    kinds = {
        "linear attention with decays of heads": linear["speed"],
        "the delta rule with decays of heads": linear["delta"]["decays of heads"],
        "the delta rule with decays of channels": linear["delta"]["decays of channels"],
    }
    for kind, row in kinds.items():
        times = row["fastest_chunked_to_ours"]["median_s"]
        yield "linear-attention", f"{kind} | {times:.1f} times"
    deltas = [linear["delta"][f"decays of {what}"] for what in ("heads", "channels")]
    seconds = linear["speed"]["seconds"]
    several, one = (seconds[f"ours, {count} devices, S 32768"]["median_s"] for count in (8, 1))
    several_to_one = [several / one, *(kind["devices_to_one"]["median_s"] for kind in deltas)]
    words = "{:.2f}, {:.2f} and {:.2f} times the time of one"
    yield "linear-attention", words.format(*several_to_one)
    longer = linear["length"]["twice_the_length"]["median_s"]
    yield "linear-attention", f"| {longer:.1f} times the time of 131,072 tokens"
    workers = (each["one_to_all"]["median_s"] for each in linear["workers"].values())
    words = "{:.2f}, {:.2f} and {:.2f} times the time of two workers"
    yield "linear-attention", words.format(*workers)
    ratio = linear["delta"]["infini"]["whole_to_parts"]
    yield "linear-attention", f"| {ratio:.2f} times the time of its two parts |"


def gpu_sentences() -> Iterable[tuple[str, str]]:
    """Yields pages and words of the measurements on an H100."""
    rows = results(f"{files.H100}-ring")["rows"]
    both = "forward + backward"
    forward, all_of_it = (rows["mask"]["passes"][which]["ratio"] for which in ("forward", both))
    yield (
        "gpus",
        f"cost {forward - 1:.0%} more than `is_causal` forward and "
        f"{all_of_it - 1:.1%} with gradients",
    )
    yield (
        "gpus",
        f"takes {rows['window']['passes']['forward']['ratio']:.2f} times as long as the whole",
    )
    decode = rows["decode, tokens 131072"]
    yield "gpus", f"reads {decode['gb_s']['ours']:,.0f} GB/s, {decode['ratio']:.2f} times a copy"
    ring = [
        rows["ring, heads grouped, tokens 4096"]["passes"][which] for which in ("forward", both)
    ]
    words = "takes {:.2f} times as long as one launch forward and {:.2f} with gradients"
    yield "gpus", words.format(*(each["ratio"] for each in ring))
    words = "takes {:.2f} times as long as one launch forward, and {:.2f} times with gradients"
    yield "README", words.format(*(each["ratio"] for each in ring))
    packed = [rows["packed"]["passes"][which]["share"] for which in ("forward", both)]
    yield "gpus", "take {:.2f} and {:.2f} times their share".format(*packed)
    step = rows["host"]["us_a_step"]
    words = "The host takes {:.0f} µs for a step forward and {:.0f} with gradients"
    yield "gpus", words.format(step["forward"], step[both])
    linear, delta = (rows[f"{name}, channels False"]["passes"] for name in ("linear", "delta"))
    yield (
        "gpus",
        f"takes {linear['forward']['ratio']:.2f} times as long as plain JAX in chunks of 256",
    )
    words = "takes {:.2f} and {:.2f} times as long as plain JAX in chunks of 128"
    yield "gpus", words.format(*(delta[which]["ratio"] for which in ("forward", both)))


def profile_sentences() -> Iterable[tuple[str, str]]:
    """Yields words of what JAX's profiler saw on an H100 and an H200."""
    h100, h200 = results(files.H100_PROFILE), results(files.H200_PROFILE)
    for row in h100["recurrences"]["rows"]:
        words = "| {what} | {decays} | {ms:.2f} ms | {own_ms:.2f} ms |"
        yield "linear-attention", words.format(**row)
    latents, infini = h100["latents"]["us"], h200["infini"]["ms"]
    words = "On an H100 weights in registers took {} µs and `jax.nn` {} µs"
    yield "decode", words.format(latents["weights in registers"], latents["jax.nn"])
    words = "took {:.2f} ms of kernels over 131,072 latents with 128 query heads, and `jax.nn` "
    words += "{:.2f} ms"
    yield "gpus", words.format(*(us / 1e3 for us in latents.values()))
    words = "where {weights} and {values} µs were measured"
    yield "decode", words.format(**h200["latents"]["kernels_us"])
    whole = h200["latents"]["rows"][0]["us"]
    ours = whole["weights through memory"]
    words = "take {:.2f} times as long as it and {:.2f} times as long as `jax.nn`"
    yield "gpus", words.format(*(ours / whole[peer] for peer in ("weights in registers", "jax.nn")))
    words = 'took {linear:.2f} ms on an H200, and {delta:.2f} ms with `update="delta"`'
    yield "linear-attention", words.format(**infini)
    parts = infini["softmax within segments"] + infini["linear attention"]
    yield "linear-attention", f"takes {infini['linear'] / parts:.2f} times the sum of its parts"
    row = results(f"{files.H100}-ring")["rows"]["infini"]["passes"]["forward + backward"]
    yield "linear-attention", f"took {row['ratio']:.1f} times that sum on an H100"


def ratios(row: dict[str, Any], *passes: str) -> list[float]:
    """Returns the ratios of a row of results, for some passes."""
    return [row[which]["ratio"] for which in passes]
