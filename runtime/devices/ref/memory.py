"""The memory of one device's part of a program: planned and used again, as a GPU's would be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ...program import Node, Program
from ...program.analysis import Order, buffer_bytes, plan_memory
from ...program.node import RANK_SIZES
from ...program.weights import WeightStore
from ..collectives import Communicator
from .weights import layouts


class RefBuffers:
    """The buffers of a program, as ops read and write them.

    Args:
        weights: the weights of the program's model.
        sizes: the sizes of the step (``Program.step_sizes``).
        fixed: by name, tensors of the "input" and "cache" buffers.
        order: of the device, for the memory plan; None: every buffer has memory of its own.
        ranks: where the program meets those of other ranks; None: it meets none.

    Attributes:
        outputs: by name, tensors of the "output" buffers.
        nbytes: bytes of the buffers between nodes.

    Raises:
        PykernelsError: an input or a cache that is not given.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightStore,
        sizes: torch.Tensor,
        fixed: Mapping[str, torch.Tensor],
        order: Order | None,
        ranks: Communicator | None = None,
    ) -> None:
        self._ranks = ranks
        self.program, self.weights, self.sizes = program, weights, sizes
        self._layout_of = layouts(program)
        self._tensors: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.nbytes = sum(buffer_bytes(program).values())
        offsets: Mapping[str, int] = {}
        if order is not None:
            plan = plan_memory(program, order)
            self.nbytes = plan.nbytes
            offsets, arena = plan.offsets, torch.zeros(plan.nbytes, dtype=torch.uint8, device="cpu")
        for name, buffer in program.buffers.items():
            shape = program.shape(name)
            if buffer.kind in ("input", "cache"):
                if name not in fixed:
                    raise PykernelsError(
                        f"the {buffer.kind} {name!r} of {program.name!r} is not given",
                        "See runtime.program.step_inputs.allocate_inputs",
                    )
                self._tensors[name] = fixed[name]
            elif name in offsets:
                nbytes = math.prod(shape) * buffer.dtype.itemsize
                raw = arena[offsets[name] : offsets[name] + nbytes]
                self._tensors[name] = raw.view(buffer.dtype).view(shape)
            else:
                self._tensors[name] = torch.zeros(shape, dtype=buffer.dtype, device="cpu")
                if buffer.kind == "output":
                    self.outputs[name] = self._tensors[name]

    @property
    def ranks(self) -> Communicator:
        """Where the program meets those of other ranks."""
        assert self._ranks is not None, f"{self.program.name} runs without its peers"
        return self._ranks

    def weight(self, node: Node, port: str) -> Any:
        """A weight as the reference ops read it."""
        return self.weights.get(self.program.weight(node, port), *self._layout_of(node, port))

    def whole_weight(self, node: Node, port: str) -> Any:
        """The experts of a layer of which the node takes some."""
        spec = self.program.weight(node, port)
        return self.weights.get(spec.full or spec, *self._layout_of(node, port))

    def optional(self, node: Node, port: str) -> Any | None:
        """A weight that a node may have or not."""
        return self.weight(node, port) if port in node.weights else None

    def full(self, name: str) -> torch.Tensor:
        """A buffer in its largest shape: a cache, a page table."""
        return self._tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """The part of a buffer that the step fills."""
        return self._tensors[name][: self.length(name)]

    def write(self, name: str, value: torch.Tensor) -> None:
        """Sets that part, in the buffer's shape and dtype."""
        part = self.read(name)
        part.copy_(value.reshape(part.shape))

    def length(self, name: str) -> int:
        """What the first dimension of a buffer is in this step."""
        dim = self.program.buffers[name].shape[0]
        return int(self.sizes[RANK_SIZES.index(dim)]) if isinstance(dim, str) else dim
