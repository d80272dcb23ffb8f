"""The ends of the channels to other devices as launches, and the pinned memory that they share.

What is sent is stored into pinned memory by a kernel, then the stream writes the channel's flag;
what comes is waited for by the stream, then loaded by a kernel. Nothing of it needs the host, so a
whole step is one graph. What the channels carry lies in a few buffers of pinned memory, used again
as soon as the program's order allows it (``until`` and ``since`` of the nodes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from pykernels.gpu.common.stream_memory import wait_value, write_value
from pykernels.gpu.handshake import MAX_ROWS, copy_rows

from ...planning.placement import CPU
from ...program import Program
from ...program.node import Node
from ..link import Link
from .graph import in_turn
from .memory.blocks import Shape, block_bytes, view, views
from .memory.buffers import GpuBuffers

Launch = Callable[[], None]

KERNEL_BYTES = 4 << 20
"""Up to here a kernel copies faster than the copy engine, which takes 10 us to begin."""


@dataclass
class ChannelBuffers:
    """Pinned memory that all programs of a runner share, since only one of them runs at once.

    Args:
        pinned: False in Triton's interpreter.
    """

    pinned: bool
    buffers: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def take(self, kind: str, number: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of a slot; it grows, and programs that have the smaller one keep it."""
        key = kind, number
        if key not in self.buffers or len(self.buffers[key]) < nbytes:
            self.buffers[key] = torch.zeros(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.pinned
            )
        return self.buffers[key][:nbytes]


@dataclass(frozen=True)
class _Life:
    """When a channel's memory is in use, in nodes of a GPU's program."""

    node: Node
    first: int
    last: int


def link(parts: Mapping[str, Program], pool: ChannelBuffers) -> Link | None:
    """The link of a program's parts by device, its buffers in blocks of pinned memory; None where
    nothing goes over a channel.

    float32 and int64, as the CPU's kernels take them.
    """
    shared = {name for name, count in _channels(parts).items() if count > 1}
    buffers: dict[str, torch.Tensor] = {}
    for device, part in parts.items():
        if device == CPU:
            continue
        ends: list[int] = []  # of each slot, the last node that uses what is in it
        for life in sorted(_lives(part), key=lambda life: life.first):
            names = dict.fromkeys((*life.node.reads, *life.node.writes))
            for name in shared.intersection(names).difference(buffers):  # in use to the end
                shape = _shape(part, name)
                buffers[name] = view(pool.take(name, 0, block_bytes({name: shape})), shape)
            carried_names = [name for name in names if name not in shared]
            number = next((i for i, end in enumerate(ends) if end < life.first), len(ends))
            ends[number:] = [life.last, *ends[number + 1 :]]
            shapes = {name: _shape(part, name) for name in carried_names}
            buffers |= views(pool.take(device, number, block_bytes(shapes)), shapes)
    return Link(parts, buffers, pool.pinned) if _channels(parts) else None


def _channels(parts: Mapping[str, Program]) -> Counter[str]:
    """Over how many channels each buffer goes."""
    submits = (node for part in parts.values() for node in part.nodes if node.op == "submit")
    return Counter(name for node in submits for name in node.reads)


def _shape(program: Program, name: str) -> Shape:
    return program.shape(name), program.buffers[name].dtype


def _lives(gpu: Program) -> list[_Life]:
    """Lifetimes of this GPU's channels; those between two GPUs count at the sender."""
    places = {node.name: i for i, node in enumerate(gpu.nodes)}
    lives = []
    for i, node in enumerate(gpu.nodes):
        if node.op == "submit":
            until = node.attr("until")
            lives.append(_Life(node, i, places[until] if until else len(gpu.nodes)))
        elif node.op == "wait" and node.attr("source") == CPU:
            since = node.attr("since")
            lives.append(_Life(node, places[since] + 1 if since else 0, i))
    return lives


def submit(m: GpuBuffers, node: Node, shared: Link) -> Launch:
    """Stores what a node reads to pinned memory, then sets the channel's flag."""
    pairs = [(m.tensor(name), shared.buffers[name]) for name in node.reads]
    copies = [in_turn(launch, m.device) for launch in _copies(pairs)]
    return _in_order([*copies, _setter(m, node, shared)])


def wait(m: GpuBuffers, node: Node, shared: Link) -> Launch:
    """Waits for the channel's flag, then loads what a node writes from pinned memory."""
    pairs = [(shared.buffers[name], m.tensor(name)) for name in node.writes]
    copies = [in_turn(launch, m.device) for launch in _copies(pairs)]
    return _in_order([_waiter(m, node, shared), *copies])


def _in_order(launches: list[Launch]) -> Launch:
    def launch() -> None:
        for one in launches:
            one()

    return launch


def _copies(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Launch]:
    small = [pair for pair in pairs if pair[1].nbytes <= KERNEL_BYTES and pair[1].ndim == 2]
    large = [pair for pair in pairs if not any(pair[1] is other[1] for other in small)]
    launches: list[Launch] = []
    for first in range(0, len(small), MAX_ROWS):
        sources, targets = zip(*small[first : first + MAX_ROWS], strict=True)
        launches.append(lambda s=sources, t=targets: copy_rows(s, t))  # type: ignore[misc]
    for source, target in large:
        launches.append(lambda s=source, t=target: _copy(s, t))  # type: ignore[misc]
    return launches


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies by the copy engine in the source's dtype, and converts on the GPU."""
    if source.dtype == target.dtype:
        target.copy_(source, non_blocking=True)
    elif source.device.type == "cpu":
        target.copy_(source.to(target.device, non_blocking=True))
    else:
        target.copy_(source.to(target.dtype), non_blocking=True)


def _setter(m: GpuBuffers, node: Node, shared: Link) -> Launch:
    if m.device.type != "cuda":
        return lambda: shared.set(node)
    address = shared.address(node)
    return lambda: write_value(address, 1)


def _waiter(m: GpuBuffers, node: Node, shared: Link) -> Launch:
    if m.device.type == "cuda":
        address, value = shared.address(node), shared.needed(node)
        return lambda: wait_value(address, value)
    return lambda: shared.wait(node)
