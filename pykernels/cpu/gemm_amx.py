"""AMX GEMM of packed 32-row blocks by many tokens (SOSP'25 section 3.2, Figure 6).

The loops, from the outside: slabs of 512 inputs; the task's blocks of 32 outputs; pairs of 16
tokens;
steps of 32 inputs. A slab of the tokens is gathered once into A tiles and stays in L2 for all
blocks;
a slab of a block is 32 KiB of B tiles and stays in L1 for all tokens; 2 x 2 C tiles hold 32 tokens
by 32 outputs in registers for a slab. The next slab of weights is prefetched meanwhile.

bf16 blocks are B tiles already. FP8 ones are decoded into a slab of them; since a scale belongs to
128 inputs, C tiles are folded into the float32 sums with one multiply-add at the end of each.
"""

from __future__ import annotations

from typing import Any

from numba import carray, types

from ..quant.layout import K_BLOCK, K_STEP
from .intrin.avx512 import (
    broadcast_f32,
    broadcast_u8,
    fma_f32,
    load_f32,
    load_u8,
    store_f32,
    store_u8,
    zero_f32,
)
from .intrin.prefetch import prefetch_l2
from .intrin.sync import as_pointer
from .jit import inlined, kernel
from .job import f32, i64
from .tile_avx512 import read_rows

MAX_TOKENS = 256
"""Tokens of one pass over the weights: their A slab and sums still fit in L2."""
MAX_BLOCKS = 16
"""32-row blocks of one call, gate and up counted each."""

_STEPS = K_BLOCK // K_STEP
_SLAB = 4  # scale blocks of 128 inputs
_TILE = 1024
_A_BYTES = _SLAB * _STEPS * (MAX_TOKENS // 16) * _TILE
_B_BYTES = _SLAB * _STEPS * 2 * _TILE
_PART_BYTES = 32 * 32 * 4
_OUT_BYTES = MAX_BLOCKS * MAX_TOKENS * 32 * 4

ROWS_AT = 0
"""Scratch offset of int64 [MAX_TOKENS]: the addresses of the tokens' rows, set by the caller."""
OUT_AT = MAX_TOKENS * 8
"""Scratch offset of the result, float32 [blocks, M rounded up to 32, 32]."""
_CONFIG_AT = OUT_AT + _OUT_BYTES
_PART_AT = _CONFIG_AT + 64
_A_AT = _PART_AT + _PART_BYTES
_B_AT = _A_AT + _A_BYTES
SCRATCH_BYTES = _B_AT + _B_BYTES
"""Scratch of one worker, 64-byte aligned."""


@inlined
def padded_tokens(M):
    """M rounded up to whole pairs of A tiles."""
    return (M + 31) // 32 * 32


@inlined
def write_config(config):
    """The tile configuration: palette 1, eight tiles of 16 rows by 64 bytes (SDM, LDTILECFG)."""
    store_u8(config, broadcast_u8(0))
    poke_u8(config, 1)
    for tile in range(8):
        poke_u8(config + 16 + 2 * tile, 64)
        poke_u8(config + 48 + tile, 16)
    return config


@inlined
def poke_u8(address, value):
    carray(as_pointer(address), (1,), types.uint8)[0] = value


@inlined
def _gather(rows, M, groups, first_byte, steps, a_slab):
    """A tiles of a slab: [step][group of 16 tokens][16 rows][64 bytes], zeros beyond M."""
    for token in range(16 * groups):
        to = a_slab + token * 64
        if token < M:
            row = i64(rows, token) + first_byte
            for step in range(steps):
                store_u8(to + step * groups * _TILE, load_u8(row + step * 64))
        else:
            for step in range(steps):
                store_u8(to + step * groups * _TILE, broadcast_u8(0))


@inlined
def _prefetch(address, nbytes):
    for line in range(0, nbytes, 64):
        prefetch_l2(address + line)


@inlined
def _fold(part, scale, out):
    """out[32, 32] += scale * part[32, 32]."""
    factor = broadcast_f32(scale)
    for i in range(0, _PART_BYTES, 64):
        store_f32(out + i, fma_f32(load_f32(part + i), factor, load_f32(out + i)))


def make_gemm(fmt: str, amx: Any) -> Any:
    """Compiles ``gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, tables, scratch)``.

    It computes ``out[b, t, n] = sum_k w[b][n, k] * x_t[k]`` for ``blocks`` consecutive packed
    blocks and ``M`` tokens into scratch at ``OUT_AT``.

    Args:
        fmt: weight format.
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.

    Args of the function (addresses are int64):
        M: tokens, at most MAX_TOKENS; their row addresses lie in scratch at ``ROWS_AT``.
        blocks: at most MAX_BLOCKS, ``block_bytes`` apart from ``w`` on.
        scale: float32 [blocks][k_blocks], rows ``scale_bytes`` apart; unread if there are none.
        k_blocks: inputs / 128.
        tables: ``tile_avx512.E4M3_TABLES``.
        scratch: SCRATCH_BYTES of this worker.
    """
    read, GROUP, SCALED = read_rows(fmt)
    STEP_BYTES = 16 * GROUP  # packed bytes of one step: two tiles of 8 groups
    tile_zero, tile_load, tile_store, dot = amx.zero, amx.load, amx.store, amx.dot_bf16

    @inlined
    def decode(w, steps, tables, ahead, b_slab):
        """Packed blocks -> B tiles in scratch."""
        for step in range(steps):
            for _ in range(16):
                row0, row1 = read(w, tables)
                store_u8(b_slab, row0)
                store_u8(b_slab + 64, row1)
                w += GROUP
                b_slab += 128
            _prefetch(ahead + step * STEP_BYTES, STEP_BYTES)

    @inlined
    def dots(steps, a, a_step, b):
        """The four C tiles += 2 A tiles x 2 B tiles over ``steps`` steps."""
        for _ in range(steps):
            tile_load(4, a, 64)
            tile_load(6, b, 64)
            tile_load(5, a + _TILE, 64)
            tile_load(7, b + _TILE, 64)
            dot(0, 4, 6)
            dot(1, 4, 7)
            dot(2, 5, 6)
            dot(3, 5, 7)
            a += a_step
            b += 2 * _TILE

    @inlined
    def store_c(to):
        tile_store(0, to, 128)
        tile_store(1, to + 64, 128)
        tile_store(2, to + 16 * 128, 128)
        tile_store(3, to + 16 * 128 + 64, 128)

    @inlined
    def zero_c():
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)

    @inlined
    def load_c(at):
        tile_load(0, at, 128)
        tile_load(1, at + 64, 128)
        tile_load(2, at + 16 * 128, 128)
        tile_load(3, at + 16 * 128 + 64, 128)

    @kernel(f"{fmt}-{amx.__name__.split('.')[-1]}")
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, tables, scratch):
        Mp = padded_tokens(M)
        groups = Mp // 16
        out, part = scratch + OUT_AT, scratch + _PART_AT
        a_slab, b_slab = scratch + _A_AT, scratch + _B_AT
        a_step = groups * _TILE
        for i in range(0, blocks * Mp * 128, 64):
            store_f32(out + i, zero_f32())
        amx.load_config(write_config(scratch + _CONFIG_AT))
        for slab in range(0, k_blocks, _SLAB):
            steps = min(_SLAB, k_blocks - slab) * _STEPS
            _gather(scratch + ROWS_AT, M, groups, slab * K_BLOCK * 2, steps, a_slab)
            w_slab = w + slab * _STEPS * STEP_BYTES
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + steps * STEP_BYTES
                if SCALED:
                    decode(b, steps, tables, ahead, b_slab)
                    b = b_slab
                else:
                    _prefetch(ahead, steps * STEP_BYTES)
                scales = scale + block * scale_bytes + slab * 4
                for group in range(0, groups, 2):
                    c = out + (block * Mp + 16 * group) * 128
                    a = a_slab + group * _TILE
                    if SCALED:
                        for k in range(steps // _STEPS):
                            zero_c()
                            dots(
                                _STEPS, a + k * _STEPS * a_step, a_step, b + k * _STEPS * 2 * _TILE
                            )
                            store_c(part)
                            _fold(part, f32(scales, k), c)
                    else:
                        load_c(c)
                        dots(steps, a, a_step, b)
                        store_c(c)
        amx.release()

    return gemm
