"""The ends of the channels to other devices as launches.

What is sent is stored to the channel's memory (``channels``), then the stream writes the channel's
flag; what comes is waited for by the stream, then loaded. Nothing of it needs the host, so a whole
step is one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pykernels.gpu.common.stream_memory import copy_memory, wait_value, write_value
from pykernels.gpu.copy_bytes import MAX_COPIES, copy_bytes
from pykernels.gpu.handshake import MAX_ROWS, copy_rows

from ...program.node import Node
from ..link import Link
from .graph import in_turn
from .memory.buffers import GpuBuffers

Launch = Callable[[], None]
_Pair = tuple[torch.Tensor, torch.Tensor]

KERNEL_BYTES = 4 << 20
"""Up to here a kernel copies faster than the copy engine, which takes 10 us to begin."""


def submit(m: GpuBuffers, node: Node, shared: Link) -> Launch:
    """Stores what a node reads to the channel's memory, then sets its flag."""
    memory = shared.memory(node)
    pairs = [(m.tensor(name), memory[name]) for name in node.reads]
    return _in_order([*_copies(m, node, shared, pairs), _setter(m, node, shared)])


def wait(m: GpuBuffers, node: Node, shared: Link) -> Launch:
    """Waits for the channel's flag, then loads what a node writes from its memory."""
    memory = shared.memory(node)
    pairs = [(memory[name], m.tensor(name)) for name in node.writes]
    return _in_order([_waiter(m, node, shared), *_copies(m, node, shared, pairs)])


def _in_order(launches: list[Launch]) -> Launch:
    def launch() -> None:
        for one in launches:
            one()

    return launch


def _copies(m: GpuBuffers, node: Node, shared: Link, pairs: list[_Pair]) -> list[Launch]:
    launches = _as_they_are(pairs) if shared.is_between_gpus(node) else _converting(pairs)
    return [in_turn(launch, m.device) for launch in launches]


def _as_they_are(pairs: list[_Pair]) -> list[Launch]:
    """Copies between GPUs, which have a buffer in one dtype: small ones together in one launch."""
    small = [pair for pair in pairs if pair[1].nbytes <= KERNEL_BYTES or not pair[1].is_cuda]
    launches: list[Launch] = []
    for first in range(0, len(small), MAX_COPIES):
        sources, targets = zip(*small[first : first + MAX_COPIES], strict=True)
        launches.append(partial(copy_bytes, sources, targets))
    large = [pair for pair in pairs if not any(pair is other for other in small)]
    return [*launches, *(partial(copy_memory, target, source) for source, target in large)]


def _converting(pairs: list[_Pair]) -> list[Launch]:
    """Copies to and from the CPU's dtypes."""
    small = [pair for pair in pairs if pair[1].nbytes <= KERNEL_BYTES and pair[1].ndim == 2]
    large = [pair for pair in pairs if not any(pair is other for other in small)]
    launches: list[Launch] = []
    for first in range(0, len(small), MAX_ROWS):
        sources, targets = zip(*small[first : first + MAX_ROWS], strict=True)
        launches.append(partial(copy_rows, sources, targets))
    return [*launches, *(partial(_convert, source, target) for source, target in large)]


def _convert(source: torch.Tensor, target: torch.Tensor) -> None:
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
