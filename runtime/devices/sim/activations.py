"""What activations take of a GPU's memory: a prompt's are read there and written there, node by
node."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...program import Node, Program
from ...program.analysis import experts_per_token


def activation_bytes(
    node: Node, program: Program, whole: Program, filled: float, parts: Mapping[str, float]
) -> float:
    """Bytes of a step's activations that a node reads and writes.

    Rows of routed experts are sorted by expert, and their outputs added up, by kernels of their
    own: a row of each pair of a token and an expert is written and read again.

    Args:
        whole: the program that ``program`` is a part of.
        filled: the part of its tokens that the step has.
        parts: of buffers of which not all is used, by name.
    """
    names = (*node.reads, *node.writes)
    total = sum(_bytes(program, name, filled) * parts.get(name, 1.0) for name in names)
    if node.op == "moe_ffn" and "ids" in node.inputs:
        pairs = experts_per_token(whole, node.inputs["ids"])
        total += 2 * pairs * _bytes(program, node.inputs["x"], filled)
    return total


def _bytes(program: Program, name: str, filled: float) -> float:
    """Bytes of a buffer's rows; 0 of a cache, and of weights that lie in a buffer."""
    buffer, shape = program.buffers[name], program.shape(name)
    if buffer.kind == "cache" or buffer.dtype == torch.uint8 or len(shape) < 2:
        return 0.0
    part = filled if shape[0] % int(program.sizes["T"]) == 0 else 1.0
    return part * math.prod(shape) * buffer.dtype.itemsize
