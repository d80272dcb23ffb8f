"""AVX2 tiles: a packed 32-row block times M tokens, of every format.

Floats and 8-bit integers meet exact inputs as floats (``avx2_floats``); narrower integers, and all
of them with int8 inputs, are multiplied as integers (``avx2_codes``, ``avx2_superblocks``).

A block is read once, in the order of its bytes: group by group of its 16-output packed tiles.
Several tokens go over a group's lines, by then in the first cache, once for each side of 8 outputs
if their accumulators would not fit in the 16 registers together. Each output is summed in the same
order whatever M is: a token's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...quant.activations import SLICES, SLICES_K
from ...quant.layout import K_BLOCK
from ..activations.int8_slices import SHORT
from ..activations.row_layout import RowFormat, activation_scale, has_lowest, row_format
from ..intrin.avx2 import add_f32, broadcast_f32, load_f32, mul_f32, store_f32, zero_f32
from ..intrin.prefetch import unknown
from ..intrin.registers import stack_alloc
from ..jit import inlined, kernel
from ..weights.codes_avx2 import make_codes
from ..weights.layout import PACKINGS, packed_bytes
from ..words import i64
from . import avx2_codes, avx2_floats, avx2_superblocks
from .avx2_group import Group
from .common import ahead, by_tokens

AHEAD = dict.fromkeys(("fp8", "fp8-channel"), 4096)
"""Bytes from a load to the prefetch of its like, by format name; 2048 for the others."""


def tile_row_format(fmt: str, activations: str) -> RowFormat:
    """What the tiles need of a row."""
    how = row_format(fmt, activations, "floats")
    assert how is not None
    if how.kind == "floats":
        return how
    codes = make_codes(fmt)
    if fmt in avx2_superblocks.FORMATS:
        return replace(how, sum_k=codes.k, bias=0, sums=bool(codes.bias) or how.sums)
    return replace(how, sum_k=avx2_codes.group_k(codes), bias=codes.bias)


def make_multiply(fmt: str, how: RowFormat, M: int, group: Group) -> Callable:
    """``multiply(w, near, scale, block, K, rows, tables, outs, out)``: a packed block times M
    tokens, added to ``out``; ``outs`` is scratch of its size."""
    packing, ACT_K = PACKINGS[fmt], how.act_k
    TILE, TILE_K, PIECE = packing.tile_bytes, packing.k_step, group.k
    TILES, GROUPS = 2 * K_BLOCK // packing.k_step, packing.k_step // group.k
    SIDES, LINES = group.sides, -(-TILE // 64 // GROUPS)  # of a group
    PASS_LINES = LINES if SIDES == 2 else (LINES + 1) // 2
    UNIT0, UNIT1 = (np.float32(unit) for unit in (*group.units, 1.0, 1.0)[:2])
    TWO = len(group.units) > 1
    add_group = group.add

    @inlined
    def multiply(w, near, scale, block, K, rows, tables, outs, out):
        for i in range(4 * M):
            store_f32(outs + 32 * i, zero_f32())
        # Unrolled, the loops would fill the instruction cache, and take seconds to compile.
        for index in range(unknown(TILES)):  # [inputs][half of the outputs]
            for g in range(unknown(GROUPS)):
                first = g * PIECE
                k = block * K_BLOCK + index // 2 * TILE_K + first
                asked = near + index * TILE + g * (64 * LINES)
                tile, quarter = w + index * TILE, index % 2 * 2
                for side in range(0, unknown(2), SIDES):
                    add_group(
                        outs,
                        tile,
                        first,
                        side,
                        k,
                        asked + side * (64 * PASS_LINES),
                        PASS_LINES,
                        scale,
                        quarter + side,
                        rows,
                        K,
                        tables,
                    )
        for t in range(M):
            factor = broadcast_f32(activation_scale(i64(rows, t), K, block * K_BLOCK, ACT_K))
            for i in range(4 * t, 4 * t + 4):
                value = mul_f32(load_f32(outs + 32 * i), broadcast_f32(UNIT0))
                if TWO:
                    value = mul_f32(value, broadcast_f32(UNIT1))
                value = add_f32(load_f32(out + 32 * i), mul_f32(value, factor))
                store_f32(out + 32 * i, value)

    return multiply


def make_tile(fmt: str, how: RowFormat, M: int, VNNI: bool) -> Any:
    """Compiles the tile of M tokens (``gemv.common``, without the argument M)."""
    BLOCK, DISTANCE, OUTS = packed_bytes(fmt), AHEAD.get(fmt, 2048), 128 * M
    SLICED = how.kind == "int8_slices"
    if how.kind == "floats":
        group = avx2_floats.make_group(fmt, M)
    else:
        group = _integers(fmt, how, M, SHORT if SLICED else 0, VNNI)
    short = whole = make_multiply(fmt, how, M, group)
    if SLICED:
        assert SLICES_K == K_BLOCK
        group = _integers(fmt, how, M, SLICES, VNNI)
        whole = make_multiply(fmt, how, M, group)

    @kernel(_variant(fmt, how, VNNI, f"m{M}"))
    def tile(w, then, scale, first, last, K, rows, tables, out):
        if first == 0:
            for i in range(4 * M):
                store_f32(out + 32 * i, zero_f32())
        outs = stack_alloc(OUTS)
        end = w + K // K_BLOCK * BLOCK
        w += first * BLOCK
        for block in range(first, last):
            near = ahead(w, DISTANCE, end, then)
            lowest = 0
            if SLICED:
                for t in range(M):
                    lowest |= has_lowest(i64(rows, t), K, block)
            if lowest:
                whole(w, near, scale, block, K, rows, tables, outs, out)
            else:
                short(w, near, scale, block, K, rows, tables, outs, out)
            w += BLOCK

    return tile


def _integers(fmt: str, how: RowFormat, M: int, KEPT: int, VNNI: bool) -> Group:
    if fmt in avx2_superblocks.FORMATS:
        return avx2_superblocks.make_group(fmt, M, KEPT, VNNI)
    return avx2_codes.make_group(fmt, how, M, KEPT, VNNI)


def _variant(fmt: str, how: RowFormat, VNNI: bool, *more: str) -> str:
    return "-".join((fmt, how.kind, *more, "vnni" if VNNI else "avx2"))


def make_tiles(fmt: str, activations: str, VNNI: bool = False) -> Any:
    """Compiles ``tiles`` (``gemv.common``) of rows in the format that ``tile_row_format`` says.

    Args:
        VNNI: whether the CPU has AVX-VNNI.
    """
    how = tile_row_format(fmt, activations)
    MOST = {"floats": 4, "int8_slices": 2}.get(how.kind, 8)
    tiles = {M: make_tile(fmt, how, M, VNNI) for M in (1, 2, 4, 8) if M <= MOST}
    for M in (4, 8):
        if M > MOST:
            tiles[M] = _in_turns(tiles[MOST], M, MOST)
    return by_tokens(tiles, _variant(fmt, how, VNNI))


def _in_turns(tile: Any, M: int, MOST: int) -> Any:
    """M tokens, MOST at a time, block by block: the weights come from memory once."""

    @inlined
    def several(w, then, scale, first, last, K, rows, tables, out):
        for block in range(first, last):
            for t in range(0, M, MOST):
                tile(w, then, scale, block, block + 1, K, rows + 8 * t, tables, out + 128 * t)

    return several
