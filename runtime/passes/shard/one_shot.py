"""Sums of a few rows over GPUs without channels: each GPU stores its part in the others' memory."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from ...program import Node, Program


def one_shot_sums(program: Program, most: int) -> Program:
    """The program with ``one_shot_all_reduce`` where every one of several devices adds up what all
    of them have written, as ``join`` leaves an all-reduce.

    Args:
        most: numbers of each device that go in one launch.
    """
    writers = {name: node.device for node in program.nodes for name in node.writes}
    nodes = list(program.nodes)
    for i, first in enumerate(program.nodes):
        names = first.series("x") if first.op == "add" else ()
        members = tuple(writers.get(name, "") for name in names)
        group = program.nodes[i : i + len(names)]  # together, so that none waits for another first
        if not _meet(group, names, members):
            continue
        if math.prod(program.shape(names[0])) <= most:
            attrs = MappingProxyType({"members": members})
            nodes[i : i + len(names)] = [
                replace(node, op="one_shot_all_reduce", inputs={"x": name}, attrs=attrs)
                for node, name in zip(group, names, strict=True)
            ]
    return replace(program, nodes=tuple(nodes)).check().rewritten_by("one_shot_sums")


def _meet(group: tuple[Node, ...], names: tuple[str, ...], members: tuple[str, ...]) -> bool:
    """Whether each member adds up the same, one part of each."""
    alike = all(node.op == "add" and node.series("x") == names for node in group)
    apart = len(set(members)) == len(members) > 1
    return alike and apart and tuple(node.device for node in group) == members
