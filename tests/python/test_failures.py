"""A failure on one device is told at once, its peers end, and the next run works."""

import failures
import pytest
from long import some

pytestmark = pytest.mark.needs("standin")

RAISED = [
    ("ring", 2, "execute", "forward", "cuLaunchKernel"),
    ("ring", 2, "initialize", "forward", "cuFuncLoad"),
    ("ring", 4, "initialize", "forward", "cuMemHostAlloc"),
    ("ring", 2, "initialize", "forward", "cuStreamCreateWithPriority"),
    ("ring", 2, "again", "forward", "ncclCommUserRank"),
    ("ring", 4, "execute", "backward", "cuLaunchKernel"),
    ("ring", 2, "execute", "forward", "cuStreamWaitEvent"),
    ("rings", 4, "execute", "forward", "cuEventRecord"),
]
"""Failures after which every device ends, so that JAX raises the message."""

TOLD = [
    ("ring", 2, "execute", "forward", "ncclGroupEnd"),
    ("ulysses", 2, "execute", "forward", "cuLaunchKernel"),
]
"""Failures after which the peers can't end: the message is on stderr alone."""


def told(ring, devices, stage, which, call):
    """Runs a scenario; checks that its one line on stderr names the call and came at once."""
    fault = failures.fault(call, stage, which)
    row = failures.report(ring, devices, stage, which, fault)
    assert len(row["told"]) == 1, row
    assert row["told"][0].startswith("burst_attention: device "), row
    assert call in row["told"][0], row
    assert row["seconds"] <= 30, row
    return row


@pytest.mark.parametrize(
    "scenario", some(RAISED), ids=lambda scenario: "-".join(map(str, scenario))
)
def test_jax_raises_the_message_and_the_next_run_works(scenario):
    row = told(*scenario)
    assert not row["hung"], row
    assert "raises" in row["run"][1], row
    assert row["next"][1] == "ends", row
    assert not [line for line in row["complaints"] if "race" in line], row


@pytest.mark.long
@pytest.mark.parametrize("scenario", TOLD, ids=lambda scenario: "-".join(map(str, scenario)))
def test_the_message_stands_on_stderr(scenario):
    told(*scenario)
