"""``python -m burst_attention schedule`` prints tables, JSON, pictures and errors."""

import json
import re
import struct
import sys
from typing import get_args

import commands
import numpy as np
import pytest
from burst_attention._attention.options import Schedule

pytestmark = pytest.mark.needs("text")

PROBLEM = "--world 8 --seq 65536 --heads 32 --kv-heads 8 --layout zigzag --causal"
RANK = re.compile(
    r"^ *(\d+(?:-\d+)?) +(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)%.*", re.M
)
"""Finds a table's lines: rank, steps, tiles, milliseconds computed, exposed and late, idle."""


@pytest.fixture
def schedule(monkeypatch, capsys):
    return commands.caller("schedule", monkeypatch, capsys)


def test_table_has_every_rank_of_both_passes_and_what_it_rests_on(schedule):
    output = schedule(f"{PROBLEM} --backward queries --machine h200-nvlink")
    assert "65,536 tokens over 8 ranks, 32 query and 8 key/value heads, head_dim 128" in output
    assert "rounds of this library's blocks" in output
    assert "as measured on an H100" in output
    assert "an assumption" in output
    assert "between:" not in output
    forward, backward = output.split("\n\n")[1:3]
    assert forward.startswith("forward, keys travel")
    assert backward.startswith("backward, queries travel")
    found = json.loads(schedule(f"{PROBLEM} --json --machine h200-nvlink"))
    for table, products in ((forward, 4), (backward, 10)):
        rate = found["machine"]["flops"][table.split(",")[0]]
        rows = RANK.findall(table)
        assert [int(row[0]) for row in rows] == list(range(8))
        ideal = products / 2 * 65536 * 65537 / 8 * 32 * 128 / rate * 1e3
        # Against one launch, states come in and go out, and rounds of blocks are not full.
        for row in rows:
            assert ideal < float(row[3]) < 1.15 * ideal
    assert re.search(r"^forward \+ backward: [\d.]+ ms, \d+ TFLOP/s a rank", output, re.M)


def test_machines_with_cudnn_say_where_its_speed_was_measured(schedule):
    own, cudnn = (
        json.loads(schedule(f"{PROBLEM} --json --backward keys --machine {machine}"))
        for machine in ("h200-nvlink", "h200-nvlink-cudnn")
    )
    assert "cuDNN 9.19's blocks" in cudnn["machine"]["sources"]["compute"]
    for slow, fast in zip(own["passes"], cudnn["passes"], strict=True):
        rates = (cudnn["machine"]["flops"][fast["pass"]], own["machine"]["flops"][slow["pass"]])
        # In a ring cuDNN gains about as much as in one launch: sums take what states would take.
        assert slow["seconds"] / fast["seconds"] == pytest.approx(rates[0] / rates[1], rel=0.1)
        assert rates[0] > 1.1 * rates[1]


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("gb200-nvlink-cudnn", "cuDNN 9.27 on a GB200 that NVIDIA published"),
        ("gb300-nvlink-cudnn", "cuDNN 9.25 on a GB300 that NVIDIA published"),
    ],
)
def test_machines_of_blackwells_have_published_rates(schedule, machine, words):
    found, hopper = (
        json.loads(schedule(f"{PROBLEM} --json --backward keys --machine {name}"))
        for name in (machine, "h200-nvlink-cudnn")
    )
    sources = found["machine"]["sources"]
    assert words in sources["compute"]
    assert found["machine"]["ranks_per_node"] == 72
    for fast, slow in zip(found["passes"], hopper["passes"], strict=True):
        assert fast["seconds"] < slow["seconds"] / 2


def test_table_joins_ranks_of_a_large_world_that_do_the_same(schedule):
    output = schedule("--world 64 --seq 4194304 --heads 8 --backward keys")
    ranks = [row[0] for row in RANK.findall(output.split("\n\n")[1])]
    # The last rank of each node sends to another node; all other ranks do the same.
    assert ranks[:3] == ["0-6", "7", "8-14"]
    assert len(ranks) == 16
    # Forward, keys travel; backward, keys and their sums, which have one hop home.
    assert "MB between them in up to 189 hops of a rank" in output.splitlines()[-1]


def test_json_adds_up(schedule):
    found = json.loads(schedule(f"{PROBLEM} --json --ranks-per-node 4 --link-gbps 3600 400"))
    assert found["machine"]["between"]["bandwidth"] == 50e9
    for each in found["passes"]:
        assert "timeline" not in each
        ranks = each["ranks"]
        assert sum(rank["flops"] for rank in ranks) == each["flops"]
        assert sum(rank["sent"]["between"] for rank in ranks) == each["sent"]["between"] > 0
        for rank in ranks:
            assert rank["compute"] + rank["idle"] == pytest.approx(each["seconds"])
    forward, backward = found["passes"]
    # Every chunk takes at most 7 hops, and the last hops carry half of it.
    assert forward["sent"]["within"] < 65536 * 7 * 8 * 256 * 2
    assert (forward["travels"], backward["travels"]) == ("keys", "keys")


def test_json_with_events(schedule):
    found = json.loads(schedule(f"{PROBLEM} --json --timeline --machine h200-nvlink"))
    for each in found["passes"]:
        events = each["timeline"]
        assert max(event["end"] for event in events) == each["seconds"]
        for rank, told in enumerate(each["ranks"]):
            mine = [event for event in events if event["rank"] == rank]
            spans = [x["end"] - x["start"] for x in mine if x["what"] == "compute"]
            assert sum(spans) == pytest.approx(told["compute"])
            sent = sum(x["bytes"] for x in mine if x["what"].startswith("send"))
            assert sent == told["sent"]["within"]


def test_numbers_of_the_machine_can_be_given(schedule):
    given = "--tflops 100 --link-gbps 0.8 --latency-us 7 --launch-us 0"
    output = schedule(f"--world 2 --seq 64 --heads 1 --head-dim 8 --backward keys {given}")
    assert "compute: 100 TFLOP/s forward, 100 backward, as given" in output
    assert "launch: 0 us each, as given" in output
    # 32 rows of 32 bytes take 7 us and then go at 0.1 GB/s; tiles take almost no time.
    exposed = {row[4] for row in RANK.findall(output.split("\n\n")[1])}
    assert exposed == {f"{7e-3 + 1e3 * 32 * 32 / 1e8:.3f}"}


def test_ranks_of_a_node_may_share_their_link(schedule):
    """Sums on their way home, two ranks away, leave both ranks of a node at the same time."""
    seconds = []
    for shared in ("", "--shared-link"):
        arguments = f"--world 4 --seq 65536 --heads 8 --ranks-per-node 2 --json {shared}"
        found = json.loads(schedule(f"{arguments} --backward keys --window 20000 20000"))
        assert found["machine"]["shared"] == bool(shared)
        seconds.append(found["passes"][1]["seconds"])
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("name", ["ring", "double_ring", "all_gather", "ulysses", "hybrid"])
def test_large_worlds_are_estimated_with_the_rank_that_computes_longest(schedule, name):
    arguments = f"--world 4096 --seq 4194304 --heads 4096 --causal --schedule {name}"
    output = schedule(arguments)
    assert output.count("busiest") == 2
    assert re.search(r"^forward \+ backward: ≈ [\d.]+ ms, \d+ TFLOP/s a rank", output, re.M)
    found = json.loads(schedule(f"{arguments} --json"))
    for each, products in zip(found["passes"], (4, 10), strict=True):
        assert (each["estimated"], each["world_size"], len(each["ranks"])) == (True, 4096, 1)
        assert each["flops"] == pytest.approx(products / 2 * 4194304**2 * 4096 * 128, rel=0.01)
        assert 0 <= each["idle_share"] < 1
        assert each["ranks"][0]["compute"] <= each["seconds"]
    assert "a timeline has at most 1024 ranks, got 4096" in schedule(
        f"{arguments} --json --timeline", code=2
    )


@pytest.mark.parametrize("name", ["ulysses", "hybrid"])
def test_rows_are_exchanged_for_heads(schedule, tmp_path, name):
    pytest.importorskip("matplotlib")
    arguments = "--world 8 --seq 65536 --heads 32 --kv-heads 8 --causal --ranks-per-node 4"
    path = tmp_path / "schedule.png"
    found = json.loads(schedule(f"{arguments} --schedule {name} --json --plot {path}"))
    travels = {"ulysses": "heads", "hybrid": "keys"}[name]
    assert [each["travels"] for each in found["passes"]] == [travels, travels]
    forward = found["passes"][0]
    # q, k and v go out, o and lse come back; each rank sends a part to every rank of its group.
    exchanged = 65536 * (128 * 2 * (32 + 2 * 8) + 32 * (2 * 128 + 4))
    sent = forward["sent"]
    if name == "ulysses":
        assert sent == {"within": exchanged * 3 / 8, "between": exchanged * 4 / 8}
        assert len({rank["flops"] for rank in forward["ranks"]}) == 1
    else:
        assert sent["within"] == exchanged * 3 / 4
        assert sent["between"] == 65536 / 2 * 8 * 256 * 2
    assert all(rank["exposed"] > 0 for rank in forward["ranks"])
    assert size(path)[0] > 1000
    text = schedule(f"{arguments} --schedule {name}")
    assert f"schedule {name} on" in text
    assert f"forward, {travels} travel" in text


def test_heads_that_cannot_be_divided_say_so(schedule):
    error = schedule(f"{PROBLEM} --schedule ulysses --heads 12 --kv-heads 4", code=2)
    assert "query heads must be a multiple of the 8 ranks that divide them, got 12" in error


def test_windows_and_other_masks(schedule):
    flops = {}
    for mask in ("", "--causal", "--window 127 0", "--causal --window 127 5", "--window -1 0"):
        found = json.loads(schedule(f"--world 4 --seq 4096 --heads 1 --json {mask}"))
        flops[mask] = found["passes"][0]["flops"] / 512
    assert flops[""] == 4096**2
    assert flops["--causal"] == flops["--window -1 0"] == 4096 * 4097 / 2
    assert flops["--window 127 0"] == flops["--causal --window 127 5"] == 4096 * 128 - 127 * 64


def size(path):
    """Returns the width and height of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(("world", "least"), [(8, 500), (32, 1200)])
def test_plot_is_a_picture_of_sane_size(schedule, tmp_path, world, least):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = tmp_path / "schedule.png"
    arguments = f"--seq 65536 --heads 32 --layout contiguous --causal --plot {path}"
    assert "forward, keys travel" in schedule(f"--world {world} {arguments}")
    width, height = size(path)
    assert 1000 < width < 2000
    assert least < height < 2500
    picture = pyplot.imread(path)[..., :3]
    # The paper is white, and the bars of compute are blue.
    assert 0.2 < np.mean(picture.min(-1) > 0.99) < 0.9
    blue = np.abs(picture - np.array([31, 119, 180]) / 255).max(-1) < 0.01
    assert np.mean(blue) > 0.005


def test_plot_without_matplotlib_says_what_to_install(schedule, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = schedule(f"{PROBLEM} --plot {tmp_path}/x.png", code=2)
    assert "pip install matplotlib" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layout diagonal", 'contiguous, zigzag or striped, got "diagonal"'),
        ("--seq 65544", "sequence length must be a multiple of 16 (two chunks for each rank)"),
        ("--world 7 --layout striped", "must be a multiple of 7 (the world size), got 65536"),
        ("--machine abacus", "or a100-nvlink or a100-200g, got abacus"),
        ("--machine h200-nvlink --world 16", "h200-nvlink has 8 ranks, got 16: take h200-400g"),
        ("--tflops 0", "forward FLOP/s must be above 0, got 0"),
        ("--tflops 1 2 3", "tflops takes one or two numbers, got 3"),
        ("--latency-us -1", "latency within a node must be at least 0"),
        ("--kv-heads 5", "query heads must be a multiple of key/value heads (5), got 32"),
        ("--backward both", "both"),
        ("--schedule maypole", 'got "maypole"; or ulysses or hybrid'),
        ("--dtype int8", "bfloat16"),
        ("--world 4104 --seq 131328", "world_size must be at most 4096 (further devices"),
        ("--world 0", "expected a whole number of at least 1, got '0'"),
        ("--plot schedule.pdf", "expected a file *.png, got schedule.pdf"),
        ("--plot missing/x.png", "there is no folder missing"),
    ],
)
def test_wrong_arguments_end_with_the_reason(schedule, arguments, message):
    error = schedule(f"{PROBLEM} {arguments}", code=2)
    assert "python -m burst_attention schedule: error: " in error
    assert message in error.splitlines()[-1]


def test_the_types_name_every_schedule_of_the_library(schedule):
    error = schedule(f"{PROBLEM} --schedule maypole", code=2)
    listed = error.split("schedule must be ")[1].split(", got")[0]
    families = set(re.split(", | or ", listed))
    # Two axes make a double ring of the ring.
    named = families - {"double_ring"} | {"auto", "ulysses", "hybrid"}
    assert named == set(get_args(Schedule))
