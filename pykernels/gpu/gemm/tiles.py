"""Which rows and columns a program of a grouped GEMM computes, found on the device.

Either each program finds its own tile (``locate``), or a table of all blocks of rows is made first
(``tile_table``), so that a program can walk over many. Then the parts that the grouped GEMMs share:
where a tile's inputs come from, and where its results go.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ...shapes import SWIGLU, ExpertSpec, SortedPairs
from ..common.bf16 import to_bf16

_LINES = 32
"""A program writes so many of the table."""


@triton.jit
def _tile_table(
    starts,
    table,
    E,
    bound,
    BLOCK_M: tl.constexpr,
    E_PADDED: tl.constexpr,
    OWN: tl.constexpr,
):
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    e = tl.arange(0, E_PADDED)
    lo = tl.load(starts + e, mask=e < E, other=0)
    hi = tl.load(starts + e + 1, mask=e < E, other=0)
    each = (hi - lo + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(each, 0)
    before = after[None, :] <= i[:, None]
    expert = tl.sum(before.to(tl.int32), 1)
    mask = expert < E
    expert = tl.minimum(expert, E - 1)
    local = i - tl.sum(tl.where(before, each[None, :], 0), 1)
    row = table + 4 * i
    tl.store(row, expert, mask=mask)
    tl.store(row + 1, tl.load(starts + expert) + local * BLOCK_M, mask=mask)
    tl.store(row + 2, tl.load(starts + expert + 1), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(table + 4 * bound, tl.sum(each, 0))
        tl.store(table + 4 * bound + 1, 0)


def tile_table(order: SortedPairs, block_m: int) -> tuple[torch.Tensor, int]:
    """(int32 [bound + 1, 4], bound): a line (expert, first row, row behind its last, ..) for
    each block of rows, in order; the last line holds how many there are, and a 0 to count from."""
    S, E = order.pairs.shape[0], order.starts.shape[0] - 1
    bound = block_bound(S, E, block_m)
    table = torch.empty(bound + 1, 4, dtype=torch.int32, device=order.pairs.device)
    _tile_table[(triton.cdiv(bound, _LINES),)](
        order.starts,
        table,
        E,
        bound,
        BLOCK_M=block_m,
        E_PADDED=triton.next_power_of_2(E),
        OWN=_LINES,
        num_warps=4,
    )
    return table, bound


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
        mask = e < E
        begin = tl.load(starts + e, mask=mask, other=0)
        end = tl.load(starts + e + 1, mask=mask, other=0)
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


@triton.jit
def source_rows(row, hi, order, TOPK, GATHER: tl.constexpr):
    """int64 rows of x for sorted rows ``row``; rows from ``hi`` on repeat the last one."""
    inside = tl.minimum(row, hi - 1)
    if GATHER:
        inside = tl.load(order + inside) // TOPK
    return inside.to(tl.int64)


@triton.jit
def load_inputs(tile, inside, EVEN_K: tl.constexpr):
    """A tile of pointers; with EVEN_K no step goes beyond K and nothing is masked."""
    if EVEN_K:
        value = tl.load(tile)
    else:
        value = tl.load(tile, mask=inside, other=0.0)
    return value


def activation_of(spec: ExpertSpec) -> tuple[float, float, float, float] | None:
    """``swiglu``'s ACT: (alpha, limit, up_offset, cubic), or None for silu(gate) * up."""
    plain = replace(spec, bias=False)
    return None if plain == SWIGLU else (spec.alpha, spec.limit, spec.up_offset, spec.cubic)


@triton.jit
def swiglu(gate, up, ACT: tl.constexpr):
    """``ref.activation.swiglu`` of float32 gate and up; Gluon's kernels call it too."""
    if ACT is None:
        h = gate / (1 + tl.exp(-gate)) * up
    else:  # NaN stays NaN
        gate = tl.where(gate > ACT[1], ACT[1], gate)
        up = tl.where(up > ACT[1], ACT[1], tl.where(up < -ACT[1], -ACT[1], up))
        z = ACT[0] * gate
        if ACT[3] != 0:
            z = z * (1 + ACT[3] * gate * gate)
        h = gate / (1 + tl.exp(-z)) * (up + ACT[2])
    return h


@triton.jit
def load_bias(bias, matrix, cols, N):
    """float32 [cols] of row ``matrix`` of ``bias`` [matrices, N]."""
    at = bias + matrix.to(tl.int64) * N + cols
    return tl.load(at, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def store_rows(value, out, row, hi, cols, N):
    """Writes float32 [rows, cols] to rows of ``out`` [.., N] in its dtype."""
    at = out + row.to(tl.int64)[:, None] * N + cols[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        value = to_bf16(value)
    tl.store(at, value, mask=(row < hi)[:, None] & (cols < N)[None, :])
