"""The choice of correctness cases covers every pair of values, under unique names."""

import itertools
import json

import case_list
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
