"""Build hook of the wheel: packs the files of `make wheel` and names the wheel's platform.

The library is a plain C library that Python loads with ctypes, so one wheel serves every Python 3.
Its tag is `py3-none-manylinux_2_X_<host>`: X is the newest glibc that the library asks for, and the
host is the processor that the library was compiled for.
"""

import json
import re
import struct
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "burst_attention/libburst_attention_ffi.so"
IMAGES = "burst_attention/images/*.safetensors"
"""One file for each kind of GPU."""
HOSTS = {62: "x86_64", 183: "aarch64"}
"""The processors of hosts, by their numbers in ELF files."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the library and the CUDA images into the wheel, and the right tag on it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before hatchling collects files; `version` is `standard` or `editable`."""
        if version == "editable":  # Python finds both in the source tree.
            return
        root = Path(self.root)
        for needed in (LIBRARY, IMAGES):
            if not list(root.glob(needed)):
                raise RuntimeError(
                    f"expected {root / needed}, found no such file: build the wheel with "
                    "`make wheel`, which compiles the library and the CUDA kernels first"
                )
        library = (root / LIBRARY).read_bytes()
        glibc = max(glibc_versions(library), default=(2, 17))
        host = library_host(library)
        for images in root.glob(IMAGES):
            if (came := images_host(images)) != host:
                raise RuntimeError(
                    f"expected the CUDA kernels in {images} to be for a host of {host}, as the "
                    f"library is, but they are for {came}: build the wheel with `make wheel`, for "
                    "another host than this one with HOST=aarch64 or HOST=x86_64"
                )
        build_data["artifacts"] += [LIBRARY, IMAGES]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_{host}"


def library_host(elf: bytes) -> str:
    """Returns the processor that a 64-bit little-endian ELF file is for."""
    (machine,) = struct.unpack_from("<H", elf, 18)
    if machine not in HOSTS:
        raise RuntimeError(f"expected a library for one of {HOSTS} (ELF's machine), got {machine}")
    return HOSTS[machine]


def images_host(images: Path) -> str | None:
    """Returns the host that a file of images names in its header, which its length precedes."""
    with images.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)).get("__metadata__", {}).get("host")


def glibc_versions(elf: bytes) -> set[tuple[int, int]]:
    """Returns the glibc versions (major, minor) that a 64-bit little-endian ELF file asks for.

    The names of the versions stand in its table of strings. A name elsewhere in the file could only
    make the wheel ask for a newer glibc than it needs.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise RuntimeError("expected a 64-bit little-endian ELF library: wheels are for Linux only")
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", elf)
    return {(int(major), int(minor)) for major, minor in found}
