"""Rows and columns of activations, moved."""

from __future__ import annotations

import torch

from ...program import Node
from .memory import RefBuffers


def concat_rows(m: RefBuffers, node: Node) -> None:
    parts = [m.read(name) for name in node.series("x")]
    for to, part in zip(m.read(node.outputs["out"]).chunk(len(parts)), parts, strict=True):
        to.copy_(part)


def take_rows(m: RefBuffers, node: Node) -> None:
    out, first = m.read(node.outputs["out"]), node.attr("part")
    out.copy_(m.read(node.inputs["x"])[first * len(out) : (first + 1) * len(out)])


def concat_columns(m: RefBuffers, node: Node) -> None:
    m.write(node.outputs["out"], torch.cat([m.read(name) for name in node.series("x")], 1))


ROWS = {op.__name__: op for op in (concat_rows, take_rows, concat_columns)}
"""By the names of nodes."""
