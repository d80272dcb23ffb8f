"""Each token's experts in two parts by where they are: twin of ``ref.place_routing``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.launch import check_device
from ..common.strides import check_out

_BLOCK = 256


@triton.jit(do_not_specialize=["n"])
def _place(ids, slots, local, remote, n, E, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + i, mask=i < n, other=-1)
    known = (expert >= 0) & (expert < E)
    slot = tl.load(slots + expert, mask=known, other=-1)
    to = local.dtype.element_ty
    tl.store(local + i, tl.where(slot >= 0, slot, -1).to(to), mask=i < n)
    tl.store(remote + i, tl.where(known & (slot < 0), expert, -1).to(to), mask=i < n)


def place_routing(
    ids: torch.Tensor,
    slots: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the experts that have one, and the ids of the others. One launch, which reads the
    table anew: a captured graph follows it.

    Args:
        ids: contiguous int32 or int64 [T, topk]; outside 0..E-1: not here.
        slots: contiguous int32 [E]: the slot of each expert, negative if it has none.
        out: contiguous, of ids' shape and dtype; None: new ones.

    Returns:
        Both [T, topk], each expert in its place, and -1 in the other part.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton here.
    """
    check_device(ids, slots)
    if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or not ids.is_contiguous():
        raise PykernelsError(
            f"the ids are {ids.dtype} {tuple(ids.shape)}", "Give contiguous int32 [T, topk]"
        )
    if slots.dtype != torch.int32 or slots.ndim != 1 or not slots.is_contiguous():
        raise PykernelsError(
            f"the slot table is {slots.dtype} {tuple(slots.shape)}", "Give contiguous int32 [E]"
        )
    T, topk = ids.shape
    local, remote = (
        check_out(part, ids, T, topk, dtype=ids.dtype) for part in (out or (None, None))
    )
    n = ids.numel()
    if n:
        _place[(triton.cdiv(n, _BLOCK),)](
            ids, slots, local, remote, n, len(slots), BLOCK=_BLOCK, num_warps=2
        )
    return local, remote
