"""Memory of weights that a GPU copies from by itself, pinned as long as this object lives."""

from __future__ import annotations

import weakref

import torch

from pykernels.gpu.common.host_memory import register, unregister


class Pinned:
    """Tensors in main memory that are registered with the CUDA driver, until ``close``, or until
    nobody has this object any more."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._release = weakref.finalize(self, _unpin, self._tensors)

    def add(self, memory: torch.Tensor) -> str | None:
        """Pins a contiguous tensor; None, or why it cannot be. Twice is once."""
        address = memory.data_ptr()
        if address in self._tensors or not memory.nbytes:
            return None
        if reason := register(address, memory.nbytes):
            return reason
        self._tensors[address] = memory
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned."""
        return sum(memory.nbytes for memory in self._tensors.values())

    def close(self) -> None:
        """Unpins all of them; no copy from them may be under way."""
        _unpin(self._tensors)


def _unpin(tensors: dict[int, torch.Tensor]) -> None:
    for address in tensors:
        unregister(address)
    tensors.clear()
