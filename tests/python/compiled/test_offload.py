"""`offload_attention` sends out and lse to the host and gets them back while the GPU computes."""

import programs
import pytest
from programs import HEAD_DIM, HEADS, LAYERS, TOKENS

OUT, LSE = TOKENS * HEADS * HEAD_DIM * 2, TOKENS * HEADS * 4
UNROLLED = "offloaded, unrolled"


def loops(name):
    """Returns the program, and the loops over layers of the forward and of the backward pass."""
    program = programs.program(name)
    found = program.bodies()
    return program, found["forward"], found["backward"]


def test_out_and_lse_leave_while_the_layer_goes_on():
    program, body, _ = loops("offloaded")
    found, call = program.transfers(body), program.place(body, "forward")
    assert not found["from"]
    assert len(found["to"]) == 2
    # Both copies start right behind the call and are done behind the products of the layer's rest.
    assert all(start == call + 1 and done == call + 4 for start, done in found["to"])


def test_out_and_lse_come_back_before_the_layer_needs_them():
    program, _, body = loops("offloaded")
    found, call = program.transfers(body), program.place(body, "backward")
    assert not found["to"]
    assert len(found["from"]) == 2
    assert all(start == 0 and done < call for start, done in found["from"])


@pytest.mark.xfail(
    raises=AssertionError, reason="XLA waits for both at once, before products that need neither"
)
def test_products_run_while_out_and_lse_come_back():
    program, _, body = loops("offloaded")
    assert all(done > start for start, done in program.transfers(body)["from"])


def test_the_host_holds_what_the_device_does_not():
    saved, offloaded = (
        programs.compiled(name).memory_analysis() for name in ("saved", "offloaded")
    )
    assert offloaded.host_temp_size_in_bytes == LAYERS * (OUT + LSE)
    spared = saved.temp_size_in_bytes - offloaded.temp_size_in_bytes
    assert spared == pytest.approx(LAYERS * (OUT + LSE), rel=1e-3)
    assert saved.host_temp_size_in_bytes == 0


def test_without_a_loop_each_layer_sends_and_fetches_its_own():
    program = programs.program(UNROLLED)
    found = program.transfers(program.computations[program.entry])
    assert {way: len(pairs) for way, pairs in found.items()} == dict.fromkeys(found, 2 * LAYERS)


@pytest.mark.xfail(
    raises=AssertionError, reason="XLA sends out to the host only shortly before it fetches it"
)
def test_without_a_loop_out_leaves_before_the_backward_pass():
    program = programs.program(UNROLLED)
    body = program.computations[program.entry]
    first = program.place(body, "backward")
    assert all(done < first for _, done in program.transfers(body)["to"])
