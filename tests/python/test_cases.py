"""The choice of correctness cases covers every pair of values, under unique names."""

import argparse
import itertools
import json
import os
import subprocess
import sys

import case_list
import platforms
import pytest
from long import Part

pytestmark = pytest.mark.needs("text")


@pytest.mark.parametrize("name", ["values", "features"])
def test_every_allowed_pair_of_values_occurs_in_the_choice(name):
    values = json.loads(case_list.FILE.read_text())[name]
    chosen = case_list.feature_choices() if name == "features" else case_list.pairwise(values)
    chosen = list(chosen)
    for a, b in itertools.combinations(values, 2):
        found = {(str(choice[a]), str(choice[b])) for choice in chosen}
        for x, y in itertools.product(values[a], values[b]):
            picked = {a: x, b: y}
            if picked.get("layout") == "zigzag" and picked.get("tokens_per_rank", 2) % 2:
                continue  # a zigzag shard is two chunks
            assert (str(x), str(y)) in found


def test_names_are_unique():
    names = [case.name for case in case_list.correctness_cases()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_have_every_case_once_and_are_about_equal(count):
    parts = [Part(number, count) for number in range(1, count + 1)]
    sizes = dict.fromkeys(parts, 0)
    for case in range(1000):
        (part,) = (each for each in parts if each.has(f"test_x.py::test_y[{case}]"))
        sizes[part] += 1
    assert min(sizes.values()) > 900 / count


@pytest.mark.parametrize(
    ("name", "half", "quarter"), [("test_a", 1, 3), ("test_b[1]", 2, 2), ("test_b[x-y]", 1, 1)]
)
def test_a_name_belongs_to_one_part_for_ever(name, half, quarter):
    """The part depends neither on other cases nor on the process."""
    assert [k for k in (1, 2) if Part(k, 2).has(name)] == [half]
    assert [k for k in (1, 2, 3, 4) if Part(k, 4).has(name)] == [quarter]


def test_a_part_is_read_from_text():
    assert Part.read("3/4") == (3, 4)
    for text in ("2", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "half"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected K/N with 1 ≤ K ≤ N"):
            Part.read(text)


@pytest.mark.long
def test_names_are_the_same_in_each_process():
    """They hold neither addresses nor the order of a set, which change from process to process."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:xdist"]
    if "shipped" in platforms.current().lacks:
        command.append("--checked")
    printed = [
        subprocess.run(
            [*command, str(platforms.ROOT / "tests" / "python")],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=platforms.ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    first, second = ([line for line in lines if "::" in line] for lines in printed)
    assert len(first) > 1000
    assert first == second
    assert len(first) == len(set(first))
