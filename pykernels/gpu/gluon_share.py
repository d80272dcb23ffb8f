"""What a decode kernel in Gluon does first: finding its part of the work."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
