"""Inputs with K permuted to match the lanes in which ``dequant_gemm`` dequantizes weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....shapes import SortedPairs


@triton.jit
def permute_k_kernel(x, out, order, K, K_OUT, TOPK, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out[m, p] = input k(p), zeros behind K, of row m or, with an order, of the token
    of sorted slot m.

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
    row = m
    if order is not None:
        row = tl.load(order + m) // TOPK
    value = tl.load(x + row.to(tl.int64) * K + k, mask=k < K, other=0.0)
    tl.store(out + m.to(tl.int64) * K_OUT + p, value, mask=p < K_OUT)


def permute_k(x: torch.Tensor, kind: str, order: SortedPairs | None = None) -> torch.Tensor:
    """x [M, K] with K permuted, and padded to whole steps of 128.

    Args:
        order: of M tokens: the result has each sorted slot's, [S, ..].
    """
    K = x.shape[1]
    rows = x.shape[0] if order is None else order.pairs.shape[0]
    out = torch.empty(rows, -(-K // 128) * 128, dtype=x.dtype, device=x.device)
    block = 1024
    grid = (rows, triton.cdiv(out.shape[1], block))  # rows may be more than the other axes hold
    permute_k_kernel[grid](
        x,
        out,
        order and order.pairs,
        K,
        out.shape[1],
        order.topk if order else 1,
        KIND={"q4_k": "int4", "mxfp4": "int4", "fp8": "int8"}.get(kind, kind),
        BLOCK=block,
    )
    return out
