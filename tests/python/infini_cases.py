"""Infini-attention over a mesh: its inputs, its results, and its paper's recurrence in NumPy."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import ring
from jax.sharding import PartitionSpec as P
from linear_cases import limit

X = P(None, "context")
SEGMENT = 24


def reference(q, k, v, gate, m, z, segment, update, xp=np):
    """Returns out, M and z, segment by segment, in the types of the arrays.

    With ``xp`` jax.numpy it has derivatives.
    """
    group = q.shape[2] // k.shape[2]
    phi = lambda x: xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0)))  # noqa: E731
    repeated = lambda x, axis: xp.repeat(x, group, axis=axis)  # noqa: E731

    def recalled(rows, m, z):
        known = xp.einsum("bshd,bhd->bsh", phi(rows), z)[..., None]
        is_empty = known == 0
        found = xp.einsum("bshd,bhdv->bshv", phi(rows), m)
        return xp.where(is_empty, 0, found / xp.where(is_empty, 1, known))

    outs, weight = [], 1 / (1 + xp.exp(-gate))[:, None]
    for start in range(0, q.shape[1], segment):
        qs, ks, vs = (x[:, start : start + segment] for x in (q, k, v))
        size = qs.shape[1]
        seen = xp.where(np.arange(size)[:, None] >= np.arange(size), 0.0, -np.inf)
        scores = xp.einsum("bqhd,bkhd->bhqk", qs, repeated(ks, 2)) * q.shape[3] ** -0.5 + seen
        p = xp.exp(scores - scores.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        local = xp.einsum("bhqk,bkhd->bqhd", p, repeated(vs, 2))
        found = recalled(qs, repeated(m, 1), repeated(z, 1))
        if update == "delta":
            vs = vs - recalled(ks, m, z)
        outs.append(weight * found + (1 - weight) * local)
        m, z = m + xp.einsum("bkhd,bkhv->bhdv", phi(ks), vs), z + phi(ks).sum(1)
    return xp.concatenate(outs, 1), m, z


def inputs(world, segments=2, dtype=np.float32, heads=4, kv_heads=2):
    """Returns q, k, v, gate, M and z."""
    rows = (2, world * segments * SEGMENT)
    shapes = [(*rows, heads, 16), (*rows, kv_heads, 16), (*rows, kv_heads, 8), (heads,)]
    q, k, v, gate = ring.normal(world, *shapes, dtype=np.float32)
    m, z = ring.normal(7, (2, kv_heads, 16, 8), (2, kv_heads, 16), dtype=np.float32)
    return *(x.astype(dtype) for x in (q, k, v)), gate, m, np.abs(z) * 9


def sharded(mesh, **options):
    """Returns a function of the arrays of `inputs`, which returns out, M and z."""

    def local(q, k, v, gate, m, z):
        options.setdefault("segment_size", SEGMENT)
        out, (m, z) = ba.infini_attention(
            q, k, v, gate, axis_name="context", memory=(m, z), **options
        )
        return out, m, z

    specs = (X, X, X, P(), P(), P())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(X, P(), P())))


def near(got, want, bound):
    """Asserts that the relative errors of results are within a bound."""
    for x, y in zip(got, want, strict=True):
        y = np.asarray(y, np.float64)
        assert np.linalg.norm(np.asarray(x, np.float64) - y) <= limit(bound) * np.linalg.norm(y)


def assert_right(arrays, update, world=1, bounds=(2e-6, 1e-5), segment=SEGMENT):
    """Asserts that results and gradients have relative errors within two bounds."""
    exact = [np.float64(x) for x in arrays]
    want = reference(*exact, segment, update)
    function = sharded(ring.line(world), update=update, segment_size=segment)
    cotangents = ring.normal(5, *[np.shape(x) for x in want], dtype=np.float32)
    cotangents[0] = cotangents[0].astype(arrays[0].dtype)
    got, gradients = ring.gradients(function)(arrays, tuple(cotangents))
    near(got, want, bounds[0])
    with jax.enable_x64(True):
        exact = [jnp.asarray(x) for x in exact]
        pullback = jax.vjp(lambda *x: reference(*x, segment, update, jnp), *exact)[1]
        wanted = pullback(tuple(jnp.asarray(np.float64(x)) for x in cotangents))
    near(gradients, wanted, bounds[1])
