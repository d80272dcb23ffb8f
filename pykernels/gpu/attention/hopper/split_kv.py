"""Split-KV in Gluon: where a CTA's sequences lie, and a reduction within the decode kernel.

The CTA that is the last of a sequence's splits to be done adds up all of them, as stream-K's does:
no second kernel combines them.

Splits count themselves in a counter in global memory. It is a call's own scratch, so streams,
graphs and threads share one no more than they share the partial results. Nobody has to zero it: a
counter is (the call's id, splits that are done). Before a CTA counts its split it makes sure that
the id is there: it loads the counter, and swaps what it found for the id and none done. A swap
fails if somebody else was first, which is as good; the counter cannot have gone back to what was
found, for that needs every split, this one too. Whoever counts the last split leaves a zero.

A graph gives its id at each replay. What is in the counter then is the zero, or what others have
left who had the memory between: nothing that bears the id but by a chance of 2 ** -47. The same
holds for an eager call, whose id was never used before. A kernel that was aborted takes the CUDA
context with it.

What is added up, and in which order, does not depend on who does it.
"""

from __future__ import annotations

import itertools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.gluon_compat import barrier
from ..online_softmax import with_sink


@gluon.jit
def load_lengths(length_ptr, B, BATCH: gl.constexpr, WARPS: gl.constexpr):
    """(numbers of the sequences, their lengths), int32 [BATCH]."""
    # Every warp has all sequences, so none waits for another, nor needs shared memory.
    i = gl.arange(0, BATCH, layout=gl.BlockedLayout([BATCH // 32], [32], [WARPS], [0]))
    return i, gl.load(length_ptr + i, mask=i < B, other=0)


_CALLS = itertools.count(1)
_GROUP = 4
"""Rows that are added up at a time; splits: four times as many."""
_MOST = 3
"""Groups beyond which one CTA takes longer than the many of a combining kernel."""
VALUES = gl.constexpr(gl.BlockedLayout([16, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0]))


def worth_it(rows: int, num_splits: int) -> bool:
    """Whether the last of ``num_splits`` splits should add up ``rows`` rows of 128."""
    return -(-rows // _GROUP) * -(-num_splits // (4 * _GROUP)) <= _MOST


def new_counters(device: torch.device, sequences: int) -> tuple[int, torch.Tensor]:
    """(the call's id, counters) for that many sequences, each of less than 2 ** 16 splits."""
    call = 1 << 46 | next(_CALLS) * 0x1E3779B97F4B % (1 << 46)  # odd: none comes twice
    return call << 16, torch.empty(sequences, dtype=torch.int64, device=device)


@gluon.jit
def claim_counter(counter, call):
    """Once in each CTA, before ``is_last``, behind the wait for the kernel in front."""
    found = gl.load(counter, cache_modifier=".cg")
    if (found ^ call) >> 16 != 0:
        gl.atomic_cas(counter, found, call, sem="relaxed", scope="gpu")


@gluon.jit
def is_last(counter, num_splits):
    """Counts a split whose results were stored; if it is the last, all can be loaded."""
    barrier()
    last = (gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") & 0xFFFF) == num_splits - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def combine_splits(
    values,
    lse,
    out,
    sink_ptr,
    first,
    num_splits,
    R,
    out_row,
    first_row,
    rows,
    kv,
    G: gl.constexpr,
    KVH: gl.constexpr,
):
    """out bf16, rows of 128: ``first_row`` and up to 16 from it, of ``rows`` of a KV head.

    Args:
        values, lse: float32 [total_splits, R, 128], [total_splits, R] in base 2, the sequence's
            from ``first`` on. A split of no keys has -inf, and values that mean nothing.
        sink_ptr: of each query head, or None.
        out_row: the sequence's first row of the result.
    """
    BOTH: gl.constexpr = gl.SliceLayout(2, VALUES)  # [16, 4]
    SUMS: gl.constexpr = gl.SliceLayout(0, VALUES)  # [4, 128]
    n = gl.arange(0, 16, layout=gl.SliceLayout(1, BOTH))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, VALUES)))
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, BOTH))
    j = gl.arange(0, 4, layout=gl.SliceLayout(1, SUMS))
    e = gl.arange(0, 128, layout=gl.SliceLayout(0, SUMS))
    for start in range(first_row, gl.minimum(rows, first_row + 16), 4):
        row = start + i
        head = row // G * (KVH * G) + kv * G + row % G
        m_i = gl.full([4], float("-inf"), gl.float32, layout=gl.SliceLayout(0, BOTH))
        l_i = gl.full([4], 0.0, gl.float32, layout=gl.SliceLayout(0, BOTH))
        acc = gl.full([4, 128], 0.0, gl.float32, layout=SUMS)
        for split in range(0, num_splits, 16):
            mask = (split + n < num_splits)[:, None] & (row < rows)[None, :]
            at = (first + split + n).to(gl.int64)[:, None] * R + head[None, :]
            z = gl.load(lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            at = at[:, :, None] * 128 + d[None, None, :]
            # Both loads are on their way before anything waits for the first.
            x = gl.load(values + at, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
            m_new = gl.maximum(m_i, gl.max(z, 0))
            base = gl.where(m_new == float("-inf"), 0.0, m_new)
            w = gl.exp2(z - base[None, :])
            alpha = gl.exp2(m_i - base)
            x = gl.where((z > float("-inf"))[:, :, None], x * w[:, :, None], 0.0)
            past = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))
            acc = acc * past[:, None] + gl.sum(x, 0)
            l_i = l_i * alpha + gl.sum(w, 0)
            m_i = m_new
        if sink_ptr is not None:
            l_i = with_sink(gl.load(sink_ptr + kv * G + row % G), m_i, l_i)
        l_i = gl.convert_layout(l_i, gl.SliceLayout(1, SUMS))
        y = acc / gl.where(l_i == 0, 1.0, l_i)[:, None]
        row = start + j
        head = row // G * (KVH * G) + kv * G + row % G
        to = out + (out_row + head).to(gl.int64)[:, None] * 128 + e[None, :]
        gl.store(to, y.to(out.dtype.element_ty), mask=(row < rows)[:, None])
