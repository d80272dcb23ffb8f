"""Experts that a table names, from main memory to a device: a kernel that reads pinned memory.

Which experts cross is known on the GPU alone, so no copy of the host's can bring them; a kernel
reads about as fast as the copy engine: a run of 16 KB a program, as many at once as the GPU holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....errors import PykernelsError
from ....quant import PackedExperts
from ...common.launch import check_device, interpreted
from .staging import ExpertTiles, storage_of_its_own

_BLOCK = 4096
"""Words of four bytes that a program copies."""


@triton.jit(do_not_specialize=["first"])
def _gather(order, source, out, words, first, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    expert = tl.load(order + first + i).to(tl.int64)
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(source + expert * words + w, mask=w < words)
    tl.store(out + i.to(tl.int64) * words + w, found, mask=w < words)


def gather_rows(
    source: torch.Tensor, order: torch.Tensor, first: int, out: torch.Tensor
) -> torch.Tensor:
    """Copies the rows ``order[first]``, .. of ``source``. One launch.

    Args:
        source: contiguous int32 [E, words], on the GPU or pinned.
        order: int32 [first + N or more], rows of ``source``, on the GPU.
        out: contiguous int32 [N, words], written.

    Raises:
        PykernelsError: other dtypes or shapes, memory that is not pinned, or no Triton here.
    """
    check_device(order, out)
    for name, x in (("source", source), ("out", out)):
        if x.dtype != torch.int32 or x.ndim != 2 or not x.is_contiguous():
            raise PykernelsError(
                f"{name} is {x.dtype} {tuple(x.shape)}", "Give contiguous int32 [E, words]"
            )
    if source.shape[1] != out.shape[1] or not 0 <= first <= len(order) - len(out):
        raise PykernelsError(
            f"rows {first} to {first + len(out)} of {tuple(order.shape)} to {tuple(out.shape)} from"
            f" {tuple(source.shape)}",
            "Give as many words a row, and an order of enough rows",
        )
    if not interpreted() and source.device.type == "cpu" and not source.is_pinned():
        raise PykernelsError("the source is not pinned", "Give pinned or registered memory")
    words = source.shape[1]
    if out.numel():
        _gather[(len(out), triton.cdiv(words, _BLOCK))](
            order, source, out, words, first, BLOCK=_BLOCK, num_warps=8
        )
    return out


def gather_experts(
    packed: PackedExperts, order: torch.Tensor, first: int, staging: ExpertTiles
) -> None:
    """Copies the experts ``order[first]``, .. to the places of the staging. A launch a section.

    Args:
        packed: pinned, where the staging is on a GPU.
        order: int32, expert numbers, on the staging's device.

    Raises:
        PykernelsError: memory that is not pinned, or experts of no whole words.
    """
    for place, section in zip(staging.sections, packed.sections, strict=True):
        size = place.shape[1]
        if size % 4:
            raise PykernelsError(f"{size} bytes of an expert are no whole words", "Copy them")
        if size:
            source = storage_of_its_own(section.flatten(1).view(torch.uint8))
            gather_rows(source.view(torch.int32), order, first, place.view(torch.int32))
