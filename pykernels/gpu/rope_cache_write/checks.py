"""What both ops ask of their inputs."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ..common.launch import FLOATS, unsupported

MAX_ROW = 32768
"""Numbers of all queries of a token, at most, where one norm is of all heads."""


def check_ints(name: str, x: torch.Tensor, T: int = 0) -> None:
    if x.dtype not in (torch.int32, torch.int64) or x.shape != (T,) or not x.is_contiguous():
        raise PykernelsError(
            f"{name} are {x.dtype} {tuple(x.shape)}", f"Give contiguous int32 or int64 [{T}]"
        )


def check_angles(angles: torch.Tensor, T: int, name: str = "angles") -> None:
    right = angles.ndim == 3 and angles.shape[:2] == (T, 2) and angles.is_contiguous()
    if not right or angles.dtype != torch.float32:
        raise PykernelsError(
            f"{name}: {angles.dtype} {tuple(angles.shape)}",
            f"Give contiguous float32 [{T}, 2, R / 2]",
        )


def check_cache(
    name: str, cache: torch.Tensor, scale: torch.Tensor | None, *row: int
) -> torch.Tensor:
    """The cache [P, page, *row] as the kernel takes it: E4M3 as bytes."""
    eight = cache.dtype in (torch.float8_e4m3fn, torch.uint8)
    if cache.shape[2:] != row or (not eight and cache.dtype not in FLOATS):
        raise PykernelsError(
            f"the cache of {name} is {cache.dtype} {tuple(cache.shape)}",
            f"Give floats or E4M3 [P, page, {', '.join(map(str, row))}]",
        )
    if eight != (scale is not None):
        raise PykernelsError(
            f"the cache of {name} is {cache.dtype} {'without' if eight else 'with'} scales",
            "Give E4M3 its scales",
        )
    if scale is not None and (
        scale.dtype != torch.float32 or scale.shape != cache.shape[:-1] or not scale.is_contiguous()
    ):
        raise PykernelsError(
            f"scales of {name} are {scale.dtype} {tuple(scale.shape)}", "Give float32 a row"
        )
    return cache.view(torch.uint8) if eight else cache


def supports(qkv: torch.Tensor) -> str | None:
    """None if rows of queries, keys and values like these are taken, or the reason why not."""
    if qkv.dtype not in FLOATS or qkv.ndim != 2 or qkv.stride(1) != 1:
        return f"{qkv.dtype} {tuple(qkv.shape)}, not floats [T, N] with dense rows"
    return unsupported(qkv)


def norm_kind(name: str, weight: torch.Tensor | None, heads: int, D: int) -> int:
    if weight is None:
        return 0
    if weight.dtype not in FLOATS or not weight.is_contiguous() or weight.ndim != 1:
        raise PykernelsError(
            f"{name} is {weight.dtype} {tuple(weight.shape)}",
            "Give contiguous floats, one dimension",
        )
    if len(weight) not in (D, heads * D):
        raise PykernelsError(f"{name} has {len(weight)} weights", f"Give it {D} or {heads * D}")
    if len(weight) == D:
        return 1
    if len(weight) > MAX_ROW:
        raise PykernelsError(f"{name} has {len(weight)} weights", f"Give it {MAX_ROW} at most")
    return 2
