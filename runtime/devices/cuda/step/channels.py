"""The memory of the channels between devices: where it lies, in which dtype, and when it is free.

Values between a GPU and the CPU lie in pinned memory, in the CPU's dtypes. Values between two GPUs
lie on the one that receives them, where its peer writes them over NVLink or PCIe (peer access), or
in pinned memory where GPUs cannot do that; always in the dtype that they have on both. Memory is
used again as soon as the program's order allows it (``until`` and ``since`` of the nodes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ....planning.placement import CPU
from ....program import Program
from ....program.node import Node
from ...gpus import Gpus, interpreted
from ..memory.blocks import Shape, block_bytes, view, views
from ..memory.buffers import dtypes
from .gpu_link import GpuLink, Members, OneShots
from .peers import Peers

if TYPE_CHECKING:
    from pykernels.gpu.collectives.one_shot import OneShotMemory


@dataclass
class ChannelBuffers:
    """Memory that all programs of a runner share, since only one of them runs at once.

    Args:
        gpus: by their names in programs; ``peers``: which of them reach each other's memory.
    """

    gpus: Gpus
    peers: Peers = Peers()
    buffers: dict[tuple[str, str, int], torch.Tensor] = field(default_factory=dict)
    sums: dict[Members, list[OneShotMemory]] = field(default_factory=dict)

    @property
    def pinned(self) -> bool:
        """Whether main memory has to be pinned: not in Triton's interpreter."""
        return not interpreted(self.gpus)

    def take(self, kind: str, number: int, nbytes: int, on: str = CPU) -> torch.Tensor:
        """uint8 [nbytes] of a slot; it grows, and programs that have the smaller one keep it.

        Args:
            on: the GPU on which it lies.
        """
        key = kind, on, number
        if key not in self.buffers or len(self.buffers[key]) < nbytes:
            device = self.gpus[on] if on != CPU else torch.device("cpu")
            pinned = self.pinned and on == CPU
            self.buffers[key] = torch.zeros(
                nbytes, dtype=torch.uint8, device=device, pin_memory=pinned
            )
            if device.type == "cuda":  # zeros are written before a peer writes
                torch.cuda.synchronize(device)
        return self.buffers[key][:nbytes]

    def one_shots(self, groups: Iterable[Members]) -> OneShots:
        """What these groups of GPUs need for sums without channels."""
        from pykernels.gpu.collectives.one_shot import OneShotMemory  # plans need no Triton

        for members in groups:
            if members not in self.sums:
                self.sums[members] = [OneShotMemory.on(self.gpus[name]) for name in members]
                for device in (self.gpus[name] for name in members):
                    if device.type == "cuda":  # zeros are written before a peer writes
                        torch.cuda.synchronize(device)
        return OneShots(self.sums, self.take("stop", 0, torch.int32.itemsize).view(torch.int32))


@dataclass(frozen=True)
class _Life:
    """When a channel's memory is in use, in nodes of a GPU's program."""

    node: Node
    first: int
    last: int


def link(parts: Mapping[str, Program], pool: ChannelBuffers) -> GpuLink | None:
    """The link of a program's parts by device; None where they do not meet."""
    nodes = [node for part in parts.values() for node in part.nodes]
    if not any(node.op in ("submit", "one_shot_all_reduce") for node in nodes):
        return None
    groups = dict.fromkeys(n.attr("members") for n in nodes if n.op == "one_shot_all_reduce")
    between: dict[int, dict[str, torch.Tensor]] = {}
    for device, part in parts.items():
        if device != CPU:
            between |= _received(device, part, pool)
    one_shots = pool.one_shots(groups)
    return GpuLink(parts, _with_cpu(parts, pool), pool.pinned, between, one_shots)


def received_bytes(part: Program) -> int:
    """Bytes of a GPU's memory that what it receives from other GPUs takes at most."""
    kinds = dtypes(part)
    sizes: dict[int, int] = {}
    for number, node in _slots(_lives_between(part)):
        sizes[number] = max(sizes.get(number, 0), block_bytes(_shapes(part, node, kinds)))
    return sum(sizes.values())


def _received(
    device: str, part: Program, pool: ChannelBuffers
) -> dict[int, dict[str, torch.Tensor]]:
    """What a GPU receives from other GPUs: by channel, tensors by name."""
    kinds = dtypes(part)
    received: dict[int, dict[str, torch.Tensor]] = {}
    for number, node in _slots(_lives_between(part)):
        shapes = _shapes(part, node, kinds)
        reached = (node.attr("source"), device) in pool.peers.direct
        on = device if reached else CPU
        block = pool.take(f"to {device}", number, block_bytes(shapes), on)
        received[node.attr("channel")] = views(block, shapes)
    return received


def _shapes(part: Program, node: Node, kinds: Mapping[str, torch.dtype]) -> dict[str, Shape]:
    return {name: (part.shape(name), kinds[name]) for name in node.writes}


def _lives_between(part: Program) -> list[_Life]:
    """Lifetimes of what a GPU receives from others, in its own nodes: from where they may write,
    which they do at their submit, up to its wait, which takes it away."""
    places = {node.name: i for i, node in enumerate(part.nodes)}
    return [
        _Life(node, places[since] + 1 if (since := node.attr("since")) else 0, i)
        for i, node in enumerate(part.nodes)
        if node.op == "wait" and node.attr("source") != CPU
    ]


def _slots(lives: list[_Life]) -> list[tuple[int, Node]]:
    """A slot for each channel, which it has alone while it lives."""
    ends: list[int] = []  # of each slot, the last node that uses what is in it
    slots: list[tuple[int, Node]] = []
    for life in sorted(lives, key=lambda life: life.first):
        number = next((i for i, end in enumerate(ends) if end < life.first), len(ends))
        ends[number:] = [life.last, *ends[number + 1 :]]
        slots.append((number, life.node))
    return slots


def _with_cpu(parts: Mapping[str, Program], pool: ChannelBuffers) -> dict[str, torch.Tensor]:
    """What goes between GPUs and the CPU by name, float32 and int64, as the CPU's kernels take
    it."""
    shared = {name for name, count in _channels_with_cpu(parts).items() if count > 1}
    buffers: dict[str, torch.Tensor] = {}
    for device, part in parts.items():
        if device == CPU:
            continue
        for number, node in _slots(_lives_with_cpu(part)):
            names = dict.fromkeys((*node.reads, *node.writes))
            for name in shared.intersection(names).difference(buffers):  # in use to the end
                shape = _shape(part, name)
                buffers[name] = view(pool.take(name, 0, block_bytes({name: shape})), shape)
            shapes = {name: _shape(part, name) for name in names if name not in shared}
            buffers |= views(pool.take(device, number, block_bytes(shapes)), shapes)
    return buffers


def _channels_with_cpu(parts: Mapping[str, Program]) -> Counter[str]:
    """Over how many channels from and to the CPU each buffer goes."""
    return Counter(
        name
        for device, part in parts.items()
        for node in part.nodes
        if node.op == "submit" and CPU in (device, node.attr("to"))
        for name in node.reads
    )


def _shape(program: Program, name: str) -> Shape:
    return program.shape(name), program.buffers[name].dtype


def _lives_with_cpu(gpu: Program) -> list[_Life]:
    """Lifetimes of a GPU's channels from and to the CPU."""
    places = {node.name: i for i, node in enumerate(gpu.nodes)}
    lives = []
    for i, node in enumerate(gpu.nodes):
        if node.op == "submit" and node.attr("to") == CPU:
            until = node.attr("until")
            lives.append(_Life(node, i, places[until] if until else len(gpu.nodes)))
        elif node.op == "wait" and node.attr("source") == CPU:
            since = node.attr("since")
            lives.append(_Life(node, places[since] + 1 if since else 0, i))
    return lives
