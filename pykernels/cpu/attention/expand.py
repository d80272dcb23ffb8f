"""Latents of a page to one head's keys and values: products with its ``W_UK`` and ``W_UV``.

Twin of ``kv_b_proj`` (DeepSeek-V2, arXiv 2405.04434, 2.1.2). The head's weights become float32 once
for all pages: their columns are the products with unit vectors, which the tiles of their format do,
whatever it is.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ..gemv.common import MAX_TOKENS as MAX_M
from ..gemv.common import point_at_rows
from ..intrin.descriptor import descriptor
from ..intrin.registers import stack_alloc
from ..intrin.sync import as_pointer, call_routine
from ..jit import inlined
from ..vectors import make_vectors
from ..words import f32, poke_f32
from .args import PAGE
from .layout import Layout
from .products import in_sixes

_ADDRESSES, _OUTS = 8 * MAX_M, MAX_M * 32 * 4

MATRICES, matrices_at = descriptor(
    "expansion_matrices",
    (
        "w",  # head 0's packed blocks, w_head bytes to the next head's
        "w_head",
        "block_bytes",
        "scale",
        "scale_head",
        "scale_bytes",
        "blocks",  # of 32 outputs
        "k_blocks",  # inputs / 128, padded
        "tiles",  # the format's routines
        "tables",
        "quantize_row",
        "row_stride",  # bytes of an input row, of which rows has room for MAX_M
    ),
)


def make_columns_of_head(K: int, outputs: int, unit: int, place: Any) -> Any:
    """``columns(matrices, head, rows, to)``: a head's matrix [outputs, K], times a power of two of
    which ``unit`` is the bfloat16, as float32 at ``to + place(k, n)``; returns a status.

    ``rows`` is room for input rows.
    """

    @inlined
    def unit_row(row, Kp, k):
        values = carray(as_pointer(row), (Kp,), types.uint16)
        for i in range(Kp):
            values[i] = 0
        values[k] = unit

    @inlined
    def columns(matrices, head, rows, to):
        m = matrices_at(matrices)
        addresses, out = stack_alloc(_ADDRESSES), stack_alloc(_OUTS)
        status, Kp = 0, 128 * m.k_blocks
        for k in range(0, K, MAX_M):
            M = min(MAX_M, K - k)
            for i in range(M):
                row = rows + i * m.row_stride
                unit_row(row, Kp, k + i)
                if m.quantize_row != 0:
                    status |= call_routine(m.quantize_row, (row, Kp, 0, Kp))
            point_at_rows(addresses, MAX_M, rows, m.row_stride, 0, 0, M)
            for block in range(m.blocks):
                w = m.w + head * m.w_head + block * m.block_bytes
                scale = m.scale + head * m.scale_head + block * m.scale_bytes
                tile = (
                    M,
                    w,
                    w + m.block_bytes,
                    scale,
                    0,
                    m.k_blocks,
                    Kp,
                    addresses,
                    m.tables,
                    out,
                )
                status |= call_routine(m.tiles, tile)
                for i in range(M):
                    for n in range(min(32, outputs - 32 * block)):
                        poke_f32(to + place(k + i, 32 * block + n), f32(out + 128 * i, n))
        return status

    return columns


@functools.cache
def make_key_place(L: int) -> Any:
    """``place(k, l)``: where ``W_UK``'s weight of key number k and latent number l lies."""

    @inlined
    def place(k, number):
        return 4 * (k * L + number)

    return place


@functools.cache
def make_value_place(layout: Layout, L: int) -> Any:
    """``place(l, n)``: where ``W_UV``'s weight of latent number l and value n lies, in strips [L]
    [numbers of a strip], as sums of values do."""
    N, STRIP, PAIRS = layout.N, layout.N * layout.value_vectors, layout.interleaved

    @inlined
    def place(number, n):
        strip, at = n // STRIP, n % STRIP
        if PAIRS:
            inside = at % (2 * N)
            at = at - inside + inside % 2 * N + inside // 2
        return 4 * (strip * STRIP * L + number * STRIP + at)

    return place


@functools.cache
def make_by_strip(N: int, C: int, K: int) -> Any:
    """``by_strip(a, b, first, last, to)``: rows ``first`` to before ``last``, an even number from 4
    on, of a [rows, K] by a strip b [K][C vectors of N], to rows of C vectors; all float32."""
    six, four = _make_product(N, C, K, 6), _make_product(N, C, K, 4)
    A, ROW = 4 * K, 4 * N * C

    @inlined
    def by_strip(a, b, first, last, to):
        sixes = in_sixes(last - first)
        for row in range(first, first + sixes, 6):
            six(a + row * A, b, to + row * ROW)
        for row in range(first + sixes, last, 4):
            four(a + row * A, b, to + row * ROW)

    return by_strip


def _make_product(N: int, C: int, K: int, R: int) -> Any:
    V: Any = make_vectors(N)
    BYTES, SUMS = 4 * N, R * C

    @inlined
    def product(a, b, to):
        sums = V.array(SUMS)
        for i in range(SUMS):
            sums[i] = V.zero()
        for _ in range(0, K, 4):
            for u in range(4):
                x = V.array(C)
                for c in range(C):
                    x[c] = V.load_f32(b + BYTES * (C * u + c))
                for r in range(R):
                    y = V.broadcast_at(a + 4 * (K * r + u))
                    for c in range(C):
                        sums[C * r + c] = V.fma(y, x[c], sums[C * r + c])
            a += 16
            b += 4 * BYTES * C
        for r in range(R):
            for c in range(C):
                V.store_f32(to + BYTES * (C * r + c), sums[C * r + c])

    return product


@functools.cache
def make_latent_rows(layout: Layout, L: int) -> Any:
    """``latent_rows(rows, stride, count, to)``: ``count`` latents as float32 [count, L]."""
    V: Any = make_vectors(layout.N)
    N, SIZE = layout.N, layout.number_bytes
    load = V.load_e4m3 if layout.codes else V.load_bf16

    @inlined
    def latent_rows(rows, stride, count, to):
        for token in range(count):
            for d in range(0, L, N):
                V.store_f32(to + 4 * (token * L + d), load(rows + token * stride + SIZE * d))

    return latent_rows


def expansion_offsets(layout: Layout, L: int, nope: int) -> dict[str, int]:
    """Where the parts of the scratch begin that come behind ``layout``'s own; the last one,
    ``rows``, is room for ``MAX_M`` input rows."""
    sizes = {
        "w_uk": 4 * nope * L,  # float32 [nope][L]
        "w_uv": 4 * layout.D_V * L,  # float32 [strip][L][numbers of a strip]
        "columns": 4 * L * PAGE,  # float32 [strip][L][keys of a strip]
        "latents": 4 * L * PAGE,  # float32 [PAGE, L]
    }
    found, at = {}, layout.offsets["end"]
    for part, size in sizes.items():
        found[part] = at
        at += -(-size // 64) * 64
    return found | {"rows": at}
