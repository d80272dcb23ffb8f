"""Activations to E4M3, one scale a token and 128 inputs (DeepSeek-V3, arXiv 2412.19437, 3.3.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from .decode import float_to_e4m3
from .launch import check_device

GROUP = 128


@triton.jit(do_not_specialize=["ROWS"])
def quantize_kernel(x, codes, scales, ROWS, K, GROUPS, BLOCK_R: tl.constexpr):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1)
    k = group * 128 + tl.arange(0, 128)
    inside = (row < ROWS)[:, None] & (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), axis=1)
    scale = tl.where(amax > 0, tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)), 1.0)
    scaled = tl.div_rn(value, scale[:, None] + tl.zeros_like(value))
    tl.store(codes + at, float_to_e4m3(scaled), mask=inside)
    tl.store(scales + row.to(tl.int64) * GROUPS + group, scale, mask=row < ROWS)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, K] -> (float8_e4m3fn [R, K], float32 scales [R, ceil(K / 128)]).

    A scale is the group's largest magnitude / 448 (1 if all are zero).

    Raises:
        PykernelsError: x is no contiguous float matrix, or no GPU kernel runs there.
    """
    check_device(x)
    if x.ndim != 2 or not x.is_contiguous() or not x.is_floating_point():
        raise PykernelsError(
            f"cannot quantize {x.dtype} {tuple(x.shape)}", "Give a contiguous float matrix [R, K]"
        )
    R, K = x.shape
    groups = triton.cdiv(K, GROUP)
    codes = torch.empty(R, K, dtype=torch.uint8, device=x.device)
    scales = torch.empty(R, groups, dtype=torch.float32, device=x.device)
    rows = 16
    if R:
        quantize_kernel[(triton.cdiv(R, rows), groups)](x, codes, scales, R, K, groups, rows)
    return codes.view(torch.float8_e4m3fn), scales
