"""Inputs with K permuted to match the lanes in which ``dequant_gemm`` dequantizes weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....shapes import SortedPairs


@triton.jit
def permute_k_kernel(
    x, out, order, starts, E, K, K_OUT, TOPK, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """out[m, p] = input k(p), zeros behind K, of row m or, with an order, of the token
    of sorted slot m. With starts nothing is written from starts[E] on.

    Of 64 inputs of a product, lane t of four has 16 j + 8 odd + 2 t + e, and words 4 t .. 4 t + 3;
    the codes of word j are its bytes 2 e + odd. Of nibbles the second 64 have the high halves: of
    int4 (MXFP4, Q4_K) inputs 32 further on, of Q6_K 64.
    """
    m = tl.program_id(0)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    STEP: tl.constexpr = 64 if KIND == "int8" else 128
    byte = 16 * (p // 2 % 4) + 4 * (p // 16 % 4) + 2 * (p % 2) + p // 8 % 2
    if KIND == "int4":
        k = p // STEP * STEP + byte // 32 * 64 + byte % 32 + p // 64 % 2 * 32
    elif KIND == "q6_k":
        k = p // STEP * STEP + byte + p // 64 % 2 * 64
    else:
        k = p // STEP * STEP + byte
    inside = p < K_OUT
    if starts is not None:
        inside &= m < tl.load(starts + E)
    row = m
    if order is not None:
        row = tl.load(order + m) // TOPK
    value = tl.load(x + row.to(tl.int64) * K + k, mask=inside & (k < K), other=0.0)
    tl.store(out + m.to(tl.int64) * K_OUT + p, value, mask=inside)


def permute_k(
    x: torch.Tensor, kind: str, order: SortedPairs | None = None, gather: bool = False
) -> torch.Tensor:
    """x [M, K] with K permuted, and padded to whole steps of 128.

    Args:
        order: of the experts that multiply the result; rows of pairs that none of them has stay
            unwritten, such as those of the experts of other GPUs.
        gather: x has the order's tokens: the result has each sorted slot's, [S, ..]. Else x has
            rows of sorted slots, or there is no order.
    """
    K = x.shape[1]
    rows = order.pairs.shape[0] if order and gather else x.shape[0]
    out = torch.empty(rows, -(-K // 128) * 128, dtype=x.dtype, device=x.device)
    block = 1024
    grid = (rows, triton.cdiv(out.shape[1], block))  # rows may be more than the other axes hold
    permute_k_kernel[grid](
        x,
        out,
        order.pairs if order and gather else None,
        order and order.starts,
        order.starts.shape[0] - 1 if order else 0,
        K,
        out.shape[1],
        order.topk if order else 1,
        KIND={"q4_k": "int4", "mxfp4": "int4", "fp8": "int8"}.get(kind, kind),
        BLOCK=block,
    )
    return out
