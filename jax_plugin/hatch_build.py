"""Build hook of the wheel: takes what `make wheel` made and names the platform it runs on.

The library is a plain C library that Python loads with ctypes, so one wheel serves every Python 3.
Its tag is `py3-none-manylinux_2_X_<host>`; X is the newest glibc that the library asks for, and the
host is the processor that it was compiled for.
"""

import json
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "burst_attention/libburst_attention_ffi.so"
IMAGES = "burst_attention/images/*.safetensors"
"""One file for each kind of GPU."""
HOSTS = {62: "x86_64", 183: "aarch64"}
"""Processors of hosts, by ELF's numbers of them."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the library and the CUDA images into the wheel, and the right tag on it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files; `version` is `standard` or `editable`."""
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
    """The processor that a 64-bit little-endian ELF file is for."""
    (machine,) = struct.unpack_from("<H", elf, 18)
    if machine not in HOSTS:
        raise RuntimeError(f"expected a library for one of {HOSTS} (ELF's machine), got {machine}")
    return HOSTS[machine]


def images_host(images: Path) -> str | None:
    """The host that a file of images names in its header, whose length stands in front of it."""
    with images.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)).get("__metadata__", {}).get("host")


class Section(NamedTuple):
    """What is needed of an ELF section header, in its order there."""

    kind: int
    offset: int
    size: int
    link: int


def glibc_versions(elf: bytes) -> set[tuple[int, int]]:
    """The glibc versions (major, minor) that a 64-bit little-endian ELF file asks for.

    They stand in its section of needed versions (SHT_GNU_verneed): a list of files, each with a
    list of version names. See the gABI and the LSB's chapter on symbol versioning.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise RuntimeError("expected a 64-bit little-endian ELF library: wheels are for Linux only")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [
        Section(kind, offset, size, link)
        for kind, offset, size, link in (
            struct.unpack_from("<4xI16xQQI", elf, table + index * entry_size)
            for index in range(count)
        )
    ]
    found: set[tuple[int, int]] = set()
    for section in sections:
        if section.kind == 0x6FFFFFFE:  # SHT_GNU_verneed
            for at in _needed(elf, section, sections[section.link]):
                if version := re.match(rb"GLIBC_(\d+)\.(\d+)", elf[at : at + 32]):
                    found.add((int(version[1]), int(version[2])))
    return found


def _needed(elf: bytes, section: Section, strings: Section) -> list[int]:
    """Where the names of all needed versions stand in the file."""
    offsets = []
    file = section.offset
    while True:
        count, first, next_file = struct.unpack_from("<2xH4xII", elf, file)
        version = file + first
        for _ in range(count):
            name, next_version = struct.unpack_from("<8xII", elf, version)
            offsets.append(strings.offset + name)
            version += next_version
        if not next_file:
            return offsets
        file += next_file
