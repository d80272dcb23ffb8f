"""Sums of parts in a fixed order: no float atomics, so the same bits in every run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.bf16 import to_bf16


@triton.jit
def add_kernel(parts, out, bias, N, SIZE, PARTS, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    acc = tl.zeros((BLOCK,), tl.float32)
    at = parts + i
    for _ in range(PARTS):
        acc += tl.load(at, mask=inside, other=0.0)
        at += SIZE  # not part * SIZE, which 32 bits may not hold
    if HAS_BIAS:
        acc += tl.load(bias + i % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, to_bf16(acc), mask=inside)


def add_partials(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """bfloat16 out [M, N] = sum of float32 parts [P, M, N], first to last, plus bias [N]."""
    M, N = out.shape
    block = 512
    add_kernel[(triton.cdiv(M * N, block),)](
        parts, out, bias, N, M * N, parts.shape[0], bias is not None, block
    )


@triton.jit(do_not_specialize=["M", "FIRST", "TOTAL", "BLOCKS", "PROGRAMS"])
def add_shares_kernel(
    parts,
    out,
    bias,
    M,
    N,
    STEPS,
    FIRST,
    TOTAL,
    BLOCKS,
    NUM_CTAS,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OWN: tl.constexpr,
):
    """Rows OWN j .. of x of tile FIRST + i, for program (i, j)."""
    i = tl.program_id(0)
    step = i.to(tl.int64) * STEPS
    first = ((step + 1) * NUM_CTAS - 1) // TOTAL
    last = ((step + STEPS) * NUM_CTAS - 1) // TOTAL
    m = tl.program_id(1) * OWN + tl.arange(0, OWN)
    r = tl.arange(0, ROWS)
    at = parts + m[:, None] * ROWS + r[None, :]
    acc = tl.load(at + (i + first) * (ROWS * COLS))
    for program in range(first + 1, last + 1):
        acc += tl.load(at + (i + program) * (ROWS * COLS))
    n = (FIRST + i) // BLOCKS * ROWS + r
    m += (FIRST + i) % BLOCKS * COLS
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    to = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, to_bf16(acc), mask=(m < M)[:, None] & (n < N)[None, :])


def add_shares(
    parts: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: int,
    shared: int,
    steps: int,
    num_ctas: int,
) -> None:
    """The last ``shared`` tiles of bfloat16 out [M, N], whose steps programs have shared evenly.

    Program p has steps p * total // programs .. of all ``total = shared * steps``. What it has of
    shared tile i is part i + p: a next part begins where a tile or a share ends.

    Args:
        parts: float32 [shared + programs, rows of x, rows of the matrix].
        steps: of a tile.
    """
    (M, N), (_, cols, rows) = out.shape, parts.shape
    own = min(cols, 8)
    add_shares_kernel[(shared, cols // own)](
        parts,
        out,
        bias,
        M,
        N,
        steps,
        tiles - shared,
        shared * steps,
        triton.cdiv(M, cols),
        num_ctas,
        bias is not None,
        rows,
        cols,
        own,
    )
