"""Infini-attention: softmax attention within segments, and a memory of all segments before.

Source: Munkhdalai et al. 2024, arXiv:2404.07143.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from burst_attention import _checks, _mesh
from burst_attention._attention.arguments import cast
from burst_attention._attention.options import AnyArray, check_options
from burst_attention._attention.placement import checked_spec, find_mesh, find_placement
from burst_attention._batching import explained_vmaps
from burst_attention._infini.segments import FeatureMap, Memory, Settings, Update
from burst_attention._infini.shards import Inputs, attend
from burst_attention._linear.checks import no_placement
from burst_attention._types import AnyMesh, Axes, Three

SHAPES = {
    "query": "batch q_len heads",
    "key": "batch q_len kv_heads",
    "value": "batch q_len kv_heads",
    "gate": "heads",
    "m": "batch kv_heads",
    "z": "batch kv_heads",
    "local_query": "batch q_len heads",
    "local_key": "batch q_len kv_heads",
}
"""The first dimensions of the arrays of `Inputs`, in the names of a `Placement`."""


def infini_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    gate: Float[AnyArray, " heads"],
    *,
    segment_size: int,
    axis_name: str | Axes | None = None,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    update: Update = "linear",
    memory: Memory | None = None,
    feature_map: FeatureMap = "elu",
    scale: float | None = None,
    local_query: Float[Array, "batch seq heads head_dim"] | None = None,
    local_key: Float[Array, "batch seq kv_heads head_dim"] | None = None,
) -> tuple[jax.Array, Memory]:
    """Infini-attention over a sequence that is sharded: of one device's tokens, or of all tokens.

    The sequence is cut into segments s of ``segment_size`` tokens. A token's output is a mix of
    causal softmax attention within its segment and of what it finds in the memory (M, z) of all
    segments before. With σ = ``feature_map``, by default ELU + 1::

        A_mem = σ(Q_s) M_(s−1) / (σ(Q_s) z_(s−1))                    0 where z is 0
        out   = sigmoid(gate) · A_mem + (1 − sigmoid(gate)) · A_softmax
        z_s   = z_(s−1) + Σ σ(K_s)
        M_s   = M_(s−1) + σ(K_s)ᵀ V_s                                 update="linear"
        M_s   = M_(s−1) + σ(K_s)ᵀ (V_s − σ(K_s) M_(s−1) / (σ(K_s) z_(s−1)))     "delta"

    Source: Munkhdalai et al. 2024, arXiv:2404.07143. A memory of fixed size forgets: quality falls
    as more segments are added (docs/linear-attention.md).

    Inside ``jax.shard_map`` along ``axis_name``, arrays are this device's shards, consecutive parts
    of the sequence. Everywhere else they are global arrays: as in `dot_product_attention`, their
    types say mesh, spec and axis_name where mesh axes are Explicit, and Auto meshes need ``spec``.
    Each rank sends its z and M, whatever the length. With ``update="delta"`` it also sends what its
    tokens do to M, ``batch · kv_heads · head_dim²`` floats. Sums are float32. With
    float16, σ and the memory have float16's digits and float32's range. Reverse-mode derivatives
    with respect to all arrays.

    Args:
      query: ``[batch, seq, heads, head_dim]``: bfloat16, float16 or float32; head_dim up to 256.
      key: ``[batch, seq, kv_heads, head_dim]``, of query's dtype; kv_heads divides heads.
      value: ``[batch, seq, kv_heads, value_dim]``; value_dim up to 256.
      gate: floats ``[heads]``, cast to float32.
      segment_size: tokens of a segment. It must divide the tokens of each rank. On one rank a text
        may also be shorter than a segment, such as the last piece of a long text.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner).
      mesh: for global arrays; default: the mesh of the arrays, or of ``jax.set_mesh``.
      spec: for global arrays, the sharding of query, key and value.
      update: how a segment changes the memory. ``delta`` adds only the part of a value that its key
        does not find in the memory.
      memory: M, floats ``[batch, kv_heads, head_dim, value_dim]``, and z, floats ``[batch,
        kv_heads, head_dim]``, of the text before, the same on every rank; default zeros.
      feature_map: σ: ``elu`` for ELU + 1, or a function that the call applies to query and to key,
        float32 ``[batch, seq, heads, head_dim]``, once each. It treats tokens and heads one by one,
        and its results have the same shape and are not negative. Arrays of its surroundings get
        gradients too. Its results are arrays of the whole length, which ``elu`` does not keep.
      scale: factor on the scores of the softmax, default head_dim ** -0.5.
      local_query, local_key: query and key of the softmax attention, such as with rotary
        embeddings, which the memory must not have; default: query and key.

    Returns:
      ``out``, ``[batch, seq, heads, value_dim]`` in query's dtype, and the memory after all tokens,
      ``(M, z)``, float32, the same on all ranks: the next piece of the text takes it.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    settings = _settings(segment_size, update, feature_map, scale)
    inputs = _inputs(_checks.arrays(query, key, value), gate, memory, (local_query, local_key))
    if callable(feature_map):
        inputs = _with_features(feature_map, inputs)
    axes = _mesh.axes_inside("infini_attention", axis_name)
    if axes is not None:
        no_placement("infini_attention", mesh=mesh, spec=spec)
        _mesh.all_axes_manual(_mesh.ring_mesh(axes, "infini_attention"), *inputs[:3])
        return attend(axes, settings, inputs)
    found = find_mesh(mesh, inputs.query, "infini_attention")
    ring = None if axis_name is None else _mesh.ring_axes(axis_name)
    with explained_vmaps():
        results: tuple[jax.Array, Memory] = _on_shards(
            found, checked_spec(spec), ring, settings, inputs
        )
    return results


def _settings(segment_size: object, update: object, feature_map: object, scale: object) -> Settings:
    size = _checks.at_least_1("segment_size", segment_size)
    if not callable(feature_map) and feature_map != "elu":
        raise ValueError(f"feature_map must be 'elu' or a function of arrays, got {feature_map!r}")
    options = check_options("infini_attention", {"is_causal": True, "scale": scale})
    chosen = _checks.choice("update", update, get_args(Update))
    return Settings(size, chosen, None if callable(feature_map) else "elu", options)


def _inputs(qkv: Three, gate: object, memory: object, local: Sequence[object]) -> Inputs:
    q, k, v = qkv
    shape = (k.shape[0], *k.shape[2:], v.shape[3])
    if memory is None:
        before = jnp.zeros(shape, jnp.float32), jnp.zeros(shape[:3], jnp.float32)
    elif isinstance(memory, tuple | list) and len(memory) == 2:
        before = (
            _float32("memory[0]", memory[0], shape, "[batch, kv_heads, head_dim, value_dim]"),
            _float32("memory[1]", memory[1], shape[:3], "[batch, kv_heads, head_dim]"),
        )
    else:
        raise TypeError(
            "memory must be a pair of arrays (M, z), as infini_attention returns it, got "
            f"{_checks.describe(memory)}"
        )
    local_q, local_k = (
        None
        if x is None
        else _checks.shaped(f"local_{name}", x, str(like.dtype), like.shape, words)
        for name, x, like, words in zip(
            ("query", "key"), local, (q, k), ("that of query", "that of key"), strict=True
        )
    )
    gate = _float32("gate", gate, q.shape[2:3], "[heads]")
    return Inputs(q, k, v, gate, *before, local_q, local_k)


def _with_features(feature_map: Callable[[jax.Array], object], inputs: Inputs) -> Inputs:
    """Returns inputs whose query and key are features, those of the softmax attention as before."""
    local = inputs.local_query, inputs.local_key
    q, k = (
        _float32(
            f"feature_map({name})", feature_map(x.astype(jnp.float32)), x.shape, f"that of {name}"
        )
        for name, x in (("query", inputs.query), ("key", inputs.key))
    )
    local_q, local_k = (
        x if y is None else y for x, y in zip((inputs.query, inputs.key), local, strict=True)
    )
    return inputs._replace(query=q, key=k, local_query=local_q, local_key=local_k)


def _float32(name: str, value: object, shape: tuple[int, ...], words: str) -> jax.Array:
    found = cast(name, "element", value, "float32")
    return _checks.shaped(name, found, "float32", shape, words)


# Outside jit, a call with equal settings and types runs the program of the call before it.
@partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _on_shards(
    mesh: AnyMesh,
    spec: PartitionSpec | None,
    axis_name: Axes | None,
    settings: Settings,
    inputs: Inputs,
) -> tuple[jax.Array, Memory]:
    """Returns the results for global arrays."""
    placement = find_placement(mesh, spec, axis_name, *inputs[:3])
    specs = {name: placement.spec(shape) for name, shape in SHAPES.items()}
    for name, argument in (("gate", "gate"), ("m", "memory[0]"), ("z", "memory[1]")):
        x = getattr(inputs, name)
        names = SHAPES[name].split() + ["columns"] * x.ndim
        specs[name] = placement.spec_of(argument, x, " ".join(names[: x.ndim]))

    def local(arrays: dict[str, jax.Array]) -> tuple[jax.Array, Memory]:
        (batch, _, heads, _), kv_heads = arrays["query"].shape, arrays["key"].shape[2]
        lengths = {"batch": batch, "heads": heads, "kv_heads": kv_heads}
        for name in ("gate", "m", "z"):
            arrays[name] = placement.own_part(arrays[name], SHAPES[name], lengths)
        whole = () if placement.axes["kv_heads"] else placement.axes["heads"]
        own_heads = partial(placement.own_heads, name="kv_heads")
        return attend(placement.ring_axes, settings, Inputs(**arrays), whole, own_heads)

    memory = placement.spec("batch kv_heads")
    out_specs = specs["query"], (memory, memory)
    return placement.on_shards(local, (specs,), out_specs)(inputs._asdict())
