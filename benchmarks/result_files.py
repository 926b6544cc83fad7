"""The files of results in benchmarks/results/."""

import json
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU = "amd-epyc-family-26-model-2-2-cores"
MASKS_CPU = "masks-amd-epyc-family-25-model-17-2-cores"
DECODE_CPU = "decode-amd-epyc-family-25-model-1-2-cores"
OFFLOAD_CPU = f"offload-{CPU}"
LINEAR_CPU = f"linear-{CPU}"
SCHEDULES_CPU = "schedules-intel-r-xeon-r-processor-2-80ghz-family-6-model-106-2-cores"
LATENTS_CPUS = "latents-cpus"
H100 = "nvidia-h100-80gb-hbm3"
H100_PROFILE = f"{H100}-profile"
H200_PROFILE = "nvidia-h200-profile"


@cache
def results(name: str) -> Any:
    """Returns the results of a file in benchmarks/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())
