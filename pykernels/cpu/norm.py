"""RMSNorm into the rows that linears and experts read: sum, normalise, round, quantize, at once.

Twin of ``ref.rms_norm``. What follows a norm are matrices, and what they read are *rows*
(``activations.row_layout``), in a form that their weight format asks for. So a norm writes no
float tensor: one pass over a token's numbers makes the residual sum and its rows in every form
that is asked for. Without a weight it only converts.
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
from .job import f32, i64, poke_f32
from .vectors import make_vectors, width

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
        "scratch",  # float32 [H] of worker 0; the next one's is scratch_stride on
        "scratch_stride",
        "forms",  # address of FORM records, `count` of them
        "form_count",
    ),
)

ADD, add_at = descriptor(
    "add",
    (
        "x",  # float32 [T, H]
        "stride",  # bytes
    ),
)

FORM, form_at = descriptor(
    "form",
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
def make_norm() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``NORM``: one for ``chunk`` tokens."""
    V = make_vectors(width(detect()))
    N: int = V.N

    @task("norm-open")
    def opening(address, index, worker):
        job = norm_at(address)
        return (i64(job.count_at, 0) + job.chunk - 1) // job.chunk

    @inlined
    def addend(job, row, i):
        """Address of a row of addend ``i``; 0 if there is none."""
        if i >= job.add_count:
            return 0
        add = add_at(job.adds + i * _ADD_BYTES)
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

    @inlined
    def add_up(job, t, to):
        """Writes the sum to ``to``; returns its mean square."""
        row = i64(job.index, t) if job.index != 0 else t
        x = job.x + row * job.x_stride
        total = add_two(x, addend(job, row, 0), addend(job, row, 1), job.H, to)
        for i in range(2, job.add_count, 2):
            total = add_two(to, addend(job, row, i), addend(job, row, i + 1), job.H, to)
        return total / types.float32(job.H)

    @inlined
    def fill(job, source, factor, row, K):
        """A row's bfloat16: the sum times factor and weight, behind it zeros."""
        H = job.H
        whole = H // N * N
        by = V.broadcast(factor)
        for h in range(0, whole, N):
            value = V.load_f32(source + 4 * h)
            if job.weight != 0:
                value = V.mul(V.mul(value, by), V.load_f32(job.weight + 4 * h))
            V.store_bf16(row + 2 * h, value)
        out = carray(as_pointer(row), (K,), types.uint16)
        for h in range(whole, H):
            one = f32(source, h)
            if job.weight != 0:
                one = one * factor * f32(job.weight, h)
            out[h] = round_bf16(one)
        for h in range(H, K):
            out[h] = 0

    @task("norm")
    def run(address, index, worker):
        job = norm_at(address)
        first = index * job.chunk
        last = min(first + job.chunk, i64(job.count_at, 0))
        status = 0
        for t in range(first, last):
            to = job.scratch + worker * job.scratch_stride
            if job.sum != 0:
                to = job.sum + t * job.sum_stride
            mean = add_up(job, t, to)
            eps = f32_from_bits(types.uint32(job.eps))
            factor = types.float32(1) / types.float32((mean + eps) ** types.float32(0.5))
            for i in range(job.form_count):
                form = form_at(job.forms + i * 64)
                row = form.rows + t * form.stride
                fill(job, to, factor, row, form.K)
                if form.quantize_row != 0:
                    status |= call_routine(form.quantize_row, (row, form.K, 0, form.K))
                if form.tiles != 0:
                    steps = form.tile_steps * (form.K // K_BLOCK)
                    copy_to_tile(
                        row, form.K, form.tiles, t, 0, steps, form.tile_steps, form.int8,
                        form.interleave_a,
                    )  # fmt: skip
        return status

    return opening, run
