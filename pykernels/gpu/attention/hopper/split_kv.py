"""The last part of a sequence to be done adds up all of them: no kernel that combines them.

Parts count themselves in a word of global memory. The word is a call's own scratch, so streams,
graphs and threads share one no more than they share the parts. Nobody has to zero it: a word is
(the call's number, parts that are done). Before a program counts its part it sees to it that the
number is there: it looks, and swaps what it saw for the number and none done. A swap fails if
somebody else was first, which is as good; the word cannot have gone back to what was seen, for
that needs every part, this one too. Whoever counts the last part leaves a zero.

A graph gives its number at each replay. What is in the word then is the zero, or what others have
left who had the memory between: nothing that bears the number but by a chance of 2 ** -47. The same
holds for an eager call, whose number was never used before. A kernel that was aborted takes the
CUDA context with it.

What is added up, and in which order, does not depend on who does it.

What a decode kernel in Gluon does first: finding its part of the work.
"""

from __future__ import annotations

import itertools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.gluon_compat import barrier


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sequences(length_ptr, B, BATCH: gl.constexpr, WARPS: gl.constexpr):
    """(numbers, lengths) of the sequences, [BATCH]."""
    # Every warp has all sequences, so none waits for another, nor needs shared memory.
    i = gl.arange(0, BATCH, layout=gl.BlockedLayout([BATCH // 32], [32], [WARPS], [0]))
    return i, gl.load(length_ptr + i, mask=i < B, other=0)


@gluon.jit
def _parts(
    i, lengths, B, slots, S, window, KEYS: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """(parts, first slot) of each sequence."""
    seen = lengths
    if WINDOW:
        seen = lengths - gl.maximum(0, lengths - S + 1 - window) // KEYS * KEYS
    blocks = gl.cdiv(seen, KEYS)
    parts = 1 + (slots - B) * blocks // gl.maximum(gl.sum(blocks, 0), 1)
    parts = gl.where(i < B, parts, 0)
    return parts, gl.associative_scan(parts, 0, _add) - parts


@gluon.jit
def shares_of_slots(
    length_ptr, B, slots, S, window,
    KEYS: gl.constexpr, BATCH: gl.constexpr, WARPS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """``attention_parts.shares_of_slots``: (sequences' numbers, lengths, parts, first slots)."""
    i, lengths = _sequences(length_ptr, B, BATCH, WARPS)
    parts, start = _parts(i, lengths, B, slots, S, window, KEYS, WINDOW)
    return i, lengths, parts, start


@gluon.jit
def share(
    lengths, slot, B, slots, S, window, KEYS: gl.constexpr, BATCH: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """``share_of_slot`` of lengths [BATCH] that were loaded."""
    i = gl.arange(0, BATCH, layout=lengths.type.layout)
    parts, start = _parts(i, lengths, B, slots, S, window, KEYS, WINDOW)
    mine = (slot >= start) & (slot < start + parts)
    b = gl.sum(gl.where(mine, i, 0), 0)
    length = gl.sum(gl.where(mine, lengths, 0), 0)
    part = slot - gl.sum(gl.where(mine, start, 0), 0)
    return b, length, part, gl.sum(gl.where(mine, parts, 0), 0)


@gluon.jit
def share_of_slot(
    length_ptr, slot, B, slots, S, window,
    KEYS: gl.constexpr, BATCH: gl.constexpr, WARPS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """``attention_parts.share_of_slot``: what one program does, (sequence, its length,
    part, parts); no parts: nothing."""
    _, lengths = _sequences(length_ptr, B, BATCH, WARPS)
    return share(lengths, slot, B, slots, S, window, KEYS, BATCH, WINDOW)


_CALLS = itertools.count(1)
_GROUP = 4
"""Rows that are added up at a time; parts: four times as many."""
_MOST = 3
"""Groups beyond which one program takes longer than the many of a combining kernel."""
VALUES = gl.constexpr(gl.BlockedLayout([16, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0]))


def worth_it(rows: int, parts: int) -> bool:
    """Whether the last of ``parts`` parts should add up ``rows`` rows of 128."""
    return -(-rows // _GROUP) * -(-parts // (4 * _GROUP)) <= _MOST


def counted(device: torch.device, sequences: int) -> tuple[torch.Tensor, int]:
    """(words, the call's number) for that many sequences, each of less than 2 ** 16 parts."""
    number = 1 << 46 | next(_CALLS) * 0x1E3779B97F4B % (1 << 46)  # odd: none comes twice
    return torch.empty(sequences, dtype=torch.int64, device=device), number << 16


@gluon.jit
def number_it(word, number):
    """Once in each program, before ``is_last``, behind the wait for the kernel in front."""
    seen = gl.load(word, cache_modifier=".cg")
    if (seen ^ number) >> 16 != 0:
        gl.atomic_cas(word, seen, number, sem="relaxed", scope="gpu")


@gluon.jit
def is_last(word, parts):
    """Counts a part whose results were stored; if it is the last, all can be loaded."""
    barrier()
    last = (gl.atomic_add(word, 1, sem="acq_rel", scope="gpu") & 0xFFFF) == parts - 1
    if last:
        gl.store(word, 0)
    return last


@gluon.jit
def add_up(
    values, lse, out, first, parts, R, out_row, first_row, rows, kv,
    G: gl.constexpr, KVH: gl.constexpr,
):  # fmt: skip
    """out bf16, rows of 128: ``first_row`` and up to 16 from it, of ``rows`` of a KV head.

    Args:
        values, lse: float32 [slots, R, 128], [slots, R] in base 2; the parts have slots from
            ``first`` on. A part of no keys has -inf, and values that mean nothing.
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
        m = gl.full([4], float("-inf"), gl.float32, layout=gl.SliceLayout(0, BOTH))
        total = gl.full([4], 0.0, gl.float32, layout=gl.SliceLayout(0, BOTH))
        acc = gl.full([4, 128], 0.0, gl.float32, layout=SUMS)
        for part in range(0, parts, 16):
            mask = (part + n < parts)[:, None] & (row < rows)[None, :]
            at = (first + part + n).to(gl.int64)[:, None] * R + head[None, :]
            z = gl.load(lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            at = at[:, :, None] * 128 + d[None, None, :]
            # Both loads are on their way before anything waits for the first.
            x = gl.load(values + at, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
            top = gl.maximum(m, gl.max(z, 0))
            base = gl.where(top == float("-inf"), 0.0, top)
            w = gl.exp2(z - base[None, :])
            alpha = gl.exp2(m - base)
            x = gl.where((z > float("-inf"))[:, :, None], x * w[:, :, None], 0.0)
            past = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))
            acc = acc * past[:, None] + gl.sum(x, 0)
            total = total * alpha + gl.sum(w, 0)
            m = top
        total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
        y = acc / gl.where(total == 0, 1.0, total)[:, None]
        row = start + j
        head = row // G * (KVH * G) + kv * G + row % G
        to = out + (out_row + head).to(gl.int64)[:, None] * 128 + e[None, :]
        gl.store(to, y.to(out.dtype.element_ty), mask=(row < rows)[:, None])
