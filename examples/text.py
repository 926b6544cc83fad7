"""Long real text that every machine with Python has: the sources of the standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Installed packages differ from machine to machine. Tables of code points are no text.
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


def standard_library_bytes(limit: int = 8_000_000) -> np.ndarray:
    """Returns the .py files of the standard library, sorted and joined: uint8 `[<= limit]`."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _LEFT_OUT & {*path.relative_to(root).parts})
    parts: list[bytes] = []
    size = 0
    for path in sorted(files):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return np.frombuffer(b"".join(parts)[:limit], np.uint8)


def batches(
    text: np.ndarray, batch: int, length: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (inputs, targets), int32 `[batch, length]`, from random places of the text."""
    if text.size <= length:
        raise SystemExit(f"the text has {text.size} bytes, expected more than --length {length}")
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, text.size - length, size=batch)
        windows = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
        yield windows[:, :-1], windows[:, 1:]


def nats_after_one_byte(text: np.ndarray) -> np.ndarray:
    """Returns -ln p(byte | previous byte), `[256 previous, 256 bytes]`, with p counted in the text.

    A model without attention knows only the previous byte, so its mean over the text is no smaller.
    """
    pairs = text[:-1].astype(np.int64) * 256 + text[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256)
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.log(counts / counts.sum(axis=1, keepdims=True))
