"""The platforms that the suite runs on: CPU devices, GPUs, and the stand-in for GPUs.

The stand-in (tests/standin) is a CUDA driver and an NCCL over host memory. On it run JAX's own CUDA
plugin, XLA's own GPU runtime and, on an interpreter, the kernels.
"""

import ctypes
import importlib
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import nccl_library
import pytest

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "target" / "standin"
CHECKED = ROOT / "target" / "checked-package"
COMPILED = {
    # Lines of the source in each program would cost a twentieth of the time.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "target" / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
"""Variables that let JAX keep compiled programs. Compilation is half the time of the suite."""

NEEDS = {
    "host": "reads what only the executor for CPU devices has",
    "shipped": "reads the library that ships",
    "float32": "has inputs or bounds of float32",
    "products": "has many of XLA's own matrix products, which the stand-in computes slowly",
    "text": "runs nothing: it reads documents, tables or errors of the command line",
    "speed": "is too large for the stand-in",
    "gpu": "reads what only the executor for GPUs has",
    "standin": "checks the stand-in itself",
}
"""Why a test can't run on a platform, by the word in its mark."""


@dataclass(frozen=True)
class Platform:
    """A platform, and what its tests have."""

    name: str
    lacks: frozenset[str]
    """The words of `NEEDS` whose tests the platform leaves out."""
    narrow: str
    """The type that stands for float32."""
    largest: float
    """The pairs of query and key, over batch and heads, of the largest cases."""

    @property
    def rounds(self) -> bool:
        """Whether kernels round between products, so that errors are those of 16 bits."""
        return self.name != "cpu"

    def takes(self, case) -> bool:
        """Whether the platform runs a case of `case_list`."""
        return case.batch * case.heads * case.seq**2 <= self.largest

    def start(self) -> None:
        """Prepares the environment, before numpy and JAX are imported."""
        assert "numpy" not in sys.modules, "numpy has started its threads"
        # Threads of numpy's BLAS wait in loops. On two cores they took a fifth of the suite's time.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        # JAX runs callbacks of a GPU on a CPU device.
        os.environ["JAX_PLATFORMS"] = "cpu" if self.name == "cpu" else "cuda,cpu"
        if self.name == "cpu":
            # Most programs run once. Without XLA's optimisations the suite takes 0.8 of the time.
            # One module for LLVM costs a tenth less than several; other processes use the cores.
            flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
            flags += " --xla_cpu_parallel_codegen_split_count=1"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
            os.environ.update(COMPILED)
        if self.name != "cpu":
            # The suite is the check.
            os.environ.setdefault("BURST_ATTENTION_CHECK", "ignore")
            # A pool of caches is sharded over the host's devices.
            flags = "--xla_force_host_platform_device_count=3"
            if self.name == "standin":
                # XLA writes products as loops, since there is no cuBLAS.
                flags += " --xla_gpu_enable_triton_gemm=false"
                flags += " --xla_gpu_gemm_rewrite_size_threshold=1000000000"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        if self.name == "cuda":
            # Many tests compare bits, so gradients have a fixed order unless a test asks for any.
            os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"
            # The machine's other processes, such as the suite's other workers, need memory too.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if self.name == "standin":
            _start_standin()


_NOT_ON_GPUS = frozenset({"host", "float32", "text"})

PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("cpu", frozenset({"gpu", "standin"}), "float32", math.inf),
        Platform("cuda", _NOT_ON_GPUS | {"standin"}, "bfloat16", math.inf),
        Platform("standin", _NOT_ON_GPUS | {"products", "speed"}, "bfloat16", 2e6),
    )
}

NOTES = (
    "All log messages before absl::InitializeLog() is called are written to STDERR",
    "Could not find cuda drivers on your machine, GPU will not be used.",
)
"""What JAX's CUDA plugin writes to stderr where no driver is installed."""

VARIABLE = "BURST_ATTENTION_TEST_PLATFORM"
"""Tells child processes the platform."""
_current = PLATFORMS[os.environ.get(VARIABLE, "cpu")]


def current() -> Platform:
    """Returns the platform of this session."""
    return _current


def choose(name: str, checked: bool) -> None:
    """Makes a platform the session's and starts it, if asked with the library of `make test`."""
    global _current
    _current = PLATFORMS[name]
    os.environ[VARIABLE] = name
    if checked:
        if not (CHECKED / "burst_attention" / "__init__.py").exists():
            raise pytest.UsageError(f"--checked needs {CHECKED}; run `make checked-package`")
        _current = replace(_current, lacks=_current.lacks | {"shipped"})
        _import_from(str(CHECKED))
    _current.start()


NCCL = "BURST_ATTENTION_TEST_NCCL"
"""Names a library of NCCL with which processes share a machine's only GPU directly."""


def of_process(rank: int, processes: int, devices: int, folder: Path) -> dict[str, str]:
    """Returns the variables of one of several processes with ``devices`` devices each.

    Processes on the stand-in exchange messages through the folder. On GPUs NCCL writes into it what
    it does. On a machine with one GPU, all processes share it (`_sharing`).
    """
    if _current.name == "standin":
        return {"STANDIN_DEVICES": str(devices), "STANDIN_MAIL": str(folder)}
    if _current.name == "cuda":
        gpus = visible_gpus()
        told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/nccl.{rank}"}
        if len(gpus) == 1:
            return {"CUDA_VISIBLE_DEVICES": gpus[0]} | told | _sharing(rank, processes)
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank * devices :][:devices])} | told
    # The last of equal flags counts. The other flags stay, since they change bits of results.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return {"XLA_FLAGS": flags}


def _sharing(rank: int, processes: int) -> dict[str, str]:
    """Returns the variables of a process that shares a GPU with others.

    With the library that `NCCL` names, messages go through the GPU's memory. With any other, each
    process seems to be on a host of its own, since NCCL refuses two ranks of one host on the same
    GPU, and messages go through sockets.
    """
    library = os.environ.get(NCCL)
    if not library:
        return {"NCCL_HOSTID": f"burst-attention-{rank}", "NCCL_NET": "Socket"}
    nccl_library.check(library)
    return {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        # Each rank has blocks of its own, and a small library has only rings.
        "NCCL_MAX_CTAS": "4" if processes <= 2 else "2",
        "NCCL_ALGO": "Ring",
        "NCCL_NVLS_ENABLE": "0",
        "LD_PRELOAD": library,
    }


def visible_gpus() -> list[str]:
    """Returns the GPUs that JAX may use, as CUDA_VISIBLE_DEVICES names them."""
    import jax

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(jax.device_count())]


def has_lost_device() -> bool:
    """Whether this process lost a GPU: after an illegal access, each call of the driver fails."""
    import jax

    try:
        for device in jax.local_devices():
            jax.block_until_ready(jax.device_put(0, device))
    except jax.errors.JaxRuntimeError:
        return _current.name != "cpu"
    return False


def dtype(name):
    """Returns the type that stands for a named type of the tests on this platform."""
    return _current.narrow if isinstance(name, str) and name == "float32" else name


def has_cudnn() -> bool:
    """Whether cuDNN computes what a call leaves to the environment, wherever it serves.

    Then cases have what it serves: heads of 64 columns, sums in any order and lse without gradient.
    """
    return os.environ.get("BURST_ATTENTION_KERNELS") == "cudnn"


def columns(number):
    """Returns the columns of heads that stand for a number of columns of the tests."""
    return max(number, 64) if has_cudnn() else number


def order():
    """Returns the order of sums where a test leaves it."""
    return "any" if has_cudnn() else "fixed"


def dtypes(*names):
    """Returns the types that stand for named types on this platform, each once."""
    return list(dict.fromkeys(map(dtype, names)))


def _import_from(*path: str) -> None:
    """Lets this process and its children import from folders before all others."""
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])


def _start_standin() -> None:
    # The package here is the product's, with images that the stand-in knows.
    plugin = os.environ.get("STANDIN_PLUGIN", str(ROOT / ".venv" / "cuda"))
    _import_from(str(ROOT / "tests" / "standin" / "site"), plugin, str(STANDIN / "package"))
    os.environ |= {
        "STANDIN": str(STANDIN),
        "STANDIN_IMAGES": str(STANDIN / "package" / "burst_attention" / "images"),
        "STANDIN_TILE_IR": str(ROOT / "target" / "tile-ir"),
        "STANDIN_JITTER_US": os.environ.get("STANDIN_JITTER_US", "200"),
        # The plugin's libraries are newer or older than the stand-in says.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Each buffer is an allocation of its own, so that its bounds are checked.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        # XLA logs the absence of cuDNN and of most of NVML.
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    import_jax()


def import_jax() -> None:
    """Imports JAX, and takes what its CUDA plugin notes on stderr: that there is no driver."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            importlib.import_module("jax")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        written.seek(0)
        lines = written.read().decode().splitlines()
    others = [line for line in lines if not any(note in line for note in NOTES)]
    assert not others, others


def complaints() -> str:
    """Returns what the stand-in has complained of since the last call, one complaint in a line."""
    if _current.name != "standin":
        return ""
    library = ctypes.CDLL(str(STANDIN / "lib" / "libstandin.so"))
    library.standin_complaints.restype = ctypes.c_char_p
    return library.standin_complaints().decode()
