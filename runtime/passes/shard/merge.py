"""Sums over the ranks, as few as can be: a meeting costs more than an addition.

Sums that one norm adds up become one. A sum of a few rows needs no channels, where GPUs store their
parts in each other's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ...program import Buffer, Node, Program, repeated
from ...program.op_table.sandwich import NORMS
from ..layers import rebuilt


def merge_sums(program: Program) -> Program:
    """The program with one ``all_reduce`` in front of each norm, of the sum of what it adds up."""
    sums = {node.outputs["out"]: node for node in program.nodes if node.op == "all_reduce"}
    dropped: set[str] = set()
    behind: dict[str, tuple[Node, Node]] = {}  # by the sum that stands last: what takes its place
    buffers: dict[str, Buffer] = {}
    nodes: list[Node] = []
    for norm in program.nodes:
        adds = norm.series("add") if norm.op in NORMS else ()
        names = [name for name in adds if name in sums and len(program.readers(name)) == 1]
        if len(names) < 2:
            nodes.append(norm)
            continue
        own = [
            node for node in program.nodes if node.op == "all_reduce" and node.writes[0] in names
        ]
        last = own[-1]
        total = f"{last.name}.sum"
        buffers[total] = replace(program.buffers[last.reads[0]], name=total)
        parts = repeated("x", [sums[name].reads[0] for name in names])
        add = replace(last, op="add", inputs=parts, outputs={"out": total}, attrs={}, name=total)
        behind[last.name] = add, replace(last, inputs={"x": total})
        dropped |= {node.name for node in own[:-1]}
        left = [name for name in adds if name not in names or name == last.writes[0]]
        others = {port: name for port, name in norm.inputs.items() if name not in adds}
        nodes.append(replace(norm, inputs={**others, **repeated("add", left)}))
    every = [
        new for node in nodes if node.name not in dropped for new in behind.get(node.name, (node,))
    ]
    return rebuilt(program, every, buffers)


def one_shot_sums(program: Program, most: int) -> Program:
    """The program with ``one_shot_all_reduce`` where every one of several devices adds up what all
    of them have written, as ``join`` makes an all-reduce, unless somebody reads the sum rounded.

    Args:
        most: numbers of each device that go in one launch; 0: none do.
    """
    writers = {name: node.device for node in program.nodes for name in node.writes}
    rounded = {name for node in program.nodes for name in node.reads if name not in _added(node)}
    nodes = list(program.nodes)
    for i, first in enumerate(program.nodes):
        names = first.series("x") if first.op == "add" else ()
        members = tuple(writers.get(name, "") for name in names)
        group = program.nodes[i : i + len(names)]  # together, so that none waits for another first
        if not _meet(group, names, members) or math.prod(program.shape(names[0])) > most:
            continue
        if rounded.isdisjoint(node.outputs["out"] for node in group):
            attrs = MappingProxyType({"members": members})
            nodes[i : i + len(names)] = [
                replace(node, op="one_shot_all_reduce", inputs={"x": name}, attrs=attrs)
                for node, name in zip(group, names, strict=True)
            ]
    return replace(program, nodes=tuple(nodes))


def _added(node: Node) -> tuple[str, ...]:
    """What a node adds up, and takes in any precision."""
    if node.op == "add":
        return node.reads
    return node.series("add") if node.op in NORMS else ()


def _meet(group: Sequence[Node], names: Sequence[str], members: Sequence[str]) -> bool:
    """Whether each member adds up the same, one part of each."""
    alike = all(node.op == "add" and node.series("x") == names for node in group)
    apart = len(set(members)) == len(members) > 1
    return alike and apart and [node.device for node in group] == list(members)
