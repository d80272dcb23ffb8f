"""Pages of a KV cache in main memory: those that a step reads come to the GPU, its rows go back.

Which pages a step reads is in its page tables, on the GPU, so no copy of the host's can bring them
in a captured graph: a kernel reads pinned memory. It runs beside those that compute, so it takes a
few SMs only, each of which has a run of 16 KB on its way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.launch import check_device, interpreted

_BLOCK = 4096
"""Words of four bytes that a program has on their way."""
PROGRAMS = 64
"""Programs that bring pages: 1 MB on its way is several times what the link holds."""
_SCAN = 1024
EDGE = 512
"""Tokens: from a multiple of them on, pages of a window are read. Kernels of attention begin at the
edge of a block of keys, in front of the window, which must hold numbers."""


@triton.jit(do_not_specialize=["columns", "stride", "window"])
def _mark_kv_pages(
    table,
    lengths,
    marks,
    columns,
    stride,
    window,
    PAGE: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0) // EDGE * EDGE // PAGE
    read = (column * PAGE < length) & (column >= first) & (column < columns)
    page = tl.load(table + row.to(tl.int64) * stride + column, mask=read, other=0)
    tl.store(marks + page, 1, mask=read)


@triton.jit(do_not_specialize=["pages"])
def _list_kv_pages(marks, out, pages, BLOCK: tl.constexpr):
    found = tl.zeros([], tl.int32)
    for start in tl.range(0, pages, BLOCK):
        page = start + tl.arange(0, BLOCK)
        marked = tl.load(marks + page, mask=page < pages, other=0)
        at = found + tl.cumsum(marked, 0)  # from 1 on: the number of pages is in front of them
        tl.store(out + at, page, mask=marked != 0)
        found += tl.sum(marked, 0)
    tl.store(out, found)


@triton.jit
def _load_kv_pages(pages, source, out, words, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.load(pages)
    blocks = tl.cdiv(words, BLOCK)
    for i in tl.range(tl.program_id(0), count * blocks, PROGRAMS):
        page = tl.load(pages + 1 + i // blocks).to(tl.int64)
        w = i % blocks * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(source + page * words + w, mask=w < words)
        tl.store(out + page * words + w, found, mask=w < words)


@triton.jit
def _store_kv_rows(slot_mapping, source, out, words, BLOCK: tl.constexpr):
    slot = tl.load(slot_mapping + tl.program_id(0)).to(tl.int64)
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = (w < words) & (slot >= 0)
    tl.store(out + slot * words + w, tl.load(source + slot * words + w, mask=kept), mask=kept)


def list_pages(
    table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, page: int, window: int = 0
) -> torch.Tensor:
    """The pages that sequences read, each once, by number. Two launches.

    Args:
        table: int32 [S, columns], of each sequence, in order; lines contiguous.
        lengths: contiguous int32 [S], tokens of each; 0: none.
        out: contiguous int32 [1 + pages of the cache]: how many they are, then they; written.
        page: tokens of a page.
        window: of tokens, the last ones of each sequence, whose pages are read, from a multiple of
            ``EDGE`` on; 0: those of all.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton here.
    """
    check_device(table, lengths, out)
    for name, x, ndim in (("table", table, 2), ("lengths", lengths, 1), ("pages", out, 1)):
        if x.dtype != torch.int32 or x.ndim != ndim or x.stride(-1) != 1:
            raise PykernelsError(
                f"{name} is {x.dtype} {tuple(x.shape)}", f"Give contiguous int32 of {ndim} dims"
            )
    S, columns = table.shape
    if len(lengths) != S or not len(out):
        raise PykernelsError(
            f"{len(lengths)} lengths of {S} sequences", "Give one a sequence, and room for pages"
        )
    pages = len(out) - 1
    marks = torch.zeros(max(1, pages), dtype=torch.int32, device=out.device)
    grid = S, triton.cdiv(columns, _SCAN)
    if S and columns:
        where = (table, lengths, marks, columns, table.stride(0), window)
        _mark_kv_pages[grid](*where, PAGE=page, EDGE=EDGE, BLOCK=_SCAN)
    _list_kv_pages[(1,)](marks, out, pages, BLOCK=_SCAN)
    return out


def load_pages(
    pages: torch.Tensor,
    caches: Sequence[torch.Tensor],
    staging: Sequence[torch.Tensor],
    programs: int = PROGRAMS,
) -> None:
    """Copies the pages that a list names to the same places of the staging. A launch a part.

    Args:
        pages: as ``list_pages`` writes it, on the GPU.
        caches: contiguous [pages, page, ...], pinned or on the GPU.
        staging: of the same shapes and dtypes, on the GPU; written.
        programs: that bring them.

    Raises:
        PykernelsError: other shapes, memory that is not pinned, or no Triton here.
    """
    check_device(pages, *staging)
    for source, out in zip(caches, staging, strict=True):
        from_words, to_words = _words(source, out, pages=True)
        if len(pages) != 1 + len(source):
            raise PykernelsError(
                f"a list of {len(pages) - 1} pages at most, of {len(source)}", "Give room for all"
            )
        _load_kv_pages[(programs,)](
            pages,
            from_words,
            to_words,
            from_words.shape[1],
            PROGRAMS=programs,
            BLOCK=min(_BLOCK, triton.next_power_of_2(from_words.shape[1])),
            num_warps=8,
        )


def store_rows(
    slot_mapping: torch.Tensor, staging: Sequence[torch.Tensor], caches: Sequence[torch.Tensor]
) -> None:
    """Copies the rows of a step's tokens from the staging to the caches. A launch a part.

    Args:
        slot_mapping: contiguous int32 [T], ``page * page_size + offset`` of each token; -1: none.
        staging, caches: see ``load_pages``; the caches are written.

    Raises:
        PykernelsError: other shapes, memory that is not pinned, or no Triton here.
    """
    check_device(slot_mapping, *staging)
    for source, out in zip(staging, caches, strict=True):
        from_words, to_words = _words(source, out, pages=False)
        words = from_words.shape[1]
        if len(slot_mapping):
            block = min(_BLOCK, triton.next_power_of_2(words))
            grid = len(slot_mapping), triton.cdiv(words, block)
            _store_kv_rows[grid](slot_mapping, from_words, to_words, words, BLOCK=block)


def _words(
    source: torch.Tensor, out: torch.Tensor, pages: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as int32 [pages or rows, words]."""
    for x in (source, out):
        if x.shape != source.shape or x.dtype != source.dtype or not x.is_contiguous():
            raise PykernelsError(
                f"pages of {x.dtype} {tuple(x.shape)} beside {source.dtype} {tuple(source.shape)}",
                "Give contiguous ones of one shape",
            )
        if x.device.type == "cpu" and not interpreted() and not x.is_pinned():
            raise PykernelsError("a cache in main memory is not pinned", "Pin it")
    rows = len(source) if pages else source.shape[0] * source.shape[1]
    if source.nbytes % (4 * max(1, rows)):
        raise PykernelsError(f"rows of {source.nbytes // max(1, rows)} bytes", "Give whole words")
    words = source.nbytes // (4 * max(1, rows))
    as_words = [x.view(-1).view(torch.int32).view(rows, words) for x in (source, out)]
    return as_words[0], as_words[1]
