"""The embedding gather, from a bfloat16 table or a packed one; twin of ``ref.embed``."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ..quant.layout import N_BLOCK
from ..target import detect
from .gemv.portable import make_row
from .intrin.descriptor import descriptor
from .intrin.scalar import bf16_as_f32, f32_from_bits
from .intrin.sync import as_pointer
from .jit import task
from .vectors import make_vectors, width
from .words import f32, i64, poke_f32

EMBED, embed_at = descriptor(
    "embed",
    (
        "count_at",  # address of the number of tokens
        "ids",  # int64 [T]
        "table",  # bfloat16 [V, H], or packed blocks
        "V",
        "H",
        "out",  # float32 [T, H]
        "out_stride",  # bytes
        "chunk",  # tokens of a task
        "factor",  # bits of a float32, that rows are multiplied by
        "scale",  # of packed blocks
        "block_bytes",
        "scale_bytes",
    ),
)

BAD_TOKEN = -1
"""Status of a task that was given a token outside the table."""


@functools.cache
def make_embed() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``EMBED``: one for ``chunk`` tokens."""
    V = make_vectors(width(detect()))
    N: int = V.N

    @task("embed-setup")
    def setup(address, index, worker):
        args = embed_at(address)
        return (i64(args.count_at, 0) + args.chunk - 1) // args.chunk

    @task("embed")
    def run(address, index, worker):
        args = embed_at(address)
        first = index * args.chunk
        for t in range(first, min(first + args.chunk, i64(args.count_at, 0))):
            token = i64(args.ids, t)
            if token < 0 or token >= args.V:
                return BAD_TOKEN
            row, out = args.table + token * args.H * 2, args.out + t * args.out_stride
            whole, factor = args.H // N * N, f32_from_bits(types.uint32(args.factor))
            for h in range(0, whole, N):
                value = V.mul(V.load_bf16(row + 2 * h), V.broadcast(factor))
                V.store_f32(out + 4 * h, value)
            halves = carray(as_pointer(row), (args.H,), types.uint16)
            for h in range(whole, args.H):
                poke_f32(out + 4 * h, bf16_as_f32(halves[h]) * factor)
        return 0

    return setup, run


@functools.cache
def make_embed_packed(fmt: str) -> tuple[Any, Any]:
    """The same of a table packed in a format of ``quant``: only rows that are looked up are
    dequantized."""
    read_row = make_row(fmt)

    @task("embed-packed-setup")
    def setup(address, index, worker):
        args = embed_at(address)
        return (i64(args.count_at, 0) + args.chunk - 1) // args.chunk

    @task(f"embed-{fmt}")
    def run(address, index, worker):
        args = embed_at(address)
        first = index * args.chunk
        for t in range(first, min(first + args.chunk, i64(args.count_at, 0))):
            token = i64(args.ids, t)
            if token < 0 or token >= args.V:
                return BAD_TOKEN
            w = args.table + token // N_BLOCK * args.block_bytes
            scale = args.scale + token // N_BLOCK * args.scale_bytes
            out = args.out + t * args.out_stride
            read_row(w, scale, token % N_BLOCK, args.H, out)
            factor = f32_from_bits(types.uint32(args.factor))
            for h in range(args.H):
                poke_f32(out + 4 * h, f32(out, h) * factor)
        return 0

    return setup, run
