"""Why claims don't come out, with figures of the models."""

from collections.abc import Callable

from burst_attention._cli.offload_time import cost, together

from papers import decode, figures, step
from papers.claims import DENSE
from papers.figures import PAPERS, K
from papers.step import LLAMA_7B


def _full_mask() -> str:
    saved = figures.saved_bytes(PAPERS, step.ZIGZAG, causal=False)[0]
    return (
        f"Not explained by volume: with a full mask Burst saves {saved:.0%} too. Queries save a "
        "quarter of the backward pass and nothing forward."
    )


def _megatron_bytes() -> str:
    saved = figures.saved_bytes(PAPERS, step.MEGATRON, causal=False)[0]
    return (
        "The model saves more than the claim, because this library sends no rows that a causal "
        f"mask hides. With a full mask all rows travel, and Burst saves {saved:.0%}."
    )


def _nvlink(tokens: int) -> str:
    both = step.passes(LLAMA_7B, tokens, 8, step.MEGATRON, PAPERS.node)
    layer = step.MEGATRON.exchanges * (2 * both[0]["exposed"] + both[1]["exposed"])
    waits = LLAMA_7B.layers * layer
    share = waits / step.seconds(LLAMA_7B, tokens, 8, step.MEGATRON, PAPERS.node)
    return (
        f"Not explained by volume over NVLink: Megatron waits for {share:.0%} of its step, so to "
        f"hide all of it gives {1 / (1 - share):.2f}×. The claim at 32K comes out over PCIe."
    )


def _flat_ring() -> str:
    double = step.Method("double_ring", "zigzag")
    found = figures.burst(PAPERS.nodes, 128 * K, 32, double)[0]
    return (
        "The model gives more than the claim: a single ring goes at the pace of its slow hop. "
        "BurstEngine's data for 128K tokens on 32 GPUs have 129 against 53 TFLOP/s for it, a ratio "
        f"of 2.4 of attention alone. Over a double ring with keys the model has {found:.2f}×, the "
        "data have 1.30: once messages are hidden, volume explains nothing."
    )


def _scores(ports: bool) -> str:
    times = [
        [each["seconds"] for each in step.passes(LLAMA_7B, 32 * K, 8, method, PAPERS.node)]
        for method in (step.SCORES, step.DISTFLASH)
    ]
    alone = (2 * times[0][0] + times[0][1]) / sum(times[1])
    one_node = (
        f"On one node attention alone is {alone:.1f}× as fast; linear layers, equal in both, make "
        f"that {figures.over_scores(PAPERS)[0]:.1f}× for the step. The model leaves out masks, "
        "dropout and float32 scores as kernels of their own."
    )
    return one_node if ports else f"{one_node} {_port()}"


def _port() -> str:
    tokens, ranks = 64 * K, 16
    both = step.passes(LLAMA_7B, tokens, ranks, step.DISTFLASH, figures.ONE_PORT)
    share = sum(each["exposed"] for each in both) / sum(each["seconds"] for each in both)
    return (
        "On two nodes the assumed port is too slow for any message to be hidden: at 64K tokens "
        f"the balanced chunks wait for {share:.0%} of attention. The row with a port for each GPU "
        "assumes what a DGX A100 has."
    )


def _waves() -> str:
    ratios = figures.lean_ratios(decode.A100, fixed=False)
    least = min(min(each) for each in ratios.values())
    return (
        f"Not explained by waves for this grid: ratios go from {least:.2f} to "
        f"{figures.lean_most(PAPERS, fixed=False, length=512 * K)[0]:.2f}, and are large only for "
        "few heads and requests. The paper's grid is not in the abstract."
    )


def _splits() -> str:
    return (
        "Not explained by waves: the splits that FlashAttention-2 chooses fill at least 85% as "
        "well as the best. The rest of the ratio at long caches is heads that fill between 80% "
        "and 100% of the multiprocessors, or little more, and are not split."
    )


def _lamina() -> str:
    context = 8 * K
    alone = together(decode.LLAMA_65B, decode.A100, 2, context, DENSE)
    alone /= cost([(decode.A100, 2)])
    apart = max(figures.throughput_per_dollar(context)[1])
    return (
        "In the range of the claim, whose upper end depends on what is compared: with 8 A100 the "
        f"cache has room for a large batch. Against 2 A100 alone it is {apart / alone:.1f}× at 8K "
        "tokens, and at 16K no request fits them."
    )


REASONS: dict[str, Callable[[], str]] = {
    "burst-bytes-ring": _full_mask,
    "burst-bytes-megatron": _megatron_bytes,
    "burst-32k": lambda: _nvlink(32 * K),
    "burst-128k-8": lambda: _nvlink(128 * K),
    "burst-128k-ring": _flat_ring,
    "distflash-rsa": lambda: _scores(ports=False),
    "distflash-rsa-ports": lambda: _scores(ports=True),
    "distflash-megatron": _port,
    "distflash-ulysses": _port,
    "lasp-38-megatron": lambda: (
        "The model gives more than the claim: Megatron gathers all rows of a sequence in every "
        "layer, whatever linear attention saves."
    ),
    "lasp-136-ulysses": lambda: (
        "Not explained by volume: exchanged heads over 200 Gb/s per GPU cost less than that."
    ),
    "lasp-136-megatron": lambda: (
        "The model gives more than the claim: it overlaps none of Megatron's exchanges, and 16 "
        "GPUs over two nodes are an assumption."
    ),
    "lean-mean": _waves,
    "lean-fixed-mean": _splits,
    "lean-fixed-256k": _splits,
    "lamina-cost": _lamina,
}
"""By claim that does not come out."""
