"""Expert parallelism as large machines have it (GShard, arXiv 2006.16668; OSDI'26 Figure 6a).

Each rank gates its own tokens; for every expert that a token takes its row is sent to the rank that
has the expert, and what the expert makes of it is sent back. So 2 N A H / S numbers cross between
two of S ranks, with A experts of a token: more than SmallEP's where S is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...program import Buffer, Node, Program
from ..layers import rebuilt
from .experts import ROUTED, experts_of_rank, refuse_placed


def all_to_all(program: Program, rank: int, ranks: int, shares: Sequence[float] = ()) -> Program:
    """The program of a rank's tokens with its experts for the rows that are sent to it.

    Args:
        shares: see ``experts_of_rank``.

    Raises:
        PykernelsError: more ranks than experts; experts that are streamed, or in slots.
    """
    refuse_placed(program)
    nodes: list[Node] = []
    weights = dict(program.weights)
    buffers: dict[str, Buffer] = {}
    for node in program.nodes:
        if node.op != "moe_ffn" or node.role not in ROUTED:
            nodes.append(node)
            continue
        whole = program.weight(node, "experts")
        E, H, _ = whole.shape
        experts = whole.some(experts_of_rank(rank, ranks, E, shares))
        weights[experts.name] = experts
        ids, x = (program.buffers[node.inputs[port]] for port in ("ids", "x"))
        rows = ranks * math.prod(program.shape(ids.name))  # all of them may choose this rank's
        for name, own in {
            "rows": replace(x, shape=(rows, H)),
            "received_ids": replace(ids, shape=(rows, 1)),
            "factors": Buffer("", (rows, 1)),
            "counts": replace(ids, shape=(ranks,)),
            "made": replace(program.buffers[node.outputs["out"]], shape=(rows, H)),
        }.items():
            label = f"{node.name}.{name}"
            buffers[label] = replace(own, name=label, kind="scratch")
        starts = (*(experts_of_rank(r, ranks, E, shares).start for r in range(ranks)), E)
        nodes += _nodes(node, experts.name, ranks, starts)
    return rebuilt(replace(program, weights=weights, rank=rank), nodes, buffers)


def _nodes(node: Node, experts: str, ranks: int, starts: tuple[int, ...]) -> list[Node]:
    """Sends, computes, and sends back."""
    names = {
        name: f"{node.name}.{name}"
        for name in ("rows", "received_ids", "factors", "counts", "made")
    }
    attrs: dict[str, Any] = {"ranks": tuple(range(ranks)), "starts": starts}
    meeting = replace(node, weights={}, attrs=MappingProxyType(attrs))
    sent = {name: names[name] for name in ("rows", "received_ids", "factors", "counts")}
    return [
        replace(meeting, op="dispatch", outputs=sent, name=f"{node.name}.dispatch"),
        replace(
            node,
            inputs={"x": names["rows"], "ids": names["received_ids"], "weights": names["factors"]},
            outputs={"out": names["made"]},
            weights=MappingProxyType({"experts": experts}),
        ),
        replace(
            meeting,
            op="combine",
            inputs={"rows": names["made"], "ids": node.inputs["ids"], "counts": names["counts"]},
            name=f"{node.name}.combine",
        ),
    ]
