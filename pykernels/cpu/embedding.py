"""The embedding gather, from a bfloat16 table or a packed one; twin of ``ref.embed``."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ..quant.layout import N_BLOCK
from ..target import detect
from .gemv.portable import make_row
from .intrin.descriptor import descriptor
from .intrin.scalar import bf16_as_f32
from .intrin.sync import as_pointer
from .jit import task
from .job import i64, poke_f32
from .vectors import make_vectors, width

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
        "scale",  # of packed blocks
        "block_bytes",
        "scale_bytes",
    ),
)

BAD_TOKEN = -1
"""Status of a task that was given a token outside the table."""


@functools.cache
def make_embed() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``EMBED``: one for ``chunk`` tokens."""
    V = make_vectors(width(detect()))
    N: int = V.N

    @task("embed-open")
    def opening(address, index, worker):
        job = embed_at(address)
        return (i64(job.count_at, 0) + job.chunk - 1) // job.chunk

    @task("embed")
    def run(address, index, worker):
        job = embed_at(address)
        first = index * job.chunk
        for t in range(first, min(first + job.chunk, i64(job.count_at, 0))):
            token = i64(job.ids, t)
            if token < 0 or token >= job.V:
                return BAD_TOKEN
            row, out = job.table + token * job.H * 2, job.out + t * job.out_stride
            whole = job.H // N * N
            for h in range(0, whole, N):
                V.store_f32(out + 4 * h, V.load_bf16(row + 2 * h))
            halves = carray(as_pointer(row), (job.H,), types.uint16)
            for h in range(whole, job.H):
                poke_f32(out + 4 * h, bf16_as_f32(halves[h]))
        return 0

    return opening, run


@functools.cache
def make_embed_packed(fmt: str) -> tuple[Any, Any]:
    """The same of a table packed in a format of ``quant``: only rows that are looked up are
    dequantized."""
    read_row = make_row(fmt)

    @task("embed-packed-open")
    def opening(address, index, worker):
        job = embed_at(address)
        return (i64(job.count_at, 0) + job.chunk - 1) // job.chunk

    @task(f"embed-{fmt}")
    def run(address, index, worker):
        job = embed_at(address)
        first = index * job.chunk
        for t in range(first, min(first + job.chunk, i64(job.count_at, 0))):
            token = i64(job.ids, t)
            if token < 0 or token >= job.V:
                return BAD_TOKEN
            w = job.table + token // N_BLOCK * job.block_bytes
            scale = job.scale + token // N_BLOCK * job.scale_bytes
            read_row(w, scale, token % N_BLOCK, job.H, job.out + t * job.out_stride)
        return 0

    return opening, run
