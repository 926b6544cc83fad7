"""Draws the pictures of the documents: ``python docs/pictures.py FOLDER``.

A map of causal work for each layout, the masks of `burst_attention.masks`, and what the pages' own
commands with ``--plot`` draw.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import burst_attention as ba
import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

RANKS = 8
TOKENS = 64 * RANKS
LAYOUTS = ("contiguous", "zigzag", "striped")


def causal_shares(layout: str) -> np.ndarray:
    """Returns the share of visible pairs for each rank of queries and each rank of keys."""
    shards = [ba.layout_positions(TOKENS, RANKS, layout, rank) for rank in range(RANKS)]
    return np.array([[np.mean(q[:, None] >= k) for k in shards] for q in shards])


def draw_layouts(path: Path) -> None:
    """Draws how much work each pair of ranks has under a causal mask, one map for each layout."""
    figure, axes = pyplot.subplots(1, len(LAYOUTS), figsize=(13, 5), layout="constrained")
    for axis, layout in zip(axes, LAYOUTS, strict=True):
        shares = causal_shares(layout)
        image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for (row, column), share in np.ndenumerate(shares):
            colour = "white" if share > 0.7 else "black"
            axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=colour)
        work = shares.sum(axis=1)
        axis.set_title(f"{layout}\nbusiest rank / mean: {work.max() / work.mean():.2f}")
        axis.set(xlabel="rank that holds the keys", xticks=range(RANKS), yticks=range(RANKS))
    axes[0].set_ylabel("rank that holds the queries")
    figure.suptitle(f"Causal mask, {TOKENS} tokens over {RANKS} ranks: visible pairs, in percent")
    figure.colorbar(image, ax=axes, pad=0.01, format="{x:.0%}", label="visible pairs")
    figure.savefig(path, dpi=110)


def draw_masks(path: Path) -> None:
    """Draws one mask of each builder, with the positions for rotary embeddings of its keys."""
    masks = {
        "prefix_lm([5, 8], [14, 18])": ba.masks.prefix_lm([5, 8], [14, 18]),
        "prefix_tree, 6 nodes": ba.masks.prefix_tree([-1, 0, 1, 1, 0, 4], [8, 5, 4, 4, 6, 5]),
        "chunked(32, 8)": ba.masks.chunked(32, 8),
        "spans(32, [(4, 12), (18, 26)])": ba.masks.spans(32, [(4, 12), (18, 26)]),
        "block_causal(32, 4)": ba.masks.block_causal(32, 4),
        "block_diffusion(16, 4)": ba.masks.block_diffusion(16, 4),
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 8), layout="constrained")
    for axis, (title, mask) in zip(axes.flat, masks.items(), strict=True):
        seen = ba.masks.dense(**mask.arguments)[0]
        shown = np.where(seen, mask.rope_positions[0], np.nan)
        image = axis.imshow(shown, cmap="viridis_r", vmin=0, vmax=31)
        axis.set(title=title, xlabel="key", ylabel="query")
    figure.colorbar(image, ax=axes, pad=0.01, label="position of the key for rotary embeddings")
    figure.savefig(path, dpi=110)


def plot_commands(page: Path) -> list[list[str]]:
    """Returns the shell commands of a page that draw a picture, as words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", "").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [words for words in commands if "--plot" in words]


def main() -> None:
    """Draws every picture into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    draw_layouts(folder / "layouts.png")
    draw_masks(folder / "masks.png")
    for page in sorted(Path(__file__).parent.glob("*.md")):
        for _, *arguments in plot_commands(page):
            subprocess.run(
                [sys.executable, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL
            )


if __name__ == "__main__":
    main()
