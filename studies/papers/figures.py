"""What the models give for each claim: on the machine of the publication, and on H200s."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from burst_attention._cli.offload_time import cost, offloaded, together

from papers import decode, step
from papers.claims import DENSE, PREFIXES, RELAY_MEASURED
from papers.step import LLAMA_7B, LLAMA_33_HEADS, TNL_1B, Machine, Method, Model

K = 1024


class Site:
    """The machines of one kind of GPU."""

    def __init__(self, node: str, nodes: str, gpu: decode.Gpu) -> None:
        self.gpu = gpu
        self.node = Machine(node, gpu.peak, gpu.memory, gpu.bandwidth)
        self.nodes = Machine(nodes, gpu.peak, gpu.memory, gpu.bandwidth)


PAPERS = Site("a100-nvlink", "a100-200g", decode.A100)
TODAY = Site("h200-nvlink", "h200-400g", decode.H200)
PCIE = replace(PAPERS.node, numbers={"link_gbps": [200.0, 200.0]})
ONE_PORT = replace(PAPERS.nodes, numbers={"link_gbps": [None, 100.0], "shared": True})


def two_nodes(site: Site, ports: bool) -> Machine:
    """Returns two nodes: A100s have one port of 100 Gb/s a node, or ``ports`` of 200 for each."""
    return ONE_PORT if site is PAPERS and not ports else site.nodes


def speedup(
    model: Model, tokens: int, ranks: int, slow: Method, fast: Method, machine: Machine
) -> float:
    """Returns the time of a step with one method over the time with another."""
    times = [step.seconds(model, tokens, ranks, method, machine) for method in (slow, fast)]
    return times[0] / times[1]


def saved_bytes(site: Site, against: Method, causal: bool = True) -> list[float]:
    """Returns the share of bytes that Burst saves."""
    methods = [replace(method, is_causal=causal) for method in (step.BURST, against)]
    sent = [step.sent(LLAMA_7B, 32 * K, 8, method, site.node) for method in methods]
    return [1 - sent[0] / sent[1]]


def burst(machine: Machine, tokens: int, ranks: int, against: Method) -> list[float]:
    """Returns Burst's speed over another method's, with double rings over nodes."""
    fast = step.BURST if ranks <= 8 else step.BURST_NODES
    return [speedup(LLAMA_7B, tokens, ranks, against, fast, machine)]


def over_scores(site: Site, ports: bool = False) -> list[float]:
    """Returns DistFlashAttention's speed over Ring Self-Attention's, on one and on two nodes."""
    problems = [(32 * K, 8, site.node), (64 * K, 16, two_nodes(site, ports))]
    return [
        speedup(LLAMA_7B, tokens, ranks, step.SCORES, step.DISTFLASH, machine)
        for tokens, ranks, machine in problems
    ]


def over_heads(site: Site, against: Method, ports: bool = False) -> list[float]:
    """Returns DistFlashAttention's speed over a method that divides heads, for the whole grid."""
    return [
        speedup(model, tokens * ranks, ranks, against, step.DISTFLASH, machine)
        for model in (LLAMA_7B, LLAMA_33_HEADS)
        for ranks, machine in ((8, site.node), (16, two_nodes(site, ports)))
        for tokens in (8 * K, 16 * K, 32 * K)
    ]


def longest(
    model: Model, machine: Machine, ranks: int, states: int, method: Method = step.CONTIGUOUS
) -> int:
    """Returns the most tokens of a sequence over ``ranks`` of ``states`` GPUs, a power of two."""

    def takes(tokens: int) -> float:
        scores = 0
        if method is step.SCORES:
            both = step.passes(model, tokens, ranks, method, machine)
            scores = both[1]["ranks"][0]["buffer_bytes"]
        kept = 2 if method.keeps_attention else 1
        return step.memory(model, tokens, ranks, states, scores, kept)

    return step.longest(takes, machine, ranks)


def longer_than_scores(site: Site) -> list[float]:
    """Returns how much longer DistFlashAttention's sequences are than Ring Self-Attention's."""
    return [
        longest(LLAMA_7B, machine, ranks, ranks, step.DISTFLASH)
        / longest(LLAMA_7B, machine, ranks, ranks, step.SCORES)
        for ranks, machine in ((8, site.node), (16, site.nodes))
    ]


def longer_than_heads(site: Site) -> list[float]:
    """Returns how much longer they are where heads limit the GPUs of Megatron's sequence."""
    ours = longest(LLAMA_7B, site.nodes, 16, 16, step.DISTFLASH)
    return [ours / longest(LLAMA_7B, site.nodes, heads, 16) for heads in (2, 4, 8)]


def lasp(site: Site, against: str) -> list[float]:
    """Returns LASP's speed over another exchange's."""
    times = [
        step.linear_seconds(TNL_1B, 256 * K, 16, method, site.nodes) for method in (against, "lasp")
    ]
    return [times[0] / times[1]]


def longest_lasp(site: Site) -> list[float]:
    """Returns LASP's longest sequence on 128 GPUs."""
    return [longest(TNL_1B, site.nodes, 128, 128)]


def longer_lasp(site: Site) -> list[float]:
    """Returns LASP's longest sequence over that of as many GPUs as heads."""
    return [longest_lasp(site)[0] / longest(TNL_1B, site.nodes, TNL_1B.heads, 128)]


@cache
def lean_ratios(gpu: decode.Gpu, fixed: bool) -> dict[int, list[float]]:
    """Returns, by length, the time of fixed splits, or of one block a head, over equal runs."""
    slow = decode.fixed_splits if fixed else decode.one_block
    ratios: dict[int, list[float]] = {}
    for length in (K << doublings for doublings in range(10)):
        caches = [
            decode.Cache((length,) * batch, heads, 64)
            for heads in (16, 32, 48, 64, 96)
            for batch in (1, 2, 4, 8)
        ]
        ratios[length] = [slow(each, gpu) / decode.equal_runs(each, gpu) for each in caches]
    return ratios


def lean_mean(site: Site, fixed: bool) -> list[float]:
    """Returns the mean ratio over the grid."""
    ratios = [ratio for each in lean_ratios(site.gpu, fixed).values() for ratio in each]
    return [sum(ratios) / len(ratios)]


def lean_most(site: Site, fixed: bool, length: int) -> list[float]:
    """Returns the greatest ratio at one length."""
    return [max(lean_ratios(site.gpu, fixed)[length])]


def relay(gpu: decode.Gpu, requests: int, prefix: int) -> list[float]:
    """Returns the time with the prefix read for each request over that with it read once."""
    apart, once = decode.prefix(gpu, requests, prefix, 128, 52, 128)
    return [apart / once]


CONTEXTS = (2 * K, 4 * K, 8 * K, 16 * K)
HOLDERS = (8, 16, 24, 32)
SERVERS = (2, 4, 8)


def throughput_per_dollar(
    context: int, holders: Sequence[int] = HOLDERS
) -> tuple[float, list[float]]:
    """Returns tokens per second and dollar of the best `SERVERS`, and with each of ``holders``."""
    gpu, holder, model = decode.A100, decode.RTX_4090, decode.LLAMA_65B
    alone = max(
        together(model, gpu, count, context, DENSE) / cost([(gpu, count)]) for count in SERVERS
    )
    apart = []
    for count in holders:
        step = offloaded(model, (gpu, 2), (holder, count), context, DENSE)
        rate = step.rate if step else 0.0
        apart.append(rate / cost([(gpu, 2), (holder, count)]))
    return alone, apart


def offload_ratios(context: int, holders: Sequence[int] = HOLDERS) -> list[float]:
    """Returns the throughput per dollar with the cache apart, over the best without."""
    alone, apart = throughput_per_dollar(context, holders)
    return [ratio / alone for ratio in apart]


def pays_from(context: int) -> float:
    """Returns the fewest RTX 4090 for each A100 with which the cache apart pays."""
    counts = range(2, 129, 2)
    pairs = zip(counts, offload_ratios(context, counts), strict=True)
    return next(count for count, ratio in pairs if ratio > 1) / 2


def lamina() -> list[float]:
    """Returns the best of `offload_ratios` for each context."""
    return [max(offload_ratios(context)) for context in CONTEXTS]


def sharded_cache(ranks: int) -> tuple[float, float]:
    """Returns the seconds of `decode.sharded_cache` for 32 requests of 32,768 tokens on H200s."""
    numbers = step.numbers(TODAY.nodes.name, ranks)
    slowest = numbers["between" if ranks > numbers["ranks_per_node"] else "within"]
    link = slowest["latency"], slowest["bandwidth"]
    return decode.sharded_cache(decode.H200, link, ranks, 32, 32 * K, (32, 8))


Figures = Callable[[Site], Iterable[float] | None]
FIGURES: dict[str, Figures] = {
    "burst-bytes-ring": lambda site: saved_bytes(site, step.ZIGZAG),
    "burst-bytes-megatron": lambda site: saved_bytes(site, step.MEGATRON),
    "burst-32k": lambda site: burst(site.node, 32 * K, 8, step.MEGATRON),
    "burst-32k-pcie": lambda site: (
        burst(PCIE, 32 * K, 8, step.MEGATRON) if site is PAPERS else None
    ),
    "burst-128k-8": lambda site: burst(site.node, 128 * K, 8, step.MEGATRON),
    "burst-128k-ring": lambda site: burst(site.nodes, 128 * K, 32, step.ZIGZAG),
    "burst-128k-megatron": lambda site: burst(site.nodes, 128 * K, 32, step.MEGATRON),
    "distflash-rsa": over_scores,
    "distflash-rsa-length": longer_than_scores,
    "distflash-megatron": lambda site: over_heads(site, step.MEGATRON),
    "distflash-megatron-length": longer_than_heads,
    "distflash-ring": lambda site: [
        speedup(LLAMA_7B, 256 * K, 8, step.CONTIGUOUS, step.DISTFLASH, site.node)
    ],
    "distflash-ulysses": lambda site: over_heads(site, step.ULYSSES),
    "distflash-rsa-ports": lambda site: over_scores(site, ports=True),
    "distflash-megatron-ports": lambda site: over_heads(site, step.MEGATRON, ports=True),
    "distflash-ulysses-ports": lambda site: over_heads(site, step.ULYSSES, ports=True),
    "lasp-38-ulysses": lambda site: lasp(site, "ulysses"),
    "lasp-38-megatron": lambda site: lasp(site, "megatron_tp"),
    "lasp-136-ulysses": lambda site: lasp(site, "ulysses"),
    "lasp-136-megatron": lambda site: lasp(site, "megatron_tp"),
    "lasp-length": longest_lasp,
    "lasp-8x": longer_lasp,
    "lean-mean": lambda site: lean_mean(site, fixed=False),
    "lean-512k": lambda site: lean_most(site, fixed=False, length=512 * K),
    "lean-fixed-mean": lambda site: lean_mean(site, fixed=True),
    "lean-fixed-256k": lambda site: lean_most(site, fixed=True, length=256 * K),
    "lamina-cost": lambda site: lamina() if site is PAPERS else None,
}


def _relay_figures(requests: int, prefix: int) -> Figures:
    return lambda site: relay(decode.A40 if site is PAPERS else site.gpu, requests, prefix)


FIGURES |= {
    f"relay-{requests}-{prefix}": _relay_figures(requests, prefix)
    for requests in RELAY_MEASURED
    for prefix in PREFIXES
}
