"""Where the CUDA kernels' tools are: prints shell commands that tell cargo.

    eval "$(python kernels/toolchain.py)"

The assembler, CUDA's headers and libclang come with Python packages of requirements/, so
neither a CUDA installation nor a GPU is needed. What is set already stays.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path


def environment() -> dict[str, str]:
    """Variables that the build of the kernels reads, for those that are not set."""
    site = Path(sysconfig.get_path("purelib"))
    found = {
        "CUDA_HOME": _existing(site / "nvidia" / "cu13", "bin/tileiras", "nvidia-cuda-tileiras"),
        "LIBCLANG_PATH": _existing(site / "clang" / "native", "libclang.so", "libclang"),
    }
    if "LIBCLANG_PATH" not in os.environ:  # that wheel has no headers of its own
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
