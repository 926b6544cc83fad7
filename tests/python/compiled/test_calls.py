"""Each layer of a training step runs its calls once, in place, and nothing is moved for them."""

import re
from collections import Counter

import numpy as np
import programs
import pytest
from hlo import Program
from programs import HEADS, LAYERS, RECOMPUTED, STEPS, TOKENS, WIDTH

ROWS, OUT, LSE = (
    f"1,{TOKENS},{WIDTH}",
    f"1,{TOKENS},{HEADS},{WIDTH // HEADS}",
    f"1,{TOKENS},{HEADS}",
)
EXCHANGING = ("ulysses", "hybrid")
ELSEWHERE = (*EXCHANGING, "offloaded, unrolled")
"""Steps that move rows on purpose: to exchange heads, and to the host (see `test_offload`)."""
LOOP = Counter(
    {("copy", f"bf16[{ROWS}]"): 2}
    | {
        (operation, f"{dtype}[1,{shape}]"): 1
        for operation in ("dynamic-update-slice", "dynamic-slice")
        for dtype, shape in (("bf16", ROWS), ("bf16", OUT), ("f32", LSE))
    }
)
"""The moves of a loop over layers. For each layer it writes and reads the rows, out and lse that
the backward pass needs. Two copies of rows keep the loop from writing into its caller's arrays."""


def moves(program):
    """Returns the instructions that only move arrays with a row for each token, with counts."""
    return Counter(program.moves(lambda x: x.elements and x.elements % TOKENS == 0))


@pytest.mark.parametrize("name", STEPS)
def test_each_layer_calls_each_kernel_as_often_as_it_must(name):
    step, found = STEPS[name], Counter(call.target for call in programs.program(name).calls())
    if step.is_linear:
        expected = {"burst_attention_linear_parts": 2, "burst_attention_linear_attend": 4}
    else:
        forward = 2 if step.policy is RECOMPUTED else 1
        expected = {"burst_attention_forward": forward, "burst_attention_backward": 1}
    times = 1 if step.is_loop else LAYERS
    assert found == {target: times * count for target, count in expected.items()}


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if not step.is_linear])
def test_calls_keep_their_schedule_and_their_rings(name):
    step = STEPS[name]
    axes = {"ulysses": (), "hybrid": step.ring_axes[:1]}.get(name, step.ring_axes)
    names, sizes = zip(*step.axes, strict=True)
    ids = np.arange(np.prod(sizes)).reshape(sizes)
    ids = np.moveaxis(ids, [names.index(x) for x in axes], range(-len(axes), 0))
    is_pair = len(axes) > 1
    schedule = "double_ring" if is_pair else step.options["schedule"]
    for call in programs.program(name).calls():
        groups = re.findall(r"\d+", call.attribute("groups"))
        assert [int(x) for x in groups] == ids.ravel().tolist()
        assert call.attribute("world_size") == str(step.size(*axes))
        assert call.attribute("schedule") == ("ring" if name in EXCHANGING else schedule)
        assert call.attribute("inner_size") == str(sizes[names.index(axes[1])] if is_pair else 0)


@pytest.mark.parametrize("name", STEPS)
def test_new_weights_take_the_place_of_the_old_ones(name):
    step = STEPS[name]
    count = len(step.weights()) * (1 if step.is_loop else LAYERS)
    assert programs.program(name).donated() == {i: i for i in range(count)}


@pytest.mark.parametrize("name", STEPS)
def test_kernels_add_up_the_gradients_of_slopes_in_place(name):
    """The backward call writes the result before its workspace into its last operand."""
    has_slopes = "alibi_slopes" in STEPS[name].features
    for call in programs.program(name).calls():
        in_place = has_slopes and call.target == "burst_attention_backward"
        pair = {len(call.results) - 2: len(call.operands) - 1}
        assert call.aliases() == (pair if in_place else {})


@pytest.mark.parametrize("name", [x for x in STEPS if x not in ELSEWHERE])
def test_nothing_is_moved_for_the_calls(name):
    """No instruction of the program only copies, transposes, cuts or converts rows."""
    step, found = STEPS[name], moves(programs.program(name))
    if step.is_loop:
        assert not found - LOOP
    else:
        # XLA keeps one array of zeros, and copies it for each call that adds to it in place.
        zeros = {("copy", f"f32[{LSE}]"): LAYERS} if "alibi_slopes" in step.features else {}
        assert found == zeros


@pytest.mark.parametrize("name", EXCHANGING)
def test_exchanges_of_heads_bring_rows_into_order(name):
    """A layer exchanges q, k, v and out, and their gradients, and moves rows three times for two.

    An exchange needs the head first. Zigzag shards also change the order of their chunks.
    """
    program = programs.program(name)
    exchanges = len(re.findall(r" all-to-all(?:-start)?\(", program.text))
    assert exchanges == LAYERS * 8
    assert moves(program).total() <= exchanges * 3 // 2


def test_a_transpose_is_noticed():
    """A model that stores head_dim before heads transposes q, k and v of each layer."""

    class HeadsLast(programs.Step):
        def split(self, x):
            return x.reshape(*x.shape[:2], programs.HEAD_DIM, -1).swapaxes(2, 3)

    found = moves(Program(HeadsLast(programs.CAUSAL).compiled().as_text()))
    assert Counter(name for name, _ in found.elements()) == {"transpose": 3 * LAYERS}
