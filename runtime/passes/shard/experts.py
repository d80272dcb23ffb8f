"""Expert parallelism: each rank computes the experts that it has of what all ranks have routed.

All ranks have the same tokens and the same choice of experts. A table of a layer says which of its
experts a rank has; the others' sums come by a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from pykernels.errors import PykernelsError

from ...program import Buffer, Node, Program
from ...program.weight_spec import WeightSpec
from ..layers import rebuilt
from ..order import out_of_order
from .heads import all_reduced

ROUTED = ("routed", "deferred")


def experts_of_rank(rank: int, ranks: int, E: int, shares: Sequence[float] = ()) -> range:
    """The experts of a rank, of which every one has some.

    Args:
        shares: by rank, in proportion to which they are dealt; none: as even as they go.

    Raises:
        PykernelsError: more ranks than experts.
    """
    if ranks > E:
        raise PykernelsError(f"{ranks} ranks for {E} experts", f"Use at most {E} ranks")
    parts = shares or (1.0,) * ranks
    first, last = (r + round((E - ranks) * sum(parts[:r]) / sum(parts)) for r in (rank, rank + 1))
    return range(first, last)


def local_experts(program: Program, rank: int, ranks: int) -> Program:
    """The program with a rank's experts alone, whose sums are added over the ranks.

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
        new_nodes, part = local(program, node, rank, ranks, weights, buffers)
        nodes += [*new_nodes, all_reduced(node, part, node.outputs["out"], ranks)]
    return rebuilt(replace(program, weights=weights, rank=rank), nodes, buffers)


def refuse_placed(program: Program) -> None:
    """Raises PykernelsError for experts that are streamed, or in slots."""
    if fault := out_of_order("shard", program.passes):
        raise PykernelsError(f"{program.name!r}: {fault[0]}", fault[1])


def local(
    program: Program,
    node: Node,
    rank: int,
    ranks: int,
    weights: dict[str, WeightSpec],
    buffers: dict[str, Buffer],
    shares: Sequence[float] = (),
) -> tuple[Sequence[Node], str]:
    """What takes the place of a layer's experts on a rank, and the buffer of its partial sum.

    Args:
        weights, buffers: join those of the program.
        shares: see ``experts_of_rank``.
    """
    whole = program.weight(node, "experts")
    experts = whole.some(experts_of_rank(rank, ranks, whole.shape[0], shares))
    ids, out = node.inputs["ids"], node.outputs["out"]
    local_ids, remote_ids, table = (
        f"{node.name}.{name}" for name in ("local_ids", "remote_ids", "table")
    )
    part = f"{out}.rank{rank}"
    weights[experts.name] = experts
    like = replace(program.buffers[ids], kind="scratch")
    buffers |= {name: replace(like, name=name) for name in (local_ids, remote_ids)}
    buffers[table] = Buffer(table, (whole.shape[0],), torch.int32, "cache")
    buffers[part] = replace(program.buffers[out], name=part)
    router = program.writers[ids]
    place = Node(
        "place_routing",
        {"ids": ids, "slots": table},
        {"local_ids": local_ids, "remote_ids": remote_ids},
        device=router.device,
        name=f"{node.name}.place",
        layer=node.layer,
        role="router",
        microbatch=node.microbatch,
    )
    local_node = replace(
        node,
        inputs={**node.inputs, "ids": local_ids},
        outputs={"out": part},
        weights=MappingProxyType({"experts": experts.name}),
    )
    return (place, local_node), part
