"""The ends of the channels to the CPU as launches, and the pinned memory that they share.

What is sent is stored into pinned memory by a kernel, then the stream writes the channel's flag;
what comes is waited for by the stream, then loaded by a kernel. Nothing of it needs the host, so a
whole step is one graph. What the channels carry lies in a few slots of pinned memory, used again as
soon as the program's order allows it (``until`` and ``since`` of the nodes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch

from pykernels.gpu.common.stream_memory import wait_value, write_value
from pykernels.gpu.handshake import MAX_ROWS, copy_rows

from ...node import Node
from ...program import Program
from ..link import Link, carried
from .memory import Memory

Launch = Callable[[], None]

KERNEL_BYTES = 4 << 20
"""Up to here a kernel copies faster than the copy engine, which takes 10 us to begin."""


@dataclass
class PinnedSlots:
    """Pinned memory that all programs of a runner share, since only one of them runs at once.

    Args:
        pinned: False in Triton's interpreter.
    """

    pinned: bool
    slots: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def take(self, kind: str, number: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of a slot; it grows, and programs that have the smaller one keep it."""
        key = kind, number
        if key not in self.slots or len(self.slots[key]) < nbytes:
            self.slots[key] = torch.zeros(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.pinned
            )
        return self.slots[key][:nbytes]


@dataclass(frozen=True)
class _Life:
    """When a channel's memory is in use, in nodes of the GPU's program."""

    node: Node
    first: int
    last: int


def link(gpu: Program, cpu: Program, pool: PinnedSlots) -> Link:
    """The two halves' link, its buffers in slots of pinned memory.

    float32 and int64, as the CPU's kernels take them.
    """
    names = set(carried(gpu))
    buffers: dict[str, torch.Tensor] = {}
    ends: list[int] = []  # of each slot, the last node that uses what is in it
    for life in sorted(_lives(gpu), key=lambda life: life.first):
        number = next((i for i, end in enumerate(ends) if end < life.first), len(ends))
        ends[number:] = [life.last, *ends[number + 1 :]]
        start = 0
        own = dict.fromkeys((*life.node.reads, *life.node.writes))
        sizes = {name: _nbytes(cpu, name) for name in own if name in names}
        slot = pool.take("channel", number, sum(sizes.values()))
        for name, nbytes in sizes.items():
            shape, dtype = cpu.shape(name), cpu.buffers[name].dtype
            exact = prod(shape) * dtype.itemsize
            buffers[name] = slot[start : start + exact].view(dtype).view(shape)
            start += nbytes
    return Link({"gpu": gpu, "cpu": cpu}, buffers, pool.pinned)


def _nbytes(program: Program, name: str) -> int:
    nbytes = prod(program.shape(name)) * program.buffers[name].dtype.itemsize
    return -(-nbytes // 64) * 64


def _lives(gpu: Program) -> list[_Life]:
    places = {node.name: i for i, node in enumerate(gpu.nodes)}
    found = []
    for i, node in enumerate(gpu.nodes):
        if node.op == "submit":
            until = node.attr("until")
            found.append(_Life(node, i, places[until] if until else len(gpu.nodes)))
        elif node.op == "wait":
            since = node.attr("since")
            found.append(_Life(node, places[since] + 1 if since else 0, i))
    return found


def submit(m: Memory, node: Node, shared: Link) -> Launch:
    """Stores what a node reads to pinned memory, then sets the channel's flag."""
    pairs = [(m.tensor(name), shared.buffers[name]) for name in node.reads]
    return _in_order([*_copies(pairs), _setter(m, node, shared)])


def wait(m: Memory, node: Node, shared: Link) -> Launch:
    """Waits for the channel's flag, then loads what a node writes from pinned memory."""
    pairs = [(shared.buffers[name], m.tensor(name)) for name in node.writes]
    return _in_order([_waiter(m, node, shared), *_copies(pairs)])


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
    """By the copy engine, in the source's dtype; converted on the GPU."""
    if source.dtype == target.dtype:
        target.copy_(source, non_blocking=True)
    elif source.device.type == "cpu":
        target.copy_(source.to(target.device, non_blocking=True))
    else:
        target.copy_(source.to(target.dtype), non_blocking=True)


def _setter(m: Memory, node: Node, shared: Link) -> Launch:
    if m.device.type != "cuda":
        return lambda: shared.set(node)
    address = shared.address(node)
    return lambda: write_value(address, 1)


def _waiter(m: Memory, node: Node, shared: Link) -> Launch:
    if m.device.type == "cuda":
        address, value = shared.address(node), shared.needed(node)
        return lambda: wait_value(address, value)
    return lambda: shared.wait(node)
