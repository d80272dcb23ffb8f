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
from .job import i64, poke_f32
from .rope import rotate
from .vectors import make_vectors, width

PAGE = 64
"""Tokens of a page."""
_HEADS = 16
"""Heads of a task."""
MAX_HEAD = 1024
"""Numbers of a head or a latent, at most; a multiple of 16, as attention wants them."""
_HEAD_BYTES = 4 * MAX_HEAD
_E4M3_MAX, _ZERO, _ONE = np.float32(448.0), np.float32(0.0), np.float32(1.0)

_STEP = ("count_at", "table", "half", "interleaved", "slots", "page_bytes", "token_bytes", "eps")

MLA_WRITE, mla_at = descriptor(
    "mla_write",
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
        "out",  # float32 [T, NH, L + 2 half]: the turned part of q goes behind L
        "out_stride",
    ),
)

GQA_WRITE, gqa_at = descriptor(
    "gqa_write",
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
def make_mla_write() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``MLA_WRITE``: 16 heads of a token each; the first one has its
    latent."""
    V = make_vectors(width(detect()))
    N: int = V.N
    inverse_rms, quantize_row = _make_inverse_rms(V, N), _make_quantize_row(V, N)

    @task("mla-write-open")
    def opening(address, index, worker):
        job = mla_at(address)
        return i64(job.count_at, 0) * ((job.NH + _HEADS - 1) // _HEADS)

    @inlined
    def write_latent(job, t, table):
        slot = i64(job.slots, t)
        if slot < 0:
            return
        latent, L = job.kv + t * job.kv_stride, job.L
        page, offset = slot // PAGE, slot % PAGE
        at = job.cache + page * job.page_bytes + offset * job.token_bytes
        factor, scratch = inverse_rms(latent, L, job.eps), stack_alloc(_HEAD_BYTES)
        for i in range(0, L, N):
            value = V.mul(V.load_f32(latent + 4 * i), V.broadcast(factor))
            value = V.mul(value, V.load_f32(job.weight + 4 * i))
            if job.scale != 0:
                V.store_f32(scratch + 4 * i, value)
            else:
                V.store_bf16(at + 2 * i, value)
        if job.scale != 0:
            quantize_row(scratch, L, at, job.scale + 4 * slot)
        at = job.rope + page * job.rope_page_bytes + offset * job.rope_token_bytes
        row = carray(as_pointer(at), (2 * job.half,), types.uint16)
        for pair in range(job.half):
            a, b, a_at, b_at = rotate(latent + 4 * L, table, job.half, job.interleaved, pair)
            row[a_at], row[b_at] = round_bf16(a), round_bf16(b)

    @task("mla-write")
    def run(address, index, worker):
        job = mla_at(address)
        chunks = (job.NH + _HEADS - 1) // _HEADS
        t, first = index // chunks, index % chunks * _HEADS
        half = job.half
        table = job.table + 8 * half * t
        if first == 0:
            write_latent(job, t, table)
        for head in range(first, min(first + _HEADS, job.NH)):
            q = job.q + t * job.q_stride + 4 * (head * (job.nope + 2 * half) + job.nope)
            out = job.out + t * job.out_stride + 4 * (head * (job.L + 2 * half) + job.L)
            for pair in range(half):
                a, b, a_at, b_at = rotate(q, table, half, job.interleaved, pair)
                poke_f32(out + 4 * a_at, a)
                poke_f32(out + 4 * b_at, b)
        return 0

    return opening, run


@functools.cache
def make_gqa_write() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``GQA_WRITE``: 16 heads of a token each, of its queries, keys
    and values in this order."""
    V = make_vectors(width(detect()))
    N: int = V.N
    inverse_rms, quantize_row = _make_inverse_rms(V, N), _make_quantize_row(V, N)

    @task("gqa-write-open")
    def opening(address, index, worker):
        job = gqa_at(address)
        return i64(job.count_at, 0) * ((job.NH + 2 * job.KVH + _HEADS - 1) // _HEADS)

    @inlined
    def normalised(job, x, weight, factor, to):
        """Writes x [D]; if there is a weight, normalised, by the given factor if that is not 0."""
        D = job.D
        if weight != 0 and factor == 0:
            factor = inverse_rms(x, D, job.eps)
        for i in range(0, D, N):
            value = V.load_f32(x + 4 * i)
            if weight != 0:
                value = V.mul(V.mul(value, V.broadcast(factor)), V.load_f32(weight + 4 * i))
            V.store_f32(to + 4 * i, value)

    @inlined
    def turn(job, x, table):
        """Turns the first 2 half numbers of x in place."""
        for pair in range(job.half):
            a, b, a_at, b_at = rotate(x, table, job.half, job.interleaved, pair)
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

    @task("gqa-write")
    def run(address, index, worker):
        job = gqa_at(address)
        heads = job.NH + 2 * job.KVH
        chunks = (heads + _HEADS - 1) // _HEADS
        t, first = index // chunks, index % chunks * _HEADS
        table, slot, D = job.table + 8 * job.half * t, i64(job.slots, t), job.D
        place = slot // PAGE * job.page_bytes + slot % PAGE * job.token_bytes
        scratch = stack_alloc(_HEAD_BYTES)
        row = job.qkv + t * job.qkv_stride
        q_factor = k_factor = types.float32(0)  # of all heads together
        if job.q_norm > 1:
            q_factor = inverse_rms(row, job.NH * D, job.eps)
        if job.k_norm > 1:
            k_factor = inverse_rms(row + job.k_start, job.KVH * D, job.eps)
        for head in range(first, min(first + _HEADS, heads)):
            if head < job.NH:
                x = row + 4 * head * D
                out = job.out + t * job.out_stride + 4 * head * D
                weight = job.q_weight + (4 * head * D if job.q_norm > 1 else 0)
                normalised(job, x, weight, q_factor, out)
                turn(job, out, table)
            elif slot < 0:
                continue
            elif head < job.NH + job.KVH:
                at = head - job.NH
                x = row + job.k_start + 4 * at * D
                weight = job.k_weight + (4 * at * D if job.k_norm > 1 else 0)
                normalised(job, x, weight, k_factor, scratch)
                turn(job, scratch, table)
                scale_at = scale_of(job.k_scale, slot, job.KVH, at)
                store_row(scratch, D, job.k + place + at * job.head_bytes, scale_at)
            else:
                at = head - job.NH - job.KVH
                x = row + job.v_start + 4 * at * D
                scale_at = scale_of(job.v_scale, slot, job.KVH, at)
                store_row(x, D, job.v + place + at * job.head_bytes, scale_at)
        return 0

    return opening, run
