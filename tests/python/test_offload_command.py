"""``python -m burst_attention offload`` predicts decoding with caches on other devices."""

import json
from dataclasses import replace

import commands
import pytest
from burst_attention._cli.offload_time import Decoder, Device, Link, cost, offloaded, together
from test_documents import DOCS, blocks

pytestmark = pytest.mark.needs("text")

SLOW = Device("by hand", bandwidth=1e9, peak=1e12, memory=1e9, dollars=2.0)
MODEL = Decoder(layers=2, heads=4, head_dim=8, parameters=1e8)


@pytest.fixture
def offload(monkeypatch, capsys):
    return commands.caller("offload", monkeypatch, capsys)


def test_decoding_apart_from_the_weights_by_hand():
    """A token has 2·2·4·8·2 = 256 bytes in the cache, the weights 0.2 GB."""
    assert (MODEL.token, MODEL.weights) == (256, 2e8)
    # 0.8 GB have room for 31 requests of 100,000 tokens. Weights take 0.2 s, the cache 0.7936 s.
    assert together(MODEL, SLOW, 1, 100_000, 1.0) == pytest.approx(31 / (0.2 + 0.7936))
    assert together(MODEL, replace(SLOW, memory=1e8), 1, 10, 1.0) == 0
    # 39 requests fit 1 GB. Half of them take 0.2 s for the weights and 0.4992 s for the cache.
    found = offloaded(MODEL, (SLOW, 1), (SLOW, 1), 100_000, 1.0)
    assert found.rate == pytest.approx(39 / (2 * 0.4992))
    assert found.bound == "pool"
    # With fast holders one half after the other waits for weights.
    fast = replace(SLOW, bandwidth=1e12)
    found = offloaded(MODEL, (SLOW, 1), (fast, 1), 100_000, 1.0)
    assert found.rate == pytest.approx(39 / 0.4)
    assert found.bound == "model"
    assert offloaded(MODEL, (SLOW, 1), (fast, 1), 10**7, 1.0) is None
    assert offloaded(MODEL, (replace(SLOW, memory=1e8), 1), (fast, 1), 10, 1.0) is None
    assert cost([(SLOW, 2), (SLOW, 1)]) == 6


def test_the_link_and_its_latency():
    """q, k, v and the output of a token are 2·4·8·2·4 bytes, with one key head 2·2·5·8·2."""
    few = replace(MODEL, kv_heads=1)
    assert (MODEL.crossing, few.crossing, few.token) == (512, 320, 64)
    found = offloaded(few, (SLOW, 2), (SLOW, 1), 1000, 1.0, Link(1.0, 1e3))
    assert found.batch == 15_625
    assert found.link == pytest.approx(15_625 / 2 * 320 / 2e3)
    assert (found.latency, found.bound) == (4.0, "link")
    found = offloaded(few, (SLOW, 2), (SLOW, 1), 10**7 // 2, 1.0, Link(1.0, 1e9))
    assert found.bound == "latency"
    assert found.seconds == pytest.approx(found.model + found.pool + found.link + 4.0)


def test_products_count_where_the_pool_multiplies_slowly():
    """4·2·4·8 FLOPs a token against 256 bytes."""
    found = MODEL.attention_seconds(replace(SLOW, peak=1e6), 2, 100.0, 0.5)
    assert found == pytest.approx(100 * 256 / 0.5e6 / 2)


def test_the_table_of_the_paper(offload):
    """The figures of `docs/claims.md`."""
    text = offload("--model llama-65b --context 8192 16384 --pool 8,32xrtx-4090")
    assert "weights 130 GB on 2 × A100 80 GB, cache 2,621 kB a token on RTX 4090" in text
    assert "predicted" in text
    rows = [line.split() for line in text.splitlines() if "RTX 4090  " in line]
    assert [row[7] for row in rows] == ["0.58", "1.35", "0.59", "1.32"]
    assert {row[-1] for row in rows} == {"model"}


@pytest.mark.parametrize("which", range(3))
def test_the_page_has_what_the_commands_print(offload, which):
    page = DOCS / "offloading.md"
    command = blocks(page, "sh")[which].replace("\\\n", "")
    printed = offload(" ".join(command.split()[4:]))
    shown = [x for x in blocks(page, "text") if "× alone" in x][which]
    assert printed.partition("\n")[2].strip() == shown.strip()


def test_json_and_devices_of_ones_own(offload):
    flags = "--layers 2 --heads 4 --head-dim 8 --parameters 1e8 --context 100000 --share 1 --json"
    flags += " --gpus 1xslow --pool 1xslow --device slow=1,1,1,2 --latency-us 0 --link-gbps 0.8"
    (found,) = json.loads(offload(flags))
    (row,) = found["pools"]
    assert found["alone"]["rate"] > 0
    step = offloaded(MODEL, (SLOW, 1), (SLOW, 1), 100_000, 1.0, Link(0.0, 1e8))
    assert (row["requests"], row["rate"]) == (39, pytest.approx(step.rate))
    # A device alone costs 2 dollars, the model's and the pool's together 4.
    alone = found["alone"]["rate"] / (2 * found["alone"]["gpus"])
    assert row["per_cost"] == pytest.approx(step.rate / 4 / alone)


def test_requests_that_do_not_fit(offload):
    text = offload("--model llama-3-405b --gpus 1xa100 --pool 1xl40s")
    assert "no request fits up to" in text
    assert text.count("–") == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gpt", "invalid choice: 'gpt'"),
        ("", "expected --model or the model's sizes, --layers, --heads, --parameters too"),
        ("--layers 2 --parameters 1", "sizes, --heads too"),
        (
            "--model llama-65b --kv-heads 7",
            "must be a multiple of --kv-heads, got 64 and 7",
        ),
        ("--model llama-65b --parameters 0", "--parameters must be above 0, got 0"),
        ("--model llama-65b --gpus a100", "expected a number and a kind of device, such as 2xa100"),
        ("--model llama-65b --gpus 2,4xa100", "such as 2xa100, got '2,4xa100'"),
        ("--model llama-65b --pool 0xl40s", "such as 8,16xrtx-4090, got '0xl40s'"),
        ("--model llama-65b --pool 2xtoaster", "or rtx-4090, got 'toaster'"),
        ("--model llama-65b --device host=1,2", "--device must be KIND=GB/S,TFLOPS,GB[,DOLLARS]"),
        ("--model llama-65b --link-gbps 0", "--link-gbps must be above 0"),
        ("--model llama-65b --latency-us -1", "--latency-us must be at least 0"),
        ("--model llama-65b --context 0", "expected a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_arguments_end_with_the_reason(offload, arguments, message):
    error = offload(arguments, code=2)
    assert "python -m burst_attention offload: error: " in error
    assert message in error.splitlines()[-1]
