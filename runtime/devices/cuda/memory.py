"""A program's buffers in GPU memory, and what its launches read of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...node import Node
from ...ops import OPS
from ...program import Program
from ...weights import WeightStore
from .weights import layouts

Caches = Mapping[str, torch.Tensor]


def dtypes(program: Program) -> dict[str, torch.dtype]:
    """The dtype of each scratch buffer on a GPU: activations are bfloat16 unless a node wants them
    in float32 (residual stream, logits, routing weights); indices are int32."""
    kinds: dict[str, set[str]] = {}
    for node in program.nodes:
        op = OPS[node.op]
        for ports, names in ((op.inputs, node.inputs), (op.outputs, node.outputs)):
            for port, buffer in names.items():
                row = ports.get(port) or ports[port.rstrip("0123456789")]
                kinds.setdefault(buffer, set()).add(row.kind)
    for node in program.nodes:  # sums of experts come from the CPU in float32
        if node.op == "wait":
            for name in node.writes:
                if program.buffers[name].dtype.is_floating_point:
                    kinds[name].add("float32")
    for name, found in kinds.items():  # logits, which a sampler elsewhere reads
        declared = program.buffers[name]
        if declared.kind == "output" and declared.dtype.is_floating_point:
            found.add("float32")
    return {
        name: _dtype(program.buffers[name].dtype, found)
        for name, found in kinds.items()
        if program.buffers[name].kind in ("scratch", "output")
    }


def _dtype(declared: torch.dtype, kinds: set[str]) -> torch.dtype:
    if "index" in kinds:
        return torch.int32
    if "float32" in kinds:
        return torch.float32
    return torch.bfloat16 if declared.is_floating_point else declared


@dataclass
class Memory:
    """Tensors of one program on one device, each in its largest shape.

    Attributes:
        weights: of the program's model.
        inputs: by name, tensors that are written before a step.
        caches: by name, those of the "cache" buffers.
        outputs: by name, those of results that the host reads.
        tokens_table: int32 [T, pages], the page table's row of each token.
        key_lengths: int32 [T], keys that each token attends to; 0 for padding.
    """

    program: Program
    weights: WeightStore
    device: torch.device
    inputs: Mapping[str, torch.Tensor]
    caches: Caches
    outputs: Mapping[str, torch.Tensor]
    tokens_table: torch.Tensor
    key_lengths: torch.Tensor
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = dtypes(self.program)
        self._layout_of = layouts(self.program, self.device, kinds)
        for name, dtype in kinds.items():
            if name in self.outputs:
                continue
            shape = self.program.shape(name)
            self.scratch[name] = torch.zeros(shape, dtype=dtype, device=self.device)

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer."""
        for tensors in (self.scratch, self.inputs, self.caches, self.outputs):
            if name in tensors:
                return tensors[name]
        raise KeyError(name)

    def weight(self, node: Node, port: str) -> Any:
        """A weight in the layout in which the node reads it."""
        return self.weights.get(self.program.weight(node, port), *self._layout_of(node, port))

    def optional_weight(self, node: Node, port: str) -> Any | None:
        """A weight that a node may have or not."""
        return self.weight(node, port) if port in node.weights else None

    def read(self, node: Node, port: str) -> torch.Tensor:
        """The buffer of an input."""
        return self.tensor(node.inputs[port])

    def optional(self, node: Node, port: str) -> torch.Tensor | None:
        """The buffer of an input that may be missing."""
        return self.tensor(node.inputs[port]) if port in node.inputs else None

    def written(self, node: Node, port: str) -> torch.Tensor:
        """The buffer of an output."""
        return self.tensor(node.outputs[port])
