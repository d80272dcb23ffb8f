"""Copies of buffers as they are, in one launch: to another GPU's memory, or from what it has sent.

Another GPU's memory is reached over NVLink or PCIe by the same loads and stores as a GPU's own,
once peer access is on (``common.peer_access``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .common.launch import check_device, interpreted

MAX_COPIES = 4
_BLOCK = 256  # words that a program copies: 7 programs for a bfloat16 row of 7168
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy_block(source, target, N, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Another device may have written it after this kernel's graph was launched: volatile, so that
    # nothing that was cached before is taken for it.
    word = tl.load(source + n, mask=n < N, other=0, volatile=True)
    tl.store(target + n, word, mask=n < N)


@triton.jit
def _copy_bytes(
    x0,
    x1,
    x2,
    x3,
    y0,
    y1,
    y2,
    y3,
    N0,
    N1,
    N2,
    N3,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _copy_block(x0, y0, N0, BLOCK)
    if COUNT > 1:
        _copy_block(x1, y1, N1, BLOCK)
    if COUNT > 2:
        _copy_block(x2, y2, N2, BLOCK)
    if COUNT > 3:
        _copy_block(x3, y3, N3, BLOCK)


def copy_bytes(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies buffers of any dtype and shape. One launch, on the current GPU.

    Args:
        sources: up to ``MAX_COPIES``, contiguous; on this GPU, on a peer of it, or pinned.
        targets: as many, contiguous, each of as many bytes as its source, likewise.

    Raises:
        PykernelsError: other sizes, gaps, memory of the host that is not pinned, or no Triton here.
    """
    if not 0 < len(sources) == len(targets) <= MAX_COPIES:
        raise PykernelsError(
            f"{len(sources)} sources, {len(targets)} targets", f"Give 1 to {MAX_COPIES} of each"
        )
    for source, target in zip(sources, targets, strict=True):
        _check(source, target)
    pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0].nbytes]
    if not pairs:
        return
    word = _widest(*(x for pair in pairs for x in pair))
    words = [[_as_words(x, word) for x in side] for side in zip(*pairs, strict=True)]
    counts, empty = [len(x) for x in words[0]], [None] * (MAX_COPIES - len(pairs))
    _copy_bytes[(triton.cdiv(max(counts), _BLOCK),)](
        *words[0],
        *empty,
        *words[1],
        *empty,
        *counts,
        *(0 for _ in empty),
        COUNT=len(pairs),
        BLOCK=_BLOCK,
        num_warps=1,
    )


def _widest(*tensors: torch.Tensor) -> torch.dtype:
    """The widest word of which all are made, where they lie."""
    return next(
        word
        for word in _WORDS
        if all(x.nbytes % word.itemsize == x.data_ptr() % word.itemsize == 0 for x in tensors)
    )


def _as_words(x: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    return x.view(-1).view(torch.uint8).view(word)


def _check(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.nbytes != target.nbytes:
        raise PykernelsError(
            f"{source.nbytes} bytes to copy to {target.nbytes}", "Give as many bytes of both"
        )
    for name, x in (("a source", source), ("a target", target)):
        if not x.is_contiguous():
            raise PykernelsError(f"{name} {tuple(x.shape)} has gaps", "Give a contiguous one")
        if x.device.type == "cpu" and not interpreted() and x.numel() and not x.is_pinned():
            raise PykernelsError(f"{name} is not pinned", "Give pinned or registered memory")
    own = next((x for x in (source, target) if _is_here(x)), source)
    check_device(own)


def _is_here(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and x.device.index == torch.cuda.current_device()
