"""What the library tells: its version, and the timeline of its rings."""

import json

import burst_attention as ba
import jax
import pytest
import ring
from burst_attention import _ffi


def test_library_and_package_have_one_version():
    assert _ffi.library_version() == ba.__version__


def test_timeline_names_every_step_of_every_rank(tmp_path):
    function = ring.gradients(ring.sharded(ring.line(4), backward="queries"))
    q, k, v, dout = ring.put(ring.line(4), *ring.normal(0, *[(1, 32, 2, 16)] * 4))
    path = tmp_path / "steps.json"
    with ba.trace(path):
        jax.block_until_ready(function((q, k, v), dout))
    events = json.loads(path.read_text())["traceEvents"]
    names = {(event["tid"], event["name"]) for event in events}
    for rank in range(4):
        for step in range(4):
            assert (rank, f"Forward Keys step {step} of 4") in names
            assert (rank, f"Backward Queries step {step} of 4") in names
    assert all(event["dur"] >= 0 and event["ph"] == "X" for event in events)


def test_nothing_is_recorded_after_the_block(tmp_path):
    function = jax.jit(ring.sharded(ring.line(2)))
    inputs = ring.put(ring.line(2), *ring.normal(0, *[(1, 4, 1, 8)] * 3))
    path = tmp_path / "steps.json"
    with ba.trace(path):
        pass
    jax.block_until_ready(function(*inputs))
    assert json.loads(path.read_text())["traceEvents"] == []


def test_timeline_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="could not be written"), ba.trace(tmp_path / "no" / "dir"):
        pass
