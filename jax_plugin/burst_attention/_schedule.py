"""``python -m burst_attention schedule``: what a schedule would take, as a table or drawn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from burst_attention import _ffi

EPILOG = """\
The schedule is walked by a clock: tiles at the machine's rates, messages at those of its links,
each shared by the messages that use it at the same time. Kernels' memory traffic, and the part of
a GPU that messages take, are left out. Beyond 1,024 ranks, and up to 4,096, all is estimated from
smaller worlds, and the table has the rank that computes longest.

example:
  python -m burst_attention schedule --world 8 --seq 65536 --heads 32 --kv-heads 8 \\
      --layout zigzag --causal --plot schedule.png
"""
MOST_RANKS = 32
"""Longer tables have one line for neighbouring ranks that do the same."""
COLUMNS = (
    *("rank", "steps", "tiles", "compute ms", "exposed ms", "late ms", "idle"),
    *("sent MB", "between nodes MB", "buffers MB"),
)


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m burst_attention``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "schedule",
        help="print or draw a schedule and its predicted time",
        description="What a schedule would take on a machine that need not be at hand.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda flags: run(flags, parser))
    problem = parser.add_argument_group("the attention")
    count: dict[str, Any] = {"type": _count, "metavar": "N"}
    problem.add_argument("--world", **count, required=True, help="ranks in the ring")
    problem.add_argument("--seq", **count, required=True, help="tokens of all ranks")
    problem.add_argument("--batch", **count, default=1)
    problem.add_argument("--heads", **count, required=True, help="of queries")
    problem.add_argument("--kv-heads", **count, help="of keys and values; default: as of queries")
    problem.add_argument("--head-dim", **count, default=128)
    problem.add_argument("--value-dim", **count, help="default: --head-dim")
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
    problem.add_argument(
        "--schedule",
        default="ring",
        help="ring, double_ring (inner rings are nodes), balanced, all_gather, ulysses (ranks "
        "exchange rows for heads) or hybrid (those of a node do, rings between nodes)",
    )
    problem.add_argument("--backward", default="auto", help="what travels: auto, keys or queries")
    _add_machine(parser.add_argument_group("the machine", "One number stands for both."))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="seconds and bytes, instead of a table")
    output.add_argument("--timeline", action="store_true", help="with --json: every event, too")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="also draw timelines and a map of the work (wants matplotlib)",
    )


def _add_machine(group: Any) -> None:
    def pair(name: str, metavar: tuple[str, str], what: str) -> None:
        group.add_argument(name, type=float, nargs="+", metavar=metavar, help=what)

    group.add_argument("--machine", help="h200-nvlink (up to 8 ranks) or h200-400g (nodes of them)")
    group.add_argument("--ranks-per-node", type=_count, metavar="N")
    group.add_argument(
        "--shared-link", action="store_true", help="the ranks of a node share one link to others"
    )
    pair("--tflops", ("FORWARD", "BACKWARD"), "what the kernels reach")
    pair("--link-gbps", ("WITHIN", "BETWEEN"), "gigabits per second each way, in and between nodes")
    pair("--latency-us", ("WITHIN", "BETWEEN"), "of a message, in and between nodes")
    group.add_argument("--launch-us", type=float, metavar="US", help="of a kernel")


def _count(text: str) -> int:
    """A number of things, of which there is at least one."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def run(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Carries the command out; what is wrong with its arguments ends the process with status 2."""
    if flags.plot:
        _check_plot(flags, parser)
    try:
        found = _ffi.simulate(**_request(flags))
    except ValueError as error:
        parser.error(str(error))
    if flags.plot:
        from burst_attention import _schedule_plot

        _schedule_plot.draw(found, _title(flags), flags.plot)
    if flags.json:
        if not flags.timeline:
            for each in found["passes"]:
                each.pop("timeline", None)
        print(json.dumps(found, indent=1))
    else:
        print(_text(found, flags))
    return 0


def _check_plot(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses what can't be drawn before anything is computed."""
    if flags.plot.suffix != ".png":
        parser.error(f"--plot writes a PNG: expected a file *.png, got {flags.plot}")
    if not flags.plot.parent.is_dir():
        parser.error(f"--plot: there is no folder {flags.plot.parent}")
    if flags.world > 128:
        parser.error(f"--plot has room for 128 ranks, got {flags.world}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error("--plot draws with matplotlib, which is not installed: pip install matplotlib")


def _request(flags: argparse.Namespace) -> dict[str, Any]:
    left, right = flags.window or (-1, -1)
    if flags.causal:
        right = 0
    return {
        "schedule": flags.schedule,
        "world_size": flags.world,
        "batch": flags.batch,
        "seq": flags.seq,
        "heads": flags.heads,
        "kv_heads": flags.heads if flags.kv_heads is None else flags.kv_heads,
        "head_dim": flags.head_dim,
        "value_dim": flags.head_dim if flags.value_dim is None else flags.value_dim,
        "dtype": flags.dtype,
        "layout": flags.layout,
        "window_left": None if left < 0 else left,
        "window_right": None if right < 0 else right,
        "backward": flags.backward,
        "machine": {
            "name": flags.machine,
            "ranks_per_node": flags.ranks_per_node,
            "shared": flags.shared_link,
            "tflops": flags.tflops,
            "launch_us": flags.launch_us,
            "link_gbps": flags.link_gbps,
            "latency_us": flags.latency_us,
        },
        "timeline": bool(flags.plot) or (flags.json and flags.timeline),
    }


def _title(flags: argparse.Namespace) -> str:
    """The problem in words."""
    kv_heads = flags.heads if flags.kv_heads is None else flags.kv_heads
    mask = "causal" if flags.causal else "full mask"
    if flags.window:
        mask += f", window {flags.window[0]} {flags.window[1]}"
    batch = "" if flags.batch == 1 else f"{flags.batch} × "
    return (
        f"{batch}{flags.seq:,} tokens over {flags.world} ranks, {flags.heads} query and {kv_heads} "
        f"key/value heads, head_dim {flags.head_dim}, {flags.dtype}, {mask}, {flags.layout}"
    )


def _text(found: dict[str, Any], flags: argparse.Namespace) -> str:
    machine, passes = found["machine"], found["passes"]
    lines = [_title(flags), f"schedule {flags.schedule} on {machine['title']} ({machine['name']}):"]
    lines += [f"  {name}: {source}" for name, source in machine["sources"].items()]
    for each in passes:
        lines += ["", f"{each['pass']}, {each['travels']} travel", *_table(each)]
        lines.append(_total(each["pass"], [each], machine))
    return "\n".join([*lines, "", _total("forward + backward", passes, machine)])


def _table(each: dict[str, Any]) -> list[str]:
    """One line for each rank; of long tables, for neighbours that do the same."""
    rows: list[tuple[str, ...]] = []
    ranks: list[str] = []
    for rank, row in enumerate(_row(rank, each["seconds"]) for rank in each["ranks"]):
        if rows and rows[-1] == row and len(each["ranks"]) > MOST_RANKS:
            ranks[-1] = f"{ranks[-1].split('-')[0]}-{rank}"
        else:
            rows.append(row)
            ranks.append("busiest" if each.get("estimated") else str(rank))
    table = [COLUMNS, *((rank, *row) for rank, row in zip(ranks, rows, strict=True))]
    widths = [max(len(line[at]) for line in table) for at in range(len(COLUMNS))]
    return ["  ".join(f"{x:>{w}}" for x, w in zip(line, widths, strict=True)) for line in table]


def _row(rank: dict[str, Any], seconds: float) -> tuple[str, ...]:
    times = (f"{1e3 * rank[name]:.3f}" for name in ("compute", "exposed", "late"))
    between = rank["sent"]["between"]
    sizes = (rank["sent"]["within"] + between, between, rank["buffer_bytes"])
    idle = f"{rank['idle'] / seconds if seconds else 0:.1%}"
    return (
        *(str(rank[name]) for name in ("steps", "tiles")),
        *times,
        idle,
        *(f"{size / 1e6:.1f}" for size in sizes),
    )


def _total(name: str, passes: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Of all ranks and these passes together."""
    estimated = passes[0].get("estimated", False)
    world = passes[0]["world_size"] if estimated else len(passes[0]["ranks"])
    seconds = sum(each["seconds"] for each in passes)
    idle = sum(each["idle_share"] * each["seconds"] for each in passes) / max(seconds, 1e-30)
    flops = sum(each["flops"] for each in passes) / world
    best = sum(each["flops"] / machine["flops"][each["pass"]] for each in passes) / world
    within, between = (
        sum(each["sent"][link] for each in passes) / 1e6 for link in ("within", "between")
    )
    hops = max(map(sum, zip(*(_hops(each) for each in passes), strict=True)))
    slow = f", {between:,.1f} MB between them in up to {hops} hops of a rank" if between else ""
    return (
        f"{name}: {'≈ ' if estimated else ''}{1e3 * seconds:.3f} ms, "
        f"{flops / max(seconds, 1e-30) / 1e12:.0f} TFLOP/s a rank "
        f"({best / max(seconds, 1e-30):.1%} of the kernels' rate), exposed at most "
        f"{1e3 * sum(each['exposed'] for each in passes):.3f} ms, idle "
        f"{idle:.1%}, sent {within:,.1f} MB within nodes{slow}"
    )


def _hops(each: dict[str, Any]) -> list[int]:
    """What each rank sends to other nodes; of an estimate the most that one does."""
    if each.get("estimated"):
        return [each["slow_hops"]]
    return [rank["slow_hops"] for rank in each["ranks"]]
