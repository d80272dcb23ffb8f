"""AVX-512 tiles: a packed 32-row block times M tokens (SOSP'25 section 3.2; OSDI'26 section 3.4).

A tile goes through its inputs block by block (``tile_avx512_block``), adds up in memory, and says
what is to be asked for ahead. bf16 inputs as digits are four, of which the lowest is zero where
none of a block's 128 is much smaller than the largest: in 99 % of the blocks of normal inputs, in
86 % of SiLU's products of such. Then three are multiplied, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quant.activations import DIGITS
from ...quant.layout import K_BLOCK
from ..activations.int8_slices import SHORT
from ..activations.row_layout import has_lowest
from ..intrin.avx512 import broadcast_f32, fma_f32, load_f32, store_f32, zero_f32
from ..isa import Instructions
from ..jit import inlined, kernel, linked, routine
from ..job import i64
from ..weights.dequant import make_reader
from ..weights.layout import packed_bytes
from .avx512_block import make_block
from .dot import Products, make_products
from .silu import silu_mul_f32

MAX_TOKENS = 8
"""Tokens of one pass over the weights: 16 accumulators and the decoder fill the registers."""

ARGUMENTS = 10
"""Of ``tiles``."""


@inlined
def ahead(w, distance, end, then):
    """What lies so far ahead of w in the stream, which jumps from a block's end to ``then``."""
    at = w + distance
    return at if at < end else at + (then - end)


def make_tile(fmt: str, M: int, ops: Instructions, activations: str, digits: bool = False) -> Any:
    """Compiles ``tile(w, then, scale, first, last, K, rows, tables, out)``, M tokens.

    The tile computes ``out[t, n] = sum_k w[n, k] * x_t[k]`` for 32 rows n and M tokens t, over the
    128-wide input blocks ``first .. last - 1``; from ``first`` 0 on, later ones add to ``out``.

    Args of the tile (addresses are int64):
        w: packed block (``quant.layout``), 64-byte aligned.
        then: what is read after it, for prefetches that run ahead beyond its end.
        scale: the block's packed scales, unread if the format has none.
        first, last: input blocks of 128, counted from the start of w, scale and the inputs.
        K: inputs of a row, padded.
        rows: int64 [M], address of each token's row (``cpu.rows``).
        tables: ``decode.TABLES``.
        out: float32 [M, 32].
    """
    products = _products(fmt, M, ops, activations, SHORT if digits else 0)
    block_of = make_block(fmt, M, ops, activations, products)
    DISTANCE, FURTHER, BLOCK = block_of.distance, block_of.further, packed_bytes(fmt)
    multiply = block_of.multiply
    if products.digits:
        multiply = _short_or_whole(fmt, M, ops, multiply)

    @kernel(f"{fmt}-{activations}-m{M}-{ops.name}-{products.chains}")
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


def _products(fmt: str, M: int, ops: Instructions, activations: str, digits: int) -> Products:
    # Many tokens are chains enough to hide a product's latency.
    chains = 1 if activations == "int8" and M > 4 else 2
    return make_products(fmt, ops, activations, chains, digits)


def _short_or_whole(fmt: str, M: int, ops: Instructions, short: Callable) -> Callable:
    """``multiply`` that leaves the lowest digits out, ``short``, where all of a block are zero.

    Where one is not, all are multiplied, by a routine: inlined, the tile would be twice as long.
    """
    block_of = make_block(fmt, M, ops, "bf16", _products(fmt, M, ops, "bf16", DIGITS))
    multiply_whole = block_of.multiply

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


def make_tiles(fmt: str, ops: Instructions, activations: str, digits: bool = False) -> Any:
    """Compiles the routine ``tiles(M, w, then, scale, first, last, K, rows, tables, out)``.

    ``rows`` must hold MAX_TOKENS addresses, and ``out`` as many rows: an M that has no tile of its
    own runs the next larger one (the pass over the weights is what costs), its last addresses
    repeated.
    """
    if digits and activations == "bf16" and make_reader(fmt, ops).codes:
        return _digit_tiles(fmt, ops)
    tiles = {M: make_tile(fmt, M, ops, activations) for M in (1, 2, 4, 8)}
    return by_tokens(tiles, f"{fmt}-{activations}-{ops.name}")


def by_tokens(each: dict[int, Any], variant: str) -> Any:
    """Compiles ``tiles`` (``make_tiles``) of the tiles of 1, 2, 4 and 8 tokens."""
    tile1, tile2, tile4, tile8 = (each[M] for M in (1, 2, 4, 8))

    @routine(ARGUMENTS, variant)
    def tiles(M, w, then, scale, first, last, K, rows, tables, out):
        if M == 1:
            tile1(w, then, scale, first, last, K, rows, tables, out)
        elif M == 2:
            tile2(w, then, scale, first, last, K, rows, tables, out)
        elif M <= 4:
            tile4(w, then, scale, first, last, K, rows, tables, out)
        else:
            tile8(w, then, scale, first, last, K, rows, tables, out)
        return 0

    return tiles


def _digit_tiles(fmt: str, ops: Instructions) -> Any:
    """``make_tiles`` for bf16 activations as digits: four tokens fill the registers."""
    tiles = {M: make_tile(fmt, M, ops, "bf16", True) for M in (1, 2, 4)}
    tile4 = tiles[4]

    @inlined
    def tile8(w, then, scale, first, last, K, rows, tables, out):
        for block in range(first, last):
            tile4(w, then, scale, block, block + 1, K, rows, tables, out)
            tile4(w, then, scale, block, block + 1, K, rows + 32, tables, out + 512)

    return by_tokens({**tiles, 8: tile8}, f"{fmt}-digits-{ops.name}")


def make_silu_mul_row(ops: Instructions) -> Any:
    """``silu_mul_row(gate, up, h)``: h[0:32] = bf16(silu(gate[0:32]) * up[0:32])."""
    store_bf16 = ops.store_bf16

    @inlined
    def silu_mul_row(gate, up, h):
        for i in range(2):
            value = silu_mul_f32(load_f32(gate + 64 * i), load_f32(up + 64 * i))
            store_bf16(h + 32 * i, value)

    return silu_mul_row


@inlined
def weighted_add_row(weight, value, acc):
    """acc[0:32] += weight * value[0:32]."""
    for i in range(2):
        at = acc + 64 * i
        store_f32(at, fma_f32(broadcast_f32(weight), load_f32(value + 64 * i), load_f32(at)))
