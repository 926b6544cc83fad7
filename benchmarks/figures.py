"""Tables and sentences of pages that repeat measured figures, made from the files of results.

`make figures` writes the tables into the pages, and prints each sentence that a page lacks.
tests/python/test_figures.py compares both.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from gpu.believe import measured, predicted

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU = "amd-epyc-family-26-model-2-2-cores"
H100 = "nvidia-h100-80gb-hbm3"
NOISY = 0.2
"""A peer's rate counts if the spread of its rounds, over their median, is at most this number."""
BLOCK = re.compile(
    r"^(?P<open>( *)<!-- figures: (?P<name>\w+) -->\n).*?(?P<end>^ *<!-- end -->)", re.M | re.S
)


@cache
def results(name: str) -> Any:
    """Returns the results of a file in benchmarks/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def gpu_rates() -> list[list[str]]:
    """Returns predicted and measured rates of the kernels on GPUs that the model describes."""
    rates = measured(results(H100)["speed"])
    rows = [["problem", "predicted, TFLOP/s", "measured"]]
    for name, rate in predicted().items():
        shown = f"{rates[name]:.0f}" if name in rates else "not yet"
        rows.append([name.replace("_", " "), f"{rate:.0f}", shown])
    return rows


def gpu_orders() -> list[list[str]]:
    """Returns speed against cuDNN by columns of a head, for each order of sums."""
    rows = [["columns of a head", "forward", "backward", 'backward, `backward_order="any"`']]
    for dim in (64, 128, 256):
        kinds = (("forward", ["ours"]), ("backward", ["ours"]), ("backward", ["any_order"]))
        rows.append([str(dim), *(gpu_range(dim, which, ours, "cudnn") for which, ours in kinds)])
    return rows


def gpu_peers() -> list[list[str]]:
    """Returns speed against cuDNN and flash attention by columns of a head, the faster order."""
    titles = [
        f"{which}, × {peer}" for peer in ("cuDNN", "flash") for which in ("forward", "backward")
    ]
    rows = [["columns", *titles]]
    both = ["ours", "any_order"]
    for dim in (64, 128, 256):
        kinds = [(which, peer) for peer in ("cudnn", "flash") for which in ("forward", "backward")]
        rows.append([str(dim), *(gpu_range(dim, which, both, peer) for which, peer in kinds)])
    return rows


def gpu_range(dim: int, which: str, ours: list[str], peer: str) -> str:
    """Returns the least and the largest of our rates over a peer's, of all measured shapes."""
    rates = [
        row["contenders"]
        for row in results(H100)["speed"]
        if (row["dim"], row["pass"]) == (dim, which)
    ]
    ratios = [
        max(each[name]["tflops"] for name in ours if name in each) / each[peer]["tflops"]
        for each in rates
        if set(ours) & each.keys() and each[peer]["spread"] <= NOISY
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "–"


def cpu_attention() -> list[list[str]]:
    """Returns the speed of attention on a CPU against its peers."""
    rows = [
        [
            "case (4,096 tokens, 8 heads)",
            "forward GFLOP/s",
            "backward GFLOP/s",
            "both, share of peak",
            "× `jax.nn`, half of the rounds",
            "× torch, half of the rounds",
        ]
    ]
    cases: dict[str, dict[str, Any]] = {}
    for row in results(CPU)["cases"]:
        if "speed" in row["tags"]:
            cases.setdefault(row["shape"], {})[row["pass"]] = row
    for shape, passes in cases.items():
        rates = [f"{passes[which]['gflops']:.0f}" for which in ("forward", "backward")]
        both = passes["both"]
        peers = ["{:.2f} to {:.2f}".format(*both["spread"][name]) for name in ("jax.nn", "torch")]
        rows.append([case_title(shape), *rates, f"{both['of_peak']:.0%}", *peers])
    return rows


def case_title(shape: str) -> str:
    """Returns ``D 64 causal float32`` for a shape such as ``B1 S4096 H8 D64 causal float32``."""
    _, _, heads, dim, mask, dtype = shape.split()
    shared = ", one key/value head" if heads == "H8:1" else ""
    return f"D {dim[1:]} {mask} {dtype}{shared}"


def cpu_decode() -> list[list[str]]:
    """Returns the speed of decoding on a CPU against its roof and its peers."""
    rows = [["tokens in the cache"]]
    for dtype in ("float32", "bfloat16"):
        rows[0] += [f"{dtype}, share of the roof", "× `jax.nn`", "× torch"]
    lengths = results("decode-amd-epyc-family-25-model-1-2-cores")["lengths"]
    for length in sorted({row["length"] for row in lengths}):
        cells = [f"{length:,}"]
        for row in [row for row in lengths if row["length"] == length]:
            cells += [f"{row['seconds']['ours']['of_roof']:.2f}"]
            cells += [f"{row[f'{peer}_to_ours']:.1f}" for peer in ("jax.nn", "torch")]
        rows.append(cells)
    return rows


def cpu_offload() -> list[list[str]]:
    """Returns the time of a layer beyond decoding where caches are on other devices."""
    timed = results("offload-amd-epyc-family-26-model-2-2-cores")["beyond_decoding"]
    lengths = sorted({row["positions"] for row in timed})
    rows = [["devices of the model + pool", *(f"{length:,} positions" for length in lengths)]]
    for devices in dict.fromkeys((row["model"], row["pool"]) for row in timed):
        own = [row for row in timed if (row["model"], row["pool"]) == devices]
        cells = [f"{row['more'] * 1e3:.2f} ms ({row['least_more'] * 1e3:.2f})" for row in own]
        rows.append(["{} + {}".format(*devices), *(cell.replace("-", "−") for cell in cells)])
    return rows


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    each.__name__: each
    for each in (gpu_rates, gpu_orders, gpu_peers, cpu_attention, cpu_decode, cpu_offload)
}
"""The tables by the name in a page's mark, ``<!-- figures: NAME -->``."""


def sentences() -> Iterable[tuple[str, str]]:
    """Yields the name of a page, and words with measured figures that stand in it."""
    yield from cpu_sentences()
    yield from gpu_sentences()
    yield from linear_sentences()


def cpu_sentences() -> Iterable[tuple[str, str]]:
    """Yields pages and words of the measurements on CPUs."""
    cpu = results(CPU)
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
    masks = results("masks-amd-epyc-family-25-model-17-2-cores")
    yield (
        "benchmarks",
        f"as intervals takes {masks['causal']['visible_to_is_causal']:.2f} times the time",
    )
    yield "benchmarks", f"in one row is {masks['tree']['apart_to_tree']:.2f} times as fast"


def linear_sentences() -> Iterable[tuple[str, str]]:
    """Yields words of the measurements of recurrences on a CPU."""
    linear = results("linear-amd-epyc-family-26-model-2-2-cores")
    kinds = {
        "linear attention with decays of heads": linear["speed"],
        "the delta rule with decays of heads": linear["delta"]["decays of heads"],
        "the delta rule with decays of channels": linear["delta"]["decays of channels"],
    }
    for kind, row in kinds.items():
        times = row["fastest_chunked_to_ours"]["median_s"]
        yield "linear-attention", f"{kind} | {times:.1f} times"
    ratio = linear["delta"]["infini"]["whole_to_parts"]
    yield "linear-attention", f"| {ratio:.2f} times the time of its two parts |"


def gpu_sentences() -> Iterable[tuple[str, str]]:
    """Yields pages and words of the measurements on an H100."""
    rows = results(f"{H100}-ring")["rows"]
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


def ratios(row: dict[str, Any], *passes: str) -> list[float]:
    """Returns the ratios of a row of results, for some passes."""
    return [row[which]["ratio"] for which in passes]


def markdown(rows: list[list[str]]) -> str:
    """Returns a table as Markdown has it."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """Returns a page's text with its tables as the results say."""

    def table(block: re.Match[str]) -> str:
        lines = markdown(TABLES[block["name"]]()).splitlines(keepends=True)
        return block["open"] + "".join(block[2] + line for line in lines) + block["end"]

    return BLOCK.sub(table, text)


def pages() -> list[Path]:
    """Returns the pages: the README and docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def missing() -> list[tuple[str, str]]:
    """Returns the sentences that their pages lack, with the names of the pages."""
    texts = {page.stem: " ".join(page.read_text().split()) for page in pages()}
    return [(page, words) for page, words in sentences() if words not in texts[page]]


def main() -> None:
    """Writes the tables, and prints the sentences that pages lack."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for page in pages():
        page.write_text(filled(page.read_text()))
    for name, words in missing():
        print(f"{name}.md should say: {words}")


if __name__ == "__main__":
    main()
