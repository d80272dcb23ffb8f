"""A program's buffers in GPU memory, what its launches read of it, and its results for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ....machine.memory import allocate
from ....passes.gpu.offload_kv import host_caches
from ....passes.gpu_experts import expert_slot_tables
from ....passes.keep_routing import kept_routers
from ....passes.stream_dense import ALIGN
from ....planning.placement import CPU
from ....program import Program
from ....program.analysis import MemoryPlan, on_streams, plan_memory
from ....program.node import Node
from ....program.port_kinds import port_kinds
from ....program.weights import WeightStore
from ...gpus import Gpus
from .blocks import HostResident, Shape, block_bytes, view, views
from .weights import layouts

Caches = Mapping[str, torch.Tensor]
NONE: Caches = MappingProxyType({})
EXPANDED_BYTES = 512 << 20
"""Expanded keys and values take so many at a time, unless one head's are more by themselves."""
_ROUNDING = ("linear", "sigmoid_mul")
"""Ops that read what came from the CPU, as what it attended to, in bfloat16."""


def dtypes(program: Program) -> dict[str, torch.dtype]:
    """The dtype of each scratch buffer on a GPU: activations are bfloat16 unless a node wants them
    in float32 (residual stream, logits, routing weights); indices are int32.

    Of a part of a program, too: what comes from another GPU has the dtype that it has there."""
    kinds = port_kinds(program.nodes)
    rounded = {n for node in program.nodes if node.op in _ROUNDING for n in node.reads}
    for node in program.nodes:
        if node.op == "wait" and node.attr("source") == CPU:  # which has floats in float32 alone
            for name in node.writes:
                if program.buffers[name].dtype == torch.float32 and name not in rounded:
                    kinds[name].add("float32")
        if node.op in ("submit", "wait"):
            for name, kind in zip((*node.reads, *node.writes), node.attr("kinds"), strict=False):
                kinds[name].add(kind)
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
    is_activation = declared == torch.float32 and "kv" not in kinds
    return torch.bfloat16 if is_activation else declared


def planned(program: Program, kinds: Mapping[str, torch.dtype]) -> MemoryPlan:
    """Where the buffers lie that have a dtype in ``kinds``; launches of a stream run in order."""
    sizes = {name: math.prod(program.shape(name)) * kinds[name].itemsize for name in kinds}
    return plan_memory(program, on_streams(program), sizes)


class Arena:
    """GPU memory that programs share, since none runs while another one does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes or more]; it lives as long as its views, so the largest program should be
        the first to ask."""
        if len(self._block) < nbytes:
            self._block = self._block[:0].clone()  # the smaller one goes first
            self._block = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._block


@dataclass
class GpuBuffers:
    """Tensors of one program on one device, each in its largest shape.

    Buffers that are not in use at once lie over each other: what a launch leaves unwritten (rows
    of padding) holds any numbers.

    Attributes:
        weights: the weights of the program's model.
        inputs: by name, tensors that are written before a step: inputs and attention's metadata.
        caches: by name, tensors of the "cache" buffers.
        outputs: by name, tensors of results that the host reads.
        arena: memory of all other buffers.
    """

    program: Program
    weights: WeightStore
    device: torch.device
    inputs: Mapping[str, torch.Tensor]
    caches: Caches
    outputs: Mapping[str, torch.Tensor]
    arena: Arena
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = dtypes(self.program)
        gpus = {node.device: self.device for node in self.program.nodes}
        self._layout_of = layouts(self.program, gpus, kinds)
        self._loads = {
            name: node
            for node in self.program.nodes
            if node.op == "load_weights"
            for name in node.weights.values()
        }
        apart = (*self.outputs, *self.inputs)  # metadata crosses with the inputs
        own = {name: dtype for name, dtype in kinds.items() if name not in apart}
        plan = planned(self.program, own)
        block = self.arena.take(plan.nbytes)
        for name, offset in plan.offsets.items():
            self.scratch[name] = view(block, (self.program.shape(name), kinds[name]), offset)

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer."""
        for tensors in (self.scratch, self.inputs, self.caches, self.outputs):
            if name in tensors:
                return tensors[name]
        raise KeyError(name)

    def weight(self, node: Node, port: str) -> Any:
        """A weight in the layout in which the node reads it, in a slot if it crosses to one."""
        spec = self.program.weight(node, port)
        value = self.weights.get(spec, *self._layout_of(node, port))
        if not isinstance(value, HostResident):
            return value
        slots = self.in_slot(self._loads[spec.name])
        return next(value.within(slot) for name, _, slot in slots if name == spec.name)

    def in_slot(self, load: Node) -> Iterator[tuple[str, HostResident, torch.Tensor]]:
        """Yields name and value of each weight that a node loads, and its part of the slot."""
        slot = self.written(load, "out")
        for port, name in load.weights.items():
            weight = self.weights.get(self.program.weights[name], *self._layout_of(load, port))
            yield name, weight, slot[: weight.memory.nbytes]
            slot = slot[weight.memory.nbytes :]

    def whole_weight(self, node: Node, port: str) -> Any:
        """The experts of a layer of which the node takes some."""
        spec = self.program.weight(node, port)
        return self.weights.get(spec.full or spec, *self._layout_of(node, port))

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


@dataclass(frozen=True)
class ProgramOutputs:
    """Results of one program on one GPU.

    Attributes:
        tensors: by buffer, on the GPU; ``host``: the same on the CPU, valid when ``receive`` has
            run.
    """

    tensors: Mapping[str, torch.Tensor]
    host: Mapping[str, torch.Tensor]
    _from: torch.Tensor
    _to: torch.Tensor

    def receive(self) -> None:
        """A launch, the last of the GPU's in a step: copies the results to the host."""
        self._to.copy_(self._from, non_blocking=True)


class StepOutputs:
    """Results of one GPU: of sampling, which all programs of a runner share, on the last GPU, and
    behind them a program's own.

    Those of sampling stay until the next step has written its own, so a step may read the tokens
    that the one before has drawn.

    Args:
        shapes: of what is shared, by buffer in their largest shapes.
        own: most bytes of one program's own.
    """

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device, own: int = 0) -> None:
        self._shapes, self._shared = shapes, block_bytes(shapes)
        size = self._shared + own
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = torch.zeros(
            size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
        )

    def of(self, own: Mapping[str, Shape]) -> ProgramOutputs:
        """The shared results and a program's own ones."""
        end = self._shared + block_bytes(own)
        assert end <= len(self._device), "the program's results are larger than was said"
        every = {**self._shapes, **own}
        on_gpu, on_host = self._device[:end], self._host[:end]
        return ProgramOutputs(views(on_gpu, every), views(on_host, every), on_gpu, on_host)


def kept_routing(program: Program, device: str) -> dict[str, Shape]:
    """What a program keeps of the choices of a device's routers (``passes.keep_routing``)."""
    kinds = dtypes(program)
    return {
        name: (program.shape(name), kinds[name])
        for node in kept_routers(program)
        if node.device == device
        for name in (node.outputs["ids"], node.outputs["weights"])
    }


def kept_bytes(program: Program, device: str) -> int:
    """Bytes of that, in two microbatches too, where there are twice as many results of half the
    rows."""
    shapes = kept_routing(program, device)
    return block_bytes(shapes) + 2 * ALIGN * len(shapes)


def allocated_caches(
    program: Program,
    gpus: Gpus,
    there: Caches = NONE,
    main: Callable[[int], torch.Tensor] = allocate,
) -> dict[str, torch.Tensor]:
    """The caches of a model on its GPUs or in main memory, and tables of its experts' slots.

    Args:
        program: any of the model's on its way to them (``passes.gpu.metadata``).
        there: those that are allocated already.
        main: uint8 of so many bytes of main memory, zeros.
    """
    tables, in_main = expert_slot_tables(program), host_caches(program)
    caches: dict[str, torch.Tensor] = {}
    for node in program.nodes:
        for name in node.reads:
            if program.buffers[name].kind != "cache" or node.device not in gpus:
                continue
            if name in caches or name in there:
                continue
            device, dtype = gpus[node.device], program.buffers[name].dtype
            shape = program.shape(name)
            if name in tables:
                caches[name] = tables[name].to(device)
            elif name in in_main:  # pages of their own, which can be pinned by themselves
                caches[name] = main(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            else:
                caches[name] = torch.zeros(shape, dtype=dtype, device=device)
    return caches
