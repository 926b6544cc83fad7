"""``schedule="auto"`` chooses a schedule with a reason, and traced calls choose the same one."""

import re

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from long import some

pytestmark = pytest.mark.needs("text")

GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
SLOW = ba.Links(inner_gbps=1.0, outer_gbps=0.1, inner_latency_us=1000.0, outer_latency_us=9000.0)


def shards(seq=8192, heads=32, kv_heads=8, dim=128, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct((1, seq, count, dim), dtype) for count in (heads, *[kv_heads] * 2)]


def traced(sizes, arrays, device=GPU, **options):
    """Returns the schedules of a call that is traced for a mesh of these sizes."""
    names = ("context",) if isinstance(sizes, int) else ("node", "gpu")
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    mesh = AbstractMesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )
    axis = names if len(names) == 2 else names[0]
    spec = P(None, axis)

    def attend(*qkv):
        return ba.attention(*qkv, axis_name=axis, **options)

    function = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    count = 1
    for size in sizes:
        count *= size
    whole = [
        jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * count, *x.shape[2:]), x.dtype)
        for x in arrays
    ]
    platform = "cpu" if device is None else "cuda"
    text = jax.jit(function).trace(*whole).lower(lowering_platforms=(platform,)).as_text()
    return set(re.findall(r'schedule = "(\w+)"', text))


def test_a_choice_has_every_candidate_a_reason_and_what_it_rests_on():
    choice = ba.choose_schedule(*shards(heads=12, kv_heads=4), axis_sizes=8, is_causal=True)
    assert choice.schedule == "balanced"
    by_name = {each.schedule: each for each in choice.candidates}
    assert list(by_name) == ["ring", "balanced", "all_gather", "ulysses"]
    assert by_name["balanced"].seconds < by_name["ring"].seconds / 1.2
    assert "query heads must be a multiple of the 8 ranks" in by_name["ulysses"].impossible
    assert by_name["ring"].bytes_within > 0 == by_name["ring"].bytes_between
    assert by_name["ring"].backward == choice.backward == "keys"
    text = str(choice)
    assert text.startswith("balanced: balanced takes ")
    assert "measured on an H100" in choice.machine
    assert choice.machine in text
    assert len(text.splitlines()) == 1 + 1 + 3 + 1 + 1


def test_refused_schedules_are_not_chosen(monkeypatch):
    def refuse(value, axes):
        if value != "ring":
            raise ValueError(f"no {value} over {len(axes)} axis")
        return value

    monkeypatch.setattr("burst_attention._attention.choice.library_name", refuse)
    choice = ba.choose_schedule(*shards(), axis_sizes=8, is_causal=True)
    assert choice.schedule == "ring"
    assert [each.impossible for each in choice.candidates[1:]] == [
        f"no {name} over 1 axis" for name in ("balanced", "all_gather", "ulysses")
    ]


def test_pairs_of_axes_choose_between_their_own():
    choice = ba.choose_schedule(
        *shards(4096), axis_sizes=(4, 8), is_causal=True, layout="zigzag", links=SLOW
    )
    assert [each.schedule for each in choice.candidates] == ["ring", "hybrid", "all_gather"]
    assert choice.candidates[0].bytes_between > 0


@pytest.mark.parametrize("sizes", some([8, 32, (4, 8), 100, (128, 8)], count=4))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_traced_calls_take_what_choose_schedule_says(sizes, layout):
    arrays = shards(2048)
    options = {"is_causal": True, "layout": layout}
    choice = ba.choose_schedule(*arrays, axis_sizes=sizes, **options)
    assert choice.candidates
    expected = choice.schedule
    if isinstance(sizes, tuple) and expected == "ring":
        expected = "double_ring"
    # The library's schedules do not include the two exchanges of heads.
    if expected not in ("ulysses", "hybrid"):
        assert traced(sizes, arrays, **options) == {expected}


def test_traced_calls_know_their_links():
    """With slow links bytes decide; a window's ring sends each row no farther than it must."""
    arrays = shards(256, heads=4, kv_heads=4)
    options = {"layout": "contiguous", "local_window_size": (2000, 0), "links": SLOW}
    choices = {
        links: ba.choose_schedule(*arrays, axis_sizes=8, **options | {"links": links})
        for links in (None, SLOW)
    }
    assert choices[SLOW].candidates[0].seconds > 10 * choices[None].candidates[0].seconds
    for links, choice in choices.items():
        if choice.schedule in ("ring", "balanced", "all_gather"):
            assert traced(8, arrays, **options | {"links": links}) == {choice.schedule}


def test_on_cpu_devices_it_is_the_ring_at_once():
    arrays = shards(64, heads=16, kv_heads=16, dim=32, dtype="float32")
    choice = ba.choose_schedule(*arrays, axis_sizes=8, is_causal=True, platform="cpu")
    assert (choice.schedule, choice.candidates) == ("ring", ())
    assert "share its cores" in str(choice)
    assert traced(8, arrays, device=None, is_causal=True) == {"ring"}
    assert ba.choose_schedule(*arrays, axis_sizes=1).reason == "there is one device"
    # With links, CPU devices are treated as any devices.
    given = ba.choose_schedule(*arrays, axis_sizes=8, is_causal=True, platform="cpu", links=SLOW)
    assert given.candidates


def test_a_chosen_schedule_computes_the_same():
    """The call states the links of eight CPU devices."""
    q, k, v = ring.normal(0, (1, 512, 12, 32), (1, 512, 4, 32), (1, 512, 4, 32), dtype="float32")

    def run(**options):
        spec = P(None, "context")

        def attend(*qkv):
            return ba.attention(*qkv, axis_name="context", is_causal=True, **options)

        return jax.shard_map(attend, mesh=ring.line(8), in_specs=spec, out_specs=spec)(q, k, v)

    links = ba.Links(tflops_forward=1e-4, tflops_backward=1e-4, launch_us=0.0)
    local = [jax.ShapeDtypeStruct((1, 64, *x.shape[2:]), x.dtype) for x in (q, k, v)]
    choice = ba.choose_schedule(*local, axis_sizes=8, is_causal=True, platform="cpu", links=links)
    assert choice.schedule == "balanced"
    assert jnp.allclose(run(links=links), run(), atol=1e-5)
    assert jnp.array_equal(run(links=links), run(schedule="balanced"))


@pytest.mark.parametrize(
    ("kind", "words", "arguments"),
    [
        (TypeError, "inner_gbps must be a Python number", {"inner_gbps": "fast"}),
        (ValueError, "outer_gbps must be finite and above 0, got 0", {"outer_gbps": 0}),
        (ValueError, "inner_latency_us must be finite and at least 0", {"inner_latency_us": -1}),
        (ValueError, "tflops_forward must be finite", {"tflops_forward": float("inf")}),
        (ValueError, "devices_per_node must be at least 1, got 0", {"devices_per_node": 0}),
        (ValueError, "devices_per_node must be at most 4,096, got", {"devices_per_node": 2**70}),
        (TypeError, "devices_per_node must be made of ints", {"devices_per_node": 2.0}),
        (TypeError, "shared_link must be True or False", {"shared_link": 1}),
    ],
)
def test_links_that_cannot_be_are_refused(kind, words, arguments):
    with pytest.raises(kind, match=words):
        ba.Links(**arguments)


@pytest.mark.parametrize("links", [400, {"inner_gbps": 400}, "NVLink"])
def test_links_of_another_kind_are_refused(links):
    words = "links must be burst_attention.Links or None, got"
    with pytest.raises(TypeError, match=words):
        ba.choose_schedule(*shards(), axis_sizes=8, links=links)
    q = jnp.zeros((1, 16, 2, 8))
    for schedule in ("auto", "ring"):
        with pytest.raises(TypeError, match=words):
            spec = P(None, "context")
            jax.shard_map(
                lambda x, s=schedule: ba.attention(
                    x, x, x, axis_name="context", schedule=s, links=links
                ),
                mesh=ring.line(2),
                in_specs=spec,
                out_specs=spec,
            )(q)


@pytest.mark.parametrize(
    ("kind", "words", "options"),
    [
        (ValueError, "axis_sizes must be one number or", {"axis_sizes": (2, 2, 2)}),
        (TypeError, "axis_sizes must be made of ints", {"axis_sizes": "8"}),
        (ValueError, "axis_sizes must be at least 1, got 0", {"axis_sizes": 0}),
        (ValueError, "axis_sizes must be at most 4,096 devices in all", {"axis_sizes": 10**20}),
        (ValueError, r"got \(8, 65536\): shard the batch", {"axis_sizes": (8, 65536)}),
        (TypeError, "axis_sizes must be made of ints", {"axis_sizes": 8.0}),
        (TypeError, "axis_sizes must be made of ints", {"axis_sizes": True}),
        (ValueError, "platform must be one of 'cpu' or 'cuda'", {"platform": "tpu"}),
        (ValueError, "layout must be one of", {"layout": "diagonal"}),
        (ValueError, "backward must be one of", {"backward": "both"}),
        (TypeError, "is_causal must be True or False", {"is_causal": 1}),
    ],
)
def test_wrong_arguments_say_what_was_expected(kind, words, options):
    with pytest.raises(kind, match=words):
        ba.choose_schedule(*shards(), **{"axis_sizes": 8, **options})


def test_sizes_may_be_integers_of_any_type():
    plain = ba.choose_schedule(*shards(), axis_sizes=(4, 8), is_causal=True)
    numpy = (np.int64(4), np.uint8(8))
    assert ba.choose_schedule(*shards(), axis_sizes=numpy, is_causal=True) is plain
    links = [ba.Links(devices_per_node=count) for count in (4, np.int32(4))]
    one, other = (ba.choose_schedule(*shards(), axis_sizes=8, links=each) for each in links)
    assert one is other


@pytest.mark.parametrize("sizes", [4096, (2, 2048), (512, 8), (64, 64)])
def test_thousands_of_devices_are_estimated(sizes):
    """The choice estimates large rings; `tests/choose.rs` counts its work."""
    choice = ba.choose_schedule(*shards(1024), axis_sizes=sizes, is_causal=True, layout="zigzag")
    assert choice.candidates[0].estimated
    assert choice.candidates[0].seconds > 0


def test_links_are_static_and_equal_by_value():
    assert ba.Links(inner_gbps=1.0) == ba.Links(inner_gbps=1.0)
    assert len({ba.Links(), ba.Links(), SLOW}) == 2
    arrays = shards()
    assert ba.choose_schedule(*arrays, axis_sizes=8) is ba.choose_schedule(*arrays, axis_sizes=8)


def test_global_arrays_pass_links_on():
    q = jnp.zeros((1, 16, 2, 8))
    with pytest.raises(TypeError, match=r"links must be burst_attention\.Links"):
        ba.dot_product_attention(
            q, q, q, mesh=ring.line(2), spec=P(None, "context"), links="NVLink"
        )
