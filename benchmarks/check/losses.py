"""Compares the losses of a short run on one device, with our attention and with jax.nn's."""

from typing import Any

from . import training
from .parts import compare

STEPS = 30
TOLERANCE = 0.01
"""The largest relative difference between two losses of the same step."""
NAME = "transformer, bfloat16"


class Losses:
    """The only item."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        return [NAME]

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the losses of both runs and their largest difference."""
        steps = 8 if rehearse else STEPS
        devices = {"ring": 2 if rehearse else 1, "plain": 1}
        runs = {
            which: training.train(steps, which, count, rehearse)["losses"]
            for which, count in devices.items()
        }
        apart, wrong = compare(runs["ring"], runs["plain"], TOLERANCE)
        first, last = runs["ring"][0], runs["ring"][-1]
        shown = f"{steps} steps, loss {first:.3f} to {last:.3f}, at most {apart:.2%} apart"
        return {"name": name, "shown": shown, "losses": runs, "wrong": wrong}
