"""The machine that a plan is for, as far as a plan depends on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...program import Program
from ...program.node import Node
from ...program.weight_spec import WeightSpec


class GpuLayouts(Protocol):
    """How GPUs lay out what programs name, in bytes; no GPU need be there."""

    def weight_bytes(self, spec: WeightSpec) -> int:
        """Bytes of a weight that stays on a GPU."""

    def crossing_bytes(self, program: Program, node: Node, port: str) -> int:
        """Bytes of a node's dense weight that crosses in each step, as it lies there."""

    def resident_bytes(self, spec: WeightSpec) -> int:
        """Bytes of a layer's streamed experts, as kernels compute from them."""

    def filling_bytes(self, spec: WeightSpec) -> int:
        """Bytes that filling slots with such experts takes besides."""

    def step_bytes(self, part: Program) -> int:
        """Bytes of the buffers of a GPU's part, and of what its launches allocate."""

    def why_not_streamed(self, spec: WeightSpec) -> str | None:
        """Why a layer's experts cannot cross, as a clause."""

    def gathers(self, spec: WeightSpec) -> bool:
        """Whether a kernel brings the experts of a layer that a table names."""


def _nothing_made(spec: WeightSpec, gpu: str) -> bool:
    return False


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs.

    Attributes:
        free: by GPU, in the order in which they have layers, bytes that weights, cache and steps
            may take.
        layouts: see ``GpuLayouts``.
        real: False: Triton's interpreter plays the GPUs, and there is always room unless they are
            capped.
        is_made: whether a weight lies on a GPU already.
        one_shot: numbers of each GPU that all add up in one launch, over peer access; 0: none.
        links: measures, by GPU, the bytes a second that its link brings from main memory; empty
            where there is nothing to measure.
        caps: by GPU, bytes that may be taken of it in all (``ExecutionConfig.gpu_gib``); none: all
            that is free.
    """

    free: Mapping[str, int]
    layouts: GpuLayouts
    real: bool = True
    is_made: Callable[[WeightSpec, str], bool] = _nothing_made
    one_shot: int = 0
    links: Callable[[], Mapping[str, float]] = dict
    caps: Mapping[str, int] = field(default_factory=dict)

    @property
    def capped(self) -> bool:
        """Whether less may be taken than is free."""
        return bool(self.caps)

    @property
    def bounded(self) -> bool:
        """Whether there may be no room."""
        return self.real or self.capped

    def only(self, *gpus: str) -> Machine:
        """The machine with these of its GPUs."""
        return replace(self, free={gpu: self.free[gpu] for gpu in gpus})
