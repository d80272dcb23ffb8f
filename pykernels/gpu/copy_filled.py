"""Copies the first rows of a buffer to another GPU's memory, or from what it has sent: as many as a
number on the device says."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.launch import check_device, interpreted

_BLOCK = 2048  # words of eight bytes that a program copies


@triton.jit
def _copy_filled(source, target, count, row, N, BLOCK: tl.constexpr):
    filled = tl.minimum(tl.load(count, volatile=True).to(tl.int64) * row, N)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first < filled:
        n = first + tl.arange(0, BLOCK)
        # Another device may have written it after this kernel's graph was launched: volatile.
        word = tl.load(source + n, mask=n < filled, other=0, volatile=True)
        tl.store(target + n, word, mask=n < filled)


def copy_filled(source: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> None:
    """Copies the first ``count`` rows. One launch, on the current GPU.

    Args:
        source: [room, ..], contiguous; on this GPU, on a peer of it, or pinned.
        target: of its shape and dtype, contiguous, likewise; other rows stay as they are.
        count: int32 or int64 [1], where the kernel can read it.

    Raises:
        PykernelsError: other shapes or dtypes, or no Triton for this device.
    """
    alike = source.shape == target.shape and source.dtype == target.dtype
    if not alike or not source.is_contiguous() or not target.is_contiguous():
        raise PykernelsError(
            f"rows {source.dtype} {tuple(source.shape)} to {target.dtype} {tuple(target.shape)}",
            "Give contiguous rows of one shape and dtype",
        )
    if count.dtype not in (torch.int32, torch.int64) or count.shape != (1,):
        raise PykernelsError(
            f"the count is {count.dtype} {tuple(count.shape)}", "Give int32 or int64 [1]"
        )
    tensors = source, target, count
    for x in tensors:
        if x.device.type == "cpu" and not interpreted() and x.numel() and not x.is_pinned():
            raise PykernelsError("rows in memory that is not pinned", "Give pinned memory")
    check_device(next((x for x in tensors if x.device.type != "cpu"), source))
    if not source.numel():
        return
    row = source[0].nbytes
    word = next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if all(x % dtype.itemsize == 0 for x in (row, source.data_ptr(), target.data_ptr()))
    )
    words = [x.view(-1).view(torch.uint8).view(word) for x in (source, target)]
    N = len(words[0])
    _copy_filled[(triton.cdiv(N, _BLOCK),)](
        *words, count, row // word.itemsize, N, BLOCK=_BLOCK, num_warps=8
    )
