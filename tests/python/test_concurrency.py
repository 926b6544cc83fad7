"""Many rings at once, devices in any order and missing ranks give right results and no stall."""

import contextlib
import ctypes
import random
import threading
import time
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from burst_attention import _ffi
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import dense

ON_STANDIN = platforms.current().name == "standin"
RUNS = 2 if ON_STANDIN else 20
SIZE = 8
# With 33 programs in flight, jaxlib before 0.12 stalls even in a lone psum: the thread that would
# run a device's part of the first program waits for a place to start the 33rd one.
IN_FLIGHT = 4 if ON_STANDIN else 50 if jax.__version_info__ >= (0, 12) else 32
ATOL = 2e-2 if platforms.current().rounds else 2e-5
"""The absolute error of outputs, which are averages of standard normal values."""
NEXT = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
SPEC = P(None, "context")


def over_ring(function, *, check_vma=True):
    """Returns ``function``, jitted, on arrays whose axis 1 is sharded over eight devices."""
    return jax.jit(
        jax.shard_map(
            function, mesh=ring.line(SIZE), in_specs=SPEC, out_specs=SPEC, check_vma=check_vma
        )
    )


def inputs(seed, *shape):
    return ring.put(ring.line(SIZE), *ring.normal(seed, *[shape] * 3), spec=SPEC)


def expected_output(q, k, v, *, causal=True):
    q, k, v = (np.asarray(x) for x in (q, k, v))
    return dense(q, k, v, np.zeros_like(q), np.zeros(q.shape[:3]), causal=causal).o


def same(first, *others):
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@contextlib.contextmanager
def rank_timeout(seconds):
    set_timeout = _ffi._library.burst_attention_set_rank_timeout
    set_timeout.argtypes, set_timeout.restype = [ctypes.c_double], None
    set_timeout(seconds)
    try:
        yield
    finally:
        set_timeout(0)


def test_many_calls_in_one_program_each_before_collectives():
    calls = 4 if ON_STANDIN else 40

    @over_ring
    def program(q, k, v):
        results = []
        for call in range(calls):
            o = ba.attention(q + call, k, v, axis_name="context", is_causal=True)
            total = lax.psum(o, "context")
            results.append((o, o + total, lax.ppermute(o, "context", NEXT)))
        return results

    q, k, v = inputs(0, 1, SIZE * 4, 2, 8)
    runs = [jax.device_get(program(q, k, v)) for _ in range(RUNS)]
    same(*runs)
    for call, (o, with_total, moved) in enumerate(runs[0]):
        np.testing.assert_allclose(o, expected_output(q + call, k, v), atol=ATOL)
        total = o.reshape(1, SIZE, 4, 2, 8).astype(np.float32).sum(1)
        sums = o + np.tile(total, (1, SIZE, 1, 1))
        np.testing.assert_allclose(with_total, sums, atol=5 * ATOL)
        np.testing.assert_array_equal(moved, np.roll(o, 4, axis=1))


def test_many_programs_in_flight():
    @over_ring
    def program(q, k, v):
        o = ba.attention(q, k, v, axis_name="context", is_causal=True)
        return o + lax.psum(o, "context")

    q, k, v = inputs(1, 1, SIZE * 4, 2, 8)
    queries = [q + number for number in range(IN_FLIGHT)]
    alone = [jax.device_get(program(query, k, v)) for query in queries]
    for _ in range(RUNS):
        same(alone, jax.device_get([program(query, k, v) for query in queries]))


def test_programs_dispatched_from_several_threads():
    @over_ring
    def program(q, k, v):
        return ba.attention(q, k, v, axis_name="context")

    q, k, v = inputs(2, 1, SIZE * 4, 2, 8)
    queries = [q + number for number in range(4)]
    alone = [jax.device_get(program(query, k, v)) for query in queries]
    found = [[] for _ in queries]

    def dispatch(number):
        results = [program(queries[number], k, v) for _ in range(IN_FLIGHT // 4)]
        found[number] = jax.device_get(results)

    threads = [threading.Thread(target=dispatch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, results in enumerate(found):
        assert len(results) == IN_FLIGHT // 4
        same(alone[number], *results)


def test_two_rings_then_a_sum_over_data():
    spec = P("data", "context")
    mesh = ring.mesh(2, 4, 1)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=(spec, P(None, "context")))
    def program(q, k, v):
        o = ba.attention(q, k, v, axis_name="context", is_causal=True, layout="zigzag")
        return o, lax.psum(o, "data")

    arrays = ring.normal(3, *[(2, 64 if ON_STANDIN else 1024, 2, 16)] * 3)
    placed = ring.put(mesh, *ring.stored("zigzag", 4, *arrays), spec=spec)
    runs = [jax.device_get(program(*placed)) for _ in range(RUNS)]
    same(*runs)
    o, total = ring.restored("zigzag", 4, *runs[0])
    np.testing.assert_allclose(o, expected_output(*arrays), atol=ATOL)
    np.testing.assert_array_equal(total[0], o[0] + o[1])


@pytest.mark.parametrize("unroll", [1, 4])
def test_one_call_site_many_times_in_a_run(unroll):
    @over_ring
    def program(q, k, v):
        def layer(x, _):
            return ba.attention(x, k, v, axis_name="context", is_causal=True), None

        return lax.scan(layer, q, length=8, unroll=unroll)[0]

    q, k, v = inputs(4, 1, SIZE * 4, 2, 8)
    found = jax.device_get(program(q, k, v))
    expected = np.asarray(q)
    for _ in range(8):
        expected = expected_output(expected, k, v).astype(q.dtype)
    np.testing.assert_allclose(found, expected, atol=5 * ATOL)


@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_bitwise_the_same_whatever_the_order_of_arrival(backward):
    def late(x):
        # No value of the call depends on the delay, so XLA neither folds nor shares it.
        def sleep(value):
            time.sleep(random.uniform(0, 0.02))
            return value

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct((), x.dtype), x[0, 0, 0, 0])

    def local(q, k, v):
        delayed = q.at[0, 0, 0, 0].set(late(q))
        options = {"axis_name": "context", "is_causal": True, "layout": "striped"}
        o, pullback = jax.vjp(partial(ba.attention, backward=backward, **options), delayed, k, v)
        return o, *pullback(o)

    program = over_ring(local, check_vma=False)
    q, k, v = inputs(5, 2, SIZE * 16, 2, 16)
    same(*[jax.device_get(program(q, k, v)) for _ in range(RUNS)])


@pytest.mark.needs("host")
def test_missing_ranks_are_named_and_the_next_call_works():
    @over_ring
    def program(first, q, k, v):
        def call(q, k, v):
            return ba.attention(q, k, v, axis_name="context", is_causal=True)

        taken = lax.axis_index("context") < first[0, 0].astype(jnp.int32)
        return lax.cond(taken, call, lambda q, k, v: q, q, k, v)

    q, k, v = inputs(6, 1, SIZE * 4, 2, 8)

    def run(count):
        (first,) = ring.put(ring.line(SIZE), np.full((1, SIZE), count), spec=SPEC)
        return jax.device_get(program(first, q, k, v))

    np.testing.assert_allclose(run(SIZE), expected_output(q, k, v), atol=2e-5)
    for count, missing, arrived in [(5, "ranks 5-7", "ranks 0-4"), (7, "rank 7", "ranks 0-6")]:
        with rank_timeout(1):
            start = time.monotonic()
            with pytest.raises(jax.errors.JaxRuntimeError) as caught:
                run(count)
            assert 1 <= time.monotonic() - start < 10
        message = str(caught.value)
        names = (f"{missing} of 8 did not", f"{arrived} did")
        for part in (*names, "context", "within 1s", "lax.cond"):
            assert part in message, message
        np.testing.assert_allclose(run(SIZE), expected_output(q, k, v), atol=2e-5)


@pytest.mark.needs("host")
@pytest.mark.parametrize("method", ["in_turn", "ring", "all_gather"])
def test_missing_ranks_of_a_recurrence_are_named(method):
    """XLA would end the process, after 40 s."""

    def local(k):
        def call(k):
            return ba.linear_attention(k, k, k, axis_name="context", method=method)

        return lax.cond(lax.axis_index("context") < SIZE - 1, call, lambda k: k, k)

    program = over_ring(local, check_vma=False)
    (k,) = inputs(8, 1, SIZE * 4, 2, 8)[:1]
    words = "context, ring 0: rank 7 of 8 did not reach the call within 500ms"
    with rank_timeout(0.5), pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(program(k))


@pytest.mark.needs("host")
def test_a_late_rank_gets_the_error_of_the_others():
    def local(work, q, k, v):
        # Rank 3 first does other work, whose result is never above 1.
        count = jnp.where(lax.axis_index("context") == 3, work[0, 0], 0)
        end = lax.fori_loop(0, count, lambda _, x: jnp.cos(x), jnp.float32(1))
        q = q.at[0, 0, 0, 0].add(jnp.where(end > 2, end, 0))
        return ba.attention(q, k, v, axis_name="context")

    program = over_ring(local, check_vma=False)
    q, k, v = inputs(7, 1, SIZE * 4, 2, 8)

    def run(count):
        (work,) = ring.put(ring.line(SIZE), np.full((1, SIZE), count, np.int32), spec=SPEC)
        start = time.monotonic()
        found = jax.device_get(program(work, q, k, v))
        return found, time.monotonic() - start

    expected = expected_output(q, k, v, causal=False)
    np.testing.assert_allclose(run(0)[0], expected, atol=2e-5)
    count, seconds = 10_000, 0.0
    while seconds < 0.2:
        count *= 2
        seconds = run(count)[1]
    start = time.monotonic()
    with rank_timeout(0.5), pytest.raises(jax.errors.JaxRuntimeError, match="rank 3 of 8 did not"):
        run(int(count * 2 / seconds))
    # Once the other ranks have their error, rank 3 must not wait for them, now or in the next call.
    np.testing.assert_allclose(run(0)[0], expected, atol=2e-5)
    assert time.monotonic() - start < 15
