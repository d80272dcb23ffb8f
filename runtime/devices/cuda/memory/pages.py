"""Pages and states of GPUs as bytes, which cross through a pinned buffer beside the steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

import torch

from ....kv_cache.page_store import layout_of


class GpuPages:
    """See ``kv_cache.page_store.PageStore``: one page or slot at a time crosses, on streams of its
    own, all of its parts at once.

    Args:
        caches: by name, [pages or slots, ...], contiguous; on GPUs, or on the "cpu" in Triton's
            interpreter.
        states: the names of those that are states.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], states: Collection[str]) -> None:
        self.layout = layout_of(caches, states)
        self._pages = [_bytes_of(caches[name]) for name in caches if name not in states]
        self._states = [_bytes_of(caches[name]) for name in caches if name in states]
        self.page_bytes = sum(each.shape[1] for each in self._pages)
        self.state_bytes = sum(each.shape[1] for each in self._states)
        devices = {cache.device for cache in caches.values() if cache.device.type == "cuda"}
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._buffer = torch.empty(
            max(self.page_bytes, self.state_bytes),
            dtype=torch.uint8,
            device="cpu",
            pin_memory=bool(devices),
        )

    def read_page(self, page: int) -> memoryview:
        return self._read(self._pages, page)

    def read_state(self, slot: int) -> memoryview:
        return self._read(self._states, slot)

    def page_space(self, page: int) -> Sequence[memoryview]:
        return [self._buffer[: self.page_bytes].numpy().data]

    def write_page(self, page: int) -> None:
        self._cross(self._pages, page, reads=False)

    def state_space(self, slot: int) -> Sequence[memoryview]:
        return [self._buffer[: self.state_bytes].numpy().data]

    def write_state(self, slot: int) -> None:
        self._cross(self._states, slot, reads=False)

    def _read(self, parts: Sequence[torch.Tensor], index: int) -> memoryview:
        self._cross(parts, index, reads=True)
        return self._buffer[: sum(part.shape[1] for part in parts)].numpy().data

    # Where the model was loaded in it, tensors can be changed in it only.
    @torch.inference_mode()
    def _cross(self, parts: Sequence[torch.Tensor], index: int, reads: bool) -> None:
        """From the GPUs to the buffer, or back; it waits for that."""
        with ExitStack() as around:
            for stream in self._streams:
                # Copies of states are made in the stream of the steps, when they are asked for.
                stream.wait_stream(torch.cuda.default_stream(stream.device))
                around.enter_context(torch.cuda.stream(stream))
            at = 0
            for part in parts:
                here, there = self._buffer[at : at + part.shape[1]], part[index]
                at += part.shape[1]
                to, source = (here, there) if reads else (there, here)
                to.copy_(source, non_blocking=True)
        for stream in self._streams:
            stream.synchronize()


def _bytes_of(cache: torch.Tensor) -> torch.Tensor:
    """uint8 [pages or slots, bytes of one], the same memory."""
    return cache.flatten(1).view(torch.uint8)
