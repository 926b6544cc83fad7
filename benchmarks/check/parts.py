"""The parts of the check, in the order in which they run."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu.session import LostError

from .group import EACH, METHODS, Group, failures, form, gpus
from .run import Part, Run

STEPS, SERIAL_STEPS = 200, 40
REHEARSED = 6
TOLERANCE = 0.01
"""The largest relative difference between a loss and that of plain attention on one device."""
JOIN_S, TRAIN_S = 60.0, 90.0
SERIAL = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""One queue from host to device: a wrong order of enqueued work then blocks for ever."""

BY, NOT_BY = "several processes by", "several processes not by"

Carry = Callable[[Run, Part, float], None]


def listed(name: str, must: bool, fresh: bool = False) -> Carry:
    """Returns a part whose worker lists its items; with `fresh`, each runs in a new process."""

    def carry(run: Run, record: Part, share: float) -> None:
        asked: dict[str, Any] = {"part": "names", "of": name}
        for item in run.ask(record, name, asked, share, must) or []:
            if fresh:
                run.session.close()
            asked = {"part": "measure", "of": name, "name": item}
            row = run.ask(record, item, asked, share, must)
            if row is not None:
                run.keep(record, row)

    return carry


def processes(run: Run, record: Part, share: float) -> None:
    """Checks the ring over XLA's NCCL communicators: 2 and 4 processes, and 8 with a GPU each."""
    for count in (2,) if run.rehearse else (2, 4, 8) if len(gpus()) >= 8 else (2, 4):
        with _group(run, record, share, count) as group:
            if group is None:
                continue
            asked: dict[str, Any] = {"part": "names", "of": "ranks"}
            names = _together(run, record, "names", group, count, asked, share)
            for name in names[0] if names else []:
                title = f"ring of {count} processes, {name}"
                if group.lost:
                    run.fail(record, title, "not checked: the processes were lost before")
                    continue
                asked = {"part": "measure", "of": "ranks", "name": name}
                rows = _together(run, record, title, group, count, asked, share)
                if rows is not None:
                    wrong = list(dict.fromkeys(w for row in rows for w in row["wrong"]))
                    run.keep(record, rows[0] | {"name": title, "wrong": wrong})


def training(run: Run, record: Part, share: float) -> None:
    """Trains over two processes, with sharded parameters and gathers during the ring."""
    steps, serial = (REHEARSED, REHEARSED) if run.rehearse else (STEPS, SERIAL_STEPS)
    item = {"part": "train", "steps": steps, "attention": "plain", "devices": 1}
    plain = run.ask(record, "plain attention", item, share, limit_s=TRAIN_S)
    variants: list[tuple[str, int, dict[str, str]]] = [
        (f"{steps} steps, two processes", steps, {}),
        (f"{serial} steps, CUDA_DEVICE_MAX_CONNECTIONS=1", serial, SERIAL),
    ]
    for title, count, extra in variants[1:] if run.rehearse else variants:
        with _group(run, record, share, 2, extra) as group:
            if group is None:
                continue
            # Without GPUs no ring spans processes; `losses` rehearses a ring over devices.
            attention = "gathered" if run.rehearse else "ring"
            item = {"part": "train", "steps": count, "attention": attention, "devices": 2}
            both = _together(run, record, title, group, 2, item, share, TRAIN_S)
            if both is not None and plain is not None:
                _keep_training(run, record, title, both, plain)


def _keep_training(
    run: Run, record: Part, title: str, ranks: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    losses = ranks[0]["losses"]
    apart, wrong = compare(losses, plain["losses"][: len(losses)])
    if any(rank["losses"] != losses for rank in ranks):
        wrong.append("losses differ between the processes")
    if not all(rank["gathered"] for rank in ranks):
        wrong.append("a gather during the ring gave wrong values")
    flight = ranks[0]["in flight"]
    beside = ", {beside a collective} of {calls} calls beside a collective"
    shown = (
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, at most {apart:.2%} from plain attention's"
        + (beside.format_map(flight) if flight.get("calls") else "")
    )
    row = {"name": title, "shown": shown, "wrong": wrong, "scheduler": ranks[0]["scheduler"]}
    run.keep(record, row | {"losses": {"ring": losses, "plain": plain["losses"][: len(losses)]}})


def compare(
    ring: list[float], plain: list[float], tolerance: float = TOLERANCE
) -> tuple[float, list[str]]:
    """Returns the largest relative difference of two runs' losses, and all faults."""
    if len(ring) != len(plain) or not all(map(math.isfinite, [*ring, *plain])):
        return math.nan, ["losses: expected as many as plain attention has, all finite"]
    apart = [abs(x - y) / abs(y) for x, y in zip(ring, plain, strict=True)]
    most, wrong = max(apart), []
    if most > tolerance:
        at = apart.index(most)
        wrong.append(
            f"loss {ring[at]:.4f} at step {at + 1}, {plain[at]:.4f} with plain attention; "
            f"expected a difference of at most {tolerance:.1%}"
        )
    if not ring[-1] < ring[0]:
        wrong.append(f"loss went from {ring[0]:.4f} to {ring[-1]:.4f}: nothing is learnt")
    return most, wrong


@contextmanager
def _group(
    run: Run, record: Part, share: float, count: int, extra: dict[str, str] | None = None
) -> Iterator[Group | None]:
    """Yields processes that found each other by the first method that works, or None."""
    title = f"{count} processes"
    command, environment = [*run.command, "--rank"], _environment(run) | (extra or {})
    refused: dict[str, str] = {}
    group = None
    run.session.close()  # frees its memory for the processes
    for way in _ways(run, count):
        limit_s = run.limit(record, title, share, True, JOIN_S)
        if limit_s is None:
            break
        try:
            group = form(command, way, count, environment, limit_s)
        except LostError as error:
            refused[way] = str(error)
            continue
        run.found[BY] = way
        print(f"{title}: by {way}", flush=True)
        break
    else:
        # Only JAX has worked so far, so this is no failure of the ring.
        run.found.setdefault(BY, None)
        run.leave_out(record, title, f"no method works: {refused or run.found[NOT_BY]}")
    for way, why in refused.items():
        print(f"    not by {way}: {why}", flush=True)
    run.found.setdefault(NOT_BY, {}).update(refused)
    try:
        yield group
    finally:
        if group is not None:
            group.close()


def _ways(run: Run, count: int) -> list[str]:
    """Returns the methods to try: the one that worked comes first; none if all have failed."""
    enough = not run.rehearse and len(gpus()) >= count
    ways = [way for way in METHODS if enough or way != EACH]
    if BY not in run.found:
        return ways
    return sorted(ways, key=lambda way: way != run.found[BY]) if run.found[BY] else []


def _environment(run: Run) -> dict[str, str]:
    if not run.rehearse:
        return {}
    flags = run.environment["XLA_FLAGS"].replace("device_count=2", "device_count=1")
    return run.environment | {"XLA_FLAGS": flags}


def _together(
    run: Run,
    record: Part,
    name: str,
    group: Group,
    count: int,
    item: dict[str, Any],
    share: float,
    limit_s: float | None = None,
) -> list[Any] | None:
    """Returns the results of all processes, or None, and records the failure."""
    limit_s = run.limit(record, name, share, True, limit_s)
    if limit_s is None:
        return None
    answers = group.ask([dict(item) for _ in range(count)], limit_s)
    if failures(answers):
        run.fail(record, name, failures(answers))
        return None
    return [answer["result"] for answer in answers]


PARTS: dict[str, tuple[Carry, float]] = {
    "one": (listed("one", must=True), 0.23),
    "virtual": (listed("virtual", must=True), 0.43),
    "features": (listed("features", must=True), 0.55),
    "linear": (listed("linear", must=True), 0.58),
    "losses": (listed("losses", must=True), 0.62),
    "speed": (listed("speed", must=False), 0.73),
    "memory": (listed("memory", must=False, fresh=True), 0.79),
    "processes": (processes, 0.91),
    "training": (training, 1.0),
}
"""Each part with the share of the budget at which it ends. It begins after the previous part."""
