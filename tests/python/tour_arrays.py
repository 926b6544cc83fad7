"""The arrays of the tour of the public interface, by name, and how they are sharded."""

from functools import cache

import burst_attention as ba
import jax
import numpy as np
import ring
from jax.sharding import PartitionSpec as P

AXES = ("data", "context")
ROWS = P(*AXES)
"""Batch and sequence are sharded."""
LONG = P(None, AXES)
"""The sequence is sharded over both axes."""
BATCH, SEQ, HEADS, KV_HEADS, DIM = 2, 16, 4, 2, 8
QKV = ("query", "key", "value")
ODD = ("odd_query", "odd_key", "odd_value")
TOKEN = ("token", "new_key", "new_value")
CACHES = ("key_cache", "value_cache")
PREFIXES = ("prefix_key", "prefix_value")
PAGES = ("key_pages", "value_pages")
SPECS = {
    **dict.fromkeys(("sinks", "alibi_slopes", "decay", "gate", "dropout_key", "cu_seqlens"), P()),
    **dict.fromkeys(("own_lengths", "lengths", "query_offset", "prefix_of"), P("data")),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), P("data")),
    **dict.fromkeys(("initial_state", "memory", *TOKEN, *ODD), P("data")),
    **dict.fromkeys((*PREFIXES, "page_table"), P(None, "context")),
    **dict.fromkeys(PAGES, P("context")),
    "prefix_lengths": P(),
    "mask": P("data", None, None, "context"),
}
"""How arrays are sharded that are not sharded as rows."""
TRAINED = {
    *(*QKV, *ODD, *TOKEN, *CACHES, "sinks", "alibi_slopes", "decay", "log_decay"),
    *("beta", "channels", "gate", "memory", "initial_state", "out", "lse"),
}
"""The arrays whose gradients calls return."""


def specs_of(names, rows=ROWS):
    """Returns how some arrays are sharded."""
    return {name: SPECS.get(name, rows) for name in names}


@cache
def arrays():
    """Returns every array of the tour by name, on the host."""
    rows, keys, one = ((BATCH, n, h, DIM) for n, h in ((SEQ, 4), (SEQ, 2), (1, 2)))
    shapes = {
        "query": rows,
        "key": keys,
        "value": keys,
        "out": rows,
        "lse": rows[:3],
        "key_cache": keys,
        "value_cache": keys,
        "new_key": one,
        "new_value": one,
        **dict.fromkeys(PREFIXES, (1, *keys[1:])),
        **dict.fromkeys(PAGES, (8, 4, KV_HEADS, DIM)),
        "token": (BATCH, 1, HEADS, DIM),
        "initial_state": (BATCH, HEADS, DIM, DIM),
        "log_decay": rows[:3],
        "beta": rows[:3],
        "channels": rows,
        "gate": (HEADS,),
        "sinks": (HEADS,),
        "alibi_slopes": (HEADS,),
    }
    found = dict(zip(shapes, ring.normal(0, *shapes.values()), strict=True))
    found |= {odd: found[name][:, 1:] for odd, name in zip(ODD, QKV, strict=True)}
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ))
    mask = ba.masks.block_causal([[9, 5]] * BATCH, 3, seq_len=SEQ)
    assert isinstance(mask, ba.masks.Mask)
    integers = {
        "blocks": np.arange(SEQ).reshape(4, 4)[[1, 3, 0, 2]].reshape(-1)[None].repeat(BATCH, 0),
        "segment_ids": np.where(positions < 5, 0, np.where(positions < 13, 1, -1)),
        "query_positions": positions[:, ::-1],
        "key_positions": positions[:, ::-1],
        "lengths": np.array([11, 3]),
        "own_lengths": np.array([4, 2]),
        "query_offset": np.array([3, 1]),
        "query_seq_lengths": np.array([12, 7]),
        "key_value_seq_lengths": np.array([9, 16]),
        "prefix_of": np.zeros(BATCH),
        "prefix_lengths": np.array([7]),
        "page_table": np.array([[1, 0, 0, 1], [2, 3, 3, 2]]),
        "cu_seqlens": np.array([0, 5, 13]),
    }
    return (
        found
        | {name: x.astype(np.int32) for name, x in integers.items()}
        | {
            "log_decay": -np.abs(found["log_decay"]),
            "channels": -np.abs(found["channels"]),
            "memory": (
                found["initial_state"][:, :KV_HEADS],
                np.ones(keys[:1] + keys[2:], np.float32),
            ),
            "decay": np.array([0, 0.5, 0.9, 1], np.float32),
            "visible": (mask.start, mask.stop),
            "mask": (positions < 12)[:, None, None],
            "dropout_key": jax.random.key(7),
        }
    )
