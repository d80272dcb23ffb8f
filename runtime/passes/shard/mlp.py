"""Tensor-parallel MLPs: what every token passes through, cut along its intermediate size.

Gate and up are cut by rows and down by columns, so that each rank's result is a part of the sum.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from pykernels.quant.layout import ceil_to

from ...program import Buffer, Node, Program
from ...program.weight_shard import input_unit, row_unit, shard_of
from ...program.weight_spec import RowRange, WeightSpec
from ..layers import rebuilt
from .heads import all_reduced


def cut_mlps(program: Program, rank: int, ranks: int) -> Program:
    """The program with a rank's part of each dense MLP and of shared experts, whose results are
    summed over the ranks; an MLP of fewer blocks than ranks stays whole on each."""
    nodes: list[Node] = []
    weights = dict(program.weights)
    buffers: dict[str, Buffer] = {}
    for node in program.nodes:
        span = None
        if node.op == "moe_ffn" and node.role in ("dense", "shared"):
            span = _span(program.weight(node, "experts"), rank, ranks)
        if span is None:
            nodes.append(node)
            continue
        shard = shard_of(program.weight(node, "experts"), [RowRange(*span)])
        out = node.outputs["out"]
        part = f"{out}.rank{rank}"
        weights[shard.name] = shard
        buffers[part] = replace(program.buffers[out], name=part)
        cut = MappingProxyType({"experts": shard.name})
        nodes.append(replace(node, outputs={"out": part}, weights=cut))
        nodes.append(all_reduced(node, part, out, ranks))
    return rebuilt(replace(program, weights=weights, rank=rank), nodes, buffers)


def _span(spec: WeightSpec, rank: int, ranks: int) -> tuple[int, int] | None:
    """A rank's share of the intermediate size, in blocks of both formats; None: it is not cut."""
    I, unit = spec.shape[2], max(row_unit(spec.fmt), input_unit(spec.down_fmt))  # noqa: E741
    blocks = ceil_to(I, unit) // unit
    if blocks < ranks:
        return None
    first, last = (min(I, blocks * r // ranks * unit) for r in (rank, rank + 1))
    return first, last
