"""AVX-512 tiles: a packed 32-row block times M tokens (SOSP'25 section 3.2; OSDI'26 section 3.4).

A tile goes through its inputs block by block (``avx512_block``, or ``avx512_superblocks`` where
integers meet integers under small scales), adds up in memory, and prefetches ahead. bf16 inputs as
int8 slices are four of them, of which the lowest is zero where none of a block's 128 inputs is much
smaller than the largest: in 99 % of the blocks of normal inputs, in 86 % of SiLU's products of
such. Then three are multiplied, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quant.activations import SLICES
from ...quant.layout import K_BLOCK
from ..activations.int8_slices import SHORT
from ..activations.row_layout import has_lowest
from ..intrin.avx512 import store_f32, zero_f32
from ..isa import Instructions
from ..jit import inlined, kernel, linked, routine
from ..weights.dequant import make_reader
from ..weights.layout import packed_bytes
from ..words import i64
from . import avx512_superblocks
from .avx512_block import Block, make_block
from .common import ahead, by_tokens
from .dot import make_products


def make_tile(
    fmt: str, M: int, ops: Instructions, activations: str, int8_slices: bool = False
) -> Any:
    """Compiles ``tile(w, then, scale, first, last, K, rows, tables, out)``, M tokens.

    Its arguments are those of ``common``'s ``tiles``, with M rows in ``rows`` and ``out``.

    Args:
        int8_slices: whether bf16 activations meet integer weights as int8 slices.
    """
    kept = SHORT if int8_slices else 0
    block_of, chains = _block(fmt, M, ops, activations, kept)
    DISTANCE, FURTHER, BLOCK = block_of.distance, block_of.further, packed_bytes(fmt)
    multiply = block_of.multiply
    if kept and make_reader(fmt, ops).codes:
        multiply = _short_or_whole(fmt, M, ops, multiply)

    @kernel(f"{fmt}-{activations}-m{M}-{ops.name}-{chains}")
    def tile(w, then, scale, first, last, K, rows, tables, out):
        if first == 0:
            for i in range(2 * M):
                store_f32(out + 64 * i, zero_f32())
        end = w + K // K_BLOCK * BLOCK
        w += first * BLOCK
        for block in range(first, last):
            near, far = ahead(w, DISTANCE, end, then), ahead(w, FURTHER, end, then)
            multiply(w, near, far, scale, block, K, rows, tables, out)
            w += BLOCK

    return tile


def _block(fmt: str, M: int, ops: Instructions, activations: str, slices: int) -> tuple[Block, int]:
    """How a block is multiplied, and the chains of an accumulator."""
    if fmt in avx512_superblocks.FORMATS and (slices or activations == "int8"):
        return avx512_superblocks.make_block(fmt, M, ops, slices), max(1, slices)
    # Many tokens are chains enough to hide a product's latency.
    chains = 1 if activations == "int8" and M > 4 else 2
    products = make_products(fmt, ops, activations, chains, slices)
    return make_block(fmt, M, ops, activations, products), products.chains


def _short_or_whole(fmt: str, M: int, ops: Instructions, short: Callable) -> Callable:
    """``multiply`` that leaves the lowest slices out, ``short``, where all of a block are zero.

    Where one is not, all are multiplied, by a routine: inlined, the tile would be twice as long.
    """
    multiply_whole = _block(fmt, M, ops, "bf16", SLICES)[0].multiply

    @routine(9, f"{fmt}-m{M}-{ops.name}")
    def whole(w, near, far, scale, block, K, rows, tables, out):
        multiply_whole(w, near, far, scale, block, K, rows, tables, out)
        return 0

    call_whole = linked(whole)

    @inlined
    def multiply(w, near, far, scale, block, K, rows, tables, out):
        lowest = 0
        for t in range(M):
            lowest |= has_lowest(i64(rows, t), K, block)
        if lowest:
            call_whole(w, near, far, scale, block, K, rows, tables, out)
        else:
            short(w, near, far, scale, block, K, rows, tables, out)

    return multiply


def takes_slices(fmt: str, ops: Instructions) -> bool:
    """Whether bf16 activations meet a format's weights as int8 slices, where it has the choice:
    where that is faster for all formats, and for those that scale their sums as integers."""
    return ops.int8_slices or (ops.vnni and fmt in avx512_superblocks.FORMATS)


def make_tiles(fmt: str, ops: Instructions, activations: str, int8_slices: bool = False) -> Any:
    """Compiles the routine ``tiles`` (``common``); ``int8_slices`` as in ``make_tile``."""
    if int8_slices and activations == "bf16" and make_reader(fmt, ops).codes:
        return _slice_tiles(fmt, ops)
    tiles = {M: make_tile(fmt, M, ops, activations) for M in (1, 2, 4, 8)}
    return by_tokens(tiles, f"{fmt}-{activations}-{ops.name}")


def _slice_tiles(fmt: str, ops: Instructions) -> Any:
    """``make_tiles`` for bf16 activations as int8 slices: four tokens fill the registers."""
    tiles = {M: make_tile(fmt, M, ops, "bf16", True) for M in (1, 2, 4)}
    tile4 = tiles[4]

    @inlined
    def tile8(w, then, scale, first, last, K, rows, tables, out):
        for block in range(first, last):
            tile4(w, then, scale, block, block + 1, K, rows, tables, out)
            tile4(w, then, scale, block, block + 1, K, rows + 32, tables, out + 512)

    return by_tokens({**tiles, 8: tile8}, f"{fmt}-slices-{ops.name}")
