"""Rows of softmax attention: rings and layers against one launch, cuDNN and jax.nn."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import choices
from .choices import BOTH
from .library import AbsentError
from .problems import Rows, attention_of
from .race import FLOP, Contender, arrays_of, launch, pairs_of, ring

RING_BARS = dict(zip(FLOP, (1.12, 1.08), strict=True))
"""The largest ratio of a ring's time, on all its GPUs, to that of one launch."""
PRUNED = 3.0
"""The largest ratio of a window's share of the causal mask's time to its share of the pairs."""
WINDOW = 64
"""The part of the sequence that a window spans."""
DOCUMENT = 1024
"""Tokens of a packed document."""
PEAK_BARS = {"grouped": 14.0, "equal": 24.0}
"""The largest peak, as a multiple of one 16-bit tensor like q. With as many key/value heads as
query heads, inputs and results alone take 8, double-buffered float32 sums of dq, dk and dv take 12,
and travelling queries and dout take 4."""


class AttentionRows(Rows):
    """Rows of softmax attention."""

    def ring(self, **about: Any) -> dict[str, Any]:
        """Times rings against one launch, by own kernels and by cuDNN's."""
        one = replace(self._problem(**about), kernels="tile")
        theirs = replace(one, kernels="cudnn", order="any")
        arrays = arrays_of(one)
        contenders = {
            "ring": ring(one, arrays),
            "one launch": launch(one, arrays),
            "ring by cuDNN": _by_cudnn(one, "any", ring(theirs, arrays)),
            "one launch by cuDNN": _by_cudnn(one, "any", launch(theirs, arrays)),
        }
        return self._race(contenders, pairs_of(one), RING_BARS)

    def window(self) -> dict[str, Any]:
        """Times a ring with a window against the whole causal mask."""
        whole = self._problem("grouped", 8192, layout="contiguous")
        one = replace(whole, window=(whole.q_len // WINDOW, 0))
        arrays = arrays_of(one)
        contenders = {
            "with the window": ring(one, arrays),
            "whole causal mask": replace(ring(whole, arrays), restored=None),
            "one launch": launch(one, arrays),
        }
        bar = PRUNED * pairs_of(one) / pairs_of(whole)
        return self._race(contenders, pairs_of(one), dict.fromkeys(FLOP, bar))

    def layer(self, **about: Any) -> dict[str, Any]:
        """Times a layer on one device: what a user gets, each choice, and jax.nn by cuDNN."""
        one = self._layer_problem(**about)
        arrays = arrays_of(one)
        ours = partial(attention_of, arrays, is_causal=one.causal)
        # A trial run needs no cuDNN, and the stand-in takes minutes for XLA's own products.
        by = "xla" if self._quick else "cudnn"
        is_slow = self._quick and jax.default_backend() == "gpu"
        left_out = dict.fromkeys(FLOP, "a trial run leaves it out") if is_slow else {}
        peer, theirs = f"jax.nn by {by}", partial(jax.nn.dot_product_attention, implementation=by)
        contenders = {
            "ours": ours(),
            "own kernels": ours(kernels="tile", backward_order="fixed"),
            "own kernels, any order": replace(
                ours(kernels="tile", backward_order="any"),
                passes=(BOTH,),
                missing=choices.missing_of_fused(one),
            ),
            "cuDNN": _by_cudnn(one, "any", ours(kernels="cudnn", backward_order="any")),
            "cuDNN, fixed order": replace(
                _by_cudnn(one, "fixed", ours(kernels="cudnn", backward_order="fixed")),
                passes=(BOTH,),
            ),
            peer: replace(ours(attend=theirs), is_optional=True, missing=left_out),
        }
        return self._race(contenders, pairs_of(one), peer=peer)

    def packed(self, causal: bool = False, document: int = DOCUMENT) -> dict[str, Any]:
        """Times documents in one row; the same work in rows of their own bounds it from below."""
        one = self._problem("equal", 65536, ranks=1, causal=causal)
        length = one.q_len // 4 if self._quick else document
        arrays = arrays_of(one)
        ids = (jnp.arange(one.q_len, dtype=jnp.int32) // length)[None]
        apart = {name: x.reshape(-1, length, *x.shape[2:]) for name, x in arrays.items()}
        rows = replace(one, batch=one.q_len // length, q_len=length, kv_len=length)
        own = partial(attention_of, is_causal=causal, kernels="tile", backward_order="fixed")
        by_cudnn = partial(own, kernels="cudnn", backward_order="any")
        joined = partial(replace, restored=lambda x: x.reshape(1, -1, *x.shape[2:]))
        peer = "a row for each document"
        contenders = {
            "packed": own(arrays, segment_ids=ids),
            peer: joined(own(apart)),
            "one document": replace(own(arrays), restored=None),
            f"{peer}, by cuDNN": _by_cudnn(rows, "any", joined(by_cudnn(apart))),
        }
        share = length / one.q_len
        row = self._race(contenders, pairs_of(one) * share, peer=peer)
        for which, found in row["passes"].items():
            times = {name: each["ms"] for name, each in found["contenders"].items()}
            found["share"] = times["packed"] / times["one document"] / share
            row["shown"].append(f"{which}: {found['share']:.2f} × its share of one document")
        return row

    def mask(self) -> dict[str, Any]:
        """Times a causal mask as intervals, which are data, against the flag."""
        import burst_attention as ba

        one = self._layer_problem("equal", 8192)
        arrays = arrays_of(one)
        rows = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (one.batch, *x.shape[1:])),
            ba.masks.chunked(one.q_len, one.q_len).arguments,
        )
        contenders = {
            "as intervals": attention_of(arrays, **rows),
            "is_causal": attention_of(arrays, is_causal=True, kernels="tile"),
        }
        return self._race(contenders, pairs_of(one))

    def memory(self, heads: str, by: str) -> dict[str, Any]:
        """Compares the peak of both passes with one tensor like q."""
        one = self._problem(heads, 8192, None if by == "ring" else 1)
        arrays = arrays_of(one, is_random=False)
        contender = (ring if by == "ring" else launch)(one, arrays)
        unit = arrays["q"].nbytes / contender.devices
        del arrays
        jax.block_until_ready(contender.program("both")())
        peak = (jax.local_devices()[-1].memory_stats() or {}).get("peak_bytes_in_use")
        if peak is None:
            raise AbsentError("this device's allocator does not tell its peak")
        multiple, bar = peak / unit, PEAK_BARS[heads]
        shown = f"{peak / 2**30:.2f} GiB, {multiple:.1f} × one tensor like q, bar {bar:g}"
        missed = multiple > bar and not self._quick
        row = {"peak_bytes": peak, "multiple": multiple, "bar": bar}
        return row | {"shown": [shown], "wrong": ["it missed its bar"] * missed}


def _by_cudnn(one: Any, order: str, contender: Contender) -> Contender:
    """Returns a contender that takes part where cuDNN serves a problem."""
    return replace(contender, missing=choices.missing_of_cudnn(one, order), is_optional=True)
