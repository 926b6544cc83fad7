"""Measures what the package computes in JAX programs on NVIDIA GPUs: time, peak, host time.

Where there are several GPUs, each has a rank of the rings, and NCCL carries their messages.
Otherwise eight ranks share the GPU, with copies in place of messages. The kinds of rows:

  ring    a ring against one launch of the same work
  window  a ring with a window against the whole causal mask
  layer   a layer on one device against jax.nn's attention by cuDNN
  cudnn   cuDNN's kernels in a layer against the library's own
  packed  packed documents against a row for each, and against one long document
  mask    a causal mask as intervals, which are data, against the flag
  decode  a step of decoding against a copy of as many bytes
  latents a step of decoding over latents against jax.nn and a copy
  host    the host's time for a call and a step of a ring
  linear  linear attention against plain JAX in chunks
  delta   the delta rule against plain JAX in chunks
  infini  Infini-attention against its parts
  memory  the peak of forward and backward pass, against one tensor like q

Each row runs in a process of its own with a limit on its time, so no failure hides another. The
results go to results/<device>-ring.json. `--quick` takes tiny shapes and ignores the bars. `make
gpu-check` calls this program after the tests.

Exit code 0: all rows that ran passed; 1: a row failed or missed its bar; 2: nothing to run on.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
from gpu import report, serve
from gpu.rows import ROWS, Work
from gpu.session import Budget, LostError, Session, UnusableError, module

ROW_S = 120.0
"""Seconds after which a row counts as hanging."""


def bench(session: Session, kinds: list[str], budget: Budget, folder: Path) -> bool:
    """Measures the rows, the first of each kind first; returns whether all that ran passed."""
    results: dict[str, Any] = {"device": "unknown device", "rows": {}, "failed": {}}
    wanted = [(n, kind, about) for kind in kinds for n, about in enumerate(ROWS[kind])]
    for _, kind, about in sorted(wanted, key=lambda row: row[0]):
        name = ", ".join([kind, *(f"{key} {value}" for key, value in about.items())])
        if budget.left() < 0:
            print(f"{name:<54}left out: the time was up", flush=True)
            continue
        session.close()
        answer = session.ask({"part": "measure", "kind": kind, **about}, ROW_S)
        row = answer.get("result", answer)
        results["device"] = row.get("device", results["device"])
        wrong = [answer["error"]] if "error" in answer else row.get("wrong", [])
        left_out = [f"left out: {answer['absent']}"] if "absent" in answer else []
        for text in [*row.get("shown", []), *left_out, *(f"FAILED: {text}" for text in wrong)]:
            print(f"{name:<54}{text}", flush=True)
        results["rows"][name] = row
        results["failed"] |= {name: wrong} if wrong else {}
        report.save(results, folder / f"{report.slug(results['device'])}-ring.json")
    print(f"{len(results['failed'])} of {len(results['rows'])} rows failed")
    return not results["failed"]


def main() -> int:
    """Measures, or serves as the process of a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="use tiny shapes, as a trial run")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="kinds of rows")
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
        return 0 if bench(session, flags.only, Budget(flags.budget), folder) else 1
    except (LostError, UnusableError) as why:
        print(why)
        return 2
    finally:
        session.close()


if __name__ == "__main__":
    sys.exit(main())
