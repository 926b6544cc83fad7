"""Checks the ring on a GPU: its results, its peace with XLA's collectives, its speed.

One command, under ten minutes, for a machine with an NVIDIA GPU and jax[cuda13] 0.11.2 or newer,
but no Rust. It needs the built wheel, installed or named by `--wheel dist/….whl`. Its parts:

  one        the shared cases on a ring of one, forward and gradients, against float64
  virtual    all ranks of a ring on one GPU, with copies instead of messages: every layout, mode
             and schedule
  features   windows, segments, soft cap, slopes, sinks, dropout, widths, cross attention: one
             rank with all gradients, and the virtual ring
  linear     linear attention against its recurrence in float64, and its time against plain JAX
  losses     a transformer's losses with our attention and with jax.nn's attention
  speed      the virtual ring against one launch of the same work, a window against the whole
             causal mask, a layer against cuDNN
  memory     peak of forward and backward, each in a fresh process
  processes  2 and 4 processes, over NCCL, with features and every schedule: on a GPU each if there
             are enough GPUs (then 8 processes as well), else all on one GPU
  training   200 steps of two processes, which gather parameters and sum gradients during the ring

Every part runs in processes of its own, with limits on time, so no failure hides another. The
command prints a table and writes results/<device>-ring.json and .png. `--rehearse` runs all parts
on the CPU with tiny shapes, where dense attention stands in for the GPU's calls.

Exit code 0: all that ran passed; 1: something failed or missed its bar; 2: nothing to run on.
"""

import argparse
import os
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

from check.parts import PARTS
from check.run import Run
from gpu import report
from gpu.session import Budget, LostError, UnusableError

RESULTS = Path(__file__).parent / "results"


def check(run: Run, names: list[str]) -> bool:
    """Runs these parts; returns whether all parts that ran passed."""
    run.session.start()
    answer = run.session.ask({"part": "environment"}, 60.0)
    if "result" in answer:
        run.found["environment"] = answer["result"]
        report.print_environment(answer["result"])
    else:
        print(f"the environment is unknown: {answer}")
    try:
        for name in names:
            run.carry_out(name, *PARTS[name])
    finally:
        run.session.close()
    run.found["complete"] = True
    run.save()
    _picture(run)
    return run.summary()


def _use(wheel: Path, folder: Path) -> None:
    """Puts the unpacked wheel before installed packages. A wheel needs no build and no set-up."""
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    found = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{found}" if found else str(folder)


def _picture(run: Run) -> None:
    try:
        from check.picture import draw

        draw(run.found, run.file.with_suffix(".png"))
    except ImportError:
        warnings.warn("no picture: this Python has no matplotlib", stacklevel=1)
    except Exception as error:  # the numbers count without a picture
        print(f"no picture: {error!r}")


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(PARTS)}, got {text!r}")
    return [name for name in PARTS if name in names]


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=_names, help="run only these parts, separated by commas")
    parser.add_argument("--seconds", type=float, default=570.0, help="seconds for all parts, about")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, with stand-ins")
    parser.add_argument("--wheel", type=Path, help="use this wheel; default: the installed package")
    parser.add_argument("--out", type=Path, help="folder of the results")
    flags = parser.parse_args(arguments)
    whole = not (flags.parts or flags.rehearse)
    folder = flags.out or (RESULTS if whole else RESULTS / "partial")
    with tempfile.TemporaryDirectory() as unpacked:
        if flags.wheel:
            _use(flags.wheel, Path(unpacked))
        run = Run(Budget(flags.seconds), folder, flags.rehearse)
        try:
            return 0 if check(run, flags.parts or list(PARTS)) else 1
        except (LostError, UnusableError) as why:
            print(why)
            return 2
        finally:
            run.session.close()


if __name__ == "__main__":
    sys.exit(main())
