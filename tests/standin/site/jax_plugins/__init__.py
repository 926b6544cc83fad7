"""Puts the stand-in device under JAX's CUDA plugin.

JAX imports this package, whose folder is on PYTHONPATH, before it loads any plugin; so do child
processes. STANDIN names the folder that `make` fills: `lib` with the libraries, `cuda` with the
compiler's files.
"""

import ctypes
import os
import pkgutil
from pathlib import Path

from jax._src import hardware_utils

__path__ = pkgutil.extend_path(__path__, __name__)

_FOLDER = Path(os.environ["STANDIN"])
# A library that is loaded already comes before those in the plugin's own search path.
for _name in (
    "libcuda.so.1",
    "libcudart.so.13",
    "libnccl.so.2",
    "libnvidia-ml.so.1",
    "libcublasLt.so.13",
    "libnvrtc.so.13",
    "libcudnn.so.9",
):
    if _name != os.environ.get("STANDIN_WITHOUT"):
        ctypes.CDLL(str(_FOLDER / "lib" / _name))

# The folder's ptxas copies PTX text, which the stand-in device interprets. There is nothing to
# measure, hence no autotuning.
os.environ["PATH"] = f"{_FOLDER / 'cuda' / 'bin'}:{os.environ['PATH']}"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_gpu_cuda_data_dir={_FOLDER / 'cuda'}",
        "--xla_gpu_autotune_level=0",
    ]
)
# JAX looks for the device files of NVIDIA's driver.
hardware_utils.has_visible_nvidia_gpu = lambda: True
