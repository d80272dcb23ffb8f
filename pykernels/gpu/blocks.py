"""Which rows and columns a program of a grouped GEMM computes, found on the device."""

from __future__ import annotations

import triton
import triton.language as tl


def block_bound(S: int, E: int, block_m: int) -> int:
    """Most M blocks that S rows of E experts can make: an expert's last block may be ragged."""
    return min(S, S // block_m + min(E, S))


@triton.jit
def locate(
    pid,
    starts,
    E,
    M,
    N_BLOCKS,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    E_PADDED: tl.constexpr,
):
    """The tile of program ``pid``: (expert, first row, row behind the expert's last, N block).

    An expert's programs are neighbours, and among them those of up to GROUP_M M blocks that read
    the same weights, so that these are read from memory once and then lie in L2. ``expert`` is E
    or more for a program too many: the grid is a bound (``block_bound``).

    Args:
        starts: int32 [E + 1], rows of expert e are starts[e] .. starts[e + 1] - 1.
        M: rows where there are no experts.
        E_PADDED: a power of two, at least E; 0: one matrix for all M rows.
    """
    if E_PADDED == 0:
        expert = pid * 0
        lo = expert
        hi = expert + M
        blocks = tl.cdiv(M, BLOCK_M)
        local = pid
    else:
        e = tl.arange(0, E_PADDED)
        there = e < E
        begin = tl.load(starts + e, mask=there, other=0)
        end = tl.load(starts + e + 1, mask=there, other=0)
        each = (end - begin + BLOCK_M - 1) // BLOCK_M
        before = tl.cumsum(each, 0) <= pid // N_BLOCKS
        expert = tl.sum(before.to(tl.int32))
        local = pid - tl.sum(tl.where(before, each, 0)) * N_BLOCKS
        mine = tl.minimum(expert, E - 1)
        lo = tl.load(starts + mine)
        hi = tl.load(starts + mine + 1)
        blocks = tl.maximum((hi - lo + BLOCK_M - 1) // BLOCK_M, 1)
    group = local // (GROUP_M * N_BLOCKS)
    inside = local % (GROUP_M * N_BLOCKS)
    rows = tl.maximum(tl.minimum(blocks - group * GROUP_M, GROUP_M), 1)
    m_block = group * GROUP_M + inside % rows
    return expert, lo + m_block * BLOCK_M, hi, inside // rows
