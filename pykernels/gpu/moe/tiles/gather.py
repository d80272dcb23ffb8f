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
from ...common.launch import interpreted
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


def gather_experts(
    packed: PackedExperts, order: torch.Tensor, first: int, staging: ExpertTiles
) -> None:
    """Copies the experts ``order[first]``, .. to the places of the staging. A launch a section.

    Args:
        packed: pinned, where the staging is on a GPU.
        order: int32, expert numbers, on the staging's device.

    Raises:
        PykernelsError: memory that is not pinned, or sections of no whole words.
    """
    for place, section in zip(staging.sections, packed.sections, strict=True):
        size = place.shape[1]
        if not size:
            continue
        if size % 4:
            raise PykernelsError(f"{size} bytes of an expert are no whole words", "Copy them")
        source = storage_of_its_own(section.flatten(1).view(torch.uint8)).view(torch.int32)
        if not interpreted() and not source.is_pinned():
            raise PykernelsError("the experts are not pinned", "Pin them (Pinned.add)")
        words = size // 4
        _gather[(len(place), triton.cdiv(words, _BLOCK))](
            order, source, place.view(torch.int32), words, first, BLOCK=_BLOCK, num_warps=8
        )
