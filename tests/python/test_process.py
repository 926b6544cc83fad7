"""Processes of their own test x64, the cache, export, the report and the system's limits."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import burst_attention
import jax
import numpy as np
import pytest
import ring
from burst_attention import __main__ as command
from burst_attention._cli import report
from jax.sharding import PartitionSpec as P

pytestmark = [pytest.mark.needs("host"), pytest.mark.oldest_jax]

TARGETS = ("burst_attention_forward", "burst_attention_backward")


def python(*arguments, code=0, **environment):
    """Returns the output of a Python process with eight CPU devices."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import burst_attention as ba
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 32)).astype(np.float32)

def loss(q, k, v):
    out, lse = ba.dot_product_attention(
        q, k, v, mesh=mesh, spec=P(None, "context"), is_causal=True, return_residual=True
    )
    assert out.dtype == lse.dtype == jnp.float32
    return jnp.sum(out**2) + jnp.sum(lse)

hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
)
value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
print("result", float(value).hex(), *(float(jnp.sum(g * g)).hex() for g in grads))
print("hits", len(hits))
"""


def result(output):
    return next(line for line in output.splitlines() if line.startswith("result"))


@pytest.mark.long
def test_x64_and_the_compilation_cache(tmp_path):
    """A second process compiles nothing and gives the same bits; x64 changes at most rounding."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    refusal = """
try:
    loss(*(x.astype(np.float64) for x in (q, k, v)))
except TypeError as error:
    print(error)
"""
    first = python("-c", PROGRAM, **cache)
    second = python("-c", PROGRAM, **cache)
    wide = python("-c", PROGRAM + refusal, JAX_ENABLE_X64="1")
    assert "hits 0" in first
    assert "hits 0" not in second
    assert result(first) == result(second)
    assert "query must be float32, bfloat16 or float16, got float64; cast to float32" in wide
    narrow, wide = ([float.fromhex(x) for x in result(y).split()[1:]] for y in (first, wide))
    assert np.allclose(narrow, wide, rtol=1e-6)


def test_exported_program_runs_in_a_new_process(tmp_path):
    """A gradient, serialised here, runs in a process that imports only the package."""
    function = ring.sharded(ring.line(4), is_causal=True)

    def gradient(q, k, v):
        out, pullback = jax.vjp(function, q, k, v)
        return out, *pullback(out)

    sharding = jax.sharding.NamedSharding(ring.line(4), P(None, "context"))
    inputs = ring.normal(0, *[(1, 16, 2, 32)] * 3)
    run = jax.jit(gradient, in_shardings=sharding, out_shardings=sharding)
    with pytest.raises(ValueError, match="burst_attention"):
        jax.export.export(run)(*inputs)
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
    exported = jax.export.export(run, disabled_checks=checks)(*inputs)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "inputs.npz", *inputs)
    program = f"""
import jax, numpy as np
import burst_attention

exported = jax.export.deserialize(bytearray(open("{tmp_path}/program", "rb").read()))
mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context"))
inputs = np.load("{tmp_path}/inputs.npz")
placed = [jax.device_put(x, sharding) for x in inputs.values()]
np.savez("{tmp_path}/outputs.npz", *exported.call(*placed))
"""
    python("-c", program)
    with np.load(tmp_path / "outputs.npz") as outputs:
        for found, expected in zip(outputs.values(), run(*inputs), strict=True):
            assert np.array_equal(found, expected)


@pytest.mark.long
def test_exported_programs_have_one_derivative_if_asked_for():
    function = ring.sharded(ring.line(2), is_causal=True)
    sharding = jax.sharding.NamedSharding(ring.line(2), P(None, "context"))
    x = jax.device_put(ring.normal(0, (1, 16, 2, 32))[0], sharding)
    run = jax.jit(lambda x: (function(x, x, x) ** 2).sum())
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
    exported = jax.export.export(run, disabled_checks=checks)(x)
    none, one = (jax.export.deserialize(exported.serialize(vjp_order=n)) for n in (0, 1))
    with pytest.raises(ValueError, match="No VJP is available"):
        jax.grad(none.call)(x)
    found = jax.jit(jax.grad(one.call))(x)
    assert np.array_equal(found, jax.jit(jax.grad(run))(x))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        exported.serialize(vjp_order=2)


def test_report_and_self_check():
    output = python("-m", "burst_attention")
    for line in ("burst_attention", "jax, jaxlib", "devices", "instruction_set", "NCCL_LAUNCH"):
        assert line in output
    assert "ok: ring of 8" in output
    assert "self-check, GPU" not in output


def test_report_survives_a_gpu_that_fails(monkeypatch, capsys):
    """The report names the GPU's failure and the results of the CPU devices."""
    monkeypatch.setattr(sys, "argv", ["burst_attention"])
    monkeypatch.setattr(report, "_gpus", lambda: ["not a device"])
    monkeypatch.setattr(report._ffi, "describe", lambda: {"cuda": {"driver": "13.0"}, "a": 1})
    assert command.main() == 1
    printed = capsys.readouterr().out.splitlines()
    checks = [line for line in printed if line.startswith("self-check")]
    lines = dict(line.split(maxsplit=2)[1:] for line in checks)
    assert lines["CPU"].startswith("ok: ring of 8, float32")
    assert lines["GPU"].startswith("failed: ")


def test_one_device_check_in_bfloat16():
    """The check of a GPU also passes on a CPU device."""
    size, errors = report._self_check(jax.devices()[:1], "bfloat16")
    assert size == 1
    assert set(errors) == {"out", "dq", "dk", "dv"}
    assert all(1e-4 < error < report.LIMITS["bfloat16"] for error in errors.values())


@pytest.mark.parametrize("given", [None, "0"])
def test_import_sets_the_order_of_nccl_where_c_sees_it(given):
    """If the user has set another value, the line that imports gets a warning."""
    program = f"""
import ctypes, os, warnings
os.environ.pop("NCCL_LAUNCH_ORDER_IMPLICIT", None)
if {given!r}:
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = {given!r}
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always", UserWarning)
    import burst_attention
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"NCCL_LAUNCH_ORDER_IMPLICIT").decode())
print([(x.category.__name__, x.filename) for x in found if x.category is UserWarning])
"""
    value, warned = python("-c", program).splitlines()
    assert value == (given or "1")
    assert warned == ("[('UserWarning', '<string>')]" if given else "[]")


def test_missing_library_says_how_to_get_it(tmp_path):
    package, copy = Path(burst_attention.__file__).parent, tmp_path / "burst_attention"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = """
try:
    import burst_attention
except ImportError as error:
    print(error)
"""
    output = python("-c", program, PYTHONPATH=str(tmp_path))
    assert "libburst_attention_ffi.so is missing" in output
    assert "make build" in output


RING = """
import os, resource
import jax, numpy as np
import burst_attention as ba
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
spec = P(None, "context")
x = jax.device_put(np.ones((1, 16, 2, 8), np.float32), jax.NamedSharding(mesh, spec))

def compiled(name):
    function = getattr(ba, name)
    local = lambda x: function(x, x, x, axis_name="context")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(sharded).lower(x).compile()

def refused(run):
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "nothing"
"""

VARIABLES = """
def given(name, values, run):
    for value in values:
        os.environ[name] = value
        print(f"{name}={value}: {refused(run)}")
    os.environ[name] = " "

seconds = ["x", "0", "-1", "nan", "1e20"]
given("BURST_ATTENTION_RANK_TIMEOUT_S", seconds, lambda: compiled("attention"))
call = compiled("attention")
given("BURST_ATTENTION_THREADS", ["abc", "-1", "0", "1.5", "1e20", "1025"], lambda: call(x))
given("BURST_ATTENTION_ISA", ["neon", "AVX2"], lambda: call(x))
os.environ["BURST_ATTENTION_THREADS"] = " 3 "
print(refused(lambda: call(x)), ba._ffi.describe()["compute_threads"])
"""


def test_an_environment_variable_is_valid_unset_or_an_error_of_the_call():
    """A bad value is an error at every call, and a corrected value counts at the next call."""
    *errors, last = python("-c", RING + VARIABLES).splitlines()
    expected = {
        "BURST_ATTENTION_RANK_TIMEOUT_S": "seconds from 0.001 to 1000000, or inf to wait for ever",
        "BURST_ATTENTION_THREADS": "a whole number from 1 to 1024",
        "BURST_ATTENTION_ISA": "one of .*portable, which this CPU has",
    }
    for line in errors:
        name, value = line.split(":")[0].split("=")
        words = f"{name} must be {expected[name]}, or unset for the default, got "
        assert re.search(f'INVALID_ARGUMENT: {words}"{re.escape(value)}"', line), line
    assert len(errors) == 13
    assert last == "nothing 3"


THREADS = """
calls = [compiled(name) for name in ("linear_attention", "attention")]
jax.block_until_ready(jax.jit(lambda x: x.sum())(x))  # XLA has its threads
if os.getuid() == 0:
    os.setuid(65534)  # No limit holds for root.
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
for limit in (0, most):
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, most))
    for call in calls:
        print(refused(lambda: call(x)))
"""


@pytest.mark.long
def test_a_refused_thread_is_an_error_with_the_reason_until_threads_are_granted():
    lines = python("-c", RING + THREADS, BURST_ATTENTION_THREADS="2").splitlines()
    needs = ("each of 2 compute workers", r"rank \d of 4 over mesh axis \"context\"")
    for line, need in zip(lines[:2], needs, strict=True):
        words = f"RESOURCE_EXHAUSTED: no thread for {need}.*: .*temporarily unavailable.*ulimit -u"
        assert re.search(words, line), lines
    assert lines[2:] == ["nothing", "nothing"]
