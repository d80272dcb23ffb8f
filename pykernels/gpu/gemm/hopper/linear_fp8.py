"""A linear of E4M3 rows and E4M3 blocks by the experts' kernel: one matrix, every row its own.

Tiles of 128 rows and 256 outputs seldom come in whole waves of the SMs. Those of the
last wave are shared by several programs, which write their sums apart (stream-K: arXiv 2301.03598,
with equal parts); a second launch adds them in a fixed order.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.launch import num_sms
from ..weights import Matrices
from .fp8 import BLOCK_M, launch, work_at

MOST_PARTS = 11
_ROWS = 16


def tail_split(tiles: int, steps: int, num_sms: int) -> tuple[int, int]:
    """(tiles of one program each, programs that share each of the others)."""
    whole, parts, _ = _tail(tiles, steps, num_sms)
    return whole, parts


def pays(M: int, N: int, K: int, num_sms: int) -> bool:
    """Whether this kernel beats the plain one, whose tiles of 128 outputs fill few SMs
    better and take 3/4 of a step's time."""
    blocks, steps = triton.cdiv(M, BLOCK_M), triton.cdiv(K, 128)
    whole, _, tail = _tail(blocks * triton.cdiv(N, 256), steps, num_sms)
    rounds = triton.cdiv(blocks * triton.cdiv(N, 128), num_sms)
    return whole // num_sms * steps + tail + 4 <= 0.75 * rounds * steps


def _tail(tiles: int, steps: int, num_sms: int) -> tuple[int, int, float]:
    """``tail_split``, and how many steps the last wave takes.

    A step is 128 inputs of a tile. Parts cost about 0.09 steps a part and tile to write and read,
    and 13 for the second launch and what goes idle around it.
    """
    whole = tiles - tiles % num_sms
    tail, best, least = tiles - whole, 1, float(steps)
    if tail == 0:
        return tiles, 1, 0.0
    for parts in range(2, min(MOST_PARTS, steps) + 1):
        share = triton.cdiv(steps, parts)
        if triton.cdiv(steps, share) != parts:
            continue  # some part would be empty
        cost = triton.cdiv(tail * parts, num_sms) * share + 13 + 0.09 * parts * tail
        if cost < least:
            best, least = parts, cost
    return (tiles if best == 1 else whole), best, least


@gluon.jit(do_not_specialize=["M", "whole", "N_BLOCKS"])
def add_tail(
    parts,
    out,
    bias,
    M,
    whole,
    N,
    K,
    N_BLOCKS,
    GROUP_M: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Rows ROWS j .. of half h of shared tile i, for program (i, h, j)."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    i = gl.program_id(0)
    blocks = gl.cdiv(M, 128)
    expert, first, hi, n_block, g0, groups = work_at(
        None, M, whole + i * SPLIT, blocks, whole, K, N_BLOCKS, GROUP_M, SPLIT
    )
    row = gl.program_id(2) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))
    at = parts + i.to(gl.int64) * (SPLIT * 32768) + gl.program_id(1) * 16384
    at = at + row[:, None] * 128 + col[None, :]
    acc = gl.load(at)
    for part in gl.static_range(1, SPLIT):
        acc += gl.load(at + part * 32768)
    col += n_block * 256 + gl.program_id(1) * 128
    row += first
    if bias is not None:
        acc += gl.load(bias + col, mask=col < N, other=0.0).to(gl.float32)[None, :]
    to = out + (row.to(gl.int64) * N)[:, None] + col[None, :]
    gl.store(to, acc.to(gl.bfloat16), mask=(row < hi)[:, None] & (col < N)[None, :])


def multiply_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    group_m: int,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes and dtypes.

    Args:
        x: E4M3 [M, K], at a multiple of 16 bytes, as are the weights.
        x_scale: float32 [M, ceil(K / 128)].
        stack: one matrix.
    """
    M, sms = x.shape[0], num_sms(x.device)
    n_blocks = triton.cdiv(stack.N, 256)
    tiles = triton.cdiv(M, BLOCK_M) * n_blocks
    whole, split = tail_split(tiles, triton.cdiv(stack.K, 128), sms)
    works = (tiles - whole) * split
    parts = None
    if split > 1:
        parts = torch.empty(works, 2, BLOCK_M, 128, dtype=torch.float32, device=x.device)
    launch(
        x,
        x_scale,
        stack,
        out,
        None,
        bias,
        parts,
        None,
        M,
        whole,
        n_blocks,
        num_ctas=min(sms, whole + works),
        gated=False,
        group_m=group_m,
        split=split,
    )
    if split > 1:
        add_tail[(tiles - whole, 2, BLOCK_M // _ROWS)](
            parts,
            out,
            bias,
            M,
            whole,
            stack.N,
            stack.K,
            n_blocks,
            GROUP_M=group_m,
            SPLIT=split,
            ROWS=_ROWS,
            num_warps=4,
        )
