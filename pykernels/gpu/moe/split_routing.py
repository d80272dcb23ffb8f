"""Each token's experts in two parts by their weights. Twin of ``ref.router.split_routing``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.launch import check_device, unsupported

_INTEGERS = (torch.int32, torch.int64)


@triton.jit
def _split_routing(
    ids,
    weights,
    whole,
    first,
    last,
    K,
    LAST,
    HAS_LAST: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    KP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    e = tl.load(ids + t * K + k, mask=k < K, other=-1)
    here = e >= 0
    w = tl.load(weights + t * K + k, mask=k < K, other=0.0)
    w = tl.where(here, w, float("-inf"))
    larger = (w[None, :] > w[:, None]) | ((w[None, :] == w[:, None]) & (k[None, :] < k[:, None]))
    rank = tl.sum((larger & here[None, :]).to(tl.int32), 1)
    is_last = here & (rank >= tl.sum(here.to(tl.int32), 0) - LAST)
    if HAS_WHOLE:
        is_last = is_last & (tl.load(whole + t) == 0)
    tl.store(first + t * K + k, tl.where(is_last, -1, e), mask=k < K)
    if HAS_LAST:
        tl.store(last + t * K + k, tl.where(is_last, e, -1), mask=k < K)


def split_routing(
    ids: torch.Tensor,
    weights: torch.Tensor,
    last: int,
    out: tuple[torch.Tensor, torch.Tensor | None],
    whole: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Parts each token's choice: the ``last`` smallest weights go into the second part.

    Args:
        ids: int32 or int64 [T, topk], contiguous; -1: not here, which is in neither part.
        weights: float32 [T, topk], contiguous; of equal ones the later is the smaller.
        out: ids of both parts, like ``ids``; None: the second part is dropped.
        whole: int32 or int64 [T], contiguous; a token with another number than 0 has all in the
            first part. None: none has.

    Returns:
        ``out``: an expert keeps its place, and is -1 in the other part.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    parts = [part for part in out if part is not None]
    marks = [] if whole is None else [whole]
    check_device(ids, weights, *parts, *marks)
    if reason := unsupported(ids, weights):
        raise PykernelsError(f"split_routing does not take these: {reason}", "Convert them")
    if ids.ndim != 2 or ids.dtype not in _INTEGERS or weights.dtype != torch.float32:
        raise PykernelsError(
            f"ids are {ids.dtype} {tuple(ids.shape)}, weights {weights.dtype}",
            "Give integers [T, topk] and float32",
        )
    same = all(x.shape == ids.shape and x.is_contiguous() for x in (ids, weights, *parts))
    if not same or any(part.dtype != ids.dtype for part in parts):
        raise PykernelsError(
            "the parts are not like the ids", f"Give contiguous {ids.dtype} {list(ids.shape)}"
        )
    T, K = ids.shape
    if any(x.shape != (T,) or x.dtype not in _INTEGERS or not x.is_contiguous() for x in marks):
        raise PykernelsError("whole is not a number a token", f"Give contiguous integers [{T}]")
    if T and K:
        _split_routing[(T,)](
            ids,
            weights,
            whole,
            *out,
            K,
            last,
            HAS_LAST=out[1] is not None,
            HAS_WHOLE=whole is not None,
            KP=triton.next_power_of_2(K),
            num_warps=1,
        )
    return out
