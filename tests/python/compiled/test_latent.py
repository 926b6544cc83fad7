"""Latents and their gradients travel while ranks expand chunks and compute tiles."""

import re

import burst_attention as ba
import hlo
import jax
import jax.numpy as jnp
import programs
import pytest
import topology
from jax.sharding import PartitionSpec as P

RANKS, ROWS, HEADS = 8, 4096, 16
NOPE, ROPE, VALUE, COLUMNS = 128, 64, 128, 512


def expand(params, latent):
    columns, rope = latent[..., :COLUMNS], latent[..., None, COLUMNS:]
    key = jnp.einsum("bsc,chd->bshd", columns, params["key"])
    value = jnp.einsum("bsc,chd->bshd", columns, params["value"])
    rope = jnp.broadcast_to(rope, (*key.shape[:3], ROPE))
    return jnp.concatenate([key, rope], -1), value


def program(layout):
    """Returns the scheduled program of causal attention over latents, both passes."""
    mesh, rows = topology.mesh("H100", (("context", RANKS),)), P(None, "context")

    def local(query, latent, params):
        return ba.latent_attention(
            query, latent, expand, params, axis_name="context", is_causal=True, layout=layout
        )

    attend = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, P()), out_specs=rows)

    def run(query, latent, params, dout):
        out, pullback = jax.vjp(attend, query, latent, params)
        return out, pullback(dout)

    def placed(*shape, spec=rows):
        return programs.placed(mesh, shape, jnp.bfloat16, spec)

    seq = RANKS * ROWS
    params = {
        name: placed(COLUMNS, HEADS, columns, spec=P())
        for name, columns in (("key", NOPE), ("value", VALUE))
    }
    query, latent = placed(1, seq, HEADS, NOPE + ROPE), placed(1, seq, COLUMNS + ROPE)
    given = (query, latent, params, placed(1, seq, HEADS, VALUE))
    compiled = jax.jit(run).lower(*given).compile(compiler_options=programs.COMPILER)
    return hlo.Program(compiled.as_text())


def attends(program, instruction):
    """Whether an instruction is one of our calls, or has a branch with one."""
    names = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
    branches = re.findall(r"%([^\s,]+)", names[1]) if names else []
    inside = [x for name in branches for x in program.computations[name]]
    return any((x.target or "").startswith(hlo.OURS) for x in (instruction, *inside))


def exchanges(program, body):
    """Returns the types that each exchange sends, and whether a tile runs during the exchange.

    An exchange that is no pair of start and end has nothing beside it.
    """
    begun, started, found = 0, {}, []
    for x in body:
        if x.opcode == "collective-permute-start":
            started[x.name] = begun
        elif x.opcode.startswith("collective-permute"):
            beside = begun - started.pop(x.operands[0], begun)
            found.append(([each.dtype for each in x.results], beside > 0))
        begun += attends(program, x)
    return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_chunks_travel_while_tiles_are_computed(layout):
    of_layout = program(layout)
    found = {name: exchanges(of_layout, body) for name, body in of_layout.run.items()}
    entry = found.pop(of_layout.entry)
    # A loop for each pass: latents go on, and backward float32 gradients with them.
    assert sorted(found.values()) == [[(["bf16"], True)], [(["bf16", "f32"], True)]]
    # Before the loops latents of both passes, behind them gradients, which then go home.
    assert entry == [(["bf16"], True), (["f32"], True), (["bf16"], False)]
