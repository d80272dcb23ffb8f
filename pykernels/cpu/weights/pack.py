"""The tile layout's packing as tasks: the fast twins of ``Format.pack``.

Loading a checkpoint is copying it in another order, so this runs on every worker: one task is one
32-row block, with its scales where they are many, written as one stream.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, types

from ...quant import Format, Weight, get_format
from ...quant.layout import K_STEP, N_BLOCK, padded
from ..intrin.descriptor import descriptor
from ..intrin.sync import as_pointer
from ..jit import inlined, task
from .pack_codes import CHUNK, make_code_writer, make_scale_writer
from .sources import SOURCES

PACK, _pack_at = descriptor(
    "pack",
    (
        "source",  # rows of Weight.data
        "row_bytes",
        "N",
        "K",
        "out",  # block i goes to out + i * out_stride (bytes)
        "out_stride",
        "scale",  # rows of Weight.scale, where a task packs them; else 0
        "scale_row_bytes",
        "scale_out",
        "scale_out_stride",
    ),
)
"""Job: a matrix [N, K], and where its packed blocks and scales go."""

_PAIRS = K_STEP // 2  # pair-rows of a tile
STEPS = 4
"""Steps of a row before the next row's: their tiles stay in L1 until every row has filled them."""


@inlined
def _index_wide(r, n):
    """Where a tile holds pair-row r of output n, in pairs (the wide order of ``quant.layout``)."""
    return r * 16 + n


@inlined
def _index_byte(r, n):
    """The same for the byte order."""
    return r // 2 * 32 + n // 4 * 8 + r % 2 * 4 + n % 4


@inlined
def _move_bytes(source, row_bytes, step, tile):
    """A step of 16 rows of bytes into a tile: four rows at a time, of each two pairs."""
    mask, SHIFT = types.uint64(0xFFFF), types.uint64(16)
    for four in range(4):
        first = source + 4 * four * row_bytes + step * K_STEP
        a = carray(as_pointer(first), (8,), types.uint32)
        b = carray(as_pointer(first + row_bytes), (8,), types.uint32)
        c = carray(as_pointer(first + 2 * row_bytes), (8,), types.uint32)
        d = carray(as_pointer(first + 3 * row_bytes), (8,), types.uint32)
        out = carray(as_pointer(tile + 16 * four), (58,), types.uint64)
        for i in range(8):
            w, x = types.uint64(a[i]), types.uint64(b[i])
            y, z = types.uint64(c[i]), types.uint64(d[i])
            low = (w & mask) | ((x & mask) << SHIFT)
            low |= ((y & mask) << types.uint64(32)) | ((z & mask) << types.uint64(48))
            high = (w >> SHIFT) | ((x >> SHIFT) << SHIFT)
            high |= ((y >> SHIFT) << types.uint64(32)) | ((z >> SHIFT) << types.uint64(48))
            out[8 * i], out[8 * i + 1] = low, high


@inlined
def _move_words(source, row_bytes, step, tile):
    """A step of 16 rows of numbers of 2 bytes into a tile: two rows at a time."""
    for two in range(8):
        first = source + 2 * two * row_bytes + step * K_STEP * 2
        a = carray(as_pointer(first), (16,), types.uint32)
        b = carray(as_pointer(first + row_bytes), (16,), types.uint32)
        out = carray(as_pointer(tile + 8 * two), (121,), types.uint64)
        for r in range(16):
            out[8 * r] = types.uint64(a[r]) | (types.uint64(b[r]) << types.uint64(32))


@functools.cache
def make_pack(name: str) -> Any:
    """Compiles a weight format's pack task (``jit.TASK``); one task a block."""
    source = SOURCES.get(name)
    return _make_pairs(get_format(name).dtype.itemsize) if source is None else _make_fours(name)


def packs_scales(name: str) -> bool:
    """Whether a format's task writes its scales too; where it does not, they are few."""
    return name in SOURCES and SOURCES[name].scale_k > 0


def _make_fours(name: str) -> Any:
    source = SOURCES[name]
    write_codes = make_code_writer(source)
    K_BLOCK, SCALE_K = get_format(name).k_block, source.scale_k
    write_scales: Any = make_scale_writer(source) if SCALE_K else None

    @task(f"pack-{name}")
    def pack(args_address, block, worker):
        args = _pack_at(args_address)
        k_end = (args.K + K_BLOCK - 1) // K_BLOCK * K_BLOCK
        out = args.out + block * args.out_stride
        for k in range(0, k_end, CHUNK):
            for n in range(N_BLOCK):
                row = block * N_BLOCK + n
                have = args.K if row < args.N else 0
                address = args.source + row * args.row_bytes
                write_codes(address, n, have, k, min(k + CHUNK, k_end), out)
        if SCALE_K:
            groups, scale_out = k_end // SCALE_K, args.scale_out + block * args.scale_out_stride
            for n in range(N_BLOCK):
                row = block * N_BLOCK + n
                have = (args.K + SCALE_K - 1) // SCALE_K if row < args.N else 0
                address = args.source + row * args.row_bytes
                scale_row = args.scale + row * args.scale_row_bytes
                write_scales(address, scale_row, n, have, groups, scale_out)
        return 0

    return pack


@functools.cache
def _make_pairs(itemsize: int) -> Any:
    """For elements of 1 or 2 bytes, in the byte or the wide order."""
    element, pair = (types.uint8, types.uint16) if itemsize == 1 else (types.uint16, types.uint32)
    SHIFT = 8 * itemsize
    index_of = _index_byte if itemsize == 1 else _index_wide
    move = _move_bytes if itemsize == 1 else _move_words
    TILE = 512 * itemsize

    @task(f"pack-{itemsize}")
    def pack(args_address, block, worker):
        args = _pack_at(args_address)
        steps = (args.K + 127) // 128 * 4
        source = carray(as_pointer(args.source), (args.N * args.K,), element)
        place = args.out + block * args.out_stride
        out = carray(as_pointer(place), (steps * 512,), pair)
        rows = min(N_BLOCK, args.N - block * N_BLOCK)
        halves = rows // 16  # that are moved several rows at a time
        whole = args.K // K_STEP if args.K % 4 == 0 else 0  # steps that are
        row_bytes = args.K * itemsize
        first = args.source + block * N_BLOCK * row_bytes
        for chunk in range(0, whole, STEPS):
            for half in range(halves):
                for step in range(chunk, min(chunk + STEPS, whole)):
                    at = first + 16 * half * row_bytes
                    move(at, row_bytes, step, place + (2 * step + half) * TILE)
        for n in range(N_BLOCK):
            half, column = n // 16, n % 16
            have = args.K if n < rows else 0
            start = (block * N_BLOCK + n) * args.K
            done = whole if half < halves else 0
            for step in range(done, steps):
                tile = (2 * step + half) * 256
                for r in range(_PAIRS):
                    k = step * K_STEP + 2 * r
                    low, high = pair(0), pair(0)
                    if k < have:
                        low = pair(source[start + k])
                    if k + 1 < have:
                        high = pair(source[start + k + 1])
                    out[tile + index_of(r, column)] = low | (high << pair(SHIFT))
        return 0

    return pack


def pack_job(
    fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor
) -> tuple[np.ndarray, int]:
    """The args record and its number of tasks.

    Args:
        weight: a matrix in ``fmt``, its tensors contiguous.
        blocks: uint8 [N / 32, block bytes], rows contiguous; the first dimension may be strided.
        scales: uint8 [N / 32, scale bytes], likewise.
    """
    N, K = fmt.logical_shape(weight)
    args = np.zeros(1, PACK)
    args["source"], args["row_bytes"] = weight.data.data_ptr(), weight.data[:1].nbytes
    args["N"], args["K"] = N, K
    args["out"], args["out_stride"] = blocks.data_ptr(), blocks.stride(0)
    args["scale_out"], args["scale_out_stride"] = scales.data_ptr(), scales.stride(0)
    if weight.scale is not None:
        args["scale"], args["scale_row_bytes"] = weight.scale.data_ptr(), weight.scale[:1].nbytes
    return args, padded(N, K)[0] // N_BLOCK
