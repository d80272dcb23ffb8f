"""The device on which each node of a model's programs runs, and so where its weights lie.

It follows from sizes and the machine alone, before a weight is read: what is on a GPU is then made
in the GPU's layout, and nothing is packed for a device that does not read it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from pykernels.errors import PykernelsError

from ..passes.expert_cache import expert_cache
from ..passes.gpu_experts import gpu_experts
from ..passes.layers import moe_layers
from ..program import Program
from ..program.node import Node
from ..program.weight_spec import WeightSpec
from .config import EXPERTS
from .residency import Filled, Residency

CPU = "cpu"
_NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Placement:
    """The device of every node, and what is not simply there of its weights.

    Attributes:
        device: default device; the first GPU if there are several.
        experts: device of the routed experts; on GPUs each layer's are on the GPU of the layer.
        by_layer: GPUs of layers that are not on ``device``. What is in no layer is on the GPU of
            the layer before it: the head on the last one.
        residency: by name, records of the weights whose nodes run elsewhere than their layer, or
            which do not stay where they run; of routed experts on the CPU, what a GPU has of them
            besides: some from loading on, or slots, in all layers alike.
        kv_in_main: numbers of the layers whose keys and values lie in main memory, and cross to
            their GPU in each step.
    """

    device: str = CPU
    experts: str = CPU
    by_layer: Mapping[int, str] = field(default_factory=dict)
    residency: Mapping[str, Residency] = field(default_factory=dict)
    kv_in_main: tuple[int, ...] = ()

    @property
    def last(self) -> str:
        """The device of the last layer, which has the head and samples."""
        return self.by_layer[max(self.by_layer)] if self.by_layer else self.device

    def gpu_of(self, node: Node) -> str:
        """The device of the layer of a node, wherever the node runs."""
        return self.device if node.layer is None else self.by_layer.get(node.layer, self.device)

    def of(self, program: Program) -> Iterator[tuple[Node, str]]:
        """Every node of a program, with its device."""
        here = self.device
        for node in program.nodes:
            if node.layer is not None:
                here = self.by_layer.get(node.layer, self.device)
            yield node, self._of(node, here)

    def _of(self, node: Node, here: str) -> str:
        """The device of a node whose layer is ``here``."""
        if node.op == "moe_ffn" and node.role == "routed":
            return CPU if self.experts == CPU else here
        named = (self.residency[n] for n in node.weights.values() if n in self.residency)
        return next((record.device for record in named), here)

    def place(self, program: Program) -> Program:
        """The program with its nodes where they run."""
        nodes = tuple(replace(node, device=device) for node, device in self.of(program))
        return replace(program, nodes=nodes).check()

    def fill(self, program: Program) -> Program:
        """The placed program with the experts that its GPUs have in slots.

        Raises:
            PykernelsError: it has no such experts.
        """
        named = _routed(program).items()
        with_gpu = {n: self.residency[name] for n, name in named if name in self.residency}
        devices = {layer: record.device for layer, record in with_gpu.items()}
        if slots := {layer: record.slots for layer, record in with_gpu.items() if record.slots}:
            return expert_cache(program, slots, devices)
        some = {layer: record.experts for layer, record in with_gpu.items() if record.experts}
        return gpu_experts(program, some, devices) if some else program

    def filled(self, when: Filled) -> dict[str, Residency]:
        """The records of weights that come to their device then."""
        return {name: each for name, each in self.residency.items() if each.filled is when}

    @property
    def gpu_experts_of(self) -> dict[str, tuple[int, ...]]:
        """By name, the experts of layers that GPUs have for good beside all of them on the CPU."""
        return {name: each.experts for name, each in self.residency.items() if each.experts}

    def with_experts(self, program: Program, chosen: Mapping[int, Sequence[int]]) -> Placement:
        """With experts on the GPU of their layer besides, for good.

        Args:
            program: any of the model's; ``chosen``: by layer of routed experts.
        """
        return self._beside(program, {n: {"experts": tuple(own)} for n, own in chosen.items()})

    def with_slots(self, program: Program, slots: Mapping[int, int]) -> Placement:
        """With so many slots on the GPU of each layer, for experts that change.

        Args:
            program: any of the model's; ``slots``: by layer of routed experts.
        """
        filled = Filled.BETWEEN_STEPS
        return self._beside(program, {n: {"filled": filled, "slots": slots[n]} for n in slots})

    def with_residency(self, records: Mapping[str, Residency]) -> Placement:
        """With more records."""
        return replace(self, residency={**self.residency, **records})

    def _beside(self, program: Program, parts: Mapping[int, Mapping[str, Any]]) -> Placement:
        names = _routed(program)
        return self.with_residency(
            {
                names[layer]: Residency(self.by_layer.get(layer, self.device), **part)
                for layer, part in parts.items()
            }
        )

    def weights(self, program: Program) -> Mapping[str, frozenset[str]]:
        """The devices whose nodes read each weight."""
        devices: dict[str, frozenset[str]] = {}
        for node, device in self.of(program):
            for name in node.weights.values():
                devices[name] = devices.get(name, frozenset()) | {device}
        return devices

    def nbytes(
        self,
        program: Program,
        device: str,
        size: Callable[[WeightSpec], int],
        caches: Mapping[str, int] = _NONE,
    ) -> int:
        """Bytes of the weights that a device reads, each of ``size``, and of its ``caches``."""
        devices = self.weights(program)
        read_names = {name for node, at in self.of(program) if at == device for name in node.reads}
        return sum(
            size(spec) for name, spec in program.weights.items() if device in devices[name]
        ) + sum(nbytes for name, nbytes in caches.items() if name in read_names)


def place(
    program: Program,
    experts: str,
    free: Mapping[str, int],
    size: Callable[[WeightSpec], int],
    placed: Mapping[str, str] = MappingProxyType({}),
    caches: Mapping[str, int] = _NONE,
    by_layer: Mapping[int, str] | None = None,
) -> Placement:
    """Where a model's nodes run on a machine with GPUs.

    Args:
        program: any of the model's.
        experts: one of ``EXPERTS``; of a model that has none, no device waits for the CPU.
        free: bytes of each GPU that weights and caches may take, in the order in which the GPUs
            have layers; ``size``: bytes of a weight there.
        placed: weights that rules place on another device, by name.
        caches: bytes of the "cache" buffers, by name.
        by_layer: GPUs of layers that rules place; None: they are dealt by size.

    Raises:
        PykernelsError: ``experts`` is none of them; fewer layers than GPUs, a GPU without a layer,
            or layers that go back to a GPU in front.
    """
    if experts not in EXPERTS:
        raise PykernelsError(f"experts on {experts!r}", f"Give {', '.join(EXPERTS)}")

    def with_gpu(at: str) -> Placement:
        records = {name: Residency(gpu) for name, gpu in placed.items()}
        one = Placement(next(iter(free)), at, residency=records)
        if by_layer is not None:
            return replace(one, by_layer=_checked(program, one.device, by_layer, list(free)))
        return replace(one, by_layer=_dealt(program, one, free, size, caches))

    whole = with_gpu(next(iter(free)))
    fits = experts == "auto" and all(
        whole.nbytes(program, gpu, size, caches) <= free_bytes for gpu, free_bytes in free.items()
    )
    dense = not any(node.op == "moe_ffn" and node.role == "routed" for node in program.nodes)
    return whole if fits or dense or experts == "gpu" else with_gpu(CPU)


def _routed(program: Program) -> dict[int, str]:
    """By layer, the name of its routed experts."""
    return {
        layer.experts.layer: program.weight(layer.experts, "experts").name
        for layer in moe_layers(program)
        if layer.experts.layer is not None
    }


def _dealt(
    program: Program,
    on_first: Placement,
    free: Mapping[str, int],
    size: Callable[[WeightSpec], int],
    caches: Mapping[str, int],
) -> dict[int, str]:
    """GPUs of the layers that are not on the first one; ``on_first`` has all of them there."""
    if len(free) == 1:
        return {}
    layer = next((node.layer for node in program.nodes if node.layer is not None), 0)
    parts: dict[int, dict[str, int]] = {}  # by layer, with what is in none behind it
    for node, device in on_first.of(program):
        layer = layer if node.layer is None else node.layer
        part = parts.setdefault(layer, {})
        if device != CPU:
            part |= {name: size(program.weights[name]) for name in node.weights.values()}
            part |= {name: caches[name] for name in node.reads if name in caches}
    names = list(free)
    numbers = deal([sum(part.values()) for part in parts.values()], list(free.values()))
    dealt = zip(parts, numbers, strict=True)
    return {layer: names[number] for layer, number in dealt if number}


def deal(sizes: Sequence[int], free_bytes: Sequence[int]) -> list[int]:
    """Deals layers over GPUs, in order, so that the fullest GPU is as empty as can be.

    Args:
        sizes: bytes of each layer; ``free_bytes``: of each GPU.

    Returns:
        The number of each layer's GPU; every GPU has one at least.

    Raises:
        PykernelsError: fewer layers than GPUs.
    """
    if len(sizes) < len(free_bytes):
        raise PykernelsError(
            f"{len(sizes)} layer{'s' * (len(sizes) > 1)} for {len(free_bytes)} GPUs",
            f"Give {len(sizes)} at most",
        )
    upto = list(accumulate(sizes, initial=0))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by layers that are dealt
    for each in free_bytes:
        best = {
            end: min(
                (max(full, (upto[end] - upto[start]) / max(1, each)), (*ends, end))
                for start, (full, ends) in best.items()
                if start < end
            )
            for end in range(1, len(upto))
            if any(start < end for start in best)
        }
    return [bisect_right(best[len(sizes)][1], i) for i in range(len(sizes))]


def _checked(
    program: Program, device: str, by_layer: Mapping[int, str], gpus: Sequence[str]
) -> Mapping[int, str]:
    layers = sorted({node.layer for node in program.nodes if node.layer is not None})
    order = [by_layer.get(layer, device) for layer in layers]
    for gpu in gpus:
        if gpu not in order:
            raise PykernelsError(f"no layer is on {gpu}", "Leave it out, or give it some")
    for i, (before, behind) in enumerate(pairwise(map(gpus.index, order))):
        if behind < before:
            raise PykernelsError(
                f"layer {layers[i + 1]} is on {gpus[behind]}, behind layers of {gpus[before]}",
                "Place layers on GPUs in their order",
            )
    return by_layer
