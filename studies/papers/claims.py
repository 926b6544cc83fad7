"""Claims of publications, with the problems they are tried on and the tolerances of verdicts.

A claim comes out if every figure of the model lies between ``low / tolerance`` and
``high * tolerance``. The tolerances and the assumptions were written down before the models ran,
except in rows that say so.
"""

import math
from dataclasses import dataclass, replace

BYTES, TIME, LENGTH = 1.1, 1.25, 2.0
"""Tolerances of shares of bytes, of ratios of time, and of lengths, which double."""
DENSE = 0.7
"""Share of the peak of 16-bit products that linear layers reach, an assumption."""


@dataclass(frozen=True)
class Paper:
    """A publication."""

    name: str
    arxiv: str


@dataclass(frozen=True)
class Claim:
    """A claim, and the problems that test it."""

    key: str
    paper: Paper
    words: str
    """The claim, and where it is from if not from the newest abstract."""
    low: float
    high: float
    """The least and the greatest figure claimed; infinite if the claim is a lower limit."""
    tolerance: float
    against: str
    """What the figure compares."""
    machine: str
    """Machine and problem."""
    assumed: str
    """Settings that the abstract does not name."""
    later: bool = False
    """Whether the row came after the models had run, with the tolerance of an earlier row."""


BURST = Paper("BurstAttention", "2403.09347")
DISTFLASH = Paper("DistFlashAttention", "2310.03294")
LASP = Paper("LASP", "2404.02882")
LEAN = Paper("LeanAttention", "2405.10480")
RELAY = Paper("RelayAttention", "2402.14808")
LAMINA = Paper("Lamina", "2405.01814")

LLAMA = "Llama-7B"
SMALL = "TNL-1B"
ONE_NODE = "8 × A100, NVLink"
TWO_NODES = "8 × A100 with NVLink, and 2 × 8 over one port of 100 Gb/s a node"
GRID = "8K, 16K and 32K tokens per GPU"
MODEL = "the model, whole layers, layers computed again"
LINKS = "links"

BURST_CLAIMS = (
    Claim(
        "burst-bytes-ring",
        BURST,
        "40% less communication",
        *(0.40, 0.40, BYTES),
        "share of bytes saved over a ring whose keys travel in both passes, sums in 16 bits",
        f"{ONE_NODE}; {LLAMA}, 32K tokens, both passes of attention",
        "what is compared; the model",
    ),
    Claim(
        "burst-bytes-megatron",
        BURST,
        "40% less communication",
        *(0.40, 0.40, BYTES),
        "share of bytes saved over Megatron's whole layers",
        f"{ONE_NODE}; {LLAMA}, 32K tokens, both passes",
        "what is compared; the model",
    ),
    Claim(
        "burst-32k",
        BURST,
        "2× speedup, 32K tokens, 8 × A100",
        *(2.0, 2.0, TIME),
        "time of a step of Megatron's tensor parallelism with a flash kernel / of Burst",
        f"{ONE_NODE}; {LLAMA}, 32K tokens",
        f"{MODEL}, {LINKS}",
    ),
    Claim(
        "burst-32k-pcie",
        BURST,
        "2× speedup, 32K tokens, 8 × A100",
        *(2.0, 2.0, TIME),
        "the same over PCIe 4",
        f"8 × A100, 25 GB/s each way per GPU; {LLAMA}, 32K tokens",
        f"{MODEL}, {LINKS}",
    ),
    Claim(
        "burst-128k-8",
        BURST,
        "2× speedup, 128K tokens, 8 × A100 (version 1)",
        *(2.0, 2.0, TIME),
        "time of a step of Megatron's tensor parallelism with a flash kernel / of Burst",
        f"{ONE_NODE}; {LLAMA}, 128K tokens",
        f"{MODEL}, {LINKS}",
    ),
    Claim(
        "burst-128k-ring",
        BURST,
        "1.37× speedup, 128K tokens, 32 × A100",
        *(1.37, 1.37, TIME),
        "time of a step of one zigzag ring whose keys travel / of Burst's double ring",
        f"4 × 8 A100, 200 Gb/s per GPU; {LLAMA}, 128K tokens",
        f"what is compared, {MODEL}, {LINKS}",
    ),
    Claim(
        "burst-128k-megatron",
        BURST,
        "1.37× speedup, 128K tokens, 32 × A100",
        *(1.37, 1.37, TIME),
        "time of a step of Megatron's tensor parallelism with a flash kernel / of Burst's double "
        "ring",
        f"4 × 8 A100, 200 Gb/s per GPU; {LLAMA}, 128K tokens",
        f"what is compared, {MODEL}, {LINKS}",
    ),
)

DISTFLASH_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "distflash-rsa",
        DISTFLASH,
        "4.45–5.64× speedup over Ring Self-Attention",
        *(4.45, 5.64, TIME),
        "time of a step of Ring Self-Attention / of balanced chunks with checkpoints of attention",
        f"{TWO_NODES}; {LLAMA}, 32K and 64K tokens",
        f"lengths, {LINKS}",
    ),
    Claim(
        "distflash-rsa-length",
        DISTFLASH,
        "8× longer sequences than Ring Self-Attention",
        *(8.0, 8.0, LENGTH),
        "longest power of two that fits / the longest of Ring Self-Attention",
        f"8 and 2 × 8 A100 80 GB; {LLAMA}",
        "weights and states sharded, layers computed again",
    ),
    Claim(
        "distflash-megatron",
        DISTFLASH,
        "1.24–2.01× speedup over Megatron-LM with FlashAttention",
        *(1.24, 2.01, TIME),
        "time of a step of Megatron / of balanced chunks with checkpoints of attention",
        f"{TWO_NODES}; {LLAMA} with 32 heads and with 33, {GRID}",
        f"lengths, {LINKS}",
    ),
    Claim(
        "distflash-megatron-length",
        DISTFLASH,
        "2–8× longer sequences than Megatron-LM",
        *(2.0, 8.0, LENGTH),
        "longest power of two that fits / the longest of Megatron, whose ranks of one sequence "
        "are at most its heads",
        f"2 × 8 A100 80 GB; {LLAMA} with 2, 4 and 8 heads",
        "heads, weights and states sharded, layers computed again",
    ),
    Claim(
        "distflash-ring",
        DISTFLASH,
        "1.67× speedup over Ring Attention",
        *(1.67, 1.67, TIME),
        "time of a step of a ring of contiguous shards / of balanced chunks with checkpoints of "
        "attention",
        f"{ONE_NODE}; {LLAMA}, 256K tokens",
        f"length, {LINKS}",
    ),
    Claim(
        "distflash-ulysses",
        DISTFLASH,
        "1.26–1.88× speedup over DeepSpeed-Ulysses",
        *(1.26, 1.88, TIME),
        "time of a step of Ulysses, heads padded / of balanced chunks with checkpoints of "
        "attention",
        f"{TWO_NODES}; {LLAMA} with 32 heads and with 33, {GRID}",
        f"lengths, {LINKS}",
    ),
)

PORTS = "8 × A100 with NVLink, and 2 × 8 over 200 Gb/s per GPU"

DISTFLASH_CLAIMS += tuple(
    replace(
        claim,
        key=f"{claim.key}-ports",
        machine=claim.machine.replace(TWO_NODES, PORTS),
        later=True,
    )
    for claim in DISTFLASH_CLAIMS
    if TWO_NODES in claim.machine
)

SIXTEEN = f"2 × 8 A100, 200 Gb/s per GPU; {SMALL}, 256K tokens, linear attention"
SHAPE = "baseline, shape of the model, 16 GPUs (its heads), links"

LASP_CLAIMS = (
    Claim(
        "lasp-38-ulysses",
        LASP,
        "38% faster at 256K (not in the abstract)",
        *(1.38, 1.38, TIME),
        "time of a step of Ulysses / of LASP",
        SIXTEEN,
        SHAPE,
    ),
    Claim(
        "lasp-38-megatron",
        LASP,
        "38% faster at 256K (not in the abstract)",
        *(1.38, 1.38, TIME),
        "time of a step of Megatron's tensor parallelism / of LASP",
        SIXTEEN,
        SHAPE,
    ),
    Claim(
        "lasp-136-ulysses",
        LASP,
        "136% more throughput at 256K (not in the abstract)",
        *(2.36, 2.36, TIME),
        "time of a step of Ulysses / of LASP",
        SIXTEEN,
        SHAPE,
    ),
    Claim(
        "lasp-136-megatron",
        LASP,
        "136% more throughput at 256K (not in the abstract)",
        *(2.36, 2.36, TIME),
        "time of a step of Megatron's tensor parallelism / of LASP",
        SIXTEEN,
        SHAPE,
    ),
    Claim(
        "lasp-length",
        LASP,
        "4096K tokens on 128 × A100 80 GB",
        *(4096 * 1024, math.inf, 1.0),
        "longest power of two that fits; the claim is a lower limit",
        f"128 × A100 80 GB; {SMALL}",
        "shape of the model, weights and states sharded, layers computed again",
    ),
    Claim(
        "lasp-8x",
        LASP,
        "8× longer than existing sequence parallelism",
        *(8.0, 8.0, LENGTH),
        "longest power of two that fits on 128 GPUs / the longest of Ulysses on as many GPUs as "
        "there are heads",
        f"128 × A100 80 GB; {SMALL}",
        "baseline, shape of the model, weights and states sharded, layers computed again",
    ),
)

LEAN_GRID = "16 to 96 heads of 64, batch 1 to 8, 1K to 512K keys"

LEAN_CLAIMS = (
    Claim(
        "lean-mean",
        LEAN,
        "2.6× mean over FlashAttention-2 (version 1)",
        *(2.6, 2.6, TIME),
        "mean ratio of the time of one block for each head to the time of equal runs of tiles",
        f"A100, 108 multiprocessors; {LEAN_GRID}",
        "the grid; a multiprocessor reads at most its share of the bandwidth",
    ),
    Claim(
        "lean-512k",
        LEAN,
        "8.33× at 512K (version 1)",
        *(8.33, 8.33, TIME),
        "greatest of these ratios at 512K",
        f"A100, 108 multiprocessors; {LEAN_GRID}",
        "the grid; a multiprocessor reads at most its share of the bandwidth",
    ),
    Claim(
        "lean-fixed-mean",
        LEAN,
        "1.73× mean over FlashDecoding (version 2)",
        *(1.73, 1.73, TIME),
        "mean ratio of the time of fixed splits of each head to the time of equal runs of tiles",
        f"A100, 108 multiprocessors; {LEAN_GRID}",
        "the grid; splits as FlashAttention-2 chooses them",
    ),
    Claim(
        "lean-fixed-256k",
        LEAN,
        "2.18× at 256K (version 2)",
        *(2.18, 2.18, TIME),
        "greatest of these ratios at 256K",
        f"A100, 108 multiprocessors; {LEAN_GRID}",
        "the grid; splits as FlashAttention-2 chooses them",
    ),
)

PREFIXES = (512, 2048, 8192, 16384)
RELAY_MEASURED = {
    1: (0.73, 0.85, 0.94, 0.97),
    8: (2.4, 4.6, 6.9, 7.4),
    32: (3.6, 9.6, 19.9, 24.1),
    64: (4.0, 11.6, 29.5, 40.0),
}
"""Ratios of latencies, by requests and `PREFIXES`: stat/relay_op/NVIDIA-A40.csv of the authors'
repository rayleizhu/vllm-ra."""

RELAY_CLAIMS = tuple(
    Claim(
        f"relay-{requests}-{prefix}",
        RELAY,
        f"{ratio}× with {requests} requests and a prefix of {prefix:,} tokens (authors' data)",
        *(ratio, ratio, TIME),
        "time with the prefix read for each request / with the prefix read once",
        "A40; 52 heads of 128, 128 tokens after the prefix",
        "5 us a kernel: one, or three with the prefix apart",
    )
    for requests, ratios in RELAY_MEASURED.items()
    for prefix, ratio in zip(PREFIXES, ratios, strict=True)
)

LAMINA_CLAIMS = (
    Claim(
        "lamina-cost",
        LAMINA,
        "1.48–12.1× throughput per cost (version 1)",
        *(1.48, 12.1, TIME),
        "tokens per second and dollar of 2 A100 80 GB with the best of 8, 16, 24 and 32 RTX 4090 / "
        "of the best of 2, 4 and 8 A100",
        "LLaMA-65B in 16 bits, contexts of 2K to 16K tokens",
        "devices, 100 Gb/s for each A100, prices of 15,000 and 1,600 dollars, context lengths",
    ),
)

CLAIMS = (
    *BURST_CLAIMS,
    *DISTFLASH_CLAIMS,
    *LASP_CLAIMS,
    *LEAN_CLAIMS,
    *RELAY_CLAIMS,
    *LAMINA_CLAIMS,
)
