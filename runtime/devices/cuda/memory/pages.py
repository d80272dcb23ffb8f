"""Pages and states of GPUs as bytes, which cross to pinned memory and back in parallel with the
steps. The parts of a page are gathered on the GPU: all of it crosses in one copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import NamedTuple

import torch

from pykernels.gpu.common.launch import interpreted
from pykernels.gpu.page_blocks import PageBlocks

from ....kv_cache.page_store import Bytes, Kind, aligned, layout_of, parts_of
from ....machine.pinned import Pinned


class GpuPages:
    """See ``kv_cache.page_store.PageStore``: what crosses does so on streams of its own.

    Args:
        caches: by name, [pages or slots, ...], contiguous; on GPUs, or on the "cpu" in Triton's
            interpreter.
        states: the names of those that are states.
        pinned: keeps memory of the host pinned.
        overwritten: called with each page that is written.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        states: Collection[str],
        pinned: Pinned,
        overwritten: Callable[[int], None] | None = None,
    ) -> None:
        self._overwritten = overwritten
        self.layout, self._pinned = layout_of(caches, states), pinned
        self._parts = parts_of(caches, states)
        devices = {cache.device for cache in caches.values() if cache.device.type == "cuda"}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        # States are large: their parts cross as fast one by one.
        self._runs = {Kind.PAGE: _runs(self._parts[Kind.PAGE]), Kind.STATE: []}
        at = 0
        for part in self._parts[Kind.STATE]:
            self._runs[Kind.STATE].append(_Run(at, [part], None))
            at += part.shape[1]

    def nbytes(self, kind: Kind) -> int:
        return sum(part.shape[1] for part in self._parts[kind])

    def host(self, nbytes: int) -> Bytes:
        memory = torch.from_numpy(aligned(nbytes))
        if self._streams and (reason := self._pinned.add(memory)):
            warnings.warn(f"pages cross slower than they could: {reason}", stacklevel=2)
        return memory.numpy()

    def read(self, kind: Kind, place: int, out: Bytes) -> None:
        self._cross(kind, place, torch.from_numpy(out), reads=True)

    def write(self, kind: Kind, place: int, data: Bytes) -> None:
        self._cross(kind, place, torch.from_numpy(data), reads=False)
        if self._overwritten is not None and kind is Kind.PAGE:
            self._overwritten(place)

    def space(self, kind: Kind, place: int) -> Sequence[memoryview] | None:
        return None

    # Where the model was loaded in it, tensors can be changed in it only.
    @torch.inference_mode()
    def _cross(self, kind: Kind, place: int, host: torch.Tensor, reads: bool) -> None:
        """All parts at once; it waits for them."""
        for device, stream in self._streams.items():
            # Copies of states are made in the stream of the steps, when they are asked for.
            stream.wait_stream(torch.cuda.default_stream(device))
        for run in self._runs[kind]:
            stream_of = self._streams.get(run.parts[0].device)
            with torch.cuda.stream(stream_of) if stream_of is not None else nullcontext():
                run.cross(place, host, reads)
        for stream in self._streams.values():
            stream.synchronize()


class _Run(NamedTuple):
    """Parts that follow each other in a block, on one device.

    Attributes:
        start: where they begin in it.
        blocks: gathers them, where they are on a GPU.
    """

    start: int
    parts: list[torch.Tensor]
    blocks: PageBlocks | None

    def cross(self, place: int, host: torch.Tensor, reads: bool) -> None:
        """Copies them to a block in main memory, or from there, in the current stream."""
        at, blocks = self.start, self.blocks
        if blocks is not None:
            here = host[at : at + len(blocks.block)]
            if reads:
                blocks.gather(place)
                here.copy_(blocks.block, non_blocking=True)
            else:
                blocks.block.copy_(here, non_blocking=True)
                blocks.scatter(place)
            return
        for part in self.parts:
            here, there = host[at : at + part.shape[1]], part[place]
            at += part.shape[1]
            to, source = (here, there) if reads else (there, here)
            to.copy_(source, non_blocking=True)


def _runs(parts: Sequence[torch.Tensor]) -> list[_Run]:
    runs, at = [], 0
    for device, run in groupby(parts, lambda part: part.device):
        own = list(run)
        is_gpu = device.type == "cuda" or interpreted()
        blocks = PageBlocks(own) if is_gpu and len(own) > 1 else None
        if blocks is not None and len(own[0]):  # compiles, now and not between two tokens
            blocks.gather(0)
            blocks.scatter(0)
        runs.append(_Run(at, own, blocks))
        at += sum(part.shape[1] for part in own)
    return runs
