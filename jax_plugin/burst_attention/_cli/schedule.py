"""``python -m burst_attention schedule``: the predicted time of a schedule, as a table or drawn."""

import argparse
import json
from pathlib import Path
from typing import Any

from burst_attention import _ffi
from burst_attention._cli.problem import add_problem, count, problem_of, title

EPILOG = """\
A clock walks the schedule: tiles take rounds of blocks on a GPU's multiprocessors, or time at the
rates of --tflops; messages take time at the rates of the machine's links. Messages that use a link
at the same time share it. The prediction leaves out the part of a GPU that messages take. From
1,025 to 4,096 ranks it estimates all figures from smaller worlds, and the table has the rank that
computes longest.

example:
  python -m burst_attention schedule --world 8 --seq 65536 --heads 32 --kv-heads 8 \\
      --layout zigzag --causal --plot schedule.png
"""
MACHINES = (
    "h200-nvlink, h200-nvlink-cudnn or a100-nvlink (up to 8 ranks), h200-400g, h200-400g-cudnn or "
    "a100-200g (nodes of 8), gb200-nvlink-cudnn or gb300-nvlink-cudnn (up to 72 ranks), "
    "gb200-400g-cudnn or gb300-800g-cudnn (racks of 72); H200s have what an H100 measured, other "
    "machines published rates: A100s those of FlashAttention-2, -cudnn those of cuDNN"
)
MOST_RANKS = 32
"""A table of more ranks has one line for neighbouring ranks that do the same."""
MACHINE = ("ranks_per_node", "tflops", "launch_us", "link_gbps", "latency_us")
"""Flags that the library reads under their own names."""
COLUMNS = (
    *("rank", "steps", "tiles", "compute ms", "exposed ms", "late ms", "idle"),
    *("sent MB", "between nodes MB", "buffers MB"),
)


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m burst_attention``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "schedule",
        help="print or draw a schedule and its predicted time",
        description="Predicts how long a schedule takes on a machine, which need not be present.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda flags: run(flags, parser))
    add_problem(parser)
    _add_machine(parser.add_argument_group("the machine", "One number stands for both."))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="seconds and bytes, instead of a table")
    output.add_argument("--timeline", action="store_true", help="with --json: also every event")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="also draw timelines and a map of the work (needs matplotlib)",
    )


def _add_machine(group: Any) -> None:
    def pair(name: str, metavar: tuple[str, str], what: str) -> None:
        group.add_argument(name, type=float, nargs="+", metavar=metavar, help=what)

    group.add_argument("--machine", help=MACHINES)
    group.add_argument("--ranks-per-node", type=count, metavar="N")
    group.add_argument(
        "--shared-link", action="store_true", help="ranks of a node share one link to other nodes"
    )
    pair("--tflops", ("FORWARD", "BACKWARD"), "rates that the kernels reach")
    pair("--link-gbps", ("WITHIN", "BETWEEN"), "gigabits per second each way, in and between nodes")
    pair("--latency-us", ("WITHIN", "BETWEEN"), "latency of a message, in and between nodes")
    group.add_argument("--launch-us", type=float, metavar="US", help="time of a kernel's launch")


def run(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Carries the command out. Wrong arguments end the process with status 2."""
    if flags.plot:
        _check_plot(flags, parser)
    try:
        found: dict[str, Any] = _ffi.ask(json.dumps(_request(flags)))
    except ValueError as error:
        parser.error(str(error))
    if flags.plot:
        from burst_attention._cli import schedule_plot

        schedule_plot.draw(found, f"{title(flags)}, schedule {flags.schedule}", flags.plot)
    if flags.json:
        if not flags.timeline:
            for each in found["passes"]:
                each.pop("timeline", None)
        print(json.dumps(found, indent=1))
    else:
        print(_text(found, flags))
    return 0


def _check_plot(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process, before it computes, if it can't draw the result."""
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
    """Returns the question to the library about one rank's shard.

    Raises:
      ValueError: for a sequence that ranks can't share equally.
    """
    machine = {name: getattr(flags, name) for name in MACHINE}
    return problem_of(flags) | {
        "ask": "simulate",
        "machine": machine | {"name": flags.machine, "shared": flags.shared_link},
        "timeline": bool(flags.plot) or (flags.json and flags.timeline),
    }


def _text(found: dict[str, Any], flags: argparse.Namespace) -> str:
    machine, passes = found["machine"], found["passes"]
    lines = [title(flags), f"schedule {flags.schedule} on {machine['title']} ({machine['name']}):"]
    lines += [f"  {name}: {source}" for name, source in machine["sources"].items()]
    for each in passes:
        lines += ["", f"{each['pass']}, {each['travels']} travel", *_table(each)]
        lines.append(_total(each["pass"], [each], machine))
    return "\n".join([*lines, "", _total("forward + backward", passes, machine)])


def _table(each: dict[str, Any]) -> list[str]:
    """Returns a line for each rank, or in a long table for neighbouring ranks that do the same."""
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
    """Returns a line about all ranks and these passes together."""
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
    """Returns each rank's hops to other nodes; for an estimate the most hops of a rank."""
    if each.get("estimated"):
        return [each["slow_hops"]]
    return [rank["slow_hops"] for rank in each["ranks"]]
