"""AVX-512 tiles: a packed 32-row block times M tokens (SOSP'25 section 3.2; OSDI'26 section 3.4).

The three loops of OSDI'26 Figure 10: over scale groups of the inputs, over dot products inside a
group with no multiply by the scale, one multiply-add into the running sum at its end.

Each output is summed in two chains (even and odd pair-rows) in the same order whatever M is, so a
token's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..quant.layout import K_BLOCK
from .decode import READERS
from .intrin.avx512 import (
    add_f32,
    broadcast_f32,
    broadcast_pair,
    dot_bf16,
    fma_f32,
    load_bf16,
    load_f32,
    store_bf16,
    store_f32,
    zero_f32,
)
from .intrin.registers import f32x16_array
from .jit import inlined, kernel
from .job import f32, i64
from .silu import silu_mul_f32

MAX_TOKENS = 8
"""Tokens of one pass over the weights: 16 accumulators and the decoder fill the registers."""


def make_tile(fmt: str, M: int) -> Any:
    """Compiles ``tile(w, scale, first, last, rows, tables, ahead, out)`` for M tokens.

    The tile computes ``out[t, n] = sum_k w[n, k] * x_t[k]`` for 32 rows n and M tokens t, over the
    128-wide input blocks ``first .. last - 1``; from ``first`` 0 on, later ones add to ``out``.

    Args of the tile (addresses are int64):
        w: packed block (``quant.layout``), 64-byte aligned.
        scale: the block's packed scales, unread if the format has none.
        first, last: input blocks of 128, counted from the start of w, scale and the inputs.
        rows: int64 [M], address of each token's bf16 inputs.
        tables: ``decode.TABLES``.
        ahead: bytes that prefetches run ahead of loads.
        out: float32 [M, 32].
    """
    reader = READERS[fmt]
    read, PARTS, LOAD, K_STEP = reader.rows, reader.parts, reader.load_bytes, reader.k_step
    TILE, STEPS = reader.tile_bytes, K_BLOCK // reader.k_step
    SCALE_ROWS, SCALE_STEP = reader.scale_rows, reader.scale_step_bytes
    SCALED = reader.scale_k > 0
    # Scale groups shorter than a packed tile are folded inside of it, longer ones after the sweep.
    FOLDS = K_STEP // reader.scale_k if 0 < reader.scale_k < K_STEP else 1
    LOADS = reader.loads // FOLDS
    BLOCK_FOLDS = K_BLOCK // reader.scale_k if SCALED else 1
    # Both halves of the block in one sweep while LLVM unrolls that, else one after the other.
    HALVES = 2 if M <= 2 else 1
    SUMS = 2 * HALVES * M

    @inlined
    def fold(sums, half, to_half, scale_at, out):
        """out[:, to_half] += scale * the sums of a half, which start again from zero."""
        if SCALE_ROWS:
            factor = load_bf16(scale_at + 32 * to_half)
        elif SCALED:
            factor = broadcast_f32(f32(scale_at, 0))
        else:
            factor = zero_f32()  # unused
        for t in range(M):
            i = 2 * (t * HALVES + half)
            to = out + 64 * (2 * t + to_half)
            total = add_f32(sums[i], sums[i + 1])
            if SCALED:
                total = fma_f32(total, factor, load_f32(to))
            else:
                total = add_f32(total, load_f32(to))
            store_f32(to, total)
            sums[i] = zero_f32()
            sums[i + 1] = zero_f32()

    @kernel(f"{fmt}-m{M}")
    def tile(w, scale, first, last, rows, tables, ahead, out):
        if first == 0:
            for i in range(2 * M):
                store_f32(out + 64 * i, zero_f32())
        w += first * 2 * STEPS * TILE
        scale += first * BLOCK_FOLDS * SCALE_STEP
        for block in range(first, last):
            for sweep in range(0, 2, HALVES):
                sums = f32x16_array(SUMS)  # [M, HALVES, even and odd pair-rows]
                for i in range(SUMS):
                    sums[i] = zero_f32()
                for step in range(STEPS):
                    for half in range(HALVES):  # in the order of the bytes, as prefetchers like it
                        for part_fold in range(FOLDS):
                            for load in range(LOADS):
                                lot = part_fold * LOADS + load
                                at = w + (2 * step + sweep + half) * TILE + lot * LOAD
                                for part in range(PARTS):
                                    row0, row1 = read(at, part, tables, ahead)
                                    k = block * K_BLOCK + step * K_STEP + 4 * (lot * PARTS + part)
                                    for t in range(M):
                                        x = i64(rows, t) + 2 * k
                                        i = 2 * (t * HALVES + half)
                                        sums[i] = dot_bf16(sums[i], row0, broadcast_pair(x))
                                        sums[i + 1] = dot_bf16(
                                            sums[i + 1], row1, broadcast_pair(x + 4)
                                        )
                            if FOLDS > 1:
                                scale_at = scale + (step * FOLDS + part_fold) * SCALE_STEP
                                fold(sums, half, sweep + half, scale_at, out)
                if FOLDS == 1:
                    for half in range(HALVES):
                        fold(sums, half, sweep + half, scale, out)
            w += 2 * STEPS * TILE
            scale += BLOCK_FOLDS * SCALE_STEP

    return tile


@inlined
def silu_mul_row(gate, up, h):
    """h[0:32] = bf16(silu(gate[0:32]) * up[0:32])."""
    for i in range(2):
        value = silu_mul_f32(load_f32(gate + 64 * i), load_f32(up + 64 * i))
        store_bf16(h + 32 * i, value)


@inlined
def weighted_add_row(weight, value, acc):
    """acc[0:32] += weight * value[0:32]."""
    for i in range(2):
        at = acc + 64 * i
        store_f32(at, fma_f32(broadcast_f32(weight), load_f32(value + 64 * i), load_f32(at)))


def make_tiles(fmt: str) -> Callable:
    """Compiles ``tiles(M, w, scale, first, last, rows, tables, ahead, out)``, M = 1 .. MAX_TOKENS.

    ``rows`` must hold MAX_TOKENS addresses, and ``out`` as many rows: an M that has no tile of its
    own
    runs the next larger one (the pass over the weights is what costs), its last addresses repeated.
    """
    tile1, tile2, tile4, tile8 = (make_tile(fmt, M) for M in (1, 2, 4, 8))

    @inlined
    def tiles(M, w, scale, first, last, rows, tables, ahead, out):
        if M == 1:
            tile1(w, scale, first, last, rows, tables, ahead, out)
        elif M == 2:
            tile2(w, scale, first, last, rows, tables, ahead, out)
        elif M <= 4:
            tile4(w, scale, first, last, rows, tables, ahead, out)
        else:
            tile8(w, scale, first, last, rows, tables, ahead, out)

    return tiles
