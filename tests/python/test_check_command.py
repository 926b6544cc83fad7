"""``python -m burst_attention check`` compares GPU kernels with plain JAX, and keeps verdicts."""

import json
import os
import shutil
import struct
import subprocess
import sys

import platforms
import pytest

pytestmark = pytest.mark.needs("standin")

FAMILIES = ("attention", "linear_attention", "delta_rule", "decode_attention", "cudnn")

PROGRAM = """
import jax, jax.numpy as jnp, burst_attention as ba
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.ones((1, 16, 2, 64), jnp.bfloat16)
attend = jax.jit(lambda x: ba.dot_product_attention(x, x, x, mesh=mesh, spec=P(None, "context")))
attend.lower(x)
attend.lower(x)
"""
"""Traces attention twice for the GPU."""

KEEP = """
from burst_attention._cli import check
check._keep("NVIDIA H200", {"attention": "confirmed"})
"""
"""Keeps a verdict as the command does."""

KEEP_ALL = f"""
import jax
from burst_attention._cli import check
check._keep(jax.devices()[0].device_kind, dict.fromkeys({FAMILIES}, "confirmed"))
"""
"""Keeps the verdicts of a GPU whose families are all confirmed."""


def run(cache, *arguments, **environment):
    """Returns the exit code and the output of a Python process with a cache of its own."""
    base = {name: x for name, x in os.environ.items() if name != "BURST_ATTENTION_CHECK"}
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=base | {"XDG_CACHE_HOME": str(cache), "STANDIN_DEVICES": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return ran.returncode, ran.stdout, ran.stderr


def check(cache, *arguments, **environment):
    code, out, _ = run(cache, "-m", "burst_attention", "check", *arguments, **environment)
    return code, out


def record(cache):
    """Returns the key and the verdicts of the only record."""
    ((key, verdicts),) = json.loads(
        (cache / "burst_attention" / "checked.json").read_text()
    ).items()
    return key, verdicts


def hints(cache, **environment):
    """Returns the lines of the program that name the check."""
    code, _, said = run(cache, "-c", PROGRAM, **environment)
    assert code == 0, said
    return [line for line in said.splitlines() if "python -m burst_attention check" in line]


def test_what_is_confirmed_is_asked_for_no_more(tmp_path):
    (said,) = hints(tmp_path)
    assert said.startswith("burst_attention: the GPU kernels were not checked on ")
    assert hints(tmp_path, BURST_ATTENTION_CHECK="ignore") == []
    code, _, said = run(tmp_path, "-c", KEEP_ALL)
    assert code == 0, said
    key, verdicts = record(tmp_path)
    assert "; driver " in key
    assert "; images " in key
    assert hints(tmp_path) == []
    # Another driver, library or image makes another key.
    path = tmp_path / "burst_attention" / "checked.json"
    path.write_text(json.dumps({key.replace("driver", "driver 0"): verdicts}))
    assert len(hints(tmp_path)) == 1


@pytest.mark.long
def test_all_families_are_confirmed_and_kept(tmp_path):
    """`test_ten_minutes.py` runs the same command, in `make test-full`."""
    code, out = check(tmp_path, "--seconds", "300")
    assert code == 0, out
    assert [line.split()[-1] for line in out.splitlines()[:5]] == ["confirmed"] * 5
    assert record(tmp_path)[1] == dict.fromkeys(FAMILIES, "confirmed")
    assert hints(tmp_path) == []


@pytest.mark.long
def test_a_family_that_fails_is_refuted_alone(tmp_path):
    fault = "call=cuLaunchKernel code=719 about=linear"
    code, out = check(tmp_path, "--seconds", "300", STANDIN_FAIL=fault)
    assert code == 1, out
    _, verdicts = record(tmp_path)
    assert verdicts["attention"] == verdicts["decode_attention"] == "confirmed"
    assert "cuLaunchKernel" in verdicts["linear_attention"]
    assert hints(tmp_path) == []


@pytest.mark.long
def test_a_family_that_hangs_costs_no_more_than_its_time(tmp_path):
    code, out = check(tmp_path, "--seconds", "60", STANDIN_JITTER_US="40000000")
    assert code == 1, out
    assert "attention         no answer within " in out


def test_a_folder_that_cannot_be_written_leaves_another(tmp_path):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    code, out, said = run(cache, "-c", KEEP, TMPDIR=str(tmp_path))
    assert code == 0, said
    assert out.strip() == f"kept in {tmp_path}/burst_attention-{os.getuid()}/checked.json"


def swap_images(folder, *names):
    """Makes a copy of the package in which two images are exchanged; returns its folder."""
    source, package = platforms.STANDIN / "package" / "burst_attention", folder / "burst_attention"
    (package / "images").mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".so":
            shutil.copy(file, package)
        elif file.name != "images":
            (package / file.name).symlink_to(file.resolve())
    (file,) = (source / "images").iterdir()
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    one, other = names
    header[one], header[other] = header[other], header[one]
    changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(changed) == length
    (package / "images" / file.name).write_bytes(data[:8] + changed + data[8 + length :])
    return folder


@pytest.mark.long
def test_a_wrong_image_is_refuted_with_its_error(tmp_path):
    names = [f"attention_fwd_bf16_d{width}_sm_90" for width in (64, 128)]
    package = swap_images(tmp_path / "package", *names)
    path = os.pathsep.join([str(package), os.environ["PYTHONPATH"]])
    code, out = check(tmp_path, "--seconds", "300", PYTHONPATH=path)
    assert code == 1, out
    _, verdicts = record(tmp_path)
    assert verdicts["attention"].startswith("out is off by ")
    assert verdicts["attention"].endswith("at head_dim 128, bfloat16, expected at most 0.02")
    assert verdicts["linear_attention"] == verdicts["decode_attention"] == "confirmed"
