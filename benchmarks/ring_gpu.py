"""Measures what the package computes in JAX programs on NVIDIA GPUs: time, peak, host time.

Where there are several GPUs, each has a rank of the rings, and NCCL carries their messages.
Otherwise eight ranks share the GPU, with copies in place of messages. The kinds of rows:

  carry   launches of a ring's hop that take sums in or not, and leave sums or results
  ring    a ring against one launch of the same work, by own kernels and by cuDNN's
  window  a ring with a window against the whole causal mask
  layer   a layer on one device: each choice of kernels and order, against jax.nn by cuDNN
  packed  packed documents against a row for each, and against one long document
  mask    a causal mask as intervals, which are data, against the flag
  decode  a step of decoding against a copy of as many bytes
  latents a step of decoding over latents against jax.nn and a copy
  host    the host's time for a call and a step of a ring
  linear  linear attention against plain JAX in chunks
  delta   the delta rule against plain JAX in chunks, or against flash-linear-attention
  infini  Infini-attention against its parts
  memory  the peak of forward and backward pass, against one tensor like q

The rows come in the order of gpu/agenda.py. Each runs in a process of its own with a limit on its
time, so no failure hides another. The programs of a row take turns, and nvidia-smi tells the clock
before and after. A row that fails runs once more without its peers. The results go to
results/<device>-ring.json. `--quick` takes tiny shapes and ignores the bars. `make gpu-check` calls
this program after the tests.

Exit code 0: all rows that ran passed; 1: a row failed or missed its bar; 2: nothing to run on.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
from gpu import agenda, report, serve
from gpu.rows import Work
from gpu.session import Budget, LostError, Session, UnusableError, module

ROW_S, QUICK_ROW_S = 90.0, 300.0
"""Seconds after which a row counts as hanging; a trial run's device is no GPU, and slow."""
SLACK_S = 20.0
"""Seconds over the budget that the last row may take."""


def bench(
    session: Session,
    rows: list[agenda.Row],
    budget: Budget,
    folder: Path,
    row_s: float = ROW_S,
) -> bool:
    """Measures rows in their order, each in ``row_s`` at most; returns whether all passed."""
    results: dict[str, Any] = {"device": "unknown device", "rows": {}, "failed": {}}
    for kind, about in rows:
        name = agenda.name_of(kind, about)
        if budget.left() < 0:
            print(f"{name:<53} left out: the time was up", flush=True)
            continue
        answer, wrong = measured(session, kind, about, budget, row_s)
        row = answer.get("result", answer)
        results["device"] = row.get("device", results["device"])
        wrong += row.get("wrong", [])
        left_out = [f"left out: {answer['absent']}"] if "absent" in answer else []
        for text in [*row.get("shown", []), *left_out, *(f"FAILED: {text}" for text in wrong)]:
            print(f"{name:<53} {text}", flush=True)
        results["rows"][name] = row
        results["failed"] |= {name: wrong} if wrong else {}
        report.save(results, folder / f"{report.slug(results['device'])}-ring.json")
    print(f"{len(results['failed'])} of {len(results['rows'])} rows failed")
    return not results["failed"]


def measured(
    session: Session, kind: str, about: dict[str, Any], budget: Budget, row_s: float
) -> tuple[dict[str, Any], list[str]]:
    """Returns the answer of a row's process, and errors.

    After an error, a new process measures the row without its peers, one of which may have failed.
    """
    wrong: list[str] = []
    answer: dict[str, Any] = {}
    for alone in (False, True) if kind in agenda.WITH_PEERS else (False,):
        session.close()
        limit_s = min(row_s, budget.left() + SLACK_S)
        answer = session.ask({"part": "measure", "kind": kind, "alone": alone, **about}, limit_s)
        if "error" not in answer:
            break
        wrong.append(answer["error"])
        if budget.left() < 0:
            break
    return answer, wrong


def main() -> int:
    """Measures, or serves as the process of a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="use tiny shapes, as a trial run")
    kinds = agenda.KINDS
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="kinds of rows")
    parser.add_argument("--each", type=int, metavar="N", help="rows of a kind, at most")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no row begins later")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        is_usable = flags.quick or jax.default_backend() == "gpu"
        why = None if is_usable else "expected an NVIDIA GPU that jax can use, found none"
        serve.serve(Work(flags.quick), sys.stdin, serve.own_output(), lambda: why, lambda: None)
        return 0
    session = Session(None, [*module("ring_gpu"), "--serve", *["--quick"] * flags.quick])
    results = Path(__file__).parent / "results"
    folder = flags.out or (results / "partial" if flags.quick else results)
    try:
        session.start()
        rows = agenda.chosen(flags.only, flags.each)
        row_s = QUICK_ROW_S if flags.quick else ROW_S
        return 0 if bench(session, rows, Budget(flags.budget), folder, row_s) else 1
    except (LostError, UnusableError) as why:
        print(why)
        return 2
    finally:
        session.close()


if __name__ == "__main__":
    sys.exit(main())
