"""The choice of correctness cases covers every pair of values, under unique names."""

import itertools
import json
from typing import NamedTuple

import case_list
import long
import pytest

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


class Item(NamedTuple):
    """A test as pytest names it."""

    nodeid: str


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_sample_has_some_cases_of_each_test(step):
    counts = {"alone": 0, "pair": 2, "many": 21}
    names = [f"{name}[{case}]" for name, count in counts.items() for case in range(count)]
    items = [Item(name) for name in ["alone", *names]]
    chosen = long.sample(items, step)
    assert chosen == [item for item in items if item in chosen], "the order is kept"
    assert chosen == long.sample(items, step), "the choice is the same each time"
    found = [item.nodeid.split("[")[0] for item in chosen]
    expected = {name: max(1, -(-count // step)) for name, count in counts.items()}
    assert {name: found.count(name) for name in counts} == expected
