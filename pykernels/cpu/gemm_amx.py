"""AMX GEMM of packed 32-row blocks by many tokens (SOSP'25 section 3.2, Figure 6).

The loops, from the outside: slabs of 512 inputs; the task's blocks of 32 outputs; pairs of groups
of
16 tokens; steps of 32 inputs. A slab of all tokens stays in L2 for all blocks; a slab of a block is
32 KiB of B tiles and stays in L1 for all tokens; 2 x 2 C tiles hold 32 tokens by 32 outputs in
registers for a slab. The next slab of weights is prefetched during the first pair's steps.

bf16 blocks are B tiles already. Others are decoded into a slab of them; C tiles are folded into the
float32 sums with one multiply-add at the end of each scale's inputs.
"""

from __future__ import annotations

from typing import Any

from numba import carray, types

from ..quant.layout import K_BLOCK, K_STEP
from .decode import AHEAD, READERS
from .intrin.avx512 import (
    broadcast_f32,
    broadcast_u8,
    fma_f32,
    load_bf16,
    load_f32,
    mul_f32,
    store_f32,
    store_u8,
)
from .intrin.prefetch import prefetch_l2
from .intrin.sync import as_pointer
from .jit import inlined, kernel
from .job import f32

MAX_TOKENS = 256
"""Tokens of one pass over the weights: their A slab and sums still fit in L2."""
MAX_BLOCKS = 16
"""32-row blocks of one call, gate and up counted each."""

_STEPS = K_BLOCK // K_STEP
_SLAB = 4  # scale blocks of 128 inputs
TILE = 1024
"""Bytes of a tile: 16 rows of 64."""
_B_BYTES = _SLAB * _STEPS * 2 * TILE
_PART_BYTES = 32 * 32 * 4
_OUT_BYTES = MAX_BLOCKS * MAX_TOKENS * 32 * 4

OUT_AT = 0
"""Scratch offset of the result, float32 [blocks, M rounded up to 32, 32]."""
_CONFIG_AT = OUT_AT + _OUT_BYTES
_PART_AT = _CONFIG_AT + 64
_B_AT = _PART_AT + _PART_BYTES
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


def make_gemm(fmt: str, amx: Any) -> Any:
    """Compiles the GEMM of packed blocks in ``fmt``.

    ``gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, tables, scratch)`` computes
    ``out[b, t, n] = sum_k w[b][n, k] * x_t[k]`` for ``blocks`` consecutive packed blocks
    and ``M`` tokens into scratch at ``OUT_AT``; rows beyond M hold nothing of use.

    Args:
        fmt: weight format.
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.

    Args of the function (addresses are int64):
        M: tokens, at most MAX_TOKENS.
        blocks: at most MAX_BLOCKS, ``block_bytes`` apart from ``w`` on.
        scale: packed scales, a block's ``scale_bytes`` apart; unread if the format has none.
        k_blocks: inputs / 128.
        a: A tiles [groups of 16 tokens][4 * k_blocks steps][16 rows][64 bytes]; an even number of
            groups, of which the rows beyond M may hold anything.
        tables: ``decode.TABLES``.
        scratch: SCRATCH_BYTES of this worker.
    """
    reader = READERS[fmt]
    read, PARTS, LOAD, LOADS = reader.rows, reader.parts, reader.load_bytes, reader.loads
    SCALED, SCALE_ROWS, SCALE_STEP = reader.scale_k > 0, reader.scale_rows, reader.scale_step_bytes
    FOLD_STEPS = reader.scale_k // K_STEP if SCALED else 1  # steps of one scale
    PACKED_STEPS = reader.k_step // K_STEP  # steps of one packed tile
    STEP_BYTES = 2 * reader.tile_bytes // PACKED_STEPS
    tile_zero, tile_load, tile_store, dot = amx.zero, amx.load, amx.store, amx.dot_bf16

    @inlined
    def decode(w, steps, tables, ahead, b_slab):
        """Packed blocks -> B tiles [step][half] in scratch."""
        for step in range(0, steps, PACKED_STEPS):
            for half in range(2):
                for load in range(LOADS):
                    for part in range(PARTS):
                        row0, row1 = read(w, part, tables, AHEAD)
                        lot = load * PARTS + part  # 4 inputs of 16 outputs: 8 lots fill a B tile
                        to = b_slab + (2 * (step + lot // 8) + half) * TILE + lot % 8 * 128
                        store_u8(to, row0)
                        store_u8(to + 64, row1)
                    w += LOAD
            for i in range(PACKED_STEPS):
                prefetch(ahead + (step + i) * STEP_BYTES)

    @inlined
    def fold(part, scale_at, out, first):
        """out[32, 32] = scale * part[32, 32], added to what is there unless it is the first."""
        if SCALE_ROWS:
            low, high = load_bf16(scale_at), load_bf16(scale_at + 32)
        else:
            low = broadcast_f32(f32(scale_at, 0))
            high = low
        for i in range(0, _PART_BYTES, 128):
            if first:
                store_f32(out + i, mul_f32(load_f32(part + i), low))
                store_f32(out + i + 64, mul_f32(load_f32(part + i + 64), high))
            else:
                store_f32(out + i, fma_f32(load_f32(part + i), low, load_f32(out + i)))
                store_f32(
                    out + i + 64, fma_f32(load_f32(part + i + 64), high, load_f32(out + i + 64))
                )

    @inlined
    def prefetch(address):
        for line in range(0, STEP_BYTES, 64):
            prefetch_l2(address + line)

    @inlined
    def dots(steps, a0, a1, b, ahead):
        """The four C tiles += 2 A tiles x 2 B tiles over ``steps`` steps."""
        for _ in range(steps):
            tile_load(6, b, 64)
            tile_load(4, a0, 64)
            tile_load(7, b + TILE, 64)
            tile_load(5, a1, 64)
            dot(0, 4, 6)
            dot(1, 4, 7)
            dot(2, 5, 6)
            dot(3, 5, 7)
            if ahead != 0:
                prefetch(ahead)
                ahead += STEP_BYTES
            a0 += TILE
            a1 += TILE
            b += 2 * TILE

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
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, tables, scratch):
        Mp = padded_tokens(M)
        out, part, b_slab = scratch + OUT_AT, scratch + _PART_AT, scratch + _B_AT
        a_group = k_blocks * _STEPS * TILE
        amx.load_config(write_config(scratch + _CONFIG_AT))
        for slab in range(0, k_blocks, _SLAB):
            steps = min(_SLAB, k_blocks - slab) * _STEPS
            w_slab = w + slab * _STEPS * STEP_BYTES
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + steps * STEP_BYTES
                if SCALED:
                    decode(b, steps, tables, ahead, b_slab)
                    b = b_slab
                scales = scale + block * scale_bytes + slab * _STEPS // FOLD_STEPS * SCALE_STEP
                for token in range(0, Mp, 32):
                    c = out + (block * Mp + token) * 128
                    a0 = a + token // 16 * a_group + slab * _STEPS * TILE
                    a1 = a0 + a_group
                    if SCALED:
                        for k in range(steps // FOLD_STEPS):
                            skip = k * FOLD_STEPS * TILE
                            zero_c()
                            dots(FOLD_STEPS, a0 + skip, a1 + skip, b + 2 * skip, 0)
                            store_c(part)
                            fold(part, scales + k * SCALE_STEP, c, slab + k == 0)
                    else:
                        if slab == 0:
                            zero_c()
                        else:
                            load_c(c)
                        dots(steps, a0, a1, b, ahead if token == 0 else 0)
                        store_c(c)
        amx.release()

    return gemm
