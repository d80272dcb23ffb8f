"""A page of all layers as one block of memory, and back, in one launch each: over the link a block
crosses in one copy then, where a model with 48 layers has 96 parts of some ten KB."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.launch import check_device

_BLOCK = 4096
"""Words of four bytes that a program copies."""


@triton.jit(do_not_specialize=["page"])
def _cross_page_parts(
    addresses, sizes, starts, block, page, GATHER: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    size = tl.load(sizes + i)
    part = tl.load(addresses + i).to(tl.pointer_type(tl.int32)) + page * size
    own = block + tl.load(starts + i)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if GATHER:
        tl.store(own + at, tl.load(part + at, mask=at < size), mask=at < size)
    else:
        tl.store(part + at, tl.load(own + at, mask=at < size), mask=at < size)


class PageBlocks:
    """Pages of several caches on one GPU, each as a block: its parts one behind the other.

    Args:
        parts: uint8 [pages, bytes of one], contiguous.

    Attributes:
        block: uint8 [bytes of a page in all parts], on the GPU.

    Raises:
        PykernelsError: they are not, or parts are no whole words of four bytes.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        for part in parts:
            if (part.dtype, part.ndim) != (torch.uint8, 2) or not part.is_contiguous():
                raise PykernelsError(
                    f"pages of {part.dtype} {tuple(part.shape)}, of strides {part.stride()}",
                    "Give contiguous uint8 [pages, bytes]",
                )
            if part.shape[1] % 4:
                raise PykernelsError(f"pages of {part.shape[1]} bytes", "Give whole words")
        self._parts = tuple(parts)  # which stay where they are
        self.device = check_device(*parts)
        words = [part.shape[1] // 4 for part in parts]
        *starts, end = accumulate(words, initial=0)
        self._arrays = tuple(
            torch.tensor(numbers, dtype=torch.int64, device=self.device)
            for numbers in ([part.data_ptr() for part in parts], words, starts)
        )
        self._grid = len(parts), triton.cdiv(max(words), _BLOCK)
        self.block = torch.empty(4 * end, dtype=torch.uint8, device=self.device)

    def gather(self, page: int) -> None:
        """Copies a page's parts into ``block``."""
        self._cross(page, True)

    def scatter(self, page: int) -> None:
        """The other way."""
        self._cross(page, False)

    def _cross(self, page: int, gather: bool) -> None:
        words = self.block.view(torch.int32)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            _cross_page_parts[self._grid](
                *self._arrays, words, page, GATHER=gather, BLOCK=_BLOCK, num_warps=8
            )
