"""What comes before attention: norms of queries and keys, rotary embedding, the cache's new rows.

Twins of ``ref.rope`` with ``ref.mla_write`` and ``ref.kv_write``, in one pass over a token's heads.
A slot is ``page * 64 + offset``; a token of slot -1 is written nowhere. A row, a latent or one
head's key or value, is bfloat16, or E4M3 with a float32 scale: the bytes of ``ref.quantize_rows``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, types

from ..target import detect
from .intrin.descriptor import descriptor
from .intrin.registers import stack_alloc
from .intrin.scalar import f32_from_bits, round_bf16
from .intrin.sync import as_pointer
from .jit import inlined, task
from .rope import rotate
from .vectors import make_vectors, width
from .words import i64, poke_f32

PAGE = 64
"""Tokens of a page."""
_HEADS = 16
"""Heads of a task."""
MAX_HEAD = 1024
"""Numbers of a head or a latent, at most; a multiple of 16, as attention wants them."""
_HEAD_BYTES = 4 * MAX_HEAD
_E4M3_MAX, _ZERO, _ONE = np.float32(448.0), np.float32(0.0), np.float32(1.0)

_STEP = (
    "count_at",
    "table",
    "half",
    "interleaved",
    "slot_mapping",
    "page_bytes",
    "token_bytes",
    "eps",
)

MLA_ROPE_CACHE_WRITE, mla_at = descriptor(
    "mla_rope_cache_write",
    (
        *_STEP,
        "q",  # float32 [T, NH, nope + 2 half]
        "q_stride",  # bytes
        "nope",
        "NH",
        "kv",  # float32 [T, L + 2 half]
        "kv_stride",
        "weight",  # float32 [L], of the latent's norm
        "L",
        "cache",  # bfloat16 or E4M3 [pages, PAGE, L] with the strides above
        "scale",  # of E4M3: float32 [pages, PAGE]; 0: bfloat16
        "rope",  # bfloat16 [pages, PAGE, 2 half], behind the latents or pages of its own
        "rope_page_bytes",
        "rope_token_bytes",
        "out",  # float32 [T, NH, L + 2 half]: the rotated part of q goes behind L
        "out_stride",
    ),
)

GQA_ROPE_CACHE_WRITE, gqa_at = descriptor(
    "gqa_rope_cache_write",
    (
        *_STEP,
        "qkv",  # float32 rows: queries [NH, D], further on keys [KVH, D], then values [KVH, D]
        "qkv_stride",
        "k_start",  # bytes from a row's first query to its first key
        "v_start",  # and to its first value
        "NH",
        "KVH",
        "D",
        "q_weight",  # float32 [D] of a norm a head, or [NH, D] of one over all; 0: none
        "k_weight",  # [D] or [KVH, D]
        "q_norm",  # heads of a norm: 1 or NH
        "k_norm",  # 1 or KVH
        "v_weight",  # float32 [D] of a norm a head; 0: none
        "k",  # bfloat16 or E4M3 [pages, PAGE, KVH, D]
        "v",
        "k_scale",  # of E4M3: float32 [pages, PAGE, KVH]; 0: bfloat16
        "v_scale",
        "head_bytes",
        "out",  # float32 [T, NH, D]
        "out_stride",
    ),
)


def _make_inverse_rms(V: Any, N: int) -> Any:
    @inlined
    def inverse_rms(x, count, eps_bits):
        """``1 / sqrt(mean(x^2) + eps)`` of ``count`` floats."""
        squares = V.zero()
        for i in range(0, count, N):
            value = V.load_f32(x + 4 * i)
            squares = V.fma(value, value, squares)
        mean = V.sum(squares) / types.float32(count)
        eps = f32_from_bits(types.uint32(eps_bits))
        return types.float32(1) / types.float32((mean + eps) ** types.float32(0.5))

    return inverse_rms


def _make_quantize_row(V: Any, N: int) -> Any:
    @inlined
    def quantize_row(x, D, to, scale_at):
        """D floats, a multiple of 16, as E4M3 and their scale; NaN is no candidate for it."""
        tops = V.zero()
        for i in range(0, D, N):
            tops = V.largest(V.absolute(V.load_f32(x + 4 * i)), tops)
        scale = V.maximum(tops) / _E4M3_MAX
        scale = scale if scale > _ZERO else _ONE
        for i in range(0, D, N):
            V.store_e4m3(to + i, V.div(V.load_f32(x + 4 * i), V.broadcast(scale)))
        poke_f32(scale_at, scale)

    return quantize_row


@functools.cache
def make_mla_rope_cache_write() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``MLA_ROPE_CACHE_WRITE``: 16 heads of a token each; the first
    one has its latent."""
    V = make_vectors(width(detect()))
    N: int = V.N
    inverse_rms, quantize_row = _make_inverse_rms(V, N), _make_quantize_row(V, N)

    @task("mla-rope-cache-write-setup")
    def setup(address, index, worker):
        args = mla_at(address)
        return i64(args.count_at, 0) * ((args.NH + _HEADS - 1) // _HEADS)

    @inlined
    def write_latent(args, t, table):
        slot = i64(args.slot_mapping, t)
        if slot < 0:
            return
        latent, L = args.kv + t * args.kv_stride, args.L
        page, offset = slot // PAGE, slot % PAGE
        at = args.cache + page * args.page_bytes + offset * args.token_bytes
        factor, scratch = inverse_rms(latent, L, args.eps), stack_alloc(_HEAD_BYTES)
        for i in range(0, L, N):
            value = V.mul(V.load_f32(latent + 4 * i), V.broadcast(factor))
            value = V.mul(value, V.load_f32(args.weight + 4 * i))
            if args.scale != 0:
                V.store_f32(scratch + 4 * i, value)
            else:
                V.store_bf16(at + 2 * i, value)
        if args.scale != 0:
            quantize_row(scratch, L, at, args.scale + 4 * slot)
        at = args.rope + page * args.rope_page_bytes + offset * args.rope_token_bytes
        row = carray(as_pointer(at), (2 * args.half,), types.uint16)
        for pair in range(args.half):
            a, b, a_at, b_at = rotate(latent + 4 * L, table, args.half, args.interleaved, pair)
            row[a_at], row[b_at] = round_bf16(a), round_bf16(b)

    @task("mla-rope-cache-write")
    def run(address, index, worker):
        args = mla_at(address)
        chunks = (args.NH + _HEADS - 1) // _HEADS
        t, first = index // chunks, index % chunks * _HEADS
        half = args.half
        table = args.table + 8 * half * t
        if first == 0:
            write_latent(args, t, table)
        for head in range(first, min(first + _HEADS, args.NH)):
            q = args.q + t * args.q_stride + 4 * (head * (args.nope + 2 * half) + args.nope)
            out = args.out + t * args.out_stride + 4 * (head * (args.L + 2 * half) + args.L)
            for pair in range(half):
                a, b, a_at, b_at = rotate(q, table, half, args.interleaved, pair)
                poke_f32(out + 4 * a_at, a)
                poke_f32(out + 4 * b_at, b)
        return 0

    return setup, run


@functools.cache
def make_gqa_rope_cache_write() -> tuple[Any, Any]:
    """Compiles (setup, run), tasks of ``GQA_ROPE_CACHE_WRITE``: 16 heads of a token each, of its
    queries, keys and values in this order."""
    V = make_vectors(width(detect()))
    N: int = V.N
    inverse_rms, quantize_row = _make_inverse_rms(V, N), _make_quantize_row(V, N)

    @task("gqa-rope-cache-write-setup")
    def setup(address, index, worker):
        args = gqa_at(address)
        return i64(args.count_at, 0) * ((args.NH + 2 * args.KVH + _HEADS - 1) // _HEADS)

    @inlined
    def normalised(args, x, weight, factor, to):
        """Writes x [D]; if there is a weight, normalised, by the given factor if that is not 0."""
        D = args.D
        if weight != 0 and factor == 0:
            factor = inverse_rms(x, D, args.eps)
        for i in range(0, D, N):
            value = V.load_f32(x + 4 * i)
            if weight != 0:
                value = V.mul(V.mul(value, V.broadcast(factor)), V.load_f32(weight + 4 * i))
            V.store_f32(to + 4 * i, value)

    @inlined
    def turn(args, x, table):
        """Turns the first 2 half numbers of x in place."""
        for pair in range(args.half):
            a, b, a_at, b_at = rotate(x, table, args.half, args.interleaved, pair)
            poke_f32(x + 4 * a_at, a)
            poke_f32(x + 4 * b_at, b)

    @inlined
    def store_row(x, D, at, scale_at):
        if scale_at != 0:
            quantize_row(x, D, at, scale_at)
        else:
            for i in range(0, D, N):
                V.store_bf16(at + 2 * i, V.load_f32(x + 4 * i))

    @inlined
    def scale_of(scales, slot, KVH, head):
        return scales + 4 * (slot * KVH + head) if scales != 0 else 0

    @task("gqa-rope-cache-write")
    def run(address, index, worker):
        args = gqa_at(address)
        heads = args.NH + 2 * args.KVH
        chunks = (heads + _HEADS - 1) // _HEADS
        t, first = index // chunks, index % chunks * _HEADS
        table, slot, D = args.table + 8 * args.half * t, i64(args.slot_mapping, t), args.D
        place = slot // PAGE * args.page_bytes + slot % PAGE * args.token_bytes
        scratch = stack_alloc(_HEAD_BYTES)
        row = args.qkv + t * args.qkv_stride
        q_factor = k_factor = types.float32(0)  # of all heads together
        if args.q_norm > 1:
            q_factor = inverse_rms(row, args.NH * D, args.eps)
        if args.k_norm > 1:
            k_factor = inverse_rms(row + args.k_start, args.KVH * D, args.eps)
        for head in range(first, min(first + _HEADS, heads)):
            if head < args.NH:
                x = row + 4 * head * D
                out = args.out + t * args.out_stride + 4 * head * D
                weight = args.q_weight + (4 * head * D if args.q_norm > 1 else 0)
                normalised(args, x, weight, q_factor, out)
                turn(args, out, table)
            elif slot < 0:
                continue
            elif head < args.NH + args.KVH:
                at = head - args.NH
                x = row + args.k_start + 4 * at * D
                weight = args.k_weight + (4 * at * D if args.k_norm > 1 else 0)
                normalised(args, x, weight, k_factor, scratch)
                turn(args, scratch, table)
                scale_at = scale_of(args.k_scale, slot, args.KVH, at)
                store_row(scratch, D, args.k + place + at * args.head_bytes, scale_at)
            else:
                at = head - args.NH - args.KVH
                x = row + args.v_start + 4 * at * D
                if args.v_weight != 0:
                    normalised(args, x, args.v_weight, types.float32(0), scratch)
                    x = scratch
                scale_at = scale_of(args.v_scale, slot, args.KVH, at)
                store_row(x, D, args.v + place + at * args.head_bytes, scale_at)
        return 0

    return setup, run
