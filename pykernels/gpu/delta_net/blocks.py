"""Which block of which sequence a program has, where a launch has room for any mix of sequences.

Blocks of all sequences follow each other, so that there are few programs too many: a launch whose
grid had a row of blocks of the longest sequence for each of them had mostly those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...shapes import StateBatch


def most_blocks(batch: StateBatch, T: int, rows: int) -> int:
    """The most blocks of so many rows that the sequences of T tokens together have."""
    return batch.S if batch.max_length <= rows else min(T, batch.S + T // rows)


def sequences_of(batch: StateBatch, rows: int) -> int:
    """SEQUENCES of ``block_of``."""
    return 0 if batch.max_length <= rows else max(16, triton.next_power_of_2(batch.S))


@triton.jit
def block_of(p, lengths, slots, S, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """(sequence, block within it) of program ``p``; a sequence of S or more: there is none.

    Args:
        SEQUENCES: a power of two, S at least; 0: each sequence has one block.
    """
    if SEQUENCES == 0:
        return p, 0
    else:
        i = tl.arange(0, SEQUENCES)
        length = tl.load(lengths + i, mask=i < S, other=0)
        here = tl.load(slots + i, mask=i < S, other=-1) >= 0
        blocks = tl.where(here, (length + ROWS - 1) // ROWS, 0)
        s = tl.sum((tl.cumsum(blocks, 0) <= p).to(tl.int32), 0)
        return s, p - tl.sum(tl.where(i < s, blocks, 0), 0)


@triton.jit
def first_block(s, lengths, slots, S, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """The program whose block ``block_of`` says to be the first one of sequence ``s``."""
    if SEQUENCES == 0:
        return s
    else:
        i = tl.arange(0, SEQUENCES)
        length = tl.load(lengths + i, mask=i < s, other=0)
        here = tl.load(slots + i, mask=i < s, other=-1) >= 0
        return tl.sum(tl.where(here, (length + ROWS - 1) // ROWS, 0), 0)
