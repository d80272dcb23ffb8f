"""What nodes want of the dtype of each buffer: the kinds of the ports that touch it."""

from __future__ import annotations

from collections.abc import Iterable

from .node import Node
from .ops import OPS


def port_kinds(nodes: Iterable[Node]) -> dict[str, set[str]]:
    """By buffer, the kinds (keys of ``op_table.op.DTYPES``) of all ports of these nodes."""
    kinds: dict[str, set[str]] = {}
    for node in nodes:
        op = OPS[node.op]
        for ports, names in ((op.inputs, node.inputs), (op.outputs, node.outputs)):
            for port, buffer in names.items():
                row = ports.get(port) or ports[port.rstrip("0123456789")]
                kinds.setdefault(buffer, set()).add(row.kind)
    return kinds
