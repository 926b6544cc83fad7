"""The table of claims: its models against calculations by hand, its verdicts, and its page."""

import json
import math
from dataclasses import replace

import claims as command
import pytest
from papers import decode, figures, step, table
from papers.claims import CLAIMS, PREFIXES, RELAY_MEASURED

pytestmark = pytest.mark.needs("text")

OUT = {
    *("burst-32k-pcie", "burst-128k-megatron", "distflash-rsa-length", "distflash-ring"),
    *("distflash-megatron-length", "distflash-megatron-ports", "distflash-ulysses-ports"),
    *("lasp-38-ulysses", "lasp-length", "lasp-8x", "lean-512k"),
    *(f"relay-{requests}-{prefix}" for requests in RELAY_MEASURED for prefix in PREFIXES),
}
"""Claims that come out. A change of a model that changes a verdict belongs into the page's text."""

GPU = decode.Gpu("by hand", multiprocessors=10, bandwidth=1e9, peak=1e12, memory=1e9, dollars=2.0)


def test_page_and_results_are_what_the_models_give():
    for path, text in command.written().items():
        assert path.read_text() == text, f"{path.name}: make claims"


def test_every_claim_has_a_verdict_and_every_other_verdict_a_reason():
    found = json.loads(command.RESULTS.read_text())
    assert [each["key"] for each in found] == [claim.key for claim in CLAIMS]
    assert {each["key"] for each in found if each["verdict"] == table.YES} == OUT
    assert {each["key"] for each in found if each["verdict"] == table.PARTLY} == {"lamina-cost"}
    for each in found:
        assert (each["reason"] is None) == (each["verdict"] == table.YES), each["key"]


def test_rows_added_later_keep_the_tolerance_of_the_row_they_repeat():
    rows = {claim.key: claim for claim in CLAIMS}
    later = [claim for claim in CLAIMS if claim.later]
    assert len(later) == 3
    for claim in later:
        first = rows[claim.key.removesuffix("-ports")]
        assert replace(claim, key=first.key, machine=first.machine, later=False) == first


@pytest.mark.parametrize(
    ("claimed", "found", "expected"),
    [
        ((2.0, 2.0), [2.49], table.YES),
        ((2.0, 2.0), [1.61], table.YES),
        ((2.0, 2.0), [2.51], table.NO),
        ((2.0, 2.0), [1.59], table.NO),
        ((2.0, 2.0), [2.0, 2.6], table.NO),
        ((2.0, 8.0), [2.0, 8.0], table.YES),
        ((2.0, 8.0), [2.0, 3.0], table.PARTLY),
        ((2.0, 8.0), [7.0, 8.0], table.PARTLY),
        ((2.0, math.inf), [90.0], table.YES),
        ((2.0, math.inf), [1.5], table.NO),
    ],
)
def test_verdicts(claimed, found, expected):
    claim = replace(CLAIMS[0], low=claimed[0], high=claimed[1], tolerance=1.25)
    assert table.verdict(claim, found) == expected


def test_check_fails_for_a_stale_page(monkeypatch, tmp_path, capsys):
    page = tmp_path / "claims.md"
    page.write_text(f"before\n{command.BEGIN}old\n{command.END}after\n")
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["claims.py", "--check"])
    assert command.main() == 1
    assert "claims.md is not what the models give: make claims" in capsys.readouterr().err
    assert "old" in page.read_text()


def test_blocks_take_turns():
    assert decode.makespan([], 4) == 0
    assert decode.makespan([3] * 9, 4) == 9
    assert decode.makespan([5, 1, 1, 1, 1, 1], 2) == 5
    assert decode.makespan([1, 1, 1, 1, 1, 5], 2) == 7


def test_waves_by_hand():
    """A tile has 4·2·8·2 = 128 bytes; a tenth of 1 GB/s reads it in 1.28 µs."""
    cache = decode.Cache((64, 64, 64), heads=4, head_dim=8, tile=4)
    tile = 1.28e-6
    assert cache.tile_seconds(GPU) == pytest.approx(tile)
    # 12 heads of 16 tiles on 10 multiprocessors: two waves, or runs of 20 tiles.
    assert decode.one_block(cache, GPU) == pytest.approx(decode.LAUNCH + 32 * tile)
    assert decode.equal_runs(cache, GPU) == pytest.approx(decode.LAUNCH + 20 * tile)
    # They fill 80% of the multiprocessors, so they are not split.
    assert decode.fixed_splits(cache, GPU) == decode.one_block(cache, GPU)
    # Seven heads do not: in four parts each they nearly fill three waves.
    assert [decode.split_count(heads, 16, 10) for heads in (8, 7)] == [1, 4]
    # Three heads in three parts of 6, 6 and 4 tiles: nine blocks, one wave, and a second kernel.
    few = decode.Cache((64,), heads=3, head_dim=8, tile=4)
    assert decode.split_count(3, 16, 10) == 3
    assert decode.fixed_splits(few, GPU) == pytest.approx(2 * decode.LAUNCH + 6 * tile)
    assert decode.equal_runs(few, GPU) == pytest.approx(decode.LAUNCH + 5 * tile)


def test_equal_runs_are_never_slower():
    for lengths in [(1,), (7, 300), (5000, 1, 1), (260,) * 9]:
        for heads in (1, 3, 8, 40):
            cache = decode.Cache(lengths, heads, 64)
            least = decode.equal_runs(cache, decode.A100)
            assert least <= decode.fixed_splits(cache, decode.A100)
            assert least <= decode.one_block(cache, decode.A100)


def test_a_long_request_among_short_ones_leaves_fixed_splits_empty():
    cache = decode.Cache((256 * 1024, *[2048] * 31), heads=8, head_dim=128)
    ratio = decode.fixed_splits(cache, decode.H200) / decode.equal_runs(cache, decode.H200)
    assert ratio > 1.5


def test_a_shared_prefix_is_read_once():
    apart, once = decode.prefix(GPU, 8, 1000, 10, heads=2, head_dim=16)
    row = 2 * 2 * 16 * 2 / 1e9
    assert apart == pytest.approx(decode.LAUNCH + 8 * 1010 * row)
    assert once == pytest.approx(3 * decode.LAUNCH + (1000 + 8 * 10) * row)
    # With enough requests the products take longer than reading.
    slow = replace(GPU, peak=1e9)
    assert decode.prefix(slow, 8, 1000, 0, 2, 16)[1] == pytest.approx(
        3 * decode.LAUNCH + 4 * 8 * 1000 * 2 * 16 / 1e9
    )


def test_more_ranks_than_key_heads_read_the_same_keys():
    times = [decode.sharded_cache(GPU, (0.0, math.inf), p, 4, 1000, (8, 2)) for p in (1, 2, 4)]
    row = 4 * 1000 * 2 * 128 * 2 / 1e9
    for ranks, (by_heads, by_cache) in zip((1, 2, 4), times, strict=True):
        assert by_heads == pytest.approx(decode.LAUNCH + max(2 / ranks, 1) * row)
        assert by_cache == pytest.approx(2 * decode.LAUNCH + 2 / ranks * row)
    # Three quarters of 4·8 float32 results of 129 columns leave, then 16-bit results of 128.
    slow = decode.sharded_cache(GPU, (0.5, 1e6), 4, 4, 1000, (8, 2))[1]
    assert slow - times[2][1] == pytest.approx(1.0 + 24 * (4 * 129 + 2 * 128) / 1e6)


MODEL = step.Model(layers=3, heads=4, head_dim=8, ffn=64, vocabulary=100)


def test_a_step_has_attention_and_linear_layers():
    machine = figures.PAPERS.node
    forward, backward = step.passes(MODEL, 128, 4, step.ZIGZAG, machine)
    assert MODEL.layer_parameters == 4 * 32**2 + 3 * 32 * 64
    linear = 2 * MODEL.layer_parameters * 32 / (0.7 * 312e12)
    again = 3 * (2 * forward["seconds"] + backward["seconds"] + 4 * linear)
    assert step.seconds(MODEL, 128, 4, step.ZIGZAG, machine) == pytest.approx(again)
    kept = replace(step.ZIGZAG, keeps_attention=True)
    saved = again - step.seconds(MODEL, 128, 4, kept, machine)
    assert saved == pytest.approx(3 * forward["seconds"])
    # The gated unit of a layer exchanges as much as its attention.
    forward, backward = step.passes(MODEL, 128, 4, step.MEGATRON, machine)
    waits = 2 * forward["exposed"] + backward["exposed"]
    compute = 2 * forward["seconds"] + backward["seconds"]
    expected = 3 * (compute + waits + 4 * linear)
    assert step.seconds(MODEL, 128, 4, step.MEGATRON, machine) == pytest.approx(expected)
    # Two exchanges in each pass, of attention and of the unit: 3 chunks of 32·32·2 bytes a rank.
    assert step.sent(MODEL, 128, 4, step.MEGATRON, machine) == 2 * 2 * 2 * 4 * 3 * 32 * 32 * 2


def test_one_gpu_takes_the_same_step_with_every_exchange():
    machine = figures.PAPERS.node
    times = [
        step.seconds(MODEL, 128, 1, method, machine)
        for method in (step.CONTIGUOUS, step.MEGATRON, step.ULYSSES)
    ]
    assert times == pytest.approx([times[0]] * 3)
    linear = [step.linear_seconds(MODEL, 128, 1, x, machine) for x in ("lasp", "megatron_tp")]
    assert linear[0] == pytest.approx(linear[1])


def test_heads_are_padded_to_a_multiple_of_the_gpus():
    wide = replace(MODEL, heads=8)
    found = [step.passes(x, 128, 8, step.ULYSSES, figures.PAPERS.node) for x in (MODEL, wide)]
    assert found[0] == found[1]


def test_states_of_linear_attention_go_from_gpu_to_gpu():
    """Fifteen hops of 4·4·8·8 bytes, one of them between the two nodes, in each of three passes."""
    machine = figures.PAPERS.nodes
    alone = step.linear_seconds(MODEL, 16, 1, "lasp", machine)
    within, between = 10e-6 + 1024 / 300e9, 20e-6 + 1024 / 25e9
    chain = 15 * 5e-6 + 14 * within + between
    found = step.linear_seconds(MODEL, 256, 16, "lasp", machine)
    assert found == pytest.approx(alone + 3 * 3 * chain)


def test_memory_by_hand():
    states = 16 * (3 * MODEL.layer_parameters + 2 * 100 * 32) / 8
    inputs = 3 * 2 * 16 * 32
    layer, loss = 2 * 16 * (8 * 32 + 6 * 64), 8 * 16 * 100
    assert layer > loss
    assert step.memory(MODEL, 64, 4, 8) == states + inputs + layer
    assert step.memory(MODEL, 64, 4, 8, scores=7, kept=2) == states + 2 * inputs + layer + 7
    wide = replace(MODEL, vocabulary=10_000)
    assert step.memory(wide, 64, 4, 8) == pytest.approx(
        16 * wide.parameters / 8 + inputs + 8 * 16 * 10_000
    )


def test_the_longest_sequence_is_a_power_of_two_that_fits():
    machine = replace(figures.PAPERS.node, memory=1e6)
    assert step.longest(lambda tokens: 100.0 * tokens, machine, 8) == 8192
    with pytest.raises(ValueError, match=r"expected 512 tokens to fit 1e\+06 bytes"):
        step.longest(lambda tokens: 1e5 * tokens, machine, 8)
