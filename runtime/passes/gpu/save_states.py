"""Steps of prompts that save states on their way: a prompt need not end its step at the page behind
which its state is to be kept. The few tokens behind that page would cost a step more, for which all
experts cross to a GPU or are read by the CPU.

An op that keeps a state goes over a sequence's tokens in two launches, with a copy of the state to
another slot in between. Most sequences have no tokens behind it, and the second launch nothing to
do.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pykernels.errors import PykernelsError

from ...program import Buffer, Node, Program
from ...program.op_table.delta_nets import BY_TAIL
from ...program.ops import OPS
from ...program.step_inputs import STATE_SLOTS
from ..layers import rebuilt

_CPU = "cpu"


def refuse_saved(node: Node) -> None:
    """Raises PykernelsError if a node is to save states, on a device that does not."""
    if "saved_slots" in node.inputs:
        raise PykernelsError(
            f"{node.name} saves states on its way, which {node.device} does not",
            "Leave the pass save_states out, or keep it on a GPU",
        )


def save_states(program: Program) -> Program:
    """The program with ``BY_TAIL`` as inputs of all nodes on GPUs that keep states; itself if there
    are none."""
    inputs = {name: name for name in BY_TAIL}
    nodes = [
        replace(node, inputs={**node.inputs, **inputs})
        if node.device != _CPU and STATE_SLOTS in node.inputs and BY_TAIL[0] in OPS[node.op].inputs
        else node
        for node in program.nodes
    ]
    if nodes == [*program.nodes]:
        return program
    buffers = {name: Buffer(name, ("S",), torch.int64, "input") for name in BY_TAIL}
    return rebuilt(program, nodes, buffers)
