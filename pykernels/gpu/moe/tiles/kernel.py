"""The launch that turns the CPU's tiles of staged experts into the GPU's matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from .dequantize import dequantize_chunk
from .repack import repack_codes, repack_scales, repack_tail

CHUNK = 256
"""Inputs of a block that a program turns: a superblock of the K-quants."""


@triton.jit(do_not_specialize=["SLOTS"])
def unpack_tiles_kernel(
    codes,
    scales,
    bias,
    data,
    scale,
    out_bias,
    slots,
    SLOTS,
    N,
    K,
    N_OUT,
    K_OUT,
    first_n,
    first_k,
    BLOCK_WORDS,
    SCALE_BYTES,
    ROW,
    CHUNKS,
    MATS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    SMALL: tl.constexpr,
    DEQUANTIZE: tl.constexpr,
):
    """A program turns 256 inputs of 32 rows of a matrix. Grid: (blocks * CHUNKS, MATS, experts).

    Args:
        codes, scales, bias: staged sections, an expert behind the other: words; bytes or None;
            float32 or None.
        data, scale, out_bias: of the stack, likewise, data and scale as words.
        N, K: of a staged matrix, which is a part of one [N_OUT, K_OUT]: rows from ``first_n`` and
            inputs from ``first_k`` on.
        MATS: matrices of an expert.
        ROW: words of a row of ``data``.
    """
    i = tl.program_id(2)
    mat = tl.program_id(1)
    block = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    slot = tl.load(slots + i)
    if (slot >= 0) & (slot < SLOTS):
        blocks = (N + 31) // 32
        source = (i.to(tl.int64) * blocks + block) * MATS + mat
        matrix = slot.to(tl.int64) * MATS + mat
        r = tl.arange(0, 32)
        n = block * 32 + r
        there = n < N
        to_n = first_n + n
        to_k = first_k + chunk * 256
        rows = data + (matrix * N_OUT + to_n) * ROW
        tiles = codes + source * BLOCK_WORDS
        if scales is not None:
            scales += source * SCALE_BYTES
        if DEQUANTIZE:
            dequantize_chunk(
                tiles, scales, rows, there, chunk, K, to_k, KIND, BITS, GROUP, HALVES, SMALL
            )
        else:
            repack_codes(tiles, rows, there, chunk, K, to_k, K_OUT, KIND)
            to_block = first_n + block * 32
            repack_scales(
                scales,
                scale,
                rows,
                there,
                matrix,
                to_block,
                chunk,
                K,
                to_k,
                N_OUT,
                K_OUT,
                KIND,
                GROUP,
            )
            if KIND == "q6_k":
                repack_tail(scales, rows, there, chunk, to_k, K_OUT, ROW)
        if bias is not None:
            if chunk == 0:
                found = tl.load(bias + (source * 32 + r))
                tl.store(out_bias + (matrix * N_OUT + to_n), found, mask=there)
