"""``python -m burst_attention offload``: whether caches on other devices pay."""

import argparse
import json
from typing import Any

from burst_attention._checks import listed
from burst_attention._cli.offload_time import Decoder, Device, Link, Step, cost, offloaded, together
from burst_attention._cli.problem import count

EPILOG = """\
Everything follows from bytes and rates: linear layers read the weights, or multiply at --share of
the peak; attention reads the cache; q, k, v and the output of each layer cross the link. Two halves
of the requests take turns. The pool holds as many requests as its memory does. A step is bound by
the model, the link or the pool, or by the latency of one half's way through all three. "Alone" are
as many GPUs as --gpus, twice or four times as many, whichever give most tokens per second for their
price, or for each GPU without a price. Prices are of devices alone, and assumptions.

examples:
  python -m burst_attention offload --model llama-65b --gpus 2xa100 --pool 8,16,32xrtx-4090
  python -m burst_attention offload --layers 80 --heads 64 --kv-heads 8 --parameters 70.6e9 \\
      --gpus 4xh100 --pool 2xhost --device host=460,5,1500 --context 131072 --link-gbps 400
"""
MODELS = {
    "llama-65b": Decoder(80, 64, 128, 65.2e9),
    "llama-3-8b": Decoder(32, 32, 128, 8.03e9, kv_heads=8),
    "llama-3-70b": Decoder(80, 64, 128, 70.6e9, kv_heads=8),
    "llama-3-405b": Decoder(126, 128, 128, 405.9e9, kv_heads=8),
}
"""Models by name: layers, heads, head_dim, parameters."""
DEVICES = {
    "a100": Device("A100 80 GB", 2.039e12, 312e12, 80e9, 15e3),
    "h100": Device("H100", 3.35e12, 989e12, 80e9),
    "h200": Device("H200", 4.8e12, 989e12, 141e9),
    "b200": Device("B200", 8e12, 2250e12, 180e9),
    "l40s": Device("L40S", 864e9, 362e12, 48e9),
    "rtx-4090": Device("RTX 4090", 1.008e12, 165e12, 24e9, 1.6e3),
}
"""Devices by name, as NVIDIA specifies them. Prices are assumptions of `docs/claims.md`."""
SIZES = ("layers", "heads", "kv_heads", "head_dim", "parameters")
COLUMNS = (
    *("pool", "requests", "tokens/s", "× alone", "× per cost"),
    *("model ms", "pool ms", "link ms", "bound by"),
)


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m burst_attention``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "offload",
        help="predict whether caches on other devices pay",
        description="Predicts decoding with caches on other devices (burst_attention.CachePool).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda flags: run(flags, parser))
    model = parser.add_argument_group("the model", "A name, or its sizes, or both.")
    model.add_argument("--model", choices=MODELS)
    for name in ("layers", "heads", "kv_heads", "head_dim"):
        model.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N")
    model.add_argument("--parameters", type=float, metavar="N")
    machine = parser.add_argument_group("the devices")
    machine.add_argument("--gpus", default="2xa100", metavar="NxKIND", help="of the model")
    machine.add_argument(
        "--pool", default="8,16,24,32xrtx-4090", metavar="N,N,…xKIND", help="that hold the cache"
    )
    machine.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="KIND=GB/S,TFLOPS,GB[,DOLLARS]",
        help=f"another kind of device than {', '.join(DEVICES)}; may be given several times",
    )
    machine.add_argument("--link-gbps", type=float, default=100.0, help="of each of --gpus")
    machine.add_argument("--latency-us", type=float, default=20.0, help="of a message")
    machine.add_argument("--share", type=float, default=0.7, help="of the peak that products reach")
    parser.add_argument("--context", type=count, nargs="+", default=[8192], help="tokens cached")
    parser.add_argument("--json", action="store_true", help="numbers instead of a table")


def run(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Carries the command out. Wrong arguments end the process with status 2."""
    try:
        model = _model(flags)
        kinds = DEVICES | dict(map(_device, flags.device))
        (gpu, (gpus,)), (holder, holders) = (
            _counted(flags.gpus, kinds, 1),
            _counted(flags.pool, kinds),
        )
        for name in ("link_gbps", "share"):
            if not getattr(flags, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0")
        if not flags.latency_us >= 0:
            raise ValueError("--latency-us must be at least 0")
    except ValueError as error:
        parser.error(str(error))
    link = Link(flags.latency_us * 1e-6, flags.link_gbps * 1e9 / 8)
    found = [
        _context(model, (gpu, gpus), [(holder, n) for n in holders], context, flags.share, link)
        for context in flags.context
    ]
    if flags.json:
        print(json.dumps(found, indent=1))
        return 0
    print(
        f"weights {model.weights / 1e9:,.0f} GB on {gpus} × {gpu.name}, cache "
        f"{model.token / 1e3:,.0f} kB a token on {holder.name}; {model.crossing / 1e3:,.0f} kB of "
        f"q, k, v and output cross for each token; predicted"
    )
    for each in found:
        print("\n" + _text(each))
    return 0


def _model(flags: argparse.Namespace) -> Decoder:
    """Returns the model that the flags describe."""
    named = MODELS.get(flags.model)
    sizes = {name: getattr(named, name) for name in SIZES} if named else {"head_dim": 128}
    sizes |= {name: x for name in SIZES if (x := getattr(flags, name)) is not None}
    if missing := [f"--{x}" for x in ("layers", "heads", "parameters") if x not in sizes]:
        raise ValueError(f"expected --model or the model's sizes, {', '.join(missing)} too")
    found = Decoder(**sizes)
    if found.heads % (found.kv_heads or 1):
        raise ValueError(
            f"--heads must be a multiple of --kv-heads, got {found.heads} and {found.kv_heads}"
        )
    if not found.parameters > 0:
        raise ValueError(f"--parameters must be above 0, got {found.parameters:g}")
    return found


def _device(text: str) -> tuple[str, Device]:
    """Returns the name and the numbers of a device, given as ``NAME=GB/S,TFLOPS,GB[,DOLLARS]``."""
    name, _, given = text.partition("=")
    try:
        numbers = [float(x) for x in given.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or not min(numbers[:3]) > 0:
        raise ValueError(
            f"--device must be KIND=GB/S,TFLOPS,GB[,DOLLARS], such as host=460,5,1500, got {text!r}"
        )
    bandwidth, peak, memory, *dollars = numbers
    return name, Device(name, bandwidth * 1e9, peak * 1e12, memory * 1e9, *dollars)


def _counted(
    text: str, kinds: dict[str, Device], most: int | None = None
) -> tuple[Device, list[int]]:
    """Returns a kind of device and its numbers, given as ``2xa100`` or ``8,16xrtx-4090``."""
    numbers, _, name = text.partition("x")
    counts = [int(x) for x in numbers.split(",") if x.isdecimal() and int(x) > 0]
    if len(counts) != len(numbers.split(",")) or len(counts) > (most or len(counts)):
        expected = (
            "a number and a kind of device, such as 2xa100"
            if most
            else ("numbers and a kind of device, such as 8,16xrtx-4090")
        )
        raise ValueError(f"expected {expected}, got {text!r}")
    if name not in kinds:
        raise ValueError(f"expected a kind of device, {listed(kinds, quote=False)}, got {name!r}")
    return kinds[name], counts


def _context(
    model: Decoder,
    gpus: tuple[Device, int],
    pools: list[tuple[Device, int]],
    context: int,
    share: float,
    link: Link,
) -> dict[str, Any]:
    """Returns the predictions for a length of the cache."""
    gpu, count = gpus
    groups = [(gpu, count * factor) for factor in (1, 2, 4)]
    rates = [together(model, *each, context, share) for each in groups]
    alone = max(zip(rates, groups, strict=True), key=lambda x: x[0] / (cost([x[1]]) or x[1][1]))
    steps = [offloaded(model, gpus, pool, context, share, link) for pool in pools]
    return {
        "context": context,
        "alone": {"gpus": alone[1][1], "name": gpu.name, "rate": alone[0]},
        "pools": [_row(step, gpus, pool, alone) for step, pool in zip(steps, pools, strict=True)],
    }


def _row(
    step: Step | None,
    gpus: tuple[Device, int],
    pool: tuple[Device, int],
    alone: tuple[float, tuple[Device, int]],
) -> dict[str, Any]:
    """Returns the predictions for a pool."""
    found: dict[str, Any] = {"pool": pool[1], "name": pool[0].name, "requests": 0, "rate": 0.0}
    if step is None:
        return found
    rate, group = alone
    found |= {"requests": step.batch, "rate": step.rate, "bound": step.bound}
    found |= {"model": step.model, "pool_seconds": step.pool, "link": step.link}
    if rate:
        found["over_alone"] = step.rate / rate
        if gpus[0].dollars:
            found["per_cost"] = found["over_alone"] * cost([group]) / cost([gpus, pool])
    return found


def _text(each: dict[str, Any]) -> str:
    """Returns the table of a length of the cache."""
    alone = each["alone"]
    title = f"{each['context']:,} tokens cached: "
    title += (
        f"{alone['gpus']} × {alone['name']} with weights and cache: {alone['rate']:,.0f} tokens/s"
        if alone["rate"]
        else f"no request fits up to {alone['gpus']} × {alone['name']}"
    )
    table = [COLUMNS, *(_line(row) for row in each["pools"])]
    widths = [max(len(line[at]) for line in table) for at in range(len(COLUMNS))]
    lines = ["  ".join(f"{x:>{w}}" for x, w in zip(line, widths, strict=True)) for line in table]
    return "\n".join([title, *lines])


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"{row['pool']} × {row['name']}"
    if not row["requests"]:
        return (name, *("–",) * (len(COLUMNS) - 1))
    ratios = (f"{row[key]:.2f}" if key in row else "–" for key in ("over_alone", "per_cost"))
    times = (f"{1e3 * row[key]:.1f}" for key in ("model", "pool_seconds", "link"))
    return (name, str(row["requests"]), f"{row['rate']:,.0f}", *ratios, *times, row["bound"])
