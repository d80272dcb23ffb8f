"""Pairs of a token and one of its experts to the ranks that have these, and back: twins of
``ref.pairs``, which says what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ...ref.pairs import Taken
from ...ref.pairs import place_pairs as place_by_sums
from ..common.bf16 import to_bf16
from ..common.launch import FLOATS, check_device

MAX_MEMBERS = 4
_BLOCK = 512


@triton.jit
def _take(
    x, ids, weights, places, rows, taken_ids, factors, first, last, topk, H, BLOCK: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair)
    if (expert >= first) & (expert < last):
        place = tl.load(places + pair).to(tl.int64)
        h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + pair // topk * H + h, mask=h < H)
        tl.store(rows + place * H + h, value, mask=h < H)
        if tl.program_id(1) == 0:
            tl.store(taken_ids + place, (expert - first).to(taken_ids.dtype.element_ty))
            tl.store(factors + place, tl.load(weights + pair))


@triton.jit
def _sum(
    x0,
    x1,
    x2,
    x3,
    ids,
    places,
    out,
    E0,
    E1,
    E2,
    E3,
    E4,
    topk,
    H,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(topk):
        expert = tl.load(ids + t * topk + k)
        at = tl.load(places + t * topk + k).to(tl.int64) * H + h
        if (expert >= E0) & (expert < E1):
            total += tl.load(x0 + at, mask=h < H, other=0).to(tl.float32)
        if COUNT > 1:
            if (expert >= E1) & (expert < E2):
                total += tl.load(x1 + at, mask=h < H, other=0).to(tl.float32)
        if COUNT > 2:
            if (expert >= E2) & (expert < E3):
                total += tl.load(x2 + at, mask=h < H, other=0).to(tl.float32)
        if COUNT > 3:
            if (expert >= E3) & (expert < E4):
                total += tl.load(x3 + at, mask=h < H, other=0).to(tl.float32)
    to = out + t * H + h
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(to, to_bf16(total), mask=h < H)
    else:
        tl.store(to, total.to(out.dtype.element_ty), mask=h < H)


def place_pairs(
    ids: torch.Tensor,
    starts: Sequence[int],
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``ref.place_pairs``; by torch's own sums, which never wait for the host."""
    return place_by_sums(ids, starts, out)


def take_pairs(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    places: torch.Tensor,
    experts: tuple[int, int],
    room: int,
    out: Taken | None = None,
) -> Taken:
    """See ``ref.take_pairs``. Rows behind the last pair are left as they are.

    Args:
        x: floats [T, H], contiguous as all others.
        room: rows of the results, as many as there can be pairs at the least.
        out: the rows in x's dtype.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    T, H = x.shape
    taken = out or Taken(x.new_empty(room, H), ids.new_empty(room, 1), weights.new_empty(room, 1))
    check_device(x, ids, weights, places, *taken)
    _check_pairs(ids, places, T)
    right = weights.dtype == torch.float32 and weights.shape == ids.shape
    if x.dtype not in FLOATS or not x.is_contiguous() or not right or not weights.is_contiguous():
        raise PykernelsError(
            f"rows {x.dtype} {tuple(x.shape)}, weights {weights.dtype} {tuple(weights.shape)}",
            "Give contiguous floats [T, H], float32 [T, topk]",
        )
    rooms = all(len(part) == room >= ids.numel() and part.is_contiguous() for part in taken)
    if not rooms or taken.rows.shape[1:] != (H,) or taken.rows.dtype != x.dtype:
        raise PykernelsError(
            f"room for {tuple(taken.rows.shape)} {taken.rows.dtype} of {ids.numel()} pairs",
            f"Give contiguous {x.dtype} [{ids.numel()} or more, {H}]",
        )
    taken.ids.fill_(-1)
    if ids.numel() and H:
        _take[(ids.numel(), triton.cdiv(H, _BLOCK))](
            x,
            ids,
            weights,
            places,
            *taken,
            *experts,
            ids.shape[1],
            H,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return taken


def sum_pairs(
    rows: Sequence[torch.Tensor],
    ids: torch.Tensor,
    places: torch.Tensor,
    starts: Sequence[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``ref.sum_pairs``; the sum is float32. One launch.

    Args:
        rows: of ``MAX_MEMBERS`` at most, floats, contiguous.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    T, H = len(ids), rows[0].shape[1]
    if out is None:
        out = rows[0].new_empty(T, H)
    check_device(ids, places, out, *rows)
    _check_pairs(ids, places, T)
    alike = all(x.dtype in FLOATS and x.shape[1:] == (H,) and x.is_contiguous() for x in rows)
    if not alike or not 0 < len(rows) == len(starts) - 1 <= MAX_MEMBERS:
        raise PykernelsError(
            f"rows of {len(rows)} members, experts {tuple(starts)}",
            f"Give contiguous floats [room, {H}] of 1 to {MAX_MEMBERS} members",
        )
    if out.shape != (T, H) or out.dtype not in FLOATS or not out.is_contiguous():
        raise PykernelsError(
            f"out is {out.dtype} {tuple(out.shape)}", f"Give contiguous floats {[T, H]}"
        )
    missing = MAX_MEMBERS - len(rows)
    if T and H:
        _sum[(T, triton.cdiv(H, _BLOCK))](
            *rows,
            *[None] * missing,
            ids,
            places,
            out,
            *starts,
            *[0] * missing,
            ids.shape[1],
            H,
            COUNT=len(rows),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


def _check_pairs(ids: torch.Tensor, places: torch.Tensor, T: int) -> None:
    for name, x in (("ids", ids), ("places", places)):
        ints = x.dtype in (torch.int32, torch.int64) and x.ndim == 2
        if not ints or x.shape != ids.shape or len(x) != T or not x.is_contiguous():
            raise PykernelsError(
                f"the {name} are {x.dtype} {tuple(x.shape)}", f"Give contiguous ints [{T}, topk]"
            )
