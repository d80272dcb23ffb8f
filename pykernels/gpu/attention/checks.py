"""What the attention launchers ask of their inputs before any kernel runs."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch

from ...errors import PykernelsError

FP8 = torch.float8_e4m3fn


def newest_tokens(q: torch.Tensor, name: str) -> torch.Tensor:
    """Queries of a decode step as [B, S, NH, D]."""
    if q.ndim not in (3, 4):
        raise PykernelsError(f"{name} is {list(q.shape)}", "Make it [B, NH, D] or [B, S, NH, D]")
    q = q[:, None] if q.ndim == 3 else q
    check_rows(q, name)
    return q


def check_rows(x: torch.Tensor, name: str) -> None:
    """bf16, neighbours in the last dimension next to each other."""
    if x.dtype != torch.bfloat16:
        raise PykernelsError(f"{name} is {x.dtype}", "The kernels take bfloat16")
    if x.numel() and x.stride(-1) != 1:
        raise PykernelsError(f"{name} has strides {x.stride()}", "Make its last dimension dense")


def check_cache(
    pages: torch.Tensor,
    name: str,
    token: tuple[int, ...],
    table: torch.Tensor,
    lengths: torch.Tensor,
    B: int,
    beside: torch.Tensor | None = None,
    bf16_only: bool = False,
) -> tuple[int, int]:
    """(pages, tokens a page) of a cache tensor [P, page, *token] with its page table.

    Args:
        beside: a cache tensor that must have the same pages.
    """
    if pages.shape[2:] != token or pages.ndim != 2 + len(token):
        wanted = ", ".join(map(str, ("P", "page", *token)))
        raise PykernelsError(f"{name} is {list(pages.shape)}", f"Make it [{wanted}]")
    P, page = pages.shape[:2]
    if beside is not None and pages.shape[:2] != beside.shape[:2]:
        raise PykernelsError(
            f"{name} has {P} pages of {page}, the cache beside it {list(beside.shape[:2])}",
            "Both must have the same pages",
        )
    if pages.dtype != torch.bfloat16 and (bf16_only or pages.dtype != FP8):
        kinds = "bfloat16" if bf16_only else "bfloat16 or float8_e4m3fn"
        raise PykernelsError(f"{name} is {pages.dtype}", f"The kernels take {kinds}")
    if not pages.is_contiguous():
        raise PykernelsError(f"{name} has strides {pages.stride()}", "Make the cache contiguous")
    if page < 1 or page & (page - 1):
        raise PykernelsError(f"{name} has pages of {page} tokens", "Take a power of two")
    dense = table.ndim == 2 and (table.stride(1) == 1 or not table.numel())
    if table.dtype != torch.int32 or not dense or table.shape[0] != B:
        raise PykernelsError(
            f"the page table is {table.dtype} {list(table.shape)}", f"Make it int32 [{B}, pages]"
        )
    if lengths.dtype != torch.int32 or lengths.shape != (B,) or not lengths.is_contiguous():
        raise PykernelsError(
            f"lengths are {lengths.dtype} {list(lengths.shape)}", f"Make them int32 [{B}]"
        )
    return P, page


def check_scales(
    pages: torch.Tensor, scales: torch.Tensor | None, name: str, shape: tuple[int, ...]
) -> None:
    """An E4M3 cache has float32 scales, a bf16 one has none."""
    if (pages.dtype == FP8) != (scales is not None):
        raise PykernelsError(
            f"the cache is {pages.dtype} and {name} is {'given' if scales is not None else 'not'}",
            f"An E4M3 cache needs {name}, a bfloat16 one takes none",
        )
    if scales is not None and (
        scales.dtype != torch.float32
        or tuple(scales.shape) != shape
        or not scales.is_contiguous()
        or scales.device != pages.device
    ):
        raise PykernelsError(
            f"{name} is {scales.dtype} {list(scales.shape)} on {scales.device}",
            f"Make it contiguous float32 {list(shape)} on {pages.device}",
        )


def check_sinks(sinks: torch.Tensor | None, NH: int, device: torch.device) -> None:
    """None, or one of each of ``NH`` heads."""
    kinds = (torch.bfloat16, torch.float32)
    if sinks is not None and (
        sinks.dtype not in kinds
        or sinks.shape != (NH,)
        or not sinks.is_contiguous()
        or sinks.device != device
    ):
        raise PykernelsError(
            f"sinks are {sinks.dtype} {list(sinks.shape)} on {sinks.device}",
            f"Make them contiguous bfloat16 or float32 [{NH}] on {device}",
        )


def check_scores(scale: float, window: int | None, softcap: float | None) -> None:
    """Options of the scores that no kernel could make sense of."""
    if window is not None and not (isinstance(window, Integral) and window >= 1):
        raise PykernelsError(
            f"a window of {window}", "It must be a whole number, at least 1, the token itself"
        )
    if softcap is not None and not (isinstance(softcap, Real) and 0 < softcap < math.inf):
        raise PykernelsError(
            f"a softcap of {softcap!r}", "It must be a number above 0 and finite, or None"
        )
    if not (isinstance(scale, Real) and 0 < scale < math.inf):
        raise PykernelsError(f"a scale of {scale!r}", "It must be a number above 0 and finite")
