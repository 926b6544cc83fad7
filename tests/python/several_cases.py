"""Problems that several processes and one must agree on: every schedule, feature and mesh once."""

from features import Problem

CASES = (
    Problem(mesh=(1, 8, 1), q_len=64, kv_len=64, causal=True, layout="zigzag", sinks=True),
    Problem(
        mesh=(1, 8, 1),
        inner=4,
        q_len=128,
        kv_len=128,
        dtype="bfloat16",
        layout="striped",
        backward="queries",
        segments="padded",
    ),
    Problem(mesh=(1, 8, 1), schedule="balanced", q_len=64, kv_len=64, causal=True, dropout=0.2),
    Problem(
        mesh=(2, 4, 1),
        schedule="all_gather",
        dtype="float16",
        window=(9, 2),
        slopes=True,
        soft_cap=2.0,
        value_dim=16,
    ),
    Problem(
        mesh=(1, 8, 1),
        inner=2,
        schedule="hybrid",
        q_len=64,
        kv_len=64,
        causal=True,
        layout="zigzag",
    ),
)
