#!/usr/bin/env python3
"""Answers in ten minutes with a GPU: run [--minutes 9] [--out FOLDER].

Needs Python 3.12, jax[cuda13] from 0.11.2 on, and pytest. Compares with torch where it is
installed. Needs no network, no compiler and no home to write to. Unpacks the wheels beside it into
the folder of the results, and runs the stages that benchmarks/ten_minutes.py describes.
"""

import os
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Becomes the program that runs the stages."""
    flags = sys.argv[1:]
    if {"-h", "--help"} & set(flags):
        print(__doc__)
        return
    if "--out" not in flags:
        flags += ["--out", "gpu-results"]
    out = Path(flags[flags.index("--out") + 1]).resolve()
    site = out / "site"
    site.mkdir(parents=True, exist_ok=True)
    for wheel in sorted((HERE / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        # The folder of the bundle may be read-only.
        "PYTHONPYCACHEPREFIX": str(out / "pycache"),
        "XDG_CACHE_HOME": str(out / "cache"),
    }
    program = HERE / "benchmarks" / "ten_minutes.py"
    os.execv(sys.executable, [sys.executable, str(program), *flags])


if __name__ == "__main__":
    main()
