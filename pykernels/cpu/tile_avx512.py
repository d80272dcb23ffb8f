"""AVX-512 tiles: a packed 32-row block times M tokens (SOSP'25 section 3.2; OSDI'26 section 3.4).

The three loops of OSDI'26 Figure 10: over scale blocks of 128 inputs, over dot products inside a
scale block with no multiply by the scale, one multiply-add into the running sum at its end. E4M3 is
decoded exactly, subnormals included, by looking up both bytes of its bfloat16 in a 128-entry table.

Each output is summed in two chains (even and odd pair-rows) in the same order whatever M is, so a
token's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..quant.layout import K_BLOCK, K_STEP
from .intrin.avx512 import (
    add_f32,
    broadcast_f32,
    broadcast_pair,
    broadcast_u8,
    dot_bf16,
    fma_f32,
    interleave_high,
    interleave_low,
    load_f32,
    load_u8,
    lookup_128,
    or_masked,
    store_bf16,
    store_f32,
    zero_f32,
)
from .intrin.prefetch import prefetch_l1
from .intrin.registers import f32x16_array
from .jit import inlined, kernel
from .job import f32, i64
from .silu import silu_mul_f32

MAX_TOKENS = 8
"""Tokens of one pass over the weights: 16 accumulators and the decoder fill the registers."""

_AHEAD = 4096  # bytes that the prefetch runs ahead of the loads: one page
_GROUPS = 8  # 64-byte (fp8) or 128-byte (bf16) groups of two pair-rows in a tile
_STEPS = K_BLOCK // K_STEP


def _e4m3_tables() -> torch.Tensor:
    """uint8 [2, 128] at a 64-byte-aligned address: low and high byte of bf16(code), code 0..127."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    both = codes.to(torch.bfloat16).view(torch.uint8).view(128, 2).T
    raw = torch.empty(256 + 64, dtype=torch.uint8)
    skip = -raw.data_ptr() % 64
    tables = raw[skip : skip + 256].view(2, 128)
    tables.copy_(both)
    return tables


E4M3_TABLES = _e4m3_tables()
"""Passed to the FP8 tiles by address, so that compiled kernels hold no pointer of this process."""


@inlined
def _rows_bf16(w, tables):
    """Two pair-rows of a tile: 2 x (16 n x 2 k) bf16."""
    prefetch_l1(w + _AHEAD)
    prefetch_l1(w + _AHEAD + 64)
    return load_u8(w), load_u8(w + 64)


@inlined
def _rows_fp8(w, tables):
    """Two pair-rows of a tile, decoded from 64 bytes of E4M3."""
    prefetch_l1(w + _AHEAD)
    codes = load_u8(w)
    low = lookup_128(load_u8(tables), load_u8(tables + 64), codes)
    high = lookup_128(load_u8(tables + 128), load_u8(tables + 192), codes)
    high = or_masked(high, codes, broadcast_u8(0x80))
    return interleave_low(low, high), interleave_high(low, high)


_ROWS = {"bf16": (_rows_bf16, 128, False), "fp8": (_rows_fp8, 64, True)}


def read_rows(fmt: str) -> tuple[Any, int, bool]:
    """(reader of two pair-rows as bf16, packed bytes that it reads, has the format scales)."""
    return _ROWS[fmt]


def make_tile(fmt: str, M: int) -> Any:
    """Compiles ``tile(w, scale, k_blocks, rows, tables, out)`` for M tokens.

    The tile computes ``out[t, n] = sum_k w[n, k] * x_t[k]`` for 32 rows n and M tokens t.

    Args of the tile (addresses are int64):
        w: packed block (``quant.layout``), 64-byte aligned.
        scale: float32 [k_blocks], unread if the format has none.
        k_blocks: inputs / 128.
        rows: int64 [M], address of each token's bf16 inputs.
        tables: ``E4M3_TABLES``, unread by bf16.
        out: float32 [M, 32], overwritten.
    """
    read, GROUP, SCALED = read_rows(fmt)
    HALF = _GROUPS * GROUP
    STEP = 2 * HALF
    # Both halves of the block in one sweep while LLVM unrolls that, else one after the other.
    HALVES = 2 if M <= 2 else 1
    SUMS = 2 * HALVES * M

    @kernel(f"{fmt}-m{M}")
    def tile(w, scale, k_blocks, rows, tables, out):
        for i in range(2 * M):
            store_f32(out + 64 * i, zero_f32())
        for block in range(k_blocks):
            for sweep in range(0, 2, HALVES):
                sums = f32x16_array(SUMS)  # [M, HALVES, even and odd pair-rows]
                for i in range(SUMS):
                    sums[i] = zero_f32()
                for step in range(_STEPS):
                    for half in range(HALVES):  # in the order of the bytes, as prefetchers like it
                        for group in range(_GROUPS):
                            at = w + step * STEP + (sweep + half) * HALF + group * GROUP
                            k = 2 * (block * K_BLOCK + step * K_STEP + group * 4)  # in row bytes
                            row0, row1 = read(at, tables)
                            for t in range(M):
                                x = i64(rows, t) + k
                                i = 2 * (t * HALVES + half)
                                sums[i] = dot_bf16(sums[i], row0, broadcast_pair(x))
                                sums[i + 1] = dot_bf16(sums[i + 1], row1, broadcast_pair(x + 4))
                for t in range(M):
                    for half in range(HALVES):
                        i = 2 * (t * HALVES + half)
                        to = out + 64 * (2 * t + sweep + half)
                        total = add_f32(sums[i], sums[i + 1])
                        if SCALED:
                            total = fma_f32(total, broadcast_f32(f32(scale, block)), load_f32(to))
                        else:
                            total = add_f32(total, load_f32(to))
                        store_f32(to, total)
            w += _STEPS * STEP

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
    """Compiles ``tiles(M, w, scale, k_blocks, rows, tables, out)`` for M = 1 .. MAX_TOKENS.

    ``rows`` must hold MAX_TOKENS addresses, and ``out`` as many rows: an M that has no tile of its
    own
    runs the next larger one (the pass over the weights is what costs), its last addresses repeated.
    """
    tile1, tile2, tile4, tile8 = (make_tile(fmt, M) for M in (1, 2, 4, 8))

    @inlined
    def tiles(M, w, scale, k_blocks, rows, tables, out):
        if M == 1:
            tile1(w, scale, k_blocks, rows, tables, out)
        elif M == 2:
            tile2(w, scale, k_blocks, rows, tables, out)
        elif M <= 4:
            tile4(w, scale, k_blocks, rows, tables, out)
        else:
            tile8(w, scale, k_blocks, rows, tables, out)

    return tiles
