"""Inputs with K permuted to match the lanes in which ``dequant_gemm`` dequantizes weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....shapes import SortedPairs

_FEW = 512
"""Up to so many rows a program has one of them, else 16: what it reads for nothing is little."""


@triton.jit
def permute_k_kernel(
    x,
    out,
    pairs,
    starts,
    E,
    M,
    K,
    K_OUT,
    TOPK,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[m, p] = input k(p), zeros behind K, of row m or, with pairs, of the token of sorted
    slot m. With starts nothing is written from row starts[E] on.

    Of 64 inputs of a product, lane t of four has 16 j + 8 odd + 2 t + e, and words 4 t .. 4 t + 3;
    the codes of word j are its bytes 2 e + odd. Of nibbles the second 64 have the high halves: of
    int4 (MXFP4, Q4_K) inputs 32 further on, of Q6_K 64. So p has the bits of k in another order,
    from the highest 5 3 2 0 6 4 1 for int4 and 6 3 2 0 5 4 1 else: x is read as it lies, and bits
    are axes that change places.
    """
    first = tl.program_id(0) * ROWS
    end = M
    if starts is not None:
        end = tl.load(starts + E)
    if first < end:
        m = first + tl.arange(0, ROWS)
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = m
        if pairs is not None:
            row = tl.load(pairs + m, mask=m < end, other=0) // TOPK
        own = (m < end)[:, None]
        at = row.to(tl.int64)[:, None] * K + k[None, :]
        value = tl.load(x + at, mask=own & (k < K)[None, :], other=0.0)
        value = tl.reshape(value, [ROWS, BLOCK // 128, 2, 2, 2, 2, 2, 2, 2])  # bits 6 to 0 of k
        if KIND == "int4":
            value = tl.permute(value, [0, 1, 3, 5, 6, 8, 2, 4, 7])
        else:
            value = tl.permute(value, [0, 1, 2, 5, 6, 8, 3, 4, 7])
        value = tl.reshape(value, [ROWS, BLOCK])
        to = m.to(tl.int64)[:, None] * K_OUT + k[None, :]
        tl.store(out + to, value, mask=own & (k < K_OUT)[None, :])


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
    M = order.pairs.shape[0] if order and gather else x.shape[0]
    out = torch.empty(M, -(-K // 128) * 128, dtype=x.dtype, device=x.device)
    rows, block = (1, 1024) if M <= _FEW else (16, 256)
    # Rows may be more than the other axes of a grid hold.
    permute_k_kernel[(triton.cdiv(M, rows), triton.cdiv(out.shape[1], block))](
        x,
        out,
        order.pairs if order and gather else None,
        order and order.starts,
        order.starts.shape[0] - 1 if order else 0,
        M,
        K,
        out.shape[1],
        order.topk if order else 1,
        KIND={"q4_k": "int4", "mxfp4": "int4", "fp8": "int8"}.get(kind, kind),
        ROWS=rows,
        BLOCK=block,
    )
    return out
