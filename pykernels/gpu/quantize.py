"""Activations to E4M3, one scale a token and 128 inputs (DeepSeek-V3, arXiv 2412.19437, 3.3.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from ..shapes import SortedPairs
from .common.dequant import float_to_e4m3
from .common.launch import FLOATS, arch, check_device

GROUP = 128
NATIVE_FP8 = (8, 9)
"""From this compute capability on Triton has an E4M3 type."""


@triton.jit(do_not_specialize=["ROWS"])
def quantize_kernel(
    x,
    codes,
    scales,
    positions,
    ROWS,
    K,
    GROUPS,
    TOPK: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Groups of a row, then those of the next: every program reads and writes whole stretches.
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (line // GROUPS).to(tl.int64)
    group = line % GROUPS
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (row < ROWS)[:, None] & (k < K)
    at = row[:, None] * K + k
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), axis=1)  # of the numbers: NaN is no candidate
    scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    scale = tl.where(scale > 0, scale, 1.0)
    scaled = tl.div_rn(value, scale[:, None] + tl.zeros_like(value))
    if NATIVE:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = float_to_e4m3(scaled)
    for i in tl.static_range(TOPK):
        to = row
        if positions is not None:
            to = tl.load(positions + row * TOPK + i, mask=row < ROWS, other=0).to(tl.int64)
        tl.store(codes + to[:, None] * K + k, code, mask=inside)
        tl.store(scales + to * GROUPS + group, scale, mask=row < ROWS)


def quantize_fp8(
    x: torch.Tensor, order: SortedPairs | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, K] -> (float8_e4m3fn [R, K], float32 scales [R, ceil(K / 128)]).

    A scale is the largest magnitude of the group's numbers / 448 (1 if that is 0); NaN stays NaN.

    Args:
        order: of R tokens; the results then have R * topk rows, each sorted slot's token.

    Raises:
        PykernelsError: x is no contiguous float matrix, or no GPU kernel runs there.
    """
    check_device(x)
    if x.ndim != 2 or not x.is_contiguous() or x.dtype not in FLOATS:
        raise PykernelsError(
            f"cannot quantize {x.dtype} {tuple(x.shape)}", "Give a contiguous float matrix [R, K]"
        )
    R = x.shape[0]
    if order is not None and (order.positions.shape[0] != R or order.positions.device != x.device):
        raise PykernelsError(
            f"an order of {order.positions.shape[0]} tokens for {R} rows", "Sort these tokens"
        )
    return launch_quantize(x, order)


def launch_quantize(
    x: torch.Tensor, order: SortedPairs | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_fp8`` of what has been checked."""
    R, K = x.shape
    groups = triton.cdiv(K, GROUP)
    topk = 1 if order is None else order.topk
    codes = torch.empty(R * topk, K, dtype=torch.uint8, device=x.device)
    scales = torch.empty(R * topk, groups, dtype=torch.float32, device=x.device)
    block = 16
    if R:
        quantize_kernel[(triton.cdiv(R * groups, block),)](
            x,
            codes,
            scales,
            order and order.positions,
            R,
            K,
            groups,
            TOPK=topk,
            NATIVE=arch(x.device) >= NATIVE_FP8,
            BLOCK=block,
        )
    return codes.view(torch.float8_e4m3fn), scales
