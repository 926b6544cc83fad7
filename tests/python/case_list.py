"""Reads the shared list of cases, and chooses the cases of the correctness tests."""

import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import platforms

FILE = Path(__file__).parents[1] / "cases.json"
LARGEST = 4000**2 * 160
"""The reference's work below which the pairwise choice does not look for cheaper cases."""
DRAWN = 5000
"""Choices that --exhaustive draws from the features' product; the whole product takes weeks."""
ABOUT = (
    *("causal", "window", "segments", "soft_cap", "slopes", "sinks", "dropout"),
    *("head_dim", "value_dim", "kv_len", "visible", "positions", "offset", "residual_dtype"),
)
"""Features that the name of a choice mentions."""
LONG = 720
"""Length of a sequence of several tiles."""
EXPONENTIAL = 128
"""The reference's work for a pair of query and key, besides head_dim."""


@dataclass(frozen=True)
class Case:
    """One attention problem over a mesh."""

    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str
    mesh: tuple[int, int, int]
    variants: tuple[tuple[str, bool], ...]
    """(backward, whether lse has a cotangent) for each run; the reference is the same for all."""

    @property
    def q_shape(self):
        return (self.batch, self.seq, self.heads, self.head_dim)

    @property
    def kv_shape(self):
        return (self.batch, self.seq, self.kv_heads, self.head_dim)


def correctness_cases(exhaustive=False):
    """Returns the named test cases, and a pairwise-covering choice of the values' product.

    ``exhaustive``: the whole product instead of the choice.
    """
    content = json.loads(FILE.read_text())
    named = [_named(entry) for entry in content["cases"] if "test" in entry["tags"]]
    values = content["values"]
    if not exhaustive:
        return named + [_case([choice]) for choice in pairwise(values)]
    inner = ("backward", "lse_cotangent")
    outer = {name: values[name] for name in values if name not in inner}
    variants = [
        dict(zip(inner, v, strict=True)) for v in itertools.product(*map(values.get, inner))
    ]
    products = (dict(zip(outer, v, strict=True)) for v in itertools.product(*outer.values()))
    return named + [_case([p | v for v in variants]) for p in products if _allowed(p)]


def feature_choices(exhaustive=False):
    """Returns a pairwise-covering choice of the features' product.

    ``exhaustive``: `DRAWN` random choices instead.
    """
    values = json.loads(FILE.read_text())["features"]
    if not exhaustive:
        return list(pairwise(values, lambda picked, values: 0))
    generator = random.Random(0)
    drawn = ({name: generator.choice(v) for name, v in values.items()} for _ in range(DRAWN))
    return list(filter(_allowed, drawn))


def features_alone():
    """Returns choices of a single feature each, as arguments of `features.Problem`."""
    return _features("alone")


def features_together():
    """Returns choices of several features over long sequences, as `features_alone` does."""
    long = {"batch": 1, "q_len": LONG, "kv_len": LONG, "heads": 2, "kv_heads": 1}
    return [long | choice for choice in _features("together")]


def feature_name(choice):
    """Returns the name of a choice of features."""
    words = []
    for name, x in choice.items():
        if name in ABOUT and not (name == "kv_len" and x == choice.get("q_len")):
            values = "/".join(map(str, x)) if isinstance(x, tuple) else x
            words.append(name if x is True else f"{name} {values}")
    return ", ".join(words)


def of(kind, name):
    """Returns a list of cases of ``decode`` or ``linear`` attention, with tuples for arrays."""

    def tuples(x):
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    return tuples(json.loads(FILE.read_text())[kind][name])


def _features(name):
    found = json.loads(FILE.read_text())[name]
    # The kernels of GPUs keep no out in float32.
    if platforms.current().rounds:
        found = [choice for choice in found if "residual_dtype" not in choice]
    pairs = ("mesh", "window")
    return [{n: tuple(x) if n in pairs else x for n, x in choice.items()} for choice in found]


def _allowed(picked):
    odd = picked.get("tokens_per_rank", 2) % 2
    return not (odd and picked.get("layout") == "zigzag")


def pairwise(values, cost=None, allowed=_allowed):
    """Yields a small set of choices in which every allowed pair of values occurs together.

    Each choice starts from a pair that no choice covers yet. Then it takes, factor by factor, the
    value that covers most new pairs; among equal values, the cheapest.
    """
    names, cost = list(values), cost or _cost
    pairs = [
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(values[a])), range(len(values[b])))
        if allowed({a: values[a][i], b: values[b][j]})
    ]
    # Expensive pairs come first, so that cheap pairs join few expensive choices.
    pairs.sort(key=lambda pair: -cost({n: values[n][i] for n, i in pair}, values))
    uncovered = dict.fromkeys(pairs)
    while uncovered:
        chosen = dict(next(iter(uncovered)))
        for name in names:
            if name not in chosen:
                chosen[name] = _best_value(name, chosen, values, uncovered, cost, allowed)
        for pair in _pairs_of(chosen, names):
            uncovered.pop(pair, None)
        yield {name: values[name][chosen[name]] for name in names}


def _best_value(name, chosen, values, uncovered, cost_of, allowed):
    names = list(values)

    def rank(index):
        candidate = chosen | {name: index}
        picked = {n: values[n][i] for n, i in candidate.items()}
        new = sum(pair in uncovered for pair in _pairs_of(candidate, names) if name in dict(pair))
        cost = cost_of(picked, values)
        return (not allowed(picked), max(cost, LARGEST), -new, cost, index)

    return min(range(len(values[name])), key=rank)


def _pairs_of(chosen, names):
    items = [(name, chosen[name]) for name in names if name in chosen]
    return itertools.combinations(items, 2)


def _cost(picked, values):
    """Returns the reference's work, with the smallest value of each factor not picked yet."""
    full = {name: picked.get(name, min(values[name], key=_size)) for name in values}
    data, context, tensor = full["mesh"]
    pairs = (context * full["tokens_per_rank"]) ** 2
    return data * tensor * full["group_size"] * pairs * (full["head_dim"] + EXPONENTIAL)


def _size(value):
    return math.prod(value) if isinstance(value, list) else 0 if isinstance(value, str) else value


def _case(choices):
    first = choices[0]
    data, context, tensor = first["mesh"]
    seq = context * first["tokens_per_rank"]
    few = seq <= 500
    kv_heads = tensor * (2 if few and first["group_size"] < 8 else 1)
    variants = tuple((choice["backward"], choice["lse_cotangent"]) for choice in choices)
    words = [
        "x".join(map(str, first["mesh"])),
        first["layout"],
        "causal" if first["causal"] else "full",
        f"n{first['tokens_per_rank']}",
        f"g{first['group_size']}",
        f"d{first['head_dim']}",
        first["dtype"],
    ]
    if len(variants) == 1:
        words += [variants[0][0], "dlse" if variants[0][1] else "nodlse"]
    return Case(
        name="-".join(words),
        batch=data * (2 if few else 1),
        seq=seq,
        heads=kv_heads * first["group_size"],
        kv_heads=kv_heads,
        head_dim=platforms.columns(first["head_dim"]),
        dtype=first["dtype"],
        causal=first["causal"],
        layout=first["layout"],
        mesh=tuple(first["mesh"]),
        variants=variants,
    )


def _named(entry):
    taken = ("batch", "heads", "kv_heads", "dtype", "causal", "layout")
    return Case(
        name=entry["name"],
        head_dim=platforms.columns(entry["head_dim"]),
        seq=entry.get("seq") or entry["tokens_per_rank"] * entry["mesh"][1],
        mesh=tuple(entry["mesh"]),
        variants=((entry["backward"], True),),
        **{name: entry[name] for name in taken},
    )
