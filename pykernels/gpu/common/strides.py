"""Tensors as kernels take them: rows at one distance, FP8 as bytes, buffers that fit."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from .launch import FLOATS


def rows_of(x: torch.Tensor, name: str) -> tuple[int, int]:
    """Number of rows of [..., H] and elements from one to the next.

    Raises:
        PykernelsError: the last dimension has gaps, or rows are not equally far apart.
    """
    if x.ndim < 1 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise PykernelsError(f"{name} has gaps in its last dimension", "Make it contiguous")
    count, stride, span = 1, 0, None
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if span is not None and step != span:
            raise PykernelsError(f"rows of {name} are not equally far apart", "Make it contiguous")
        stride = step if span is None else stride
        count, span = count * size, step * size
    return (count, stride) if x.numel() else (0, 0)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 as uint8: not every GPU's Triton knows the type."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def check_out(
    out: torch.Tensor | None, like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``out`` if it is contiguous, of that shape and of that dtype, or of any of ``FLOATS`` if none
    is given; a new tensor like ``like`` for None."""
    if out is None:
        return like.new_empty(shape, dtype=dtype)
    right = out.shape == shape and out.dtype in (FLOATS if dtype is None else (dtype,))
    if not right or not out.is_contiguous() or out.device != like.device:
        kind = " floats" if dtype is None else f" {dtype}"
        raise PykernelsError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}",
            f"Give it contiguous{kind} {tuple(shape)} on {like.device}",
        )
    return out
