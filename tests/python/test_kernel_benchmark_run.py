"""The run of the GPU kernels' benchmark, without a GPU: rows, failures, the report and pictures."""

import json
import math

import pytest
from gpu import numerics, report, session, speed

import kernels as command

pytestmark = pytest.mark.needs("text")


def speed_row(shape, which, ours_ms=2.0):
    flop = shape.flop(which)
    contenders = {
        name: {"ms": ms, "spread": 0.01, "tflops": flop / ms / 1e9}
        for name, ms in (("ours", ours_ms), ("cudnn", 1.5))
    }
    row = {"shape": shape.name, "pass": which, "contenders": contenders, "notes": []}
    row |= {"seq": shape.seq, "dim": shape.dim, "causal": shape.causal, "heads": shape.heads}
    return row | {"kv_heads": shape.kv_heads, "absent": {"flash": "no such kernel"}, "kernels": {}}


def test_lines_of_the_table_have_ratios_to_the_peers_and_the_bar(capsys):
    row = speed_row(speed.shapes()[0], "forward")
    report.print_speed(row, peak=row["contenders"]["ours"]["tflops"] * 2)
    printed = capsys.readouterr().out
    assert printed.split("\n")[0].split()[-4:] == ["1%", "50%", "0.75", "-"]
    assert "no flash: no such kernel" in printed
    assert "bar MISSED: at least 0.85 × cuDNN, measured 0.75" in printed
    assert speed.bar_of(speed_row(speed.shapes()[1], "forward")) is None


def test_results_are_written_and_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the wheel's environments have JAX and pytest alone")
    rows = [speed_row(s, which) for s in speed.shapes()[:30] for which in ("forward", "backward")]
    results = {"speed": rows, "peak_tflops": None, "environment": {"device": "none"}}
    results["tokens"] = speed.TOKENS
    report.save(results, tmp_path / "new" / "none.json")
    assert json.loads((tmp_path / "new" / "none.json").read_text()) == results
    report.draw(results, tmp_path / "none.png")
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")


class Answers:
    """A session that takes its answers from a function of the item."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def ask(self, item, limit_s):
        self.asked.append(item)
        return self.answer(item)


IMAGES = {"target": "sm_90", "of": 2, "refused": {}, "library": "made up"}
PEAK = {"tflops": 500.0, "nvidia-smi": "Made Up, 580, 1500 MHz, 1980 MHz"}


def good(item):
    """Gives the answers of a healthy machine, with our kernels as fast as cuDNN's."""
    part = item["part"]
    if part == "numerics":
        row = {"case": item["case"], "kernel": item["kernel"], "errors": {"o": 1e-3}}
        return {"result": row | {"limits": {"o": 1e-2}, "cudnn": {"o": 1e-3}, "wrong": []}}
    if part == "speed":
        row = speed_row(speed.SHAPES[item["shape"]], item["which"], ours_ms=1.5)
        return {"result": row | {"differs": 1e-3}}
    if part == "jax":
        return {"absent": "jax sees no GPU"}
    results = {"environment": {"device": "Made Up"}, "images": IMAGES, "peak": PEAK}
    return {"result": results[part]}


def run(answer, tmp_path, clock=lambda: 0.0, quick=False):
    asked = Answers(answer)
    benchmark = command.Benchmark(asked, session.Budget(100.0, clock), tmp_path, quick)
    benchmark._picture = lambda: None
    return benchmark.run(), benchmark, asked


def test_all_passes_where_all_is_well(tmp_path, capsys):
    passed, benchmark, asked = run(good, tmp_path)
    assert passed
    assert "all passed" in capsys.readouterr().out
    written = json.loads((tmp_path / "made-up.json").read_text())
    assert written["complete"]
    assert len(written["speed"]) == 120
    assert len(written["numerics"]) == sum(len(c.kernels) for c in numerics.CASES.values())
    assert {entry["why"] for entry in written["left_out"]} == {"jax sees no GPU"}


def test_one_failure_hides_nothing(tmp_path, capsys):
    def answer(item):
        if item.get("kernel") == "key_grads" and item["case"] == "window":
            return {"error": "ValueError: broken", "trace": "where\n"}
        return good(item)

    passed, benchmark, asked = run(answer, tmp_path)
    assert not passed
    assert [entry["name"] for entry in benchmark.failed] == ["window, key_grads"]
    assert len(asked.asked) == len(run(good, tmp_path)[2].asked)
    assert "window, key_grads: FAILED: ValueError: broken" in capsys.readouterr().out


def test_kernel_that_costs_two_workers_is_not_tried_again(tmp_path):
    def answer(item):
        lost = item.get("kernel") == "delta" and numerics.CASES[item["case"]].width == 64
        return {"error": "no answer within 45 s", "lost": True} if lost else good(item)

    passed, benchmark, asked = run(answer, tmp_path)
    assert not passed
    tried = [item["case"] for item in asked.asked if item.get("kernel") == "delta"]
    widths = [numerics.CASES[case].width for case in tried]
    assert widths.count(64) == 2
    assert widths.count(128) > 10
    why = {entry["why"] for entry in benchmark.failed[2:]}
    assert why == {"not checked: delta D64 crashed or hung 2 times"}


@pytest.mark.parametrize("which", ["error", "bar", "differs", "images"])
def test_each_kind_of_failure_fails_the_run(which, tmp_path):
    def answer(item):
        found = good(item)
        if which == "error" and item["part"] == "numerics":
            found["result"]["wrong"] = ["o: error 1.0, expected at most 0.1"]
        if which == "bar" and item["part"] == "speed":
            found["result"]["contenders"]["ours"]["ms"] = 2.5
        if which == "differs" and item["part"] == "speed":
            found["result"]["differs"] = math.nan
        if which == "images" and item["part"] == "images":
            found = {"result": IMAGES | {"refused": {"a": "too new", "b": "too new"}}}
        return found

    passed, benchmark, asked = run(answer, tmp_path, quick=True)
    assert not passed
    assert any(item["part"] == "speed" for item in asked.asked) == (which != "images")
    assert json.loads(benchmark.file.read_text())["failed"] == benchmark.failed


def test_time_that_is_up_leaves_the_rest_out_and_says_so(tmp_path, capsys):
    now = [0.0]

    def answer(item):
        now[0] += 0.01 if item["part"] == "numerics" else 2.0
        return good(item)

    passed, benchmark, asked = run(answer, tmp_path, clock=lambda: now[0])
    assert passed
    assert now[0] <= 100.0 + command.SLACK_S
    assert 0 < len(benchmark.results["speed"]) < 120
    assert benchmark.results["speed"][0]["shape"] == "D128 causal 8K 32:32"
    assert any(item["part"] == "jax" for item in asked.asked)  # its share of the time is kept
    assert "left out, the time was up: " in capsys.readouterr().out


def test_checks_left_out_are_a_failure(tmp_path):
    now = [0.0]

    def answer(item):
        now[0] += 5.0
        return good(item)

    passed, benchmark, _ = run(answer, tmp_path, clock=lambda: now[0])
    assert not passed
    assert all("not checked: the time was up" in entry["why"] for entry in benchmark.failed)
