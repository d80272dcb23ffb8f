"""The products of a few tokens with a block of 128 inputs and 32 outputs, on AMX tiles.

A tile product costs the same for any number of rows: those of A are up to 16 tokens in bfloat16, or
4 as int8 slices. Groups of inputs with a scale of their own get C tiles of their own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import carray, types

from ...quant.activations import SLICES
from ...quant.layout import K_BLOCK
from ..activations.row_layout import slices_at
from ..gemm.common import TILE
from ..intrin.avx512_bytes import broadcast_u8, load_u8, store_u8
from ..intrin.prefetch import in_order, prefetch_l1, prefetch_l2
from ..intrin.sync import as_pointer
from ..jit import inlined, linked, routine
from ..words import i64


@inlined
def _poke_u8(address, value):
    carray(as_pointer(address), (1,), types.uint8)[0] = value


@dataclass(frozen=True)
class Shape:
    """Tiles of 128 inputs by M tokens and 32 outputs.

    Attributes:
        M: tokens.
        int8: whether products are of 8 bits.
        group: inputs of a sum.
    """

    M: int
    int8: bool
    group: int

    @property
    def rows_each(self) -> int:
        """Rows of an A tile for a token."""
        return SLICES if self.int8 else 1

    @property
    def rows(self) -> int:
        return self.M * self.rows_each

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums of a group by 16 outputs: a C tile, or two."""
        return 64 * self.rows

    @property
    def step_k(self) -> int:
        """Inputs of a full tile."""
        return 64 if self.int8 else 32

    @property
    def steps(self) -> int:
        return K_BLOCK // self.step_k

    @property
    def groups(self) -> int:
        return K_BLOCK // self.group

    @property
    def per_step(self) -> int:
        """Groups in a full tile."""
        return max(1, self.step_k // self.group)

    @property
    def name(self) -> str:
        return f"m{self.M}-{'int8' if self.int8 else 'bf16'}-{self.group}"


@functools.cache
def make_configure(shape: Shape) -> Any:
    """``configure(config)``: C tiles 0 - 3, A tiles 4 and 5, B tiles 6 and 7 (SDM, LDTILECFG)."""
    ROWS, B_ROWS = min(16, shape.rows), 16 // shape.per_step

    @inlined
    def configure(config):
        store_u8(config, broadcast_u8(0))
        _poke_u8(config, 1)
        for tile in range(8):
            is_a, is_b = 4 <= tile < 6, tile >= 6
            _poke_u8(config + 16 + 2 * tile, 4 * B_ROWS if is_a else 64)
            _poke_u8(config + 48 + tile, B_ROWS if is_b else ROWS)

    return configure


@functools.cache
def make_gather(shape: Shape) -> Any:
    """Compiles ``gather(rows, K, block, a)``: a block's A tiles [step][token][its rows][64]."""
    M, EACH, ROWS, STEPS, INT8 = shape.M, shape.rows_each, shape.rows, shape.steps, shape.int8

    @routine(4, shape.name)
    def gather(rows, K, block, a):
        for t in range(M):
            row, k = i64(rows, t), block * K_BLOCK
            source = slices_at(row, K, k, 0) if INT8 else row + 2 * k
            for step in range(STEPS):
                for i in range(EACH):
                    line = load_u8(source + 64 * (step * EACH + i))
                    store_u8(a + 64 * (step * ROWS + t * EACH + i), line)
        return 0

    return linked(gather)


@functools.cache
def make_multiply(shape: Shape, direct: bool, amx: Any) -> Any:
    """Compiles ``multiply(a, b, near, far, c)``: a block's C tiles [group][half].

    Args:
        direct: whether ``b`` is packed weights; then later ones are prefetched here
            instead of in dequantization.
    """
    INT8, GROUPS, PER_STEP = shape.int8, shape.groups, shape.per_step
    SUMS, STEPS = shape.sums_bytes, max(1, shape.group // shape.step_k)
    A_BYTES, B_BYTES = 64 // PER_STEP, TILE // PER_STEP  # of a tile of one group
    TWO = shape.rows > 16  # A tiles
    dot = amx.dot_i8 if INT8 else amx.dot_bf16
    zero, load, store = amx.zero, amx.load, amx.store

    @inlined
    def prefetch_ahead(near, far, tile):
        """The lines of the ``tile``-th tile product, in the order of their bytes."""
        if direct:
            for i in range(tile * B_BYTES, (tile + 1) * B_BYTES, 64):
                prefetch_l1(near + i)
                prefetch_l2(far + i)
            in_order()

    @inlined
    def a_at(group):
        return group // PER_STEP * SUMS + group % PER_STEP * A_BYTES

    @inlined
    def b_at(group):
        return group // PER_STEP * 2 * TILE + group % PER_STEP * B_BYTES

    @inlined
    def two_groups(a, b, near, far, c):
        """Stores wait until other products have begun."""
        for group in range(0, GROUPS, 2):
            a0, b0 = a + a_at(group), b + b_at(group)
            a1, b1 = a + a_at(group + 1), b + b_at(group + 1)
            to = c + 2 * group * SUMS
            zero(0)
            zero(1)
            load(4, a0, 64)
            load(6, b0, 64)
            dot(0, 4, 6)
            prefetch_ahead(near, far, 2 * group)
            load(7, b0 + TILE, 64)
            dot(1, 4, 7)
            prefetch_ahead(near, far, 2 * group + 1)
            if group > 0:
                store(2, to - 2 * SUMS, 64)
                store(3, to - SUMS, 64)
            zero(2)
            zero(3)
            load(5, a1, 64)
            load(6, b1, 64)
            dot(2, 5, 6)
            prefetch_ahead(near, far, 2 * group + 2)
            load(7, b1 + TILE, 64)
            dot(3, 5, 7)
            prefetch_ahead(near, far, 2 * group + 3)
            store(0, to, 64)
            store(1, to + SUMS, 64)
        store(2, c + (2 * GROUPS - 2) * SUMS, 64)
        store(3, c + (2 * GROUPS - 1) * SUMS, 64)

    @inlined
    def one_group(a, b, near, far, c):
        """The block is one."""
        zero(0)
        zero(1)
        for step in range(STEPS):
            load(4, a + step * SUMS, 64)
            load(6, b + 2 * step * TILE, 64)
            dot(0, 4, 6)
            prefetch_ahead(near, far, 2 * step)
            load(7, b + (2 * step + 1) * TILE, 64)
            dot(1, 4, 7)
            prefetch_ahead(near, far, 2 * step + 1)
        store(0, c, 64)
        store(1, c + SUMS, 64)

    @inlined
    def two_a_tiles(a, b, near, far, c):
        for group in range(GROUPS):
            to = c + 2 * group * SUMS
            zero(0)
            zero(1)
            zero(2)
            zero(3)
            for step in range(STEPS):
                a0 = a + a_at(group) + step * SUMS
                b0 = b + b_at(group) + step * 2 * TILE
                load(4, a0, 64)
                load(6, b0, 64)
                dot(0, 4, 6)
                prefetch_ahead(near, far, 2 * (group * STEPS + step))
                load(5, a0 + TILE, 64)
                dot(1, 5, 6)
                load(7, b0 + TILE, 64)
                dot(2, 4, 7)
                prefetch_ahead(near, far, 2 * (group * STEPS + step) + 1)
                dot(3, 5, 7)
            store(0, to, 64)
            store(1, to + TILE, 64)
            store(2, to + SUMS, 64)
            store(3, to + SUMS + TILE, 64)

    @routine(5, f"{shape.name}-{direct}-{amx.__name__.split('.')[-1]}")
    def multiply(a, b, near, far, c):
        if TWO:
            two_a_tiles(a, b, near, far, c)
        elif GROUPS > 1:
            two_groups(a, b, near, far, c)
        else:
            one_group(a, b, near, far, c)
        return 0

    return linked(multiply)
