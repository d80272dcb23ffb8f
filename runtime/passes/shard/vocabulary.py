"""The head of a model cut by rows (Megatron-LM, arXiv 1909.08053): each rank has some logits."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from pykernels.quant.layout import ceil_to

from ...program import Node, Program
from ...program.weight_shard import row_unit, shard_of
from ...program.weight_spec import RowRange
from ..layers import rebuilt


def cut_vocabulary(program: Program, rank: int, ranks: int) -> Program:
    """The program with a rank's rows of the head, which is the linear outside the layers; a head of
    fewer blocks than ranks stays whole."""
    head = next(node for node in program.nodes if node.op == "linear" and node.layer is None)
    spec = program.weight(head, "weight")
    V, unit = spec.shape[0], row_unit(spec.fmt)
    blocks = ceil_to(V, unit) // unit
    if blocks < ranks:
        return program
    starts = tuple(min(V, blocks * r // ranks * unit) for r in range(ranks + 1))
    ranges = [RowRange(starts[rank], starts[rank + 1])]
    shards = {port: shard_of(program.weight(head, port), ranges) for port in head.weights}
    out = head.outputs["out"]
    part = f"{out}.rank{rank}"
    logits = program.buffers[out]
    width = starts[rank + 1] - starts[rank]
    buffers = {part: replace(logits, name=part, shape=(logits.shape[0], width), kind="scratch")}
    cut = replace(head, outputs={"out": part}, weights={p: spec.name for p, spec in shards.items()})
    gather = Node(
        "gather_columns",
        {"x": part},
        {"out": out},
        attrs=MappingProxyType({"ranks": tuple(range(ranks)), "starts": starts}),
        device=head.device,
        name=f"{head.name}.gather",
    )
    nodes = [new for node in program.nodes for new in ([cut, gather] if node is head else [node])]
    weights = {**program.weights, **{spec.name: spec for spec in shards.values()}}
    return rebuilt(replace(program, weights=weights, rank=rank), nodes, buffers)
