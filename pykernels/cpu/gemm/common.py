"""What a GEMM of packed 32-row blocks by many tokens is, whatever multiplies: the stages
call any by address.

The routine ``gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables,
scratch)`` computes ``out[b, t, n] = sum_k w[b][n, k] * x_t[k]`` for ``blocks`` consecutive packed
blocks and ``M`` tokens into scratch at ``OUT_AT``; rows beyond M hold nothing of use. Each output
is summed in the same order whatever M is, on either side of ``amx.LONG_FROM``.

Args of the routine (addresses are int64):
    M: tokens, at most MAX_TOKENS.
    blocks: at most MAX_BLOCKS, ``block_bytes`` apart from ``w`` on.
    scale: packed scales, a block's ``scale_bytes`` apart; unread if the format has none.
    k_blocks: inputs / 128.
    a: A tiles [groups of 16 tokens][steps][16 rows][64 bytes], 32 bf16 or 64 int8 inputs a step; an
        even number of groups, of which the rows beyond M may hold anything. bf16 inputs for formats
        in fours lie in the order 0, 2, 1, 3 of each four (``dequant_slab``).
    rows: int64 [M rounded up to 32], address of each token's row (``activations.row_layout``).
    tables: ``weights.lookup.TABLES``.
    scratch: of this worker, SCRATCH_BYTES of the GEMM's module.
"""

from __future__ import annotations

from ...quant.layout import K_BLOCK
from ..activations.row_layout import codes_at
from ..jit import inlined
from ..words import copy_line, copy_line_0213

ARGUMENTS = 11
"""The routine has so many."""
MAX_BLOCKS = 16
"""32-row blocks of one call, gate and up counted each."""
MAX_TOKENS = 256
"""Tokens of one pass over the weights: their A slab and sums still fit in L2."""
TILE = 1024
"""Bytes of a tile: 16 rows of 64."""
SLAB_BYTES = 16 << 10
"""B tiles of a block that all tokens share, in L1 (half of it: on a shared core another thread has
the other half)."""

OUT_AT = 0
"""Scratch offset of the result, float32 [blocks, M rounded up to 32, 32]."""
OUT_BYTES = MAX_BLOCKS * MAX_TOKENS * 32 * 4


@inlined
def padded_tokens(M):
    """M rounded up to whole pairs of A tiles."""
    return (M + 31) // 32 * 32


@inlined
def copy_to_tile(row, K, tiles, slot, first, last, tile_steps, int8, interleave_a):
    """Moves a row's inputs of tile steps first .. last - 1, 64 bytes each, into its A tiles.

    A tiles are [group of 16 slots][step][16 slots][64 bytes]: 32 bf16 or 64 int8 inputs a step, in
    the order that the format's B tiles have (above).
    """
    at = codes_at(row, K) if int8 != 0 else row
    to = tiles + (slot // 16 * tile_steps * (K // K_BLOCK) * 16 + slot % 16) * 64
    if interleave_a != 0:
        for step in range(first, last):
            copy_line_0213(to + step * TILE, at + 64 * step)
    else:
        for step in range(first, last):
            copy_line(to + step * TILE, at + 64 * step)
