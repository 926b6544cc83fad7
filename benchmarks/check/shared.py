"""The cases of tests/cases.json as problems in 16-bit types, and a systematic list."""

from dataclasses import replace
from typing import Any

import case_list  # type: ignore[import-not-found]

from .problem import LAYOUTS, SHORT, Layout, Problem, Schedule

LONGER = 33
"""The factor on lengths and windows of the cases `alone`: sequences then have several tiles and end
within one."""
RING = ": ring of "
"""Separates the features in a problem's name from its ring."""
PLACES: tuple[dict[str, Any], ...] = (
    {"world_size": 8, "layout": "zigzag", "backward": "keys"},
    {"world_size": 4, "layout": "striped", "backward": "queries", "dtype": "float16"},
    {"world_size": 2, "layout": "contiguous", "backward": "queries"},
    {"world_size": 4, "layout": "contiguous", "backward": "keys", "head_dim": 64},
)
"""The rings of the cases `alone`, in turn."""
FAMILIES: tuple[tuple[Schedule, int, int, Layout, bool], ...] = (
    ("double_ring", 2, 4, "zigzag", True),
    ("double_ring", 4, 8, "contiguous", False),
    ("balanced", 0, 5, "contiguous", True),
    ("balanced", 0, 8, "contiguous", True),
    ("all_gather", 0, 4, "striped", True),
    ("all_gather", 0, 8, "zigzag", False),
)
"""Schedule, ranks of an inner ring, ranks, layout, and whether the mask is causal."""


def correctness() -> list[Problem]:
    """Returns the choice of the correctness tests, with bfloat16 in the place of float32.

    Mesh axes besides that of the ring only divide batch and heads. A ring of the same length takes
    the whole batch and all heads instead.
    """
    return [_problem(case) for case in case_list.correctness_cases()]


def _problem(case: Any) -> Problem:
    backward, with_dlse = case.variants[0]
    cast = case.dtype == "float32"
    return Problem(
        name=case.name + ("-as-bfloat16" if cast else ""),
        batch=case.batch,
        seq=case.seq,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype="bfloat16" if cast else case.dtype,
        is_causal=case.causal,
        layout=case.layout,
        world_size=case.mesh[1],
        backward=backward,
        with_dlse=with_dlse,
    )


def features(longer: int = LONGER) -> list[Problem]:
    """Returns the cases `alone`, longer than in the tests, and the cases `together`."""
    alone = [
        _feature(choice, PLACES[index % len(PLACES)], longer)
        for index, choice in enumerate(case_list.features_alone())
    ]
    return alone + together()


def together() -> list[Problem]:
    """Returns combinations of features, over sequences of several tiles."""
    return [_feature(choice, {}) for choice in case_list.features_together()]


def _feature(choice: dict[str, Any], place: dict[str, Any], longer: int = 1) -> Problem:
    """Returns a choice as a problem. Without a head_dim, value_dim scales with head_dim / 32."""
    given: dict[str, Any] = {
        "head_dim": 128,
        "layout": "contiguous",
        "mesh": (1, 4, 1),
        "q_len": 48,
    }
    given |= place | choice
    width, window = given["head_dim"], given.get("window")
    value_dim = given.get("value_dim", 0)
    if "head_dim" not in choice:
        value_dim = min(256, value_dim * width // 32)
    taken = ("layout", "backward", "soft_cap", "segments", "slopes", "sinks", "dropout")
    size = given.get("world_size", given["mesh"][1])
    return Problem(
        name=f"{case_list.feature_name(choice)}{RING}{size}, {given['layout']}",
        batch=given.get("batch", 2),
        seq=longer * given["q_len"],
        heads=given.get("heads", 4),
        kv_heads=given.get("kv_heads", 2),
        head_dim=width,
        dtype="float16" if given.get("dtype") == "float16" else "bfloat16",
        is_causal=given.get("causal", False),
        world_size=size,
        kv_seq=longer * given.get("kv_len", given["q_len"]),
        value_dim=value_dim,
        window=window and (longer * window[0], longer * window[1]),
        **{name: given[name] for name in taken if name in given},
    )


def systematic() -> list[Problem]:
    """Returns rings of 2, 4 and 8: every layout, both backward modes, both masks.

    The problems have grouped heads, two batch entries, lengths that fit no tile, and both types and
    two widths in turn. Lengths are odd, except for zigzag, whose shards are two chunks.
    """
    found: list[Problem] = []
    for world_size in (2, 4, 8):
        for layout in LAYOUTS:
            for backward in ("keys", "queries"):
                for is_causal in (True, False):
                    head_dim = 128 if len(found) % 3 else 64
                    dtype = "float16" if len(found) % 4 == 3 else "bfloat16"
                    local = 198 if layout == "zigzag" else 197
                    mask = "causal" if is_causal else "full"
                    found.append(
                        Problem(
                            name=f"ring of {world_size}, {layout} {mask}, {backward} travel, "
                            f"D{head_dim} {SHORT[dtype]}",
                            batch=2,
                            seq=local * world_size,
                            heads=8,
                            kv_heads=2,
                            head_dim=head_dim,
                            dtype=dtype,
                            is_causal=is_causal,
                            layout=layout,
                            world_size=world_size,
                            backward=backward,
                        )
                    )
    return found


def families() -> list[Problem]:
    """Returns the other schedules than the ring, with both sides travelling."""
    found: list[Problem] = []
    for schedule, inner, world_size, layout, is_causal in FAMILIES:
        for backward in ("keys", "queries"):
            mask = "causal" if is_causal else "full"
            found.append(
                Problem(
                    name=f"{schedule} of {world_size}, {layout} {mask}, {backward} travel",
                    batch=2,
                    seq=198 * world_size,
                    heads=8,
                    kv_heads=2,
                    head_dim=64 if len(found) % 4 else 128,
                    dtype="float16" if len(found) % 3 == 2 else "bfloat16",
                    is_causal=is_causal,
                    layout=layout,
                    world_size=world_size,
                    backward=backward,
                    schedule=schedule,
                    inner=inner,
                )
            )
    return found


def in_any_order() -> list[Problem]:
    """Returns rings of 2 and 4 whose backward pass adds in any order, and whose keys travel.

    They cover every layout, both masks, and documents.
    """
    rings = [p for p in systematic() if p.backward == "keys" and p.world_size < 8]
    documents = [
        replace(p, segments="documents", name=f"{p.name}, segments")
        for p in rings
        if (p.head_dim, p.dtype) == (128, "bfloat16")
    ]
    return [
        replace(problem, backward_order="any", name=f"{problem.name}, any order")
        for problem in rings + documents
    ]
