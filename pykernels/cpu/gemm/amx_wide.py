"""AMX passes of wide scale groups: 2 x 2 C tiles hold 32 tokens by 32 outputs.

Applying the scales to a group's 64 rows of registers is spread over the next group's products, so
that the tile unit never waits for it. Free products, those of no scale or of one for all inputs of
an output, are one group for each slab, however long.

Planes (``planes``): the B tiles of a group's first plane are followed by those of the second in
int8, and each plane is a group of products with scales of its own; in bf16 the two stand side by
side in each step, and go into the same C tiles. Minima (``amx_minima``) are a last plane of one
product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..intrin.avx512 import add_f32, broadcast_f32, fma_f32, load_f32, mul_f32, store_f32
from ..intrin.avx512_bytes import load_i32, to_f32
from ..intrin.prefetch import prefetch_l2
from ..jit import inlined
from ..weights.scales import Scales
from ..words import f32, i64, poke_f32, poke_i64
from .amx_passes import HEADER, Passes
from .common import MAX_TOKENS, SLAB_BYTES, TILE

PLANE_BASE = np.float32(64.0)
"""What the first plane of weights counts in."""
_ONE = np.float32(1.0)

_SUMS, _SCALE, _GROUP, _ACT, _ROWS, _PLANE, _MINIMA = range(7)  # words of the header


def make_wide(
    scales: Scales,
    ACT_K: int,
    SLAB_K: int,
    STEP_K: int,
    amx: Any,
    streams: int,
    planes: int = 1,
    free: bool = False,
) -> Passes:
    """The passes of groups of 64 inputs and more, or none.

    Args:
        scales: of the groups, and of minima.
        ACT_K: inputs of one activation scale; 0 for bf16 activations.
        SLAB_K: most inputs of a slab.
        STEP_K: inputs of a full tile.
        amx: ``intrin.amx`` or ``intrin.amx_model``.
        streams: of lines that prefetches follow side by side.
        planes: of B tiles: 1 or 2.
        free: whether a slab is one group: bf16 activations, and no scale or one an output.
    """
    assert not free or (not ACT_K and planes == 1 and (scales.k == 0 or scales.whole))
    GROUP, SCALED, INT8 = min(scales.k or SLAB_K, SLAB_K), scales.k > 0, ACT_K > 0
    SPLIT = scales.k // GROUP if SCALED else 1  # groups of one scale
    MINIMA = scales.super_minimum is not None
    minimum_of: Any = scales.super_minimum
    assert not MINIMA or (INT8 and GROUP == SLAB_K), "a slab is a superblock"
    JOINT = planes > 1 and not INT8
    PLANE_OF = (PLANE_BASE, _ONE) if planes > 1 and INT8 else (_ONE,)
    PLANES = len(PLANE_OF)
    STEP_BYTES = (4 if JOINT else 2) * TILE
    factor_of: Any = scales.factor
    zero, load, store = amx.zero, amx.load, amx.store
    dot, dot_bf16 = amx.dot_i8 if INT8 else amx.dot_bf16, amx.dot_bf16

    @inlined
    def apply_minima(c, part, count, scale, group, act):
        low, high = minimum_of(scale, group, 0), minimum_of(scale, group, 1)
        for _ in range(count):
            x = broadcast_f32(f32(act, 0))
            store_f32(c, fma_f32(mul_f32(load_f32(part), x), low, load_f32(c)))
            store_f32(c + 64, fma_f32(mul_f32(load_f32(part + 64), x), high, load_f32(c + 64)))
            part += 128
            c += 128
            act += 4

    @inlined
    def apply_scales(parts, first, count):
        """Sums += ``count`` rows of the products that the header tells of; it may be empty."""
        if count == 0:
            return
        part, c = parts + HEADER + 128 * first, i64(parts, _SUMS) + 128 * first
        if SCALED:
            scale, group = i64(parts, _SCALE), i64(parts, _GROUP)
        act = i64(parts, _ACT) + 4 * first
        if MINIMA:
            if i64(parts, _MINIMA) != 0:
                apply_minima(c, part, count, scale, group, act)
                return
        if SCALED:
            low, high = factor_of(scale, group // SPLIT, 0), factor_of(scale, group // SPLIT, 1)
            if PLANES > 1:
                plane = broadcast_f32(f32(parts + 8 * _PLANE, 0))
                low, high = mul_f32(low, plane), mul_f32(high, plane)
        for _ in range(count):
            if INT8:
                x = broadcast_f32(f32(act, 0))
                a, b = mul_f32(to_f32(load_i32(part)), x), mul_f32(to_f32(load_i32(part + 64)), x)
            else:
                a, b = load_f32(part), load_f32(part + 64)
            if SCALED:
                store_f32(c, fma_f32(a, low, load_f32(c)))
                store_f32(c + 64, fma_f32(b, high, load_f32(c + 64)))
            else:
                store_f32(c, add_f32(load_f32(c), a))
                store_f32(c + 64, add_f32(load_f32(c + 64), b))
            part += 128
            c += 128
            act += 4

    @inlined
    def flush(parts):
        apply_scales(parts, 0, i64(parts, _ROWS))
        poke_i64(parts, _ROWS, 0)

    @inlined
    def prefetch(ahead, stream, first, last):
        for i in range(first, last):
            for k in range(streams):
                prefetch_l2(ahead + 64 * i + k * stream)

    @inlined
    def product(pair, a0, a1, b, ahead, stream, lines):
        """The C tiles += 1 or 2 A tiles x 2 B tiles; lines are prefetched between the products: all
        at once they would take the buffers that tile loads need."""
        load(6, b, 64)
        load(4, a0, 64)
        load(7, b + TILE, 64)
        if pair:
            load(5, a1, 64)
        dot(0, 4, 6)
        prefetch(ahead, stream, 0, lines // 4)
        dot(1, 4, 7)
        prefetch(ahead, stream, lines // 4, lines // 2)
        if pair:
            dot(2, 5, 6)
        prefetch(ahead, stream, lines // 2, lines * 3 // 4)
        if pair:
            dot(3, 5, 7)
        prefetch(ahead, stream, lines * 3 // 4, lines)
        if JOINT:
            load(6, b + 2 * TILE, 64)
            load(7, b + 3 * TILE, 64)
            dot(0, 4, 6)
            dot(1, 4, 7)
            if pair:
                dot(2, 5, 6)
                dot(3, 5, 7)

    @inlined
    def multiply_minima(pair, a, b):
        load(6, b, 64)
        load(4, a, 64)
        load(7, b + TILE, 64)
        dot_bf16(0, 4, 6)
        dot_bf16(1, 4, 7)
        if pair:
            load(5, a + TILE, 64)
            dot_bf16(2, 5, 6)
            dot_bf16(3, 5, 7)

    @inlined
    def begin():
        zero(0)
        zero(1)
        zero(2)
        zero(3)

    @inlined
    def end(pair, parts, c, scale, group, act):
        """Stores the C tiles, and in the header what they are to be added to."""
        part = parts + HEADER
        store(0, part, 128)
        store(1, part + 64, 128)
        if pair:
            store(2, part + 16 * 128, 128)
            store(3, part + 16 * 128 + 64, 128)
        poke_i64(parts, _SUMS, c)
        poke_i64(parts, _SCALE, scale)
        poke_i64(parts, _GROUP, group)
        poke_i64(parts, _ACT, act)
        poke_i64(parts, _ROWS, 32 if pair else 16)

    @inlined
    def run(
        inputs,
        count,
        a,
        a_group,
        b,
        c,
        scale,
        first_k,
        act_scales,
        minima,
        parts,
        ahead,
        stream,
        lines,
    ):
        pair = count > 1
        at = b
        group = inputs if free else GROUP
        for k in range(0, inputs, group):
            steps = min(group, inputs - k) // STEP_K
            index = (first_k + k) // GROUP
            act = act_scales + 4 * MAX_TOKENS * (k // ACT_K) if INT8 else 0
            for plane in range(PLANES):
                a0 = a + k // STEP_K * TILE
                left = i64(parts, _ROWS)
                each, done = (left + steps - 1) // steps, 0
                begin()
                for _ in range(steps):
                    product(pair, a0, a0 + a_group, at, ahead, stream, lines)
                    ahead += 64 * lines
                    rows = min(each, left - done)
                    apply_scales(parts, done, rows)
                    done += rows
                    a0 += TILE
                    at += STEP_BYTES
                end(pair, parts, c, scale, index, act)
                if PLANES > 1:
                    poke_f32(parts + 8 * _PLANE, PLANE_OF[plane])
                if MINIMA:
                    poke_i64(parts, _MINIMA, 0)
            if MINIMA:
                begin()
                multiply_minima(pair, minima, b + SLAB_BYTES)
                flush(parts)
                end(pair, parts, c, scale, index, act)
                poke_i64(parts, _MINIMA, 1)
        return ahead

    return Passes(run, flush, token_groups=2, b_rows=16)
