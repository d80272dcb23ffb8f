"""RMSNorm into the rows that linears and experts read: sum, normalise, round, quantize, at once.

Twin of ``ref.rms_norm``. What follows a norm are matrices, and what they read are *rows*
(``activations.row_layout``), in a layout that their weight format asks for. So a norm writes no
float tensor: one pass over a token's numbers makes the residual sum and its rows in every layout
that is asked for. Without a weight it only converts, and then the tasks may be pieces of a row.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ..quant.layout import K_BLOCK
from ..target import detect
from .gemm.common import copy_to_tile
from .intrin.descriptor import descriptor
from .intrin.scalar import f32_from_bits, round_bf16
from .intrin.sync import as_pointer, call_routine
from .jit import inlined, task
from .vectors import make_vectors, width
from .words import f32, i64, poke_f32

NORM, norm_at = descriptor(
    "norm",
    (
        "count_at",  # address of the number of tokens
        "index",  # int64 [count]: which row of x and of the addends each is; 0: its own
        "x",  # float32 [T, H]
        "x_stride",  # bytes
        "adds",  # address of ADD records, add_count of them: added in this order
        "add_count",
        "sum",  # float32 [T, H]: where the sum goes, of sum_stride; 0: nowhere
        "sum_stride",
        "weight",  # float32 [H]; 0: rows are x as it is
        "eps",  # bits of a float32
        "H",
        "chunk",  # tokens of a task
        "piece",  # numbers of a row that a task converts, of K_BLOCK; 0: a task has whole rows
        "scratch",  # float32 [H] of worker 0; the next one's is scratch_stride on
        "scratch_stride",
        "layouts",  # address of LAYOUT records, `count` of them
        "layout_count",
    ),
)

ADD, add_at = descriptor(
    "add",
    (
        "x",  # float32 [T, H]
        "stride",  # bytes
    ),
)

LAYOUT, layout_at = descriptor(
    "layout",
    (
        "rows",  # row of token 0; the next one's is stride on
        "stride",
        "K",  # padded
        "quantize_row",  # routine, 0: none
        "tiles",  # A tiles of the GEMM, 0: none (gemm.common)
        "tile_steps",  # of 128 inputs
        "int8",
        "interleave_a",
    ),
)

_ADD_BYTES = ADD.itemsize


@functools.cache
def make_sums(N: int) -> tuple[Any, Any]:
    """(addend, add_two) in vectors of N floats: where an addend's row lies, and a sum of rows."""
    V: Any = make_vectors(N)

    @inlined
    def addend(args, row, i):
        """Address of a row of addend ``i``; 0 if there is none."""
        if i >= args.add_count:
            return 0
        add = add_at(args.adds + i * _ADD_BYTES)
        return add.x + row * add.stride

    @inlined
    def add_two(x, first, second, H, to):
        """Writes x plus up to two addends to ``to``; returns the sum of its squares."""
        whole = H // N * N
        squares = V.zero()
        for h in range(0, whole, N):
            value = V.load_f32(x + 4 * h)
            if first != 0:
                value = V.add(value, V.load_f32(first + 4 * h))
            if second != 0:
                value = V.add(value, V.load_f32(second + 4 * h))
            V.store_f32(to + 4 * h, value)
            squares = V.fma(value, value, squares)
        total = V.sum(squares)
        for h in range(whole, H):
            one = f32(x, h)
            if first != 0:
                one += f32(first, h)
            if second != 0:
                one += f32(second, h)
            poke_f32(to + 4 * h, one)
            total += one * one
        return total

    return addend, add_two


@functools.cache
def make_norm() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``NORM``: one for ``chunk`` tokens."""
    V = make_vectors(width(detect()))
    N: int = V.N
    addend, add_two = make_sums(N)

    @task("norm-setup")
    def setup(address, index, worker):
        args = norm_at(address)
        if args.piece != 0:
            return i64(args.count_at, 0) * ((args.H + args.piece - 1) // args.piece)
        return (i64(args.count_at, 0) + args.chunk - 1) // args.chunk

    @inlined
    def add_up(args, t, to):
        """Writes the sum to ``to``; returns its mean square."""
        row = i64(args.index, t) if args.index != 0 else t
        x = args.x + row * args.x_stride
        total = add_two(x, addend(args, row, 0), addend(args, row, 1), args.H, to)
        for i in range(2, args.add_count, 2):
            total = add_two(to, addend(args, row, i), addend(args, row, i + 1), args.H, to)
        return total / types.float32(args.H)

    @inlined
    def fill(args, source, factor, row, first, last, K):
        """A row's bfloat16 from ``first`` on: the sum times factor and weight, from ``last`` on
        zeros."""
        whole = last // N * N
        by = V.broadcast(factor)
        for h in range(first, whole, N):
            value = V.load_f32(source + 4 * h)
            if args.weight != 0:
                value = V.mul(V.mul(value, by), V.load_f32(args.weight + 4 * h))
            V.store_bf16(row + 2 * h, value)
        out = carray(as_pointer(row), (K,), types.uint16)
        for h in range(whole, last):
            one = f32(source, h)
            if args.weight != 0:
                one = one * factor * f32(args.weight, h)
            out[h] = round_bf16(one)
        for h in range(last, K):
            out[h] = 0

    @inlined
    def convert(args, index):
        """One piece of one row, in every layout."""
        pieces = (args.H + args.piece - 1) // args.piece
        t, first = index // pieces, index % pieces * args.piece
        source, status = args.x + t * args.x_stride, 0
        for i in range(args.layout_count):
            layout = layout_at(args.layouts + i * 64)
            row, end = layout.rows + t * layout.stride, min(first + args.piece, layout.K)
            fill(args, source, types.float32(1), row, first, min(end, args.H), end)
            if layout.quantize_row != 0:
                status |= call_routine(layout.quantize_row, (row, layout.K, first, end))
        return status

    @task("norm")
    def run(address, index, worker):
        args = norm_at(address)
        if args.piece != 0:
            return convert(args, index)
        first = index * args.chunk
        last = min(first + args.chunk, i64(args.count_at, 0))
        status = 0
        for t in range(first, last):
            to = args.scratch + worker * args.scratch_stride
            if args.sum != 0:
                to = args.sum + t * args.sum_stride
            mean = add_up(args, t, to)
            eps = f32_from_bits(types.uint32(args.eps))
            factor = types.float32(1) / types.float32((mean + eps) ** types.float32(0.5))
            for i in range(args.layout_count):
                layout = layout_at(args.layouts + i * 64)
                row = layout.rows + t * layout.stride
                fill(args, to, factor, row, 0, args.H, layout.K)
                if layout.quantize_row != 0:
                    status |= call_routine(layout.quantize_row, (row, layout.K, 0, layout.K))
                if layout.tiles != 0:
                    steps = layout.tile_steps * (layout.K // K_BLOCK)
                    copy_to_tile(
                        row,
                        layout.K,
                        layout.tiles,
                        t,
                        0,
                        steps,
                        layout.tile_steps,
                        layout.int8,
                        layout.interleave_a,
                    )
        return status

    return setup, run
