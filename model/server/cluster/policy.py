"""Which node reads a prompt, and which one writes its answer: pure functions of what is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A node that is up, for one prompt.

    Attributes:
        held: leading pages of the prompt that it need not compute.
        inside: outputs that it has; ``seats``: that it runs at once.
        queued: tokens of prompts that it is asked to read and has not yet.
        rate: tokens of prompts that it reads a second; 0: unknown.
    """

    name: str
    held: int
    inside: int
    seats: int
    queued: int = 0
    rate: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Until it has read so many tokens behind those that wait; a node of which no rate is known
        is tried."""
        return (self.queued + tokens) / self.rate if self.rate else 0.0


def decode_node(candidates: Sequence[Candidate], pages: int) -> Candidate:
    """The node with the most of the prompt and the fewest outputs: its share of the pages, less the
    share of its seats that are taken. A node without a free seat comes last.

    Args:
        candidates: at least one.
        pages: of the prompt.
    """

    def worth(each: Candidate) -> tuple[bool, float, int]:
        taken = each.inside / each.seats
        return each.inside < each.seats, each.held / max(1, pages) - taken, -each.inside

    return max(candidates, key=worth)


def prefill_node(candidates: Sequence[Candidate], tokens: int, page_size: int) -> Candidate:
    """The node that has read the prompt first: what waits there, and what it lacks of this one, at
    its measured rate.

    Args:
        candidates: at least one.
        tokens: of the prompt.
    """

    def cost(each: Candidate) -> tuple[float, int]:
        lacks = tokens - each.held * page_size
        return each.seconds(lacks), each.queued + lacks

    return min(candidates, key=cost)


def is_read_elsewhere(decode: Candidate, stored: int, pages: int) -> bool:
    """Whether a prefill node is to read a prompt: the node that writes the answer, which can have
    ``stored`` pages from others, lacks a whole page."""
    return max(decode.held, stored) < pages
