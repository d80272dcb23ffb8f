"""On which device each node of a model's programs runs, and so where its weights lie.

It follows from sizes and the machine alone, before a weight is read: what is on a GPU is then made
in the GPU's layout, and nothing is packed for a device that does not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pykernels.errors import PykernelsError

from .node import Node
from .passes.expert_cache import expert_cache
from .passes.gpu_experts import gpu_experts
from .program import Program
from .weight_spec import WeightSpec

EXPERTS = ("auto", "cpu", "gpu")
"""Where routed experts may be beside a GPU; "auto": there if all fit, else on the CPU."""
CPU = "cpu"


@dataclass(frozen=True)
class Placement:
    """The device of every node.

    Attributes:
        device: of all that no other attribute names.
        experts: of the routed experts.
        placed: weights whose nodes run elsewhere, by name.
        cached: by layer, those of its experts that ``device`` has besides, in slots.
        slots: by layer, slots of ``device`` for experts that change from step to step; not beside
            ``cached``.
    """

    device: str = CPU
    experts: str = CPU
    placed: Mapping[str, str] = field(default_factory=dict)
    cached: Mapping[int, Sequence[int]] = field(default_factory=dict)
    slots: Mapping[int, int] = field(default_factory=dict)

    def of(self, node: Node) -> str:
        """The device of a node."""
        if node.op == "moe_ffn" and node.role == "routed":
            return self.experts
        return next(
            (self.placed[n] for n in node.weights.values() if n in self.placed), self.device
        )

    def apply(self, program: Program) -> Program:
        """The program with its nodes where they run.

        Raises:
            PykernelsError: it has no such experts.
        """
        nodes = tuple(replace(node, device=self.of(node)) for node in program.nodes)
        placed = replace(program, nodes=nodes).check()
        if self.slots:
            return expert_cache(placed, self.slots, self.device)
        return gpu_experts(placed, self.cached, self.device) if self.cached else placed

    def weights(self, program: Program) -> Mapping[str, frozenset[str]]:
        """By weight, the devices whose nodes read it."""
        devices: dict[str, frozenset[str]] = {}
        for node in program.nodes:
            for name in node.weights.values():
                devices[name] = devices.get(name, frozenset()) | {self.of(node)}
        return devices

    def nbytes(self, program: Program, device: str, size: Callable[[WeightSpec], int]) -> int:
        """Bytes of the weights that a device reads, each of ``size``."""
        devices = self.weights(program)
        return sum(size(spec) for name, spec in program.weights.items() if device in devices[name])


def place(
    program: Program,
    device: str,
    experts: str,
    free: int,
    size: Callable[[WeightSpec], int],
    placed: Mapping[str, str] = MappingProxyType({}),
) -> Placement:
    """Where a model's nodes run on a machine with a GPU.

    Args:
        program: any of the model's.
        device: the GPU.
        experts: one of ``EXPERTS``.
        free: bytes of the GPU that weights may take; ``size``: bytes of a weight there.
        placed: weights that rules place on another device, by name.

    Raises:
        PykernelsError: ``experts`` is none of them.
    """
    if experts not in EXPERTS:
        raise PykernelsError(f"experts on {experts!r}", f"Give {', '.join(EXPERTS)}")
    whole = Placement(device, device, placed)
    fits = experts == "auto" and whole.nbytes(program, device, size) <= free
    return whole if fits or experts == "gpu" else Placement(device, CPU, placed)
