"""Linears in every format of ``quant``: packed 32-row blocks times the rows that a norm has made.

Twin of ``ref.linear``. An expert's tile is a plain linear's tile: few tokens go through
``gemv.common``'s tiles, many through the GEMM, as in ``moe.stages``; a task owns a run of outputs,
so no sum is shared and the result is the same bits at any thread count.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from .gemm import common
from .gemv.common import MAX_TOKENS as MAX_M
from .gemv.common import point_at_rows
from .intrin.descriptor import descriptor
from .intrin.registers import stack_alloc
from .intrin.scalar import round_bf16
from .intrin.sync import as_pointer, call_routine
from .jit import inlined, task
from .words import f32, i64, poke_i64

_ROW_BYTES = 32 * 4  # one token's outputs of a block
_ADDRESSES, _OUTS, _MANY = 8 * MAX_M, MAX_M * _ROW_BYTES, 8 * common.MAX_TOKENS

LINEAR, linear_at = descriptor(
    "linear",
    (
        "count_at",  # address of the number of tokens, T
        "rows",  # row (activations.row_layout) of token 0; the next one's is row_stride on
        "row_stride",
        "k_blocks",  # inputs / 128, padded
        "w",  # packed blocks
        "block_bytes",
        "scale",
        "scale_bytes",  # of one block's scales
        "blocks",  # of 32 outputs
        "N",  # outputs that count
        "bias",  # float32 [N]; 0: none
        "out",  # float32 [T, N]
        "out_stride",  # bytes
        "chunk",  # blocks of a task with few tokens
        "gemm_chunk",  # with many, gemm.common.MAX_BLOCKS at most
        "gemm_from",  # tokens from which the GEMM is taken
        "tiles",  # the format's routines
        "gemm",
        "tables",
        "a_tiles",  # A tiles of the rows
        "tile_steps",
        "scratch",  # of worker 0, for the GEMM; the next one's is scratch_stride on
        "scratch_stride",
    ),
)


@inlined
def _write(args, t, block, sums):
    """A token's 32 sums of a block, with the bias, to where they go."""
    first = 32 * block
    count = min(32, args.N - first)
    at = args.out + t * args.out_stride + 4 * first
    out = carray(as_pointer(at), (32,), types.float32)
    found = carray(as_pointer(sums), (32,), types.float32)
    if count == 32 and args.bias == 0:
        for n in range(32):
            out[n] = found[n]
    else:
        for n in range(count):
            out[n] = found[n] + (f32(args.bias, first + n) if args.bias != 0 else types.float32(0))


@functools.cache
def make_linear() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``LINEAR``: one for a run of blocks of all tokens."""

    @task("linear-setup")
    def setup(address, index, worker):
        args = linear_at(address)
        T = i64(args.count_at, 0)
        if T == 0:
            return 0
        chunk = args.gemm_chunk if T >= args.gemm_from else args.chunk
        return (args.blocks + chunk - 1) // chunk

    @inlined
    def by_tiles(args, T, first, last):
        rows, out = stack_alloc(_ADDRESSES), stack_alloc(_OUTS)
        status = 0
        for block in range(first, last):
            w, scale = args.w + block * args.block_bytes, args.scale + block * args.scale_bytes
            then = w if block + 1 == last else w + args.block_bytes
            for t in range(0, T, MAX_M):
                M = min(MAX_M, T - t)
                point_at_rows(rows, MAX_M, args.rows, args.row_stride, 0, t, M)
                tile = (
                    M,
                    w,
                    then,
                    scale,
                    0,
                    args.k_blocks,
                    128 * args.k_blocks,
                    rows,
                    args.tables,
                    out,
                )
                status |= call_routine(args.tiles, tile)
                for m in range(M):
                    _write(args, t + m, block, out + m * _ROW_BYTES)
        return status

    @inlined
    def by_gemm(args, T, first, last, scratch):
        rows = stack_alloc(_MANY)
        status = 0
        for t in range(0, T, common.MAX_TOKENS):
            M = min(common.MAX_TOKENS, T - t)
            Mp = common.padded_tokens(M)
            point_at_rows(rows, Mp, args.rows, args.row_stride, 0, t, M)
            a = args.a_tiles + t // 16 * args.tile_steps * args.k_blocks * common.TILE
            blocks = (
                M,
                last - first,
                args.w + first * args.block_bytes,
                args.block_bytes,
                args.scale + first * args.scale_bytes,
                args.scale_bytes,
                args.k_blocks,
                a,
                rows,
                args.tables,
                scratch,
            )
            status |= call_routine(args.gemm, blocks)
            for b in range(last - first):
                for m in range(M):
                    _write(args, t + m, first + b, scratch + common.OUT_AT + (b * Mp + m) * 128)
        return status

    @task("linear")
    def run(address, index, worker):
        args = linear_at(address)
        T = i64(args.count_at, 0)
        use_gemm = T >= args.gemm_from
        chunk = args.gemm_chunk if use_gemm else args.chunk
        first = index * chunk
        last = min(first + chunk, args.blocks)
        if use_gemm:
            return by_gemm(args, T, first, last, args.scratch + worker * args.scratch_stride)
        return by_tiles(args, T, first, last)

    return setup, run


PER_HEAD_LINEAR, per_head_linear_at = descriptor(
    "per_head_linear",
    (
        "count_at",  # address of the number of tokens, T
        "G",  # heads, a task each
        "x",  # float32: head 0's inputs of token 0, x_head bytes to the next head's
        "x_stride",  # bytes to the next token's
        "x_head",
        "K",  # inputs
        "k_blocks",  # of 128, padded
        "w",  # head 0's packed blocks, w_head bytes to the next head's
        "w_head",
        "block_bytes",
        "scale",
        "scale_head",
        "scale_bytes",
        "blocks",  # of 32 outputs
        "N",
        "bias",  # 0
        "out",  # float32: head 0's outputs of token 0
        "out_stride",
        "out_head",
        "tiles",
        "tables",
        "quantize_row",
        "row_stride",
        "sequence",  # int64 [T], of tokens; those of sequences with
        "tokens_to",  # so many in the step, or more, are left out; 0: none is
        "scratch",  # rows of MAX_M tokens, of worker 0; the next one's is scratch_stride on
        "scratch_stride",
    ),
)


@functools.cache
def make_per_head_linear() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``PER_HEAD_LINEAR``: each head its own matrix (``W_UK`` and
    ``W_UV`` of absorbed latent attention, DeepSeek-V2 2.1.2). A head's inputs are read by nobody
    else, so its task makes their rows too."""

    @task("per-head-linear-setup")
    def setup(address, index, worker):
        args = per_head_linear_at(address)
        return args.G if i64(args.count_at, 0) > 0 else 0

    @inlined
    def fill(x, K, Kp, row):
        values = carray(as_pointer(x), (K,), types.float32)
        out = carray(as_pointer(row), (Kp,), types.uint16)
        for k in range(K):
            out[k] = round_bf16(values[k])
        for k in range(K, Kp):
            out[k] = 0

    @inlined
    def write(args, g, t, block, sums):
        first = 32 * block
        count = min(32, args.N - first)
        at = args.out + t * args.out_stride + g * args.out_head + 4 * first
        out = carray(as_pointer(at), (32,), types.float32)
        found = carray(as_pointer(sums), (32,), types.float32)
        for n in range(count):
            out[n] = found[n]

    @inlined
    def next_tokens(args, T, t, tokens):
        """Up to MAX_M of those that take part, from t on; their number, and the next t."""
        M = 0
        while t < T and M < MAX_M:
            if args.tokens_to != 0 and (
                t == 0 or i64(args.sequence, t) != i64(args.sequence, t - 1)
            ):
                last = t + 1
                while last < T and i64(args.sequence, last) == i64(args.sequence, t):
                    last += 1
                if last - t >= args.tokens_to:
                    t = last
                    continue
            poke_i64(tokens, M, t)
            M, t = M + 1, t + 1
        return M, t

    @task("per-head-linear")
    def run(address, g, worker):
        args = per_head_linear_at(address)
        T, Kp = i64(args.count_at, 0), 128 * args.k_blocks
        scratch = args.scratch + worker * args.scratch_stride
        rows, out, tokens = stack_alloc(_ADDRESSES), stack_alloc(_OUTS), stack_alloc(_ADDRESSES)
        status = 0
        M, t = next_tokens(args, T, 0, tokens)
        while M > 0:
            for m in range(M):
                row = scratch + m * args.row_stride
                x = args.x + i64(tokens, m) * args.x_stride + g * args.x_head
                fill(x, args.K, Kp, row)
                if args.quantize_row != 0:
                    status |= call_routine(args.quantize_row, (row, Kp, 0, Kp))
            point_at_rows(rows, MAX_M, scratch, args.row_stride, 0, 0, M)
            for block in range(args.blocks):
                w = args.w + g * args.w_head + block * args.block_bytes
                scale = args.scale + g * args.scale_head + block * args.scale_bytes
                tile = (
                    M,
                    w,
                    w + args.block_bytes,
                    scale,
                    0,
                    args.k_blocks,
                    Kp,
                    rows,
                    args.tables,
                    out,
                )
                status |= call_routine(args.tiles, tile)
                for m in range(M):
                    write(args, g, i64(tokens, m), block, out + m * _ROW_BYTES)
            M, t = next_tokens(args, T, t, tokens)
        return status

    return setup, run
