"""The ends of the channels to other devices as launches.

What is sent is stored to the channel's memory (``channels``), then the stream writes the channel's
flag; what comes is waited for by the stream, then loaded. Nothing of it needs the host, so a whole
step is one graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from pykernels.gpu.collectives.one_shot import BLOCK, OneShotMemory
from pykernels.gpu.collectives.one_shot import one_shot_all_reduce as all_reduce
from pykernels.gpu.common.stream_memory import copy_memory, wait_value, write_value
from pykernels.gpu.copy_bytes import MAX_COPIES, copy_bytes
from pykernels.gpu.copy_filled import copy_filled
from pykernels.gpu.handshake import MAX_ROWS, copy_rows

from ....program.node import Node
from ..memory.buffers import GpuBuffers
from .gpu_link import GpuLink
from .graph import in_turn

Launch = Callable[[], None]
_Pair = tuple[torch.Tensor, torch.Tensor]

POLL_S = 2e-5
KERNEL_BYTES = 4 << 20
"""Up to here a kernel copies faster than the copy engine, which takes 10 us to begin."""


def submit(m: GpuBuffers, node: Node, shared: GpuLink) -> Launch:
    """Stores what a node reads to the channel's memory, then sets its flag."""
    memory = shared.memory(node)
    pairs = {name: (m.tensor(name), memory[name]) for name in node.reads}
    return _in_order([*_copies(m, node, shared, pairs), _setter(m, node, shared)])


def wait(m: GpuBuffers, node: Node, shared: GpuLink) -> Launch:
    """Waits for the channel's flag, then loads what a node writes from its memory."""
    memory = shared.memory(node)
    pairs = {name: (memory[name], m.tensor(name)) for name in node.writes}
    return _in_order([_waiter(m, node, shared), *_copies(m, node, shared, pairs)])


def one_shot_all_reduce(m: GpuBuffers, node: Node, shared: GpuLink) -> Launch:
    """Stores the own part in the others' memory, waits for theirs, and adds up."""
    members = node.attr("members")
    rank, memory = members.index(node.device), shared.one_shots.memory[members]
    x, out, stop = m.read(node, "x"), m.written(node, "out"), shared.one_shots.stop
    whole = partial(all_reduce, x, memory, rank, stop, out)
    if m.device.type == "cuda":
        return whole
    # In the interpreter a launch that waits for another thread's would wait for ever.
    send = in_turn(partial(whole, add=False), m.device)
    return _in_order(
        [
            lambda: shared.delay(),
            send,
            partial(_await_parts, memory[rank], x.numel(), len(members), rank, stop),
            in_turn(partial(whole, send=False), m.device),
        ]
    )


def _await_parts(
    own: OneShotMemory, numbers: int, members: int, rank: int, stop: torch.Tensor
) -> None:
    programs = -(-numbers // BLOCK)
    counts = own.counts[:programs] + 1
    others = [own.flags[i, :programs] for i in range(members) if i != rank]
    while not stop[0] and any(bool((flags < counts).any()) for flags in others):
        time.sleep(POLL_S)


def _in_order(launches: list[Launch]) -> Launch:
    def launch() -> None:
        for one in launches:
            one()

    return launch


def _copies(m: GpuBuffers, node: Node, shared: GpuLink, pairs: Mapping[str, _Pair]) -> list[Launch]:
    if shared.is_between_gpus(node):
        counts = {name: m.program.buffers[name].filled for name in pairs}
        launches = _as_they_are([pair for name, pair in pairs.items() if not counts[name]])
        launches += [
            partial(copy_filled, *pairs[name], _on_gpu(pairs[count]))
            for name, count in counts.items()
            if count
        ]
    else:
        launches = _converting(list(pairs.values()))
    return [in_turn(launch, m.device) for launch in launches]


def _on_gpu(pair: _Pair) -> torch.Tensor:
    """The one of a copied pair that is fast to read, which thousands of programs do."""
    source, target = pair
    return source if source.is_cuda else target


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


def _setter(m: GpuBuffers, node: Node, shared: GpuLink) -> Launch:
    if m.device.type != "cuda":
        return lambda: shared.set(node)
    address = shared.address(node)
    return lambda: write_value(address, 1)


def _waiter(m: GpuBuffers, node: Node, shared: GpuLink) -> Launch:
    if m.device.type != "cuda":
        return lambda: shared.wait(node)
    until = partial(wait_value, shared.address(node), shared.needed(node))

    def wait() -> None:
        if not shared.in_order:
            shared.wait(node)
        until()

    return wait


ENDS = submit.__name__, wait.__name__, one_shot_all_reduce.__name__
"""The ops of nodes at which this GPU meets another device: what binds them has their name."""
