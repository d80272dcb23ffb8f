"""Pages and states of GPUs as bytes, which cross to pinned memory and back in parallel with the
steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

import torch

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
        self._streams = [torch.cuda.Stream(device) for device in devices]

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
        with ExitStack() as around:
            for stream in self._streams:
                # Copies of states are made in the stream of the steps, when they are asked for.
                stream.wait_stream(torch.cuda.default_stream(stream.device))
                around.enter_context(torch.cuda.stream(stream))
            at = 0
            for part in self._parts[kind]:
                here, there = host[at : at + part.shape[1]], part[place]
                at += part.shape[1]
                to, source = (here, there) if reads else (there, here)
                to.copy_(source, non_blocking=True)
        for stream in self._streams:
            stream.synchronize()
