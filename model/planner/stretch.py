"""What a model takes of which only some layers are lowered: so much as all of them."""

from __future__ import annotations

from functools import cached_property

from runtime.planning.gpu.machine import GpuLayouts
from runtime.program import Program
from runtime.program.node import Node
from runtime.program.weight_spec import WeightSpec

from .subject import Subject


class Stretch:
    """Bytes of the weights of a subject's layers, as if there were ``subject.stretch`` times as
    many."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self.factor = subject, subject.stretch

    @cached_property
    def _program(self) -> Program:
        return self._subject.decoder.lower()

    @cached_property
    def _inside(self) -> frozenset[str]:
        """The names of layers' weights."""
        nodes = (node for node in self._program.nodes if node.layer is not None)
        return frozenset(name for node in nodes for name in node.weights.values())

    def nbytes(self, spec: WeightSpec) -> int:
        """Bytes of a weight in main memory."""
        return self.of(spec, spec.nbytes)

    def of(self, spec: WeightSpec, nbytes: int) -> int:
        """Bytes of a weight that takes ``nbytes`` in one layer."""
        inside = self.factor != 1 and (spec.moe is not None or spec.name in self._inside)
        return round(nbytes * self.factor) if inside else nbytes

    @property
    def all_weights(self) -> int:
        """Bytes of all weights in main memory."""
        return sum(map(self.nbytes, self._program.weights.values()))

    @property
    def layouts(self) -> GpuLayouts:
        """Tells what all layers take on GPUs."""
        from runtime.devices.cuda.layouts import CudaLayouts

        stretch = self

        class Stretched(CudaLayouts):
            def weight_bytes(self, spec: WeightSpec) -> int:
                return stretch.of(spec, super().weight_bytes(spec))

            def crossing_bytes(self, program: Program, node: Node, port: str) -> int:
                return round(super().crossing_bytes(program, node, port) * stretch.factor)

        return CudaLayouts() if self.factor == 1 else Stretched()
