"""A failure on one device is told at once, and no run hangs."""

import re
import signal

import failures
import pytest

pytestmark = pytest.mark.needs("standin")

RAISED = [
    ("ring", 2, "initialize", "forward", "cuFuncLoad"),
    ("ring", 4, "initialize", "forward", "cuMemHostAlloc"),
    ("ring", 2, "again", "forward", "ncclCommUserRank"),
    ("ring", 2, "execute", "forward", "cuStreamWaitEvent"),
    ("ring", 4, "execute", "backward", "cuLaunchKernel"),
    ("rings", 4, "execute", "forward", "cuEventRecord"),
]
"""Failures after which every device ends."""

ENDED = [
    ("ring", 2, "initialize", "forward", "cuCtxPushCurrent"),
    ("ring", 2, "execute", "forward", "ncclGroupEnd"),
    ("ring", 2, "execute", "forward", "execute"),
    ("ulysses", 2, "execute", "forward", "cuLaunchKernel"),
]
"""Failures after which the other devices would wait for ever."""


def names(scenario):
    return "-".join(map(str, scenario))


def run(ring, devices, stage, which, call):
    """Runs a scenario whose fault must be told."""
    row = failures.report(ring, devices, stage, which, failures.fault(call, stage, which))
    check(row, call)
    return row


def check(row, call):
    """Checks that a line on stderr names the call, and that nothing hangs or races."""
    assert not row["hung"], row
    assert row["told"], row
    assert row["seconds"] <= 30, row
    # A device that is lost fails at whichever call comes next.
    assert call in row["told"][0] or "ILLEGAL_ADDRESS" in row["told"][0], row
    assert not [line for line in row["complaints"] if "race" in line], row


@pytest.mark.parametrize("scenario", RAISED, ids=names)
def test_jax_raises_the_error_and_the_next_run_works(scenario):
    row = run(*scenario)
    assert len(row["told"]) == 1, row
    assert "raises" in row["run"][1], row
    assert row["next"][1] == "ends", row


@pytest.mark.parametrize("scenario", ENDED, ids=names)
def test_ranks_do_not_wait_for_ever_for_a_rank_that_failed(scenario):
    row, last = run(*scenario), scenario[1] - 1
    expected = f"device 0 has waited {failures.RANK_TIMEOUT:.0f} s for device {last}, "
    assert expected in row["told"][-1], row
    assert row["code"] == -signal.SIGABRT, row


@pytest.mark.parametrize("call", ["ncclGroupStart", "ncclSend", "ncclRecv"])
def test_messages_that_nccl_refuses_once_are_sent_again(call):
    fault = failures.fault(call, "initialize", "forward")
    row = failures.report("ring", 2, "initialize", "forward", fault)
    assert (row["run"][1], row["next"][1], row["told"]) == ("ends", "ends", []), row


def test_a_user_who_asks_reads_once_which_backend_computes(monkeypatch):
    monkeypatch.setenv("BURST_ATTENTION_EXPLAIN", "1")
    nothing = "call=cuLaunchKernel code=719 about=no_such_kernel"
    row = failures.report("ring", 4, "execute", "forward", nothing)
    assert (row["run"][1], row["next"][1]) == ("ends", "ends"), row
    (told,) = row["told"]
    words = "burst_attention: forward pass over 4 ranks: forward by tile, .* ms predicted"
    assert re.match(words, told.strip()), told


def test_a_user_who_asks_with_another_value_gets_an_error(monkeypatch):
    monkeypatch.setenv("BURST_ATTENTION_EXPLAIN", "yes")
    nothing = "call=cuLaunchKernel code=719 about=no_such_kernel"
    row = failures.report("ring", 2, "initialize", "forward", nothing)
    assert not row["hung"], row
    words = "BURST_ATTENTION_EXPLAIN must be 0 or 1, or unset for the default, got"
    assert words in row["run"][1], row


def test_the_driver_gets_the_right_calls(monkeypatch, tmp_path):
    """Objects have the right flags; an image without its function is unloaded."""
    log = tmp_path / "log"
    monkeypatch.setenv("STANDIN_LOG", str(log))
    row = run("ring", 2, "initialize", "forward", "cuModuleGetFunction")
    assert "failed: attention_fwd_entry: CUDA_ERROR_INVALID_VALUE, invalid arg" in row["told"][0]
    calls = [line.split(" ", 1) for line in log.read_text().splitlines()]
    thread = next(thread for thread, call in calls if "cuModuleGetFunction of device 1" in call)
    own = [call.removeprefix("device 1: ") for name, call in calls if name == thread]
    begin = next(n for n, call in enumerate(own) if "cuMemHostAlloc 131072 bytes" in call)
    assert own[begin : begin + 12] == [
        # Flags 1 and 2 are portable and mapped for the device.
        "cuMemHostAlloc 131072 bytes, flags 3: 0",
        "cuCtxGetDevice : 0",
        "cuDeviceGetAttribute : 0",
        "cuDeviceGetAttribute : 0",
        "cuCtxGetStreamPriorityRange : 0",
        # Flag 1 is non-blocking, and -5 is the highest priority.
        "cuStreamCreateWithPriority flags 1, priority -5: 0",
        # Flag 2 is without timing.
        "cuEventCreate flags 2: 0",
        "cuEventCreate flags 2: 0",
        "cuModuleLoadData : 0",
        "cuModuleGetFunction of device 1 fails as asked: ",
        "cuGetErrorString : 0",
        "cuModuleUnload : 0",
    ]


@pytest.mark.long
@pytest.mark.parametrize("scenario", list(failures.scenarios()), ids=names)
def test_no_failure_hangs(scenario):
    row = failures.report(*scenario)
    call = scenario[-1].split()[0].removeprefix("call=")
    if call in failures.MESSAGES and not row["told"]:
        # NCCL took the messages at the second attempt, or this rank has none of this kind.
        assert (row["run"][1], row["next"][1]) == ("ends", "ends"), row
        return
    check(row, call)
    if row["code"]:
        assert row["code"] == -signal.SIGABRT, row
    else:
        assert "raises" in row["run"][1], row
        assert row["next"][1] == "ends", row
