"""Routed experts on another device (SOSP'25 3.3), the deferred ones with them.

Only the device of their nodes changes. ``partition`` then puts a submit where what they read is
written, and a wait in front of the first node that reads what they give. Everything between runs in
parallel: the shared experts, and with ``defer`` the whole of the next layer up to its own sum.
"""

from __future__ import annotations

from dataclasses import replace

from pykernels.errors import PykernelsError

from ..program import Program
from .layers import moe_layers
from .order import ordered

OFFLOADED = ("routed", "deferred")


@ordered
def offload(program: Program, device: str = "cpu") -> Program:
    """The program with its routed experts on ``device``.

    Raises:
        PykernelsError: it has none, or they are streamed.
    """
    if not moe_layers(program):
        raise PykernelsError(f"{program.name!r} has no routed experts", "Use it as it is")
    nodes = tuple(
        replace(node, device=device) if node.op == "moe_ffn" and node.role in OFFLOADED else node
        for node in program.nodes
    )
    return replace(program, nodes=nodes).check()
