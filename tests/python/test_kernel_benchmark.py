"""What of the GPU kernels' benchmark needs no GPU: requests, launches, the run, the report."""

import ctypes
import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
driver, library, numerics, ours, report, session, speed = (
    importlib.import_module(f"gpu.{name}")
    for name in ("driver", "library", "numerics", "ours", "report", "session", "speed")
)
command = importlib.import_module("kernels")


def tensor(*shape, dtype="torch.bfloat16", address=1 << 20):
    """As much of a contiguous torch tensor as requests are made of."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    itemsize = 2 if dtype == "torch.bfloat16" else 4

    class Tensor(SimpleNamespace):
        def __getitem__(self, key):
            keys = key if isinstance(key, tuple) else (key,)
            ranges = [k.indices(n) for k, n in zip(keys, shape, strict=False)]
            at = sum(start * stride for (start, _, _), stride in zip(ranges, strides, strict=False))
            sizes = [end - start for start, end, _ in ranges] + list(shape[len(ranges) :])
            return Tensor(
                shape=tuple(sizes),
                dtype=dtype,
                data_ptr=lambda: address + at * itemsize,
                stride=lambda axis: strides[axis],
            )

    return Tensor()[:]


def empty(name, shape, dtype):
    return tensor(*shape, dtype="torch.float32" if dtype == "float32" else dtype)


class Recorder:
    """A launcher that keeps the requests, each of which the library must accept."""

    def __init__(self, kernels):
        self.kernels, self.requests, self.calls = kernels, [], []

    def prepare(self, request):
        assert self.kernels.launches("sm_90", request)
        self.requests.append(request)
        return lambda: self.calls.append(request)

    def of(self, kernel):
        return [request[kernel] for request in self.requests if kernel in request]


@pytest.fixture(scope="module")
def kernels():
    return library.Kernels(library.find_library(None))


@pytest.fixture
def problem(kernels, monkeypatch):
    """Two batch entries, 512 × 400, 8:2 heads of 96 columns, with a window."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(float32="float32"))
    q_shape, kv_shape = (2, 512, 8, 96), (2, 400, 2, 96)
    arrays = {"q": tensor(*q_shape), "dout": tensor(*q_shape), "o": tensor(*q_shape)}
    arrays |= {"k": tensor(*kv_shape), "v": tensor(*kv_shape)}
    arrays["lse"] = tensor(*q_shape[:3], dtype="torch.float32")
    return ours.Attention(Recorder(kernels), arrays, empty, (-100, 30)), arrays


@pytest.mark.long  # It takes the images, which `make test` builds meanwhile.
def test_library_describes_and_finds_every_image(kernels):
    targets = {image["target"] for image in kernels.images.values()}
    assert targets == {"sm_80", *library.TARGETS.values()}
    assert sum(len(kernels.images_for(target)) for target in targets) == len(kernels.images)
    for name in kernels.images_for("sm_90"):
        cubin = kernels.image(name)
        assert cubin.startswith(b"\x7fELF")
        assert kernels.images[name]["entry"].encode() in cubin
    with pytest.raises(RuntimeError, match="no image nothing"):
        kernels.image("nothing")


def test_request_becomes_launches_whose_values_fit_the_record(kernels, problem):
    attention, _ = problem
    attention.forward()
    (request,) = attention._launcher.requests
    (launch,) = kernels.launches("sm_90", request)
    assert launch["image"] == "attention_fwd_window_bf16_d128_sm_90"
    record = kernels.images[launch["image"]]
    assert launch["grid"] == [512 // record["rows"] * 8 * 2, 1, 1]  # tiles, heads, batch entries
    values, types = library.arguments(launch["values"])
    assert [ctypes.sizeof(kind) for kind in types] == [a["bytes"] for a in record["arguments"]]
    named = dict(zip((a["name"] for a in record["arguments"]), values, strict=True))
    assert (named["q_len"], named["kv_len"], named["lower"], named["upper"]) == (512, 400, -100, 30)
    assert named["q_batch_stride"] == 512 * 8 * 96


def test_bad_request_is_an_error_that_names_it(kernels):
    odd = tensor(1, 64, 4, 100)
    with pytest.raises(ValueError, match="finish: .*multiple of 8"):
        kernels.launches("sm_90", ours.finish_request(odd, None, odd))


def test_keys_in_steps_move_the_band_and_the_addresses(problem):
    attention, arrays = problem
    attention.forward(steps=3)()
    steps = attention._launcher.of("forward")
    assert len(attention._launcher.calls) == 3
    assert [step["rectangle"]["kv_len"] for step in steps] == [132, 132, 136]
    assert [step["rectangle"]["lower"] for step in steps] == [-100, -232, -364]
    assert [step["rectangle"]["upper"] for step in steps] == [30, -102, -234]
    starts = [step["k"]["address"] - arrays["k"].data_ptr() for step in steps]
    assert starts == [rows * 2 * 96 * 2 for rows in (0, 132, 264)]
    assert [(step["first"], step["last"]) for step in steps] == [
        (True, False), (False, False), (False, True)
    ]  # fmt: skip
    assert {"acc", "row_max", "row_sum"} <= steps[0].keys()


def test_queries_in_steps_move_the_band_the_other_way(problem):
    attention, _ = problem
    attention.make_delta()
    attention.key_grads(steps=2)
    steps = attention._launcher.of("key_grads")
    assert [step["rectangle"]["q_len"] for step in steps] == [256, 256]
    assert [step["rectangle"]["lower"] for step in steps] == [-100, 156]
    delta = [step["delta"]["address"] for step in steps]
    assert delta[1] - delta[0] == 256 * 4


def test_fused_kernel_adds_to_zeros_that_are_cast_afterwards(kernels, problem):
    _, arrays = problem
    attention = ours.Attention(Recorder(kernels), arrays, empty)
    attention.all_grads()()
    asked, dq_acc = attention._launcher, arrays["dq_acc"].data_ptr()
    assert [next(iter(request)) for request in asked.calls] == ["delta", "key_grads", "finish"]
    (delta,), (fused,), (cast,) = (asked.of(name) for name in ("delta", "key_grads", "finish"))
    assert delta["zeros"]["address"] == fused["dq_acc"]["address"] == cast["a"]["address"] == dq_acc
    assert cast["scale"] == pytest.approx(96**-0.5)
    launches = kernels.launches("sm_90", {"key_grads": fused})
    assert launches[-1]["image"] == "attention_bwd_dkdv_fused_bf16_d128_sm_90"


def test_no_fused_kernel_is_no_failure(kernels, problem):
    attention, _ = problem  # with a window
    with pytest.raises(library.AbsentError, match="96 columns .* no fused kernel"):
        attention.all_grads()


def test_no_limit_of_a_band_moves():
    assert ours.shifted(ours.CAUSAL, slice(None), slice(64, None)) == (ours.LEAST, -64)
    assert ours.shifted(ours.ANY, slice(8, None), slice(64, None)) == ours.ANY


def test_each_kernel_is_checked_in_both_types_and_all_widths():
    seen = {
        (kernel, case.element, case.dim)
        for case in numerics.CASES.values()
        for kernel in case.kernels
    }
    for kernel in ("forward", "delta", "key_grads", "query_grads"):
        assert {(kernel, e, d) for e in ("bf16", "f16") for d in (64, 128, 256)} <= seen
    assert {"bf16", "f16"} <= {element for kernel, element, _ in seen if kernel == "finish"}
    assert set(numerics.QUICK) <= numerics.CASES.keys()


def test_cudnn_is_asked_only_for_masks_it_has():
    plain = {name for name, case in numerics.CASES.items() if case.plain}
    assert {"bf16 D128 causal", "other lengths", "grouped heads 8:2"} <= plain
    assert plain.isdisjoint({"window", "segments", "soft cap", "lse has a gradient"})


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 6), "sm_80"), ((9, 0), "sm_90"), ((12, 0), "sm_120")]
)
def test_capability_finds_target(capability, target):
    assert library.target_of(capability) == target


def test_unknown_capability_is_an_error():
    with pytest.raises(RuntimeError, match="expected compute capability"):
        library.target_of((7, 5))


class FakeCuda:
    """A driver that refuses some images, says why in its log, and keeps launches."""

    CUresult = SimpleNamespace(CUDA_SUCCESS="fine")
    CUjit_option = SimpleNamespace(
        CU_JIT_ERROR_LOG_BUFFER=1,
        CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES=2,
        CU_JIT_INFO_LOG_BUFFER=3,
        CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES=4,
    )
    refused = SimpleNamespace(name="CUDA_ERROR_NO_BINARY_FOR_GPU")

    def __init__(self, refuses=False):
        self.refuses, self.loaded, self.launched = refuses, 0, []

    def cuModuleLoadData(self, cubin):  # noqa: N802 - the driver's name
        self.loaded += 1
        return (self.refused, None) if self.refuses else ("fine", cubin[:4])

    def cuModuleLoadDataEx(self, cubin, count, options, values):  # noqa: N802
        assert count == len(options) == len(values)
        values[options.index(1)][:9] = b"too new\0\0"
        return self.refused, None

    def cuModuleGetFunction(self, module, entry):  # noqa: N802
        return "fine", (module, entry)

    def cuLaunchKernel(self, *arguments):  # noqa: N802
        self.launched.append(arguments)
        return ("fine",)

    def cuGetErrorString(self, error):  # noqa: N802
        return "fine", b"no kernel image"

    def cuDriverGetVersion(self):  # noqa: N802
        return "fine", 13000


@pytest.fixture
def images(kernels, monkeypatch):
    """An image for every name: the library needs none to say what it would launch."""
    monkeypatch.setattr(kernels, "image", lambda name: b"\x7fELF" + name.encode())


def test_refused_image_is_reported_with_all_that_the_driver_says(kernels, images):
    refusing = driver.Driver(kernels, "sm_90", FakeCuda(refuses=True))
    with pytest.raises(RuntimeError) as raised:
        refusing.load("finish_bf16_d128_sm_90")
    for part in ("finish_bf16_d128_sm_90", "NO_BINARY", "no kernel image", "CUDA 13.0", "too new"):
        assert part in str(raised.value)


def test_driver_loads_an_image_once_and_launches_by_the_library(kernels, images, monkeypatch):
    monkeypatch.setattr(driver.Driver, "_stream", lambda self: 7)
    cuda = FakeCuda()
    running = driver.Driver(kernels, "sm_90", cuda)
    a, out = tensor(1, 70, 3, 96, dtype="torch.float32"), tensor(1, 70, 3, 96)
    for _ in range(2):
        running.prepare(ours.finish_request(a, None, out))()
    assert cuda.loaded == 1
    assert len(cuda.launched) == 2
    function, *grid_block_shared, stream, values, extra = cuda.launched[0]
    assert function == (b"\x7fELF", b"finish_entry")
    assert grid_block_shared == [2 * 3, 1, 1, 1, 1, 1, 0]
    assert (stream, extra) == (7, 0)
    assert values[0][0] == a.data_ptr()
    assert values[1][0] is ctypes.c_void_p


def test_shapes_begin_with_the_one_that_decides():
    shapes = speed.shapes()
    assert [shape.decides for shape in shapes] == [True] + [False] * 59
    assert shapes[0].name == "D128 causal 8K 32:32"
    assert {shape.dim for shape in shapes[:20]} == {128}
    assert len({shape.name for shape in shapes}) == 60
    assert shapes[0].flop("forward") == 2.0 * 4 * 8192**2 * 32 * 128
    assert shapes[0].flop("backward") == 2.5 * shapes[0].flop("forward")
    full = next(shape for shape in shapes if shape.name == "D128 full 8K 32:32")
    assert full.flop("forward") == 2 * shapes[0].flop("forward")


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
    """A session that answers by a function of the item."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def ask(self, item, limit_s):
        self.asked.append(item)
        return self.answer(item)


IMAGES = {"target": "sm_90", "of": 2, "refused": {}, "library": "made up"}


def good(item):
    """The answers of a machine where all is well, and our kernels as fast as cuDNN's."""
    part = item["part"]
    if part == "numerics":
        row = {"case": item["case"], "kernel": item["kernel"], "errors": {"o": 1e-3}}
        return {"result": row | {"limits": {"o": 1e-2}, "cudnn": {"o": 1e-3}, "wrong": []}}
    if part == "speed":
        row = speed_row(speed.SHAPES[item["shape"]], item["which"], ours_ms=1.5)
        return {"result": row | {"differs": 1e-3}}
    if part == "jax":
        return {"absent": "jax sees no GPU"}
    results = {"environment": {"device": "Made Up"}, "images": IMAGES, "peak": {"tflops": 500.0}}
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
    assert any(item["part"] == "jax" for item in asked.asked)  # its share is kept for it
    assert "left out, the time was up: " in capsys.readouterr().out


def test_checks_left_out_are_a_failure(tmp_path):
    now = [0.0]

    def answer(item):
        now[0] += 5.0
        return good(item)

    passed, benchmark, _ = run(answer, tmp_path, clock=lambda: now[0])
    assert not passed
    assert all("not checked: the time was up" in entry["why"] for entry in benchmark.failed)
