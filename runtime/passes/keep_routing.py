"""Keeps each token's experts after the step, so that the engine can tell which ones it used."""

from __future__ import annotations

from dataclasses import replace

from ..program import Node, Program
from .order import ordered


@ordered
def keep_routing(program: Program) -> Program:
    """The program with the choices of all its routers as further outputs."""
    kept = [name for node in routers(program) for name in node.outputs.values()]
    if not kept:
        return program
    buffers = {
        name: replace(buffer, kind="output") if name in kept else buffer
        for name, buffer in program.buffers.items()
    }
    return replace(program, buffers=buffers).check()


def routers(program: Program) -> tuple[Node, ...]:
    """The nodes that choose experts, in the order of their layers; not those of a shared expert,
    which every token takes."""
    return tuple(node for node in program.nodes if node.op == "router" and node.role != "shared")


def kept_routers(program: Program) -> tuple[Node, ...]:
    """Those whose choice is a result: on one of the ranks that choose alike."""
    return tuple(
        node for node in routers(program) if program.buffers[node.outputs["ids"]].kind == "output"
    )
