"""Which tokens of a step are whose, where ranks share a prompt (OSDI'26 3.2).

The tokens of a step are cut into twice as many runs as there are ranks, and a rank has the r-th one
from the front and the r-th one from the end (zig-zag): with causal attention all ranks then have
about as much to do. Each has as many places; what is left over is padding, at a rank's end.

A *piece* is what a sequence has in one of a rank's two runs: consecutive tokens, to which all keys
up to the last of them belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]

BY_SEQUENCE = ("query_starts", "query_lengths", "lengths", "page_rows")
PREFIX_LENGTHS, BLOCK_SLOTS = "prefix_lengths", "block_slots"
"""[T]: keys that a token's sequence has had before the step; the places 0, 1 and so on."""
_PADDING = {"sequences": -1, "slot_mapping": -1}


def stripe_tokens(T: int, ranks: int) -> int:
    """Places of a rank in a step of T tokens."""
    return 2 * -(-T // (2 * ranks))


def places(tokens: Ints, T: int, ranks: int, room: int) -> Ints:
    """Where tokens of a step of T are among the places of all ranks, ``room`` of each."""
    run = stripe_tokens(T, ranks) // 2
    number, within = np.divmod(tokens, run)
    front = number < ranks
    rank = np.where(front, number, 2 * ranks - 1 - number)
    place: Ints = rank * room + np.where(front, within, run + within)
    return place


def of_rank(rank: int, name: str) -> str:
    """What the inputs of a rank's tokens are called, in the programs of all ranks."""
    return f"rank{rank}.{name}"


def of_all(name: str) -> str:
    """What the inputs of all ranks' tokens are called, one rank's behind the other's."""
    return f"ranks.{name}"


def deal(
    step: Mapping[str, Ints], ranks: int, T: int, S: int, R: int, room: int, out: Mapping[str, Ints]
) -> None:
    """Writes the inputs of all ranks' programs; what is left of each is padding.

    Args:
        step: by name, the inputs of a step of T tokens, S sequences and R rows of logits
            (``program.step_inputs``).
        room: places of each rank in the inputs of all ranks' tokens.
        out: by name, those of the programs, as far as they have them.
    """
    for name, target in out.items():
        kind, _, of = name.partition(".")
        if name == BLOCK_SLOTS:
            target[:] = np.arange(len(target))
        elif name == of_all("logits_indices"):
            target[:R] = places(step["logits_indices"][:R], T, ranks, room)
            target[R:] = 0
        elif name == of_all(of):
            for rank in range(ranks):
                own = target[rank * room : (rank + 1) * room]
                _deal_tokens(_by_token(step, of, T, S), rank, ranks, own, _PADDING.get(of, 0))
        elif kind.startswith("rank") and kind[4:].isdecimal() and of not in BY_SEQUENCE:
            own = _by_token(step, of, T, S)
            _deal_tokens(own, int(kind[4:]), ranks, target, _PADDING.get(of, 0))
    for rank in range(ranks):
        if of_rank(rank, BY_SEQUENCE[0]) in out:
            pieces(step, rank, ranks, T, S, [out[of_rank(rank, name)] for name in BY_SEQUENCE])


def pieces(
    step: Mapping[str, Ints], rank: int, ranks: int, T: int, S: int, out: Sequence[Ints]
) -> int:
    """Writes the pieces of a rank in the order of its places, S + 1 at the most; then zeros.

    Args:
        step: as ``deal`` has it.
        out: by piece: its first place, its tokens, keys up to its last one, and the row of the page
            table (``BY_SEQUENCE``).

    Returns:
        how many there are.
    """
    starts, counts, keys, rows = (step[name][:S] for name in BY_SEQUENCE)
    ends, run, count = starts + counts, stripe_tokens(T, ranks) // 2, 0
    for place, begin in zip((0, run), _begins(rank, ranks, run), strict=True):
        first, last = np.maximum(starts, begin), np.minimum(ends, begin + run)
        (own,) = np.nonzero(first < last)
        to = slice(count, count + len(own))
        first, last = first[own], last[own]
        values = first - begin + place, last - first, keys[own] - (ends[own] - last), rows[own]
        for target, value in zip(out, values, strict=True):
            target[to] = value
        count += len(own)
    for target in out:
        target[count:] = 0
    return count


def _begins(rank: int, ranks: int, run: int) -> tuple[int, int]:
    """The first tokens of a rank's two runs."""
    return rank * run, (2 * ranks - 1 - rank) * run


def _deal_tokens(values: Ints, rank: int, ranks: int, target: Ints, padding: int) -> None:
    """Writes what a rank's tokens have of ``values`` [T], then padding."""
    run, count = stripe_tokens(len(values), ranks) // 2, 0
    for begin in _begins(rank, ranks, run):
        own = values[begin : begin + run]
        target[count : count + len(own)] = own
        count += len(own)
    target[count:] = padding


def _by_token(step: Mapping[str, Ints], name: str, T: int, S: int) -> Ints:
    if name != PREFIX_LENGTHS:
        return step[name][:T]
    counts = step["query_lengths"][:S]
    return np.repeat(step["lengths"][:S] - counts, counts)
