"""The flags of an attention problem, which several commands share."""

import argparse
from typing import Any

from burst_attention import _ffi

SCATTERED = (
    "ulysses: Ranks exchange rows for heads. "
    "hybrid: Ranks of a node exchange rows for heads, and rings join the nodes."
)
"""Schedules that the library makes of another one."""
PROBLEM = (
    *("schedule", "batch", "heads", "kv_heads", "head_dim", "value_dim"),
    *("dtype", "layout", "backward"),
)


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a problem and its schedule."""
    problem = parser.add_argument_group("the attention")
    number: dict[str, Any] = {"type": count, "metavar": "N"}
    problem.add_argument("--world", **number, required=True, help="ranks in the ring")
    problem.add_argument("--seq", **number, required=True, help="tokens of all ranks")
    problem.add_argument("--batch", **number, default=1)
    problem.add_argument("--heads", **number, required=True, help="of queries")
    problem.add_argument("--kv-heads", **number, help="of keys and values; default: as of queries")
    problem.add_argument("--head-dim", **number, default=128)
    problem.add_argument("--value-dim", **number, help="default: --head-dim")
    problem.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    problem.add_argument("--causal", action="store_true")
    problem.add_argument(
        "--window",
        type=int,
        nargs=2,
        metavar=("LEFT", "RIGHT"),
        help="local_window_size; -1 for no limit",
    )
    problem.add_argument("--layout", default="contiguous", help="contiguous, zigzag or striped")
    families = [f"{each['name']}: {each['doc']}" for each in _ffi.interface()["schedules"]]
    problem.add_argument("--schedule", default="ring", help=" ".join([*families, SCATTERED]))
    problem.add_argument("--backward", default="auto", help="what travels: auto, keys or queries")


def count(text: str) -> int:
    """Returns a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def problem_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the library's questions that describe one rank's shard.

    Raises:
      ValueError: for a sequence that ranks can't share equally.
    """
    flags.kv_heads = flags.kv_heads or flags.heads
    flags.value_dim = flags.value_dim or flags.head_dim
    left, right = flags.window or (-1, -1)
    if flags.causal:
        right = 0
    zigzag = flags.layout == "zigzag"
    chunks = 2 * flags.world if zigzag else flags.world
    if flags.seq % chunks:
        what = "two chunks for each rank" if zigzag else "the world size"
        raise ValueError(
            f"sequence length must be a multiple of {chunks} ({what}), got {flags.seq}"
        )
    return {name: getattr(flags, name) for name in PROBLEM} | {
        "world_size": flags.world,
        "q_len": flags.seq // flags.world,
        "kv_len": flags.seq // flags.world,
        "window": {"left": None if left < 0 else left, "right": None if right < 0 else right},
        "softmax_scale": 1.0,
    }


def title(flags: argparse.Namespace) -> str:
    """Returns the problem in words."""
    mask = "causal" if flags.causal else "full mask"
    if flags.window:
        mask += f", window {flags.window[0]} {flags.window[1]}"
    batch = "" if flags.batch == 1 else f"{flags.batch} × "
    return (
        f"{batch}{flags.seq:,} tokens over {flags.world} ranks, {flags.heads} query and "
        f"{flags.kv_heads} key/value heads, head_dim {flags.head_dim}, {flags.dtype}, {mask}, "
        f"{flags.layout}"
    )
