"""What of the GPU kernels' benchmark needs no GPU: requests, launches, bookkeeping, the picture."""

import ctypes
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
library, ours, report, speed = (
    importlib.import_module(f"gpu.{name}") for name in ("library", "ours", "report", "speed")
)


def tensor(*shape, dtype="torch.bfloat16", address=1 << 20):
    """As much of a contiguous torch tensor as requests are made of."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return SimpleNamespace(
        shape=shape, dtype=dtype, data_ptr=lambda: address, stride=lambda axis: strides[axis]
    )


@pytest.fixture(scope="module")
def kernels():
    return library.Kernels(library.find_library(None))


def forward_request(q, k, band=ours.ANY):
    inputs = {"rectangle": ours.rectangle(q, k, band, 0.125), "q": ours.rows(q)}
    results = {"o": ours.rows(q), "lse": ours.rows(tensor(*q.shape[:3]))}
    ends = {"first": True, "last": True}
    return {"forward": inputs | {"k": ours.rows(k), "v": ours.rows(k)} | results | ends}


def test_library_describes_and_embeds_every_image(kernels):
    assert len(kernels.images) == 240
    image = kernels.images["attention_fwd_bf16_d128_sm_90"]
    assert image["entry"] == "attention_fwd_entry"
    cubin = kernels.image(image["name"])
    assert cubin.startswith(b"\x7fELF")
    assert b"attention_fwd_entry" in cubin
    with pytest.raises(RuntimeError, match="has no image nothing"):
        kernels.image("nothing")


def test_request_becomes_launches_whose_values_fit_the_record(kernels):
    q, k = tensor(2, 300, 8, 96), tensor(2, 500, 2, 96)
    (launch,) = kernels.launches("sm_90", forward_request(q, k, (-(2**63), 7)))
    assert launch["image"] == "attention_fwd_bf16_d128_sm_90"
    record = kernels.images[launch["image"]]
    assert launch["grid"] == [3 * 8 * 2, 1, 1]  # tiles of 128 rows, heads, batch entries
    values, types = library.arguments(launch["values"])
    assert [ctypes.sizeof(kind) for kind in types] == [a["bytes"] for a in record["arguments"]]
    named = dict(zip((a["name"] for a in record["arguments"]), values, strict=True))
    assert (named["q_len"], named["kv_len"], named["upper"]) == (300, 500, 7)
    assert named["q_batch_stride"] == 300 * 8 * 96


def test_bad_request_is_an_error_that_names_it(kernels):
    odd = tensor(1, 64, 4, 100)
    with pytest.raises(ValueError, match="forward: .*multiple of 8"):
        kernels.launches("sm_90", forward_request(odd, odd))


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 6), "sm_80"), ((9, 0), "sm_90"), ((12, 0), "sm_120")]
)
def test_capability_finds_target(capability, target):
    assert library.target_of(capability) == target


def test_unknown_capability_is_an_error():
    with pytest.raises(RuntimeError, match="expected compute capability"):
        library.target_of((7, 5))


def test_shapes_begin_with_the_one_that_decides():
    shapes = speed.shapes()
    assert shapes[0].decides
    assert shapes[0].name == "D128 causal 8K 32:32"
    assert len({shape.name for shape in shapes}) == len(shapes) == 60
    assert shapes[0].flop("forward") == 2.0 * 4 * 8192**2 * 32 * 128
    assert shapes[0].flop("backward") == 2.5 * shapes[0].flop("forward")


def test_results_are_written_and_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the wheel's environments have JAX and pytest alone")
    times = {"ours": {"ms": 2.0, "tflops": 500.0}, "cudnn": {"ms": 1.0, "tflops": 600.0}}
    rows = [
        {"shape": shape.name, "passes": {"forward": times, "backward": times}}
        for shape in speed.shapes()
    ]
    results = {"speed": rows, "peak_tflops": 700.0, "device": "none", "tokens": 32768}
    report.save(results, tmp_path / "new" / "none.json")
    assert json.loads((tmp_path / "new" / "none.json").read_text()) == results
    report.draw(results, tmp_path / "none.png")
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_the_table_have_ratios_to_the_peers(capsys):
    times = {"ours": {"ms": 2.0, "tflops": 500.0}, "cudnn": {"ms": 1.0, "tflops": 600.0}}
    row = {"shape": "D128 causal 8K 32:32", "passes": {"forward": times}}
    report.print_speed(row, peak=1000.0)
    assert capsys.readouterr().out.split()[-5:] == ["500", "2.000", "50%", "0.50", "-"]


def test_a_part_that_fails_hides_nothing(capsys):
    parts = importlib.import_module("kernels").Parts(budget_s=60.0)
    assert parts.run("broken", lambda: 1 / 0) is None
    assert parts.run("whole", lambda: 7) == 7
    assert parts.failed == ["broken"]
    assert "broken" in capsys.readouterr().out
    assert parts.time_left
    assert not importlib.import_module("kernels").Parts(budget_s=0.0).time_left


def test_without_a_gpu_the_command_says_so():
    command = [sys.executable, str(BENCHMARKS / "kernels.py")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "expected" in result.stdout
    assert "found none" in result.stdout
