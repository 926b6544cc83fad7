"""Lets JAX find its CUDA plugin, whose compiler needs no GPU.

The plugin lies outside the packages of .venv, so that JAX finds it in these tests only. JAX looks
for plugins once for each process, so these tests have a session of their own: `make test-compiled`.
"""

import os
import sys
from pathlib import Path

import pytest

PLUGIN = Path(sys.prefix) / "cuda"

if not (PLUGIN / "ready").exists():
    raise pytest.UsageError(f"{PLUGIN} must hold JAX's CUDA plugin; run `make test-compiled`")
sys.path.append(str(PLUGIN))
# JAX would keep these programs, but can't load a program for devices that are not there.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


def pytest_collection_modifyitems(items):
    """Puts the tests of one program side by side, so that few workers compile it."""

    def program(item):
        given = item.callspec.params if hasattr(item, "callspec") else {}
        return str(given.get("name", ""))

    items.sort(key=program)
