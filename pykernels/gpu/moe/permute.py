"""Tokens sorted by expert: a counting sort without atomics, and the rows' gather and sum.

Few pairs are ranked by comparing each with all, in one launch. Of more, blocks count their experts;
the counts are summed over the blocks; then each block's pairs are ranked: three launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ...shapes import SortedPairs
from ..common.launch import FLOATS, check_device, unsupported
from ..common.strides import as_bytes, check_out

MAX_EXPERTS = 4096
"""Each block counts all of them at once, in registers; keys of expert and pair are 32 bits."""
MAX_COMPARED = 4096
"""Up to so many pairs, each is compared with all others: 1 us more a thousand, or two launches."""
_FEW_OWN = 32  # of these one program ranks, by 8 warps, so that a thread has little to do
_FEW_STEP = 512
BLOCK = 512  # pairs that are ranked by comparing each with all of them
_OWN = 128  # pairs of a block that one program ranks, with as many of them at a time as threads:
_STEP = 64  # fewer would be loaded by every thread for itself, more spill


@triton.jit
def _load_ids(ids, first, n, E, BLOCK: tl.constexpr):
    """Experts of pairs from ``first`` on; E for those outside 0..E-1 and past the end.

    Pairs past the end come after all others, so that counting them moves none.
    """
    pair = first + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < n, other=-1)
    return tl.where((expert < 0) | (expert >= E), E, expert).to(tl.int32), pair


# Numbers of pairs are not specialized: else 1 and multiples of 16 were kernels of their own.
@triton.jit(do_not_specialize=["n"])
def _rank_few(
    ids,
    pairs,
    starts,
    positions,
    n,
    E,
    MOST: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Slot i's key is i of those ranked; n + e is the start of expert e: what ranks below it."""
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    expert = tl.load(ids + i, mask=i < n, other=-1)
    expert = tl.where((expert < 0) | (expert >= E), E, expert).to(tl.int32)
    # Unique keys in order of expert, then of pair: a pair's rank is how many keys are smaller.
    key = tl.where(i < n, expert * MOST + i, (i - n) * MOST)
    rank = tl.zeros([OWN], tl.int32)
    theirs, other = _load_ids(ids, 0, n, E, STEP)
    for first in range(0, n, STEP):
        keys = theirs * MOST + other  # past the end: above every rank that is kept
        theirs, other = _load_ids(ids, first + STEP, n, E, STEP)
        rank += tl.sum((keys[:, None] < key[None, :]).to(tl.int32), 0)
    tl.store(pairs + rank, i, mask=i < n)
    tl.store(positions + i, rank, mask=i < n)
    tl.store(starts + i - n, rank, mask=(i >= n) & (i <= n + E))


@triton.jit(do_not_specialize=["n"])
def _count(ids, counts, n, E, EP: tl.constexpr, BLOCK: tl.constexpr):
    expert, pair = _load_ids(ids, tl.program_id(0) * BLOCK, n, E, BLOCK)
    e = tl.arange(0, EP)
    tl.store(counts + tl.program_id(0) * EP + e, tl.histogram(expert, EP), mask=e <= E)


@triton.jit(do_not_specialize=["blocks"])
def _add_up(counts, E, blocks, EP: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr):
    """counts [blocks + 1, EP], in place: row b becomes the sum of the rows before it."""
    e = (tl.program_id(0) * BE + tl.arange(0, BE))[None, :]
    before = tl.zeros([1, BE], tl.int32)
    for first in range(0, blocks, ROWS):
        block = first + tl.arange(0, ROWS)[:, None]
        mask = (block < blocks) & (e <= E)
        found = tl.load(counts + block * EP + e, mask=mask, other=0)
        tl.store(counts + block * EP + e, before + tl.cumsum(found, 0) - found, mask=mask)
        before += tl.sum(found, 0)[None, :]
    tl.store(counts + blocks * EP + e, before, mask=e <= E)


@triton.jit(do_not_specialize=["n", "blocks"])
def _rank(
    ids,
    counts,
    pairs,
    starts,
    positions,
    n,
    E,
    blocks,
    EP: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
):
    first = tl.program_id(0) * OWN
    this = first // BLOCK
    expert, pair = _load_ids(ids, first, n, E, OWN)
    e = tl.arange(0, EP)
    key = expert * BLOCK + pair % BLOCK
    rank = tl.zeros([OWN], tl.int32)
    for j in range(0, BLOCK, STEP):
        theirs, other = _load_ids(ids, this * BLOCK + j, n, E, STEP)
        smaller = (theirs * BLOCK + other % BLOCK)[:, None] < key[None, :]
        rank += tl.sum(smaller.to(tl.int32), 0)  # over the first axis: no thread asks another
    mask = e <= E
    whole = tl.load(counts + blocks * EP + e, mask=mask, other=0)
    before = tl.load(counts + this * EP + e, mask=mask, other=0)
    after = tl.load(counts + this * EP + EP + e, mask=mask, other=0)
    if first == 0:
        tl.store(starts + e, tl.cumsum(whole, 0) - whole, mask=mask)
    # A rank counts the block's lower experts too, the start those of every block.
    others = whole - (after - before)
    rank += tl.gather(tl.cumsum(others, 0) - others + before, expert, 0)
    tl.store(pairs + rank, pair, mask=pair < n)
    tl.store(positions + pair, rank, mask=pair < n)


@triton.jit
def _permute(x, positions, out, H, x_stride, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * x_stride + h, mask=h < H)
    for k in tl.static_range(TOPK):
        to = tl.load(positions + token * TOPK + k).to(tl.int64)
        tl.store(out + to * H + h, values, mask=h < H)


@triton.jit
def _unpermute(
    y,
    positions,
    starts,
    weights,
    add,
    out,
    H,
    E,
    add_stride,
    TOPK: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(starts + E)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOPK):
        at = tl.load(positions + token * TOPK + k)
        weight = tl.load(weights + token * TOPK + k)
        weight = tl.where(at < end, weight, 0.0)  # padding's may be NaN
        row = tl.load(y + at.to(tl.int64) * H + h, mask=(h < H) & (at + 0 * h < end), other=0.0)
        acc += weight * row.to(tl.float32)
    if ADD:
        acc += tl.load(add + token * add_stride + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + h, acc, mask=h < H)


def empty_order(T: int, topk: int, E: int, device: torch.device) -> SortedPairs:
    """Buffers for a sort of T tokens."""
    return SortedPairs(
        torch.empty(T * topk, dtype=torch.int32, device=device),
        torch.empty(E + 1, dtype=torch.int32, device=device),
        torch.empty(T, topk, dtype=torch.int32, device=device),
    )


def check_order(order: SortedPairs, T: int, topk: int, E: int, device: torch.device) -> None:
    """Raises PykernelsError unless these are buffers for a sort of T tokens over E experts."""
    shapes = ((T * topk,), (E + 1,), (T, topk))
    for x, shape in zip((order.pairs, order.starts, order.positions), shapes, strict=True):
        if (x.shape, x.dtype, x.device) != (shape, torch.int32, device) or not x.is_contiguous():
            raise PykernelsError(
                f"a sort of {T} tokens, top-{topk} of {E}, into {x.dtype} {tuple(x.shape)}",
                "Give what a sort of as many returned",
            )


def supports(ids: torch.Tensor) -> str | None:
    """None if `sort_pairs` takes these, or the reason why not."""
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        return f"ids are {ids.dtype} {tuple(ids.shape)}, not contiguous int32 or int64 [T, topk]"
    return unsupported(ids)


def sort_pairs(ids: torch.Tensor, E: int, out: SortedPairs | None = None) -> SortedPairs:
    """Pairs ordered by expert, those of one expert by token; the same in every run.

    One launch up to ``MAX_COMPARED`` pairs, three above. Ids outside ``0..E-1`` come last, in pair
    order.

    Args:
        ids: int32 or int64 [T, topk], contiguous.
        E: experts, up to ``MAX_EXPERTS``.
        out: what an earlier call returned, to be written again.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    device = check_device(ids)
    if reason := supports(ids):
        raise PykernelsError(f"sort_pairs does not take these: {reason}", "Convert them")
    T, topk = ids.shape
    if not 1 <= E <= MAX_EXPERTS:
        raise PykernelsError(f"a sort by {E} experts", f"Sort by 1 to {MAX_EXPERTS} of them")
    out = out or empty_order(T, topk, E, device)
    check_order(out, T, topk, E, device)
    n, EP = T * topk, triton.next_power_of_2(E + 1)
    if n <= MAX_COMPARED:
        _rank_few[(triton.cdiv(n + E + 1, _FEW_OWN),)](
            ids,
            out.pairs,
            out.starts,
            out.positions,
            n,
            E,
            MOST=MAX_COMPARED,
            OWN=_FEW_OWN,
            STEP=_FEW_STEP,
            num_warps=8,
        )
        return out
    blocks = triton.cdiv(n, BLOCK)
    counts = torch.empty(blocks + 1, EP, dtype=torch.int32, device=device)
    _count[(blocks,)](ids, counts, n, E, EP=EP, BLOCK=BLOCK, num_warps=4)
    columns = min(16, EP)
    _add_up[(triton.cdiv(E + 1, columns),)](
        counts, E, blocks, EP=EP, ROWS=_OWN, BE=columns, num_warps=4
    )
    _rank[(triton.cdiv(n, _OWN),)](
        ids,
        counts,
        out.pairs,
        out.starts,
        out.positions,
        n,
        E,
        blocks,
        EP=EP,
        BLOCK=BLOCK,
        OWN=_OWN,
        STEP=_STEP,
        num_warps=_STEP // 32,
    )
    return out


def _row_grid(T: int, H: int) -> tuple[tuple[int, int], int]:
    """Grid over tokens and chunks of their rows, and the chunk."""
    block = min(2048, triton.next_power_of_2(H))
    return (T, triton.cdiv(H, block)), block


def permute(x: torch.Tensor, order: SortedPairs, out: torch.Tensor | None = None) -> torch.Tensor:
    """Row of the token of each sorted pair: every row of ``x`` is read once, written topk times.

    Args:
        x: [T, H], any dtype that is not complex; its rows contiguous.
        order: of T tokens.
        out: [T * topk, H].

    Raises:
        PykernelsError: shapes that do not match, or no Triton for this device.
    """
    T = order.positions.shape[0]
    if x.ndim != 2 or x.shape[0] != T or x.stride(1) != 1 or x.is_complex():
        raise PykernelsError(
            f"x {x.dtype} {tuple(x.shape)} with an order of {T} tokens",
            "Give it contiguous rows of the same tokens, real ones",
        )
    H = x.shape[1]
    check_device(x, order.positions)
    out = check_out(out, x, T * order.topk, H, dtype=x.dtype)
    launch_permute(x, order, out)
    return out


def launch_permute(x: torch.Tensor, order: SortedPairs, out: torch.Tensor) -> None:
    """``permute`` of what has been checked."""
    T, H = x.shape
    if x.numel():
        grid, block = _row_grid(T, H)
        _permute[grid](
            as_bytes(x),
            order.positions,
            as_bytes(out),
            H,
            x.stride(0),
            TOPK=order.topk,
            BLOCK=block,
            num_warps=4,
        )


def check_sum(order: SortedPairs, weights: torch.Tensor, add: torch.Tensor | None, H: int) -> None:
    """Raises PykernelsError unless ``unpermute`` takes these weights, and what to add."""
    T, topk = order.positions.shape
    if weights.shape != (T, topk):
        raise PykernelsError(
            f"weights {tuple(weights.shape)} of {T} tokens, top-{topk}", f"Give [{T}, {topk}]"
        )
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise PykernelsError(f"the weights are {weights.dtype}", "Give contiguous float32")
    if add is not None and (add.shape != (T, H) or add.stride(1) != 1 or add.dtype not in FLOATS):
        raise PykernelsError(f"add is {add.dtype} {tuple(add.shape)}", f"Give floats [{T}, {H}]")
    check_device(weights, order.positions, order.starts, *(() if add is None else (add,)))


def unpermute(
    y: torch.Tensor,
    order: SortedPairs,
    weights: torch.Tensor,
    add: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of each token's rows, k = 0 first, in float32; rounded once.

    Rows behind ``starts[E]`` (experts of another device) are not read, and whatever their
    weights are, they add nothing.

    Args:
        y: floats [T * topk, H], contiguous, in sorted order.
        order: of the same pairs.
        weights: float32 [T, topk], contiguous.
        add: floats [T, H], joins the sum: the shared expert's output, say.
        out: [T, H], contiguous; None makes one of y's dtype.

    Raises:
        PykernelsError: shapes that do not match, or no Triton for this device.
    """
    T, topk = order.positions.shape
    rows = y.ndim == 2 and y.shape[0] == T * topk and y.is_contiguous() and y.dtype in FLOATS
    if not rows:
        raise PykernelsError(
            f"y is {y.dtype} {tuple(y.shape)} of {T} tokens, top-{topk}",
            "Make it contiguous floats [T * topk, H]",
        )
    H = y.shape[1]
    check_sum(order, weights, add, H)
    check_device(y, order.positions)
    out = check_out(out, y, T, H)
    launch_unpermute(y, order, weights, add, out)
    return out


def launch_unpermute(
    y: torch.Tensor,
    order: SortedPairs,
    weights: torch.Tensor,
    add: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """``unpermute`` of what has been checked."""
    (T, H), topk = out.shape, order.topk
    if out.numel():
        grid, block = _row_grid(T, H)
        _unpermute[grid](
            y,
            order.positions,
            order.starts,
            weights,
            add,
            out,
            H,
            order.starts.shape[0] - 1,
            0 if add is None else add.stride(0),
            TOPK=topk,
            ADD=add is not None,
            BLOCK=block,
            num_warps=4,
        )
