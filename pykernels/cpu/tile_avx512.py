"""AVX-512 tiles: a packed 32-row block times M tokens (SOSP'25 section 3.2; OSDI'26 section 3.4).

The three loops of OSDI'26 Figure 10: over scale groups of the inputs, over dot products inside a
group with no multiply by the scale, one multiply-add into the running sum at its end. What a dot
product is, bfloat16 or int8, is ``products``' business.

Each output is summed in two chains in the same order whatever M is, so a token's result does not
depend on its batch.
"""

from __future__ import annotations

from typing import Any

from ..quant.layout import K_BLOCK
from .decode import LOADS, make_reader
from .instructions import Instructions
from .intrin.avx512 import add_f32, broadcast_f32, fma_f32, fnma_f32, load_f32, store_f32, zero_f32
from .jit import inlined, kernel, routine
from .job import i64
from .products import make_products
from .silu import silu_mul_f32

MAX_TOKENS = 8
"""Tokens of one pass over the weights: 16 accumulators and the decoder fill the registers."""

ARGUMENTS = 10
"""Of ``tiles``."""


def make_tile(fmt: str, M: int, ops: Instructions, activations: str) -> Any:
    """Compiles ``tile(w, scale, first, last, K, rows, tables, ahead, out)`` for M tokens.

    The tile computes ``out[t, n] = sum_k w[n, k] * x_t[k]`` for 32 rows n and M tokens t, over the
    128-wide input blocks ``first .. last - 1``; from ``first`` 0 on, later ones add to ``out``.

    Args of the tile (addresses are int64):
        w: packed block (``quant.layout``), 64-byte aligned.
        scale: the block's packed scales, unread if the format has none.
        first, last: input blocks of 128, counted from the start of w, scale and the inputs.
        K: inputs of a row, padded.
        rows: int64 [M], address of each token's row (``cpu.rows``).
        tables: ``decode.TABLES``.
        ahead: bytes that prefetches run ahead of loads.
        out: float32 [M, 32].
    """
    reader = make_reader(fmt, ops)
    # Both halves of the block in one sweep while LLVM unrolls that, else one after the other.
    HALVES = 2 if M <= 2 else 1
    products = make_products(fmt, reader, ops, activations, M)
    new_sums, clear, multiply, total = (
        products.new_sums,
        products.clear,
        products.multiply,
        products.total,
    )
    SUMS = 2 * HALVES * M
    TILE, K_STEP, PARTS = reader.packing.tile_bytes, reader.packing.k_step, reader.packing.parts
    STEPS = K_BLOCK // K_STEP
    GROUP = reader.scales.k or K_BLOCK
    # Groups shorter than a packed tile are folded inside of it, longer ones after the sweep.
    FOLDS = max(1, K_STEP // GROUP)
    FOLD_LOADS = LOADS // FOLDS
    factor_of, minimum_of = reader.scales.factor, reader.scales.minimum
    offset = products.offset

    @inlined
    def fold(sums, half, to_half, K, k, rows, scale, out):
        """out[:, to_half] += the group's sums, scaled; they start again from zero."""
        group = k // GROUP
        for t in range(M):
            i = 2 * (t * HALVES + half)
            to = out + 64 * (2 * t + to_half)
            value = total(sums, i, i64(rows, t), K, k)
            if factor_of is None:
                value = add_f32(value, load_f32(to))
            else:
                value = fma_f32(value, factor_of(scale, group, to_half), load_f32(to))
            if minimum_of is not None:
                less = broadcast_f32(offset(i64(rows, t), K, k))
                value = fnma_f32(less, minimum_of(scale, group, to_half), value)
            store_f32(to, value)
            clear(sums, i)

    @kernel(f"{fmt}-{activations}-m{M}-{ops.name}")
    def tile(w, scale, first, last, K, rows, tables, ahead, out):
        if first == 0:
            for i in range(2 * M):
                store_f32(out + 64 * i, zero_f32())
        w += first * 2 * STEPS * TILE
        for block in range(first, last):
            for sweep in range(0, 2, HALVES):
                sums = new_sums(SUMS)  # [M, HALVES, two chains]
                for i in range(0, SUMS, 2):
                    clear(sums, i)
                for step in range(STEPS):
                    k = block * K_BLOCK + step * K_STEP
                    for half in range(HALVES):  # in the order of the bytes, as prefetchers like it
                        at = w + (2 * step + sweep + half) * TILE
                        for part_fold in range(FOLDS):
                            for fold_load in range(FOLD_LOADS):
                                load = part_fold * FOLD_LOADS + fold_load
                                for part in range(PARTS):
                                    lot_k = k + 4 * (load * PARTS + part)
                                    multiply(
                                        sums, 2 * half, 2 * HALVES, at, load, part, tables, ahead,
                                        rows, K, lot_k,
                                    )  # fmt: skip
                            if FOLDS > 1:
                                to_k = k + part_fold * GROUP
                                fold(sums, half, sweep + half, K, to_k, rows, scale, out)
                if FOLDS == 1:
                    for half in range(HALVES):
                        fold(sums, half, sweep + half, K, block * K_BLOCK, rows, scale, out)
            w += 2 * STEPS * TILE

    return tile


def make_tiles(fmt: str, ops: Instructions, activations: str) -> Any:
    """Compiles the routine ``tiles(M, w, scale, first, last, K, rows, tables, ahead, out)``.

    ``rows`` must hold MAX_TOKENS addresses, and ``out`` as many rows: an M that has no tile of its
    own runs the next larger one (the pass over the weights is what costs), its last addresses
    repeated.
    """
    tile1, tile2, tile4, tile8 = (make_tile(fmt, M, ops, activations) for M in (1, 2, 4, 8))

    @routine(ARGUMENTS, f"{fmt}-{activations}-{ops.name}")
    def tiles(M, w, scale, first, last, K, rows, tables, ahead, out):
        if M == 1:
            tile1(w, scale, first, last, K, rows, tables, ahead, out)
        elif M == 2:
            tile2(w, scale, first, last, K, rows, tables, ahead, out)
        elif M <= 4:
            tile4(w, scale, first, last, K, rows, tables, ahead, out)
        else:
            tile8(w, scale, first, last, K, rows, tables, ahead, out)
        return 0

    return tiles


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
