"""A program for each of several ranks: tensor-parallel attention and expert-parallel experts, or
stripes of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pykernels.errors import PykernelsError

from ...program import Node, Program
from ...program.step_inputs import STATE_SLOTS
from ..gpu.metadata import with_latents_apart
from .all_to_all import all_to_all
from .experts import local_experts
from .gathered import Gathered
from .heads import cut_heads
from .join import join, replica, with_replicas
from .meetings import check_meetings, sent_bytes
from .merge import merge_sums
from .mlp import cut_mlps
from .ring import Ring
from .small_ep import small_ep
from .striped import Stripe, striped
from .vocabulary import cut_vocabulary

__all__ = [
    "ATTENTION",
    "EXPERTS",
    "join",
    "replica",
    "sent_bytes",
    "shard",
    "stripe",
    "with_replicas",
]


def shard(program: Program, ranks: int, heads: bool = True) -> tuple[Program, ...]:
    """A program for each rank, all of which have all tokens: each has some heads of attention,
    some experts and a part of the MLPs of each layer, and some logits. Rank 0 has the outputs.

    Args:
        heads: False: every rank has all heads, and keys and values of all.

    Raises:
        PykernelsError: fewer than one rank; layers with a state; more than there are heads or
            experts; what ``cut_heads`` and ``local_experts`` refuse.
    """
    if _alone(program, ranks):
        return (program,)
    return _with_one_output([_shard(program, r, ranks, heads) for r in range(ranks)])


def _shard(program: Program, rank: int, ranks: int, heads: bool) -> Program:
    """Every pass that cuts something, then one sum where several are added."""
    if heads:
        program = cut_heads(program, rank, ranks)
    for cut in (cut_mlps, local_experts, cut_vocabulary):
        program = cut(program, rank, ranks)
    return merge_sums(program)


EXPERTS: Mapping[str, Callable[[Program, int, int, Sequence[float]], Program]] = {
    "small_ep": small_ep,
    "all_to_all": all_to_all,
}
"""How ranks with tokens of their own share experts."""


ATTENTION: Mapping[str, Callable[[Program, int, int], Stripe]] = {
    "ring": Ring,
    "gather": Gathered,
}
"""How their tokens attend to those of others."""


def stripe(
    program: Program,
    ranks: int,
    experts: str = "small_ep",
    attention: str = "ring",
    shares: Sequence[float] = (),
) -> tuple[Program, ...]:
    """A program for each rank, each of which has some of the tokens, for all layers; and some
    experts of each layer, for all tokens. Rank 0 has the outputs.

    Args:
        program: where GPUs are to run it, its nodes are placed.
        experts: of ``EXPERTS``; ``attention``: of ``ATTENTION``.
        shares: of the experts, by rank (``experts_of_rank``).

    Raises:
        PykernelsError: fewer than one rank; layers with a state; more than there are experts; what
            ``striped`` and the form of ``experts`` refuse.
    """
    for what, given, known in (("experts", experts, EXPERTS), ("attention", attention, ATTENTION)):
        if given not in known:
            raise PykernelsError(f"no {what} {given!r}", f"Use {' or '.join(known)}")
    if _alone(program, ranks):
        return (program,)
    rewrite, form = EXPERTS[experts], ATTENTION[attention]
    program = with_latents_apart(program)  # their rows cross as they lie in caches
    return _with_one_output(
        [rewrite(striped(program, r, ranks, form), r, ranks, shares) for r in range(ranks)]
    )


def _alone(program: Program, ranks: int) -> bool:
    if ranks < 1:
        raise PykernelsError(f"{ranks} ranks", "Use one or more")
    if ranks > 1 and any(STATE_SLOTS in node.inputs for node in program.nodes):
        raise PykernelsError(
            f"{program.name!r} has layers with a state, which {ranks} ranks cannot share",
            "Use one rank",
        )
    return ranks == 1


def _with_one_output(programs: list[Program]) -> tuple[Program, ...]:
    by_rank = tuple(own if own.rank == 0 else without_outputs(own) for own in programs)
    check_meetings(by_rank)
    return by_rank


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
