"""Rows into cache slots as they are: twin of ``ref.cache_write``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.launch import check_device

MAX_PARTS = 4
_BLOCK = 512  # words that a program copies


@triton.jit
def _copy_words(rows, cache, t, slot, word, N):
    value = tl.load(rows + t * N + word, mask=word < N)
    tl.store(cache + slot * N + word, value, mask=word < N)


@triton.jit
def _write_rows(
    x0,
    x1,
    x2,
    x3,
    y0,
    y1,
    y2,
    y3,
    slot_mapping,
    N0,
    N1,
    N2,
    N3,
    SLOTS,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + t).to(tl.int64)
    if (slot >= 0) & (slot < SLOTS):
        _copy_words(x0, y0, t, slot, word, N0)
        if COUNT > 1:
            _copy_words(x1, y1, t, slot, word, N1)
        if COUNT > 2:
            _copy_words(x2, y2, t, slot, word, N2)
        if COUNT > 3:
            _copy_words(x3, y3, t, slot, word, N3)


def cache_write(
    rows: Sequence[torch.Tensor], cache: Sequence[torch.Tensor], slot_mapping: torch.Tensor
) -> None:
    """Writes rows, coded as the cache is, to their slots in every part of a layer's cache. One
    launch.

    Args:
        rows: up to ``MAX_PARTS`` of [T, *row], any numbers, contiguous.
        cache: of the same dtypes, [P, page, *row], contiguous.
        slot_mapping: int32 or int64 [T], ``page * page_size + offset``; what is outside the cache
            (-1) is not written.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    if not 0 < len(rows) == len(cache) <= MAX_PARTS:
        raise PykernelsError(
            f"{len(rows)} parts of rows, {len(cache)} of the cache",
            f"Give 1 to {MAX_PARTS} of each",
        )
    check_device(slot_mapping, *rows, *cache)
    T, slots = len(slot_mapping), cache[0].shape[0] * cache[0].shape[1]
    ints = slot_mapping.dtype in (torch.int32, torch.int64) and slot_mapping.ndim == 1
    if not ints or not slot_mapping.is_contiguous():
        raise PykernelsError(
            f"slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)}",
            "Give contiguous int32 or int64 [T]",
        )
    for source, target in zip(rows, cache, strict=True):
        _check(source, target, T, slots)
    words = [_words(source, target) for source, target in zip(rows, cache, strict=True)]
    sizes = [source.numel() // T for source, _ in words] if T else []
    if not sizes or not max(sizes):
        return
    empty = [None] * (MAX_PARTS - len(rows))
    _write_rows[(T, triton.cdiv(max(sizes), _BLOCK))](
        *(source for source, _ in words),
        *empty,
        *(target for _, target in words),
        *empty,
        slot_mapping,
        *sizes,
        *(0 for _ in empty),
        slots,
        COUNT=len(rows),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def _check(source: torch.Tensor, target: torch.Tensor, T: int, slots: int) -> None:
    same = source.dtype == target.dtype and source.shape[1:] == target.shape[2:]
    dense = source.is_contiguous() and target.is_contiguous()
    if not same or not dense or len(source) != T or target.shape[:2].numel() != slots:
        raise PykernelsError(
            f"rows {source.dtype} {tuple(source.shape)} for a cache {target.dtype}"
            f" {tuple(target.shape)} of {slots} slots, {T} tokens",
            "Give contiguous [T, *row] and [P, page, *row] of one dtype",
        )


def _words(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as words of four bytes if they are whole ones, else as bytes."""
    row = source[0].nbytes if len(source) else 0
    flat = source.flatten(), target.flatten()
    aligned = all(x.data_ptr() % 4 == 0 for x in flat if x.device.type != "meta")
    word = torch.int32 if row % 4 == 0 and aligned else torch.uint8
    return flat[0].view(word), flat[1].view(word)
