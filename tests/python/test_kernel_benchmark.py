"""The GPU kernels' benchmark without a GPU: requests, launches and shapes are right."""

import ctypes
import math
import sys
from types import SimpleNamespace

import pytest
from gpu import driver, library, numerics, ours, speed

pytestmark = pytest.mark.needs("text")


def tensor(*shape, dtype="torch.bfloat16", address=1 << 20):
    """Returns the part of a contiguous torch tensor that requests are made of."""
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
    """A launcher that keeps the requests; the library must accept each of them."""

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
    """Returns attention of 512 queries and 400 keys, 8:2 heads of 96 columns, with a window."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(float32="float32"))
    q_shape, kv_shape = (2, 512, 8, 96), (2, 400, 2, 96)
    arrays = {"q": tensor(*q_shape), "dout": tensor(*q_shape), "o": tensor(*q_shape)}
    arrays |= {"k": tensor(*kv_shape), "v": tensor(*kv_shape)}
    arrays["lse"] = tensor(*q_shape[:3], dtype="torch.float32")
    return ours.Attention(Recorder(kernels), arrays, empty, (-100, 30)), arrays


@pytest.mark.images
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
    with pytest.raises(ValueError, match="cast: .*multiple of 8"):
        kernels.launches("sm_90", ours.cast_request(odd, None, odd))


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


def test_launches_take_sums_in_and_leave_sums_to_others(problem):
    attention, _ = problem
    attention.make_delta()
    for kernel, name in (("forward", "acc"), ("key_grads", "dk_acc"), ("query_grads", "dq_acc")):
        for ends in ((True, True), (True, False), (False, True), (False, False)):
            getattr(attention, kernel)(ends=ends)
            step = attention._launcher.of(kernel)[-1]
            assert (step["first"], step["last"]) == ends
            assert (name in step) == (ends != (True, True))


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
    assert [next(iter(request)) for request in asked.calls] == ["delta", "key_grads", "cast"]
    (delta,), (fused,), (cast,) = (asked.of(name) for name in ("delta", "key_grads", "cast"))
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
    assert {"bf16", "f16"} <= {element for kernel, element, _ in seen if kernel == "cast"}
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
    """A driver that keeps launches; on request it refuses images and logs the reason."""

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
    """Gives every name an image; the library lists launches without one."""
    monkeypatch.setattr(kernels, "image", lambda name: b"\x7fELF" + name.encode())


def test_refused_image_is_reported_with_all_that_the_driver_says(kernels, images):
    refusing = driver.Driver(kernels, "sm_90", FakeCuda(refuses=True))
    with pytest.raises(RuntimeError) as raised:
        refusing.load("cast_bf16_d128_sm_90")
    for part in ("cast_bf16_d128_sm_90", "NO_BINARY", "no kernel image", "CUDA 13.0", "too new"):
        assert part in str(raised.value)


def test_driver_loads_an_image_once_and_launches_by_the_library(kernels, images, monkeypatch):
    monkeypatch.setattr(driver.Driver, "_stream", lambda self: 7)
    cuda = FakeCuda()
    running = driver.Driver(kernels, "sm_90", cuda)
    a, out = tensor(1, 70, 3, 96, dtype="torch.float32"), tensor(1, 70, 3, 96)
    for _ in range(2):
        running.prepare(ours.cast_request(a, None, out))()
    assert cuda.loaded == 1
    assert len(cuda.launched) == 2
    function, *grid_block_shared, stream, values, extra = cuda.launched[0]
    assert function == (b"\x7fELF", b"cast_entry")
    assert grid_block_shared == [2 * 3, 1, 1, 1, 1, 1, 0]
    assert (stream, extra) == (7, 0)
    assert values[0][0] == a.data_ptr()
    assert values[1][0] is ctypes.c_void_p


def test_shapes_begin_with_the_one_that_decides():
    shapes = speed.shapes()
    assert [shape.decides for shape in shapes] == [True] + [False] * 59
    assert shapes[0].name == "D128 causal 8K 32:32"
    assert {shape.seq for shape in shapes[:8]} == {8192}
    assert {shape.dim for shape in shapes[:8]} == {64, 128, 256}
    assert len({shape.name for shape in shapes}) == 60
    assert shapes[0].flop("forward") == 2.0 * 4 * 8192**2 * 32 * 128
    assert shapes[0].flop("backward") == 2.5 * shapes[0].flop("forward")
    full = next(shape for shape in shapes if shape.name == "D128 full 8K 32:32")
    assert full.flop("forward") == 2 * shapes[0].flop("forward")
