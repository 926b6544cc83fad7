"""``python -m burst_attention kernels``: which code computes a call on a kind of GPU, and why."""

import argparse
import json
from typing import Any

from burst_attention import _ffi
from burst_attention._attention.options import BACKWARD_ORDERS, KERNELS
from burst_attention._attention.ring import order_of_sums
from burst_attention._cli.problem import add_problem, count, problem_of, title

EPILOG = """\
A backend that did not compute an operation is named with its reason. Times are those of one
operation, the mean over all ranks, predicted from rates that were measured, published or estimated.
The line "gradients" stands for all tiles of a rank: one operation computes all gradients of a tile,
or two do. BURST_ATTENTION_EXPLAIN=1 prints the same of a program that runs.

example:
  python -m burst_attention kernels --gpu sm_90 --world 8 --seq 65536 --heads 32 --kv-heads 8 \\
      --layout zigzag --causal
"""
RATES = {
    "measured": "measured rates",
    "published": "published rates",
    "predicted": "estimated rates",
}
FEATURES = tuple(
    dict.fromkeys(row["flag"] for row in _ffi.interface()["feature_operands"] if row["flag"])
)
"""Features without a number, as the library calls them."""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m burst_attention``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "kernels",
        help="print which kernels compute a call on a GPU",
        description="Says which backend computes each operation of a call, on a GPU that need not "
        "be present.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda flags: run(flags, parser))
    add_problem(parser)
    device = parser.add_argument_group("the device")
    device.add_argument("--gpu", required=True, metavar="sm_90", help="its architecture")
    device.add_argument("--ranks-per-node", type=count, default=8, metavar="N")
    features = parser.add_argument_group("features")
    features.add_argument("--soft-cap", type=float, metavar="CAP")
    features.add_argument("--dropout", type=float, metavar="RATE")
    features.add_argument(
        "--with",
        dest="arrays",
        nargs="+",
        default=[],
        choices=FEATURES,
        metavar="FEATURE",
        help=", ".join(FEATURES),
    )
    features.add_argument(
        "--backward-order",
        default="auto",
        choices=BACKWARD_ORDERS,
        help="auto, the default, is fixed where XLA_FLAGS asks for determinism",
    )
    features.add_argument(
        "--kernels",
        default="auto",
        choices=KERNELS,
        help="auto, the default, chooses as on GPUs with a confirmed cuDNN; tile as elsewhere",
    )
    parser.add_argument("--json", action="store_true", help="instead of a table")


def run(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Carries the command out. Wrong arguments end the process with status 2."""
    try:
        found: dict[str, Any] = _ffi.ask(json.dumps(_request(flags)))
    except ValueError as error:
        parser.error(str(error))
    if flags.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{title(flags)}, schedule {flags.schedule} on {flags.gpu}:")
    for each in found["passes"]:
        print(f"{each['pass']}, all ranks together")
        for one in each["operations"]:
            print(f"  {one['count']:>6}  {_line(one)}")
    return 0


def _line(one: dict[str, Any]) -> str:
    """Returns an operation, its backend and the refusals, each with its cost if one is known."""
    refused = ((x["backend"], x["reason"] + _time(x["cost"])) for x in one["refusals"])
    refusals = "; ".join(f"{name}: {reason}" for name, reason in refused)
    line = f"{one['operation']:16}  {one['backend']}{_time(one['cost'])}"
    return f"{line}  ({refusals})" if refusals else line


def _time(cost: dict[str, Any] | None) -> str:
    return (
        f", {1e3 * cost['seconds']:.3g} ms predicted from {RATES[cost['source']]}" if cost else ""
    )


def _request(flags: argparse.Namespace) -> dict[str, Any]:
    arrays = {name: name in flags.arrays for name in FEATURES}
    return problem_of(flags) | {
        "ask": "backends",
        "features": arrays | {"soft_cap": flags.soft_cap, "dropout": flags.dropout},
        "ranks_per_node": flags.ranks_per_node,
        "backward_order": order_of_sums(flags.backward_order),
        "kernels": flags.kernels,
        "target": flags.gpu,
    }
