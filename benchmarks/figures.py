"""Tables and sentences of pages that repeat measured figures, made from the files of results.

`make figures` writes the tables into the pages, and prints each sentence that a page lacks.
tests/python/test_figures.py compares both.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result_files as files
from figure_sentences import sentences
from gpu.believe import measured, predicted
from result_files import H100, ROOT, results

NOISY = 0.2
"""A peer's rate counts if the spread of its rounds, over their median, is at most this number."""
BLOCK = re.compile(
    r"^(?P<open>( *)<!-- figures: (?P<name>\w+) -->\n).*?(?P<end>^ *<!-- end -->)", re.M | re.S
)


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
    for row in results(files.CPU)["cases"]:
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
    lengths = results(files.DECODE_CPU)["lengths"]
    for length in sorted({row["length"] for row in lengths}):
        cells = [f"{length:,}"]
        for row in [row for row in lengths if row["length"] == length]:
            cells += [f"{row['seconds']['ours']['of_roof']:.2f}"]
            cells += [f"{row[f'{peer}_to_ours']:.1f}" for peer in ("jax.nn", "torch")]
        rows.append(cells)
    return rows


def cpu_offload() -> list[list[str]]:
    """Returns the time of a layer beyond decoding where caches are on other devices."""
    timed = results(files.OFFLOAD_CPU)["beyond_decoding"]
    lengths = sorted({row["positions"] for row in timed})
    rows = [["devices of the model + pool", *(f"{length:,} positions" for length in lengths)]]
    for devices in dict.fromkeys((row["model"], row["pool"]) for row in timed):
        own = [row for row in timed if (row["model"], row["pool"]) == devices]
        cells = [f"{row['more'] * 1e3:.2f} ms ({row['least_more'] * 1e3:.2f})" for row in own]
        rows.append(["{} + {}".format(*devices), *(cell.replace("-", "−") for cell in cells)])
    return rows


def cpu_latents() -> list[list[str]]:
    """Returns the time of latents that travel over that of keys and values."""
    layouts = ("contiguous", "zigzag")
    rows = [["machine, type, heads", "ratio of", "tokens of a device", *layouts]]
    for row in results(files.LATENTS_CPUS)["travelling"]:
        name = f"{row['machine']}, {row['dtype']}, {row['heads']}"
        ratios = (f"{row[layout]:.2f}" if layout in row else "" for layout in layouts)
        rows.append([name, row["of"], f"{row['tokens']:,}", *ratios])
    return rows


def h200_latents() -> list[list[str]]:
    """Returns the time of the kernels of a step over latents on an H200."""
    peer = "`jax.nn.dot_product_attention`"
    rows = [["query heads", "latents", "weights through memory", "weights in registers", peer]]
    numbers = {4: "four", 8: "eight"}
    for row in results(files.H200_PROFILE)["latents"]["rows"]:
        heads, latents = str(row["heads"]), f"{row['capacity']:,}"
        for what in ("sequences", "new_tokens"):
            if row[what] > 1:
                heads += f", {numbers[row[what]]} {what.replace('_', ' ')}"
        if row["in_use"] < row["capacity"]:
            latents += f", of which {row['in_use']:,} are in use"
        rows.append([heads, latents, *(f"{us} µs" for us in row["us"].values())])
    return rows


def linear_memory() -> list[list[str]]:
    """Returns the memory of recurrences besides arguments and results, on a CPU."""
    linear = results(files.LINEAR_CPU)
    ours = "ours, 8 devices"
    kinds = {
        "linear attention": ("linear", ours),
        "the fastest chunked program in plain JAX, one device": (
            "linear",
            linear["speed"]["fastest_chunked"],
        ),
        "the delta rule, decays of heads": ("delta", ours),
        "the delta rule, decays of channels": ("delta of channels", ours),
        "Infini-attention, as XLA plans it": ("infini", ours),
    }
    lengths = (65536, 131072, 262144, 1048576)
    found = {
        (row["recurrence"], row["name"], row["length"]): row[
            "planned_bytes" if row["recurrence"] == "infini" else "extra_bytes"
        ]
        for row in linear["memory"] + linear["memory_of_others"]
    }
    rows = [["measured", f"{lengths[0]:,} tokens", *(f"{length:,}" for length in lengths[1:])]]
    for title, kind in kinds.items():
        sizes = (found.get((*kind, length)) for length in lengths)
        rows.append([title, *(f"{size / 2**20:,.0f} MiB" if size else "" for size in sizes)])
    return rows


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    each.__name__: each
    for each in (
        gpu_rates,
        gpu_orders,
        gpu_peers,
        cpu_attention,
        cpu_decode,
        cpu_offload,
        cpu_latents,
        h200_latents,
        linear_memory,
    )
}
"""The tables by the name in a page's mark, ``<!-- figures: NAME -->``."""


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
