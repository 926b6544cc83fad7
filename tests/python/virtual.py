"""The virtual ring: all ranks of a ring on one GPU, one custom call for each pass.

The library has the calls, and this module registers them. An array holds the ranks' shards one
after another, ``[world_size, batch, seq of a rank, …]``.
"""

import ctypes
from functools import cache, partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
from burst_attention import _ffi, _library
from burst_attention._attention.options import NO_LIMIT

STAGES = ("instantiate", "initialize", "execute")
ROWS = ("q", "k", "v", "dout", "dlse", "q_segments", "kv_segments")
"""The arrays that are cut into shards, in the order of the calls."""


@cache
def register():
    """Registers the calls with XLA."""
    library = ctypes.CDLL(str(_library.LIBRARY))
    for which in ("forward", "backward"):
        target = f"burst_attention_virtual_{which}"
        stages = {x: jax.ffi.pycapsule(getattr(library, f"{target}_{x}")) for x in STAGES}
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")


def is_possible(one):
    """Whether the calls compute a `features.Problem`; sinks are added to their results."""
    is_data = one.visible or one.positions or one.offset
    return not one.sinks and not is_data and one.schedule not in ("ulysses", "hybrid")


def stacked(one, x):
    """Returns the shards of an array ``[batch, seq, …]`` in the order of the sequence."""
    size = one.mesh[1]
    x = ba.to_layout(x, size, one.layout)
    return x.reshape(x.shape[0], size, -1, *x.shape[2:]).swapaxes(0, 1)


def restored(one, shards):
    """Inverts `stacked`."""
    x = shards.swapaxes(0, 1)
    return ba.from_layout(x.reshape(x.shape[0], -1, *x.shape[3:]), one.mesh[1], one.layout)


def operands(one, arrays):
    """Returns a problem's arrays as `forward` and `both` take them."""
    found = [stacked(one, arrays[name]) for name in ROWS if name in arrays]
    size = one.mesh[1]
    if one.slopes:
        found.append(np.broadcast_to(arrays["alibi_slopes"], (size, one.batch, one.heads)))
    if one.dropout:
        entries = np.arange(one.batch, dtype=np.uint32)
        words = [np.full_like(entries, word) for word in arrays["dropout_key"]]
        each = np.stack([*words, entries, np.zeros_like(entries)], axis=1)
        found.append(np.broadcast_to(each, (size, *each.shape)))
    return found


def forward(one, q, k, v, *features):
    """Returns o and lse."""
    o = jax.ShapeDtypeStruct((*q.shape[:4], v.shape[4]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:4], jnp.float32)
    return _call(one, "forward", [o, lse], (q, k, v, *features))


def both(one, q, k, v, dout, dlse, *features, order=None):
    """Returns o, lse, dq, dk and dv, and with slopes each query's part of dslopes."""
    o, lse = forward(one, q, k, v, *features)
    given, zeros = (q, k, v, o, lse, dout, dlse, *features), ()
    if one.slopes:
        # The call adds to them.
        zeros = (jnp.zeros(lse.shape, jnp.float32),)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, *zeros)]
    aliases = {len(given) + i: 3 + i for i in range(len(zeros))}
    return o, lse, *_call(one, "backward", results, (*given, *zeros), order, aliases)


def found(one, arrays, order=None):
    """Returns a problem's results and gradients by name, as `features.Problem.found` does."""
    run = jax.jit(partial(both, one, order=order))
    *rows, dslopes = [*map(np.asarray, run(*operands(one, arrays))), None][:6]
    named = dict(zip(("o", "lse", "dq", "dk", "dv"), rows, strict=True))
    named = {name: restored(one, x) for name, x in named.items()}
    return named | ({} if dslopes is None else {"dslopes": dslopes.sum((0, 1, 2))})


def _call(one, which, results, given, order=None, aliases=None):
    register()
    size, scale = one.mesh[1], np.float32(one.head_dim**-0.5)
    options, sums = _options(one), {"backward": one.backward}
    sums["backward_order"] = order or one.order or platforms.order()
    left = "cudnn" if platforms.has_cudnn() else "tile"
    kernels = {"kernels": left if one.kernels == "auto" else one.kernels}
    q, k, v = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in given[:3])
    needed = _ffi.workspace_bytes(
        **{"pass": which, "softmax_scale": float(scale), "layout": one.layout},
        **_ffi.shapes(q, k, v),
        **sums,
        **kernels,
        world_size=size,
        options={name: np.asarray(value).item() for name, value in options.items()},
    )
    call = jax.ffi.ffi_call(
        f"burst_attention_virtual_{which}",
        [*results, jax.ShapeDtypeStruct((size * needed,), jnp.uint8)],
        input_output_aliases=aliases,
    )
    attributes = {"world_size": np.int64(size), "layout": one.layout, "softmax_scale": scale}
    attributes |= {"axis_name": "context"} | kernels
    if which == "backward":
        attributes |= sums | {"lse_gradient": one.has_lse}
    return call(*given, **attributes, **options)[:-1]


def _options(one):
    """Returns mask and features as the calls' attributes."""
    left, right = one.window or (NO_LIMIT, NO_LIMIT)
    features = {
        "query_segment_ids": one.segments,
        "key_segment_ids": one.segments,
        "alibi_slopes": one.slopes,
        "dropout": one.dropout,
    }
    return {
        "window_left": np.int64(left),
        "window_right": np.int64(0 if one.causal else right),
        "logits_soft_cap": np.float32(one.soft_cap or 0),
        "dropout_rate": np.float32(one.dropout),
        "feature_operands": ",".join(name for name, there in features.items() if there),
        "schedule": "double_ring" if one.inner else one.schedule.replace("auto", "ring"),
        "inner_size": np.int64(one.inner),
    }
