"""A program for each of several ranks: tensor-parallel attention, expert-parallel experts."""

from __future__ import annotations

from dataclasses import replace

from pykernels.errors import PykernelsError

from ...program import Node, Program
from .experts import expert_tables, local_experts
from .heads import cut_heads

__all__ = ["expert_tables", "shard"]


def shard(program: Program, ranks: int) -> tuple[Program, ...]:
    """A program for each rank: all have all tokens, some heads of attention, and some experts of
    each layer. Rank 0 has the outputs.

    Raises:
        PykernelsError: fewer than one rank; more than there are heads or experts; what
            ``cut_heads`` and ``local_experts`` refuse.
    """
    if ranks < 1:
        raise PykernelsError(f"{ranks} ranks", "Use one or more")
    if ranks == 1:
        return (program,)
    found = [local_experts(cut_heads(program, r, ranks), r, ranks) for r in range(ranks)]
    return tuple(one if one.rank == 0 else without_outputs(one) for one in found)


def without_outputs(program: Program) -> Program:
    """The program without nodes that only serve its outputs: what is left writes caches, or meets
    other ranks."""
    kept: list[Node] = []
    read: set[str] = set()
    for node in reversed(program.nodes):
        lasting = any(program.buffers[name].kind == "cache" for name in node.writes)
        if lasting or "ranks" in node.attrs or "peer" in node.attrs or read & set(node.writes):
            kept.append(node)
            read |= set(node.reads)
    named = {name for node in kept for name in (*node.reads, *node.writes)}
    buffers = {
        name: replace(buffer, kind="scratch") if buffer.kind == "output" else buffer
        for name, buffer in program.buffers.items()
        if name in named
    }
    weights = {spec: program.weights[spec] for node in kept for spec in node.weights.values()}
    return replace(program, nodes=tuple(kept[::-1]), buffers=buffers, weights=weights).check()
