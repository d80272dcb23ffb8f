"""Sums over the ranks that one norm adds up become one: a meeting costs more than an addition."""

from __future__ import annotations

from dataclasses import replace

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
