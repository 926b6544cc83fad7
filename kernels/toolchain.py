"""Prints shell commands that tell cargo where the CUDA kernels' tools are.

    eval "$(python kernels/toolchain.py)"

The assembler, CUDA's headers and libclang come with the Python packages of requirements/, so the
build needs neither a CUDA installation nor a GPU. Variables that are set already stay.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path


def environment() -> dict[str, str]:
    """Returns the variables that the build of the kernels reads and that are not set."""
    site = Path(sysconfig.get_path("purelib"))
    found = {
        "CUDA_HOME": _existing(site / "nvidia" / "cu13", "bin/tileiras", "nvidia-cuda-tileiras"),
        "LIBCLANG_PATH": _existing(site / "clang" / "native", "libclang.so", "libclang"),
    }
    if "LIBCLANG_PATH" not in os.environ:  # the wheel of libclang has no headers
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-print-file-name=include"]
        include = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        found["BINDGEN_EXTRA_CLANG_ARGS"] = f"-I{include}"
    return {name: value for name, value in found.items() if name not in os.environ}


def _existing(folder: Path, file: str, package: str) -> str:
    if not (folder / file).exists():
        sys.exit(
            f"the CUDA kernels need {folder / file}, which comes with the package {package}: "
            f"run {sys.executable} -m pip install -r requirements/dev.txt"
        )
    return str(folder)


if __name__ == "__main__":
    for name, value in environment().items():
        print(f"export {name}={shlex.quote(value)}")
