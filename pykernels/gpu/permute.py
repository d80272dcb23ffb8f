"""Tokens sorted by expert: a counting sort without float atomics, and the rows' gather and sum.

Blocks of slots count their experts (first launch); then each block adds up the counts of those
before it and ranks its own slots (second launch). What fits in one block takes one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from ..shapes import SortedSlots
from .launch import check_device

BLOCK = 512  # slots a program ranks: pairs within it are compared, 1 / BLOCK of all pairs
_STEP = 32


@triton.jit
def _load_ids(ids, n, E, BLOCK: tl.constexpr):
    """Experts of this program's slots; E for those outside 0..E-1 and past the end.

    Slots past the end come after all others, so that counting them moves none.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + slot, mask=slot < n, other=-1)
    return tl.where((expert < 0) | (expert >= E), E, expert).to(tl.int32), slot


# Numbers of slots are not specialized: else 1 and multiples of 16 were kernels of their own.
@triton.jit(do_not_specialize=["n"])
def _count(ids, counts, n, E, EP: tl.constexpr, BLOCK: tl.constexpr):
    expert, slot = _load_ids(ids, n, E, BLOCK)
    e = tl.arange(0, EP)
    tl.store(counts + tl.program_id(0) * EP + e, tl.histogram(expert, EP))


@triton.jit(do_not_specialize=["n", "blocks"])
def _rank(
    ids, counts, slots, starts, positions, n, E, blocks,
    EP: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    this = tl.program_id(0)
    expert, slot = _load_ids(ids, n, E, BLOCK)
    e = tl.arange(0, EP)
    if ROWS == 0:  # the only block
        whole = tl.histogram(expert, EP)
        before = tl.zeros([EP], tl.int32)
    else:
        whole = tl.zeros([EP], tl.int32)
        before = tl.zeros([EP], tl.int32)
        for b in range(0, blocks, ROWS):
            block = b + tl.arange(0, ROWS)[:, None]
            found = tl.load(counts + block * EP + e[None, :], mask=block < blocks, other=0)
            whole += tl.sum(found, 0)
            before += tl.sum(tl.where(block < this, found, 0), 0)
    start = tl.cumsum(whole, 0) - whole
    if this == 0:
        tl.store(starts + e, start, mask=e <= E)
    place = tl.gather(start + before, expert, 0)
    for j in range(0, BLOCK, STEP):  # and after the equals before it in this block
        other = this * BLOCK + j + tl.arange(0, STEP)
        theirs = tl.load(ids + other, mask=other < n, other=-1)
        theirs = tl.where((theirs < 0) | (theirs >= E), E, theirs).to(tl.int32)
        earlier = (theirs[None, :] == expert[:, None]) & (other[None, :] < slot[:, None])
        place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(slots + place, slot, mask=slot < n)
    tl.store(positions + slot, place, mask=slot < n)


@triton.jit
def _permute(
    x, positions, out, H, x_stride, TOPK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * x_stride + h, mask=h < H)
    for k in tl.static_range(TOPK):
        to = tl.load(positions + token * TOPK + k).to(tl.int64)
        tl.store(out + to * H + h, values, mask=h < H)


@triton.jit
def _unpermute(
    y, positions, starts, weights, add, out, H, E, add_stride,
    TOPK: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(starts + E)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOPK):
        at = tl.load(positions + token * TOPK + k)
        weight = tl.load(weights + token * TOPK + k)
        row = tl.load(y + at.to(tl.int64) * H + h, mask=(h < H) & (at + 0 * h < end), other=0.0)
        total += weight * row.to(tl.float32)
    if ADD:
        total += tl.load(add + token * add_stride + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + h, total, mask=h < H)


def empty_order(T: int, topk: int, E: int, device: torch.device) -> SortedSlots:
    """Buffers for a sort of T tokens."""
    return SortedSlots(
        torch.empty(T * topk, dtype=torch.int32, device=device),
        torch.empty(E + 1, dtype=torch.int32, device=device),
        torch.empty(T, topk, dtype=torch.int32, device=device),
    )


def supports(ids: torch.Tensor) -> str | None:
    """None if `sort_slots` takes these, or the reason why not."""
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        return f"ids are {ids.dtype} {tuple(ids.shape)}, not contiguous int32 or int64 [T, topk]"
    return None


def sort_slots(ids: torch.Tensor, E: int, out: SortedSlots | None = None) -> SortedSlots:
    """Slots ordered by expert, those of one expert by token; the same in every run.

    One launch up to 512 slots, two above. Ids outside ``0..E-1`` come last, in slot order.

    Args:
        ids: int32 or int64 [T, topk], contiguous.
        E: experts.
        out: what an earlier call returned, to be written again.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    if reason := supports(ids):
        raise PykernelsError(f"sort_slots does not take these: {reason}", "Convert them")
    device, (T, topk) = check_device(ids), ids.shape
    out = out or empty_order(T, topk, E, device)
    n, EP = T * topk, triton.next_power_of_2(E + 1)
    blocks = max(1, triton.cdiv(n, BLOCK))
    block = min(BLOCK, max(_STEP, triton.next_power_of_2(n)))
    counts = None
    if blocks > 1:
        counts = torch.empty(blocks, EP, dtype=torch.int32, device=device)
        _count[(blocks,)](ids, counts, n, E, EP=EP, BLOCK=BLOCK, num_warps=4)
    _rank[(blocks,)](
        ids, counts, out.slots, out.starts, out.positions, n, E, blocks,
        EP=EP, BLOCK=block, STEP=_STEP, ROWS=16 if blocks > 1 else 0, num_warps=8,
    )  # fmt: skip
    return out


def _row_grid(T: int, H: int) -> tuple[tuple[int, int], int]:
    """Grid over tokens and chunks of their rows, and the chunk."""
    block = min(2048, triton.next_power_of_2(H))
    return (T, triton.cdiv(H, block)), block


def permute(x: torch.Tensor, order: SortedSlots, out: torch.Tensor | None = None) -> torch.Tensor:
    """Row of the token of each sorted slot: every row of ``x`` is read once, written topk times.

    Args:
        x: [T, H], any dtype; its rows contiguous.
        order: of T tokens.
        out: [T * topk, H].

    Raises:
        PykernelsError: shapes that do not match, or no Triton for this device.
    """
    T, H = x.shape
    if order.positions.shape[0] != T or x.stride(1) != 1:
        raise PykernelsError(
            f"x {tuple(x.shape)} with an order of {order.positions.shape[0]} tokens",
            "Give it contiguous rows of the same tokens",
        )
    check_device(x, order.positions)
    out = x.new_empty(T * order.topk, H) if out is None else out
    if x.numel():
        grid, block = _row_grid(T, H)
        # FP8 as bytes: not every GPU's Triton knows the type.
        source, target = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (x, out))
        _permute[grid](
            source, order.positions, target, H, x.stride(0),
            TOPK=order.topk, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def unpermute(
    y: torch.Tensor,
    order: SortedSlots,
    weights: torch.Tensor,
    add: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of each token's rows, k = 0 first, in float32; rounded once.

    Rows behind ``starts[E]`` (experts that somebody else computes) are not read.

    Args:
        y: [T * topk, H], contiguous, in sorted order.
        order: of the same slots.
        weights: float32 [T, topk], contiguous.
        add: [T, H], joins the sum: the shared expert's output, say.
        out: [T, H], contiguous; None makes one of y's dtype.

    Raises:
        PykernelsError: shapes that do not match, or no Triton for this device.
    """
    (T, topk), H = order.positions.shape, y.shape[1]
    if y.shape[0] != T * topk or weights.shape != (T, topk) or not y.is_contiguous():
        raise PykernelsError(
            f"y {tuple(y.shape)} and weights {tuple(weights.shape)} of {T} tokens, top-{topk}",
            "y must be contiguous [T * topk, H], the weights [T, topk]",
        )
    if add is not None and (add.shape != (T, H) or add.stride(1) != 1):
        raise PykernelsError(f"add is {tuple(add.shape)}", f"Give it [{T}, {H}]")
    check_device(y, weights, order.positions, *(() if add is None else (add,)))
    out = y.new_empty(T, H) if out is None else out
    if out.numel():
        grid, block = _row_grid(T, H)
        _unpermute[grid](
            y, order.positions, order.starts, weights, add, out, H, order.starts.shape[0] - 1,
            0 if add is None else add.stride(0),
            TOPK=topk, ADD=add is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
