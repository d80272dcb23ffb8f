"""Activations cross between GPUs in the precision in which they are computed there."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...program import Node, Program
from ...program.ops import OPS

_CPU = "cpu"
_ROUNDED = {"activation", "any"}


def with_exchanges(program: Program) -> Program:
    """The program with bfloat16 for float32 in what one GPU writes and another one reads, where
    nobody wants it exact, and the CPU reads none of it."""
    kinds: dict[str, set[str]] = {}
    readers: dict[str, set[str]] = {}
    for node in program.nodes:
        for port, name in (*node.inputs.items(), *node.outputs.items()):
            kinds.setdefault(name, set()).add(_kind(node, port))
            readers.setdefault(name, set()).add(node.device)
    buffers = {
        name: replace(buffer, dtype=torch.bfloat16)
        for name, buffer in program.buffers.items()
        if (buffer.kind, buffer.dtype) == ("scratch", torch.float32)
        and len(readers.get(name, ())) > 1
        and _CPU not in readers[name]
        and kinds[name] <= _ROUNDED
    }
    return replace(program, buffers={**program.buffers, **buffers}) if buffers else program


def _kind(node: Node, port: str) -> str:
    row = OPS[node.op]
    ports = {**row.outputs, **row.inputs}
    return ports[port if port in ports else port.rstrip("0123456789")].kind
