"""The two lanes of a decode step (OSDI'26 3.3.1): each has half of its sequences.

A sequence has one token in such a step, so that the tokens of a lane are its sequences, too. Lane A
has the first ones, and one more if their number is odd.
"""

from __future__ import annotations

LANES = ("A", "B")


def lane_name(lane: str, name: str) -> str:
    """What a lane calls its own of a node or a buffer; "" is no lane."""
    return f"{lane}.{name}" if lane else name


def lane_dim(lane: str) -> str:
    """The dimension of a lane's tokens."""
    return f"T{lane}"


def lane_tokens(T: int) -> tuple[int, int]:
    """The tokens of each lane of a step of T."""
    return T - T // 2, T // 2
